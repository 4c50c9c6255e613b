"""Programs written for torch give the same results on gradwire."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WORKERS = {
    "first_steps": 2,
    "parameter_server": 4,
    "batched_updates": 3,
    "pipeline": 3,
    "remote_embedding": 2,
    "reinforcement": 3,
    "split_learning": 3,
}


def results_of(example: str, *options: str) -> list[str]:
    script = f"examples/torch/{example}.py"
    ran = subprocess.run(
        [sys.executable, "-m", "gradwire", "run", "-n", str(WORKERS[example]), *options, script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout.splitlines()


@pytest.mark.parametrize("example", WORKERS)
def test_the_results_are_those_of_torch(example: str) -> None:
    ours = results_of(example, "--torch")
    assert len(ours) >= 2
    assert ours == results_of(example)


def test_all_examples_are_run() -> None:
    assert {path.stem for path in (ROOT / "examples" / "torch").glob("*.py")} == WORKERS.keys()
