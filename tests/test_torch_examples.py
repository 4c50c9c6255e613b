"""Programs written for torch give the same results on gradwire."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.torch_programs import EXAMPLES, WORKERS

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def results() -> Any:
    """The output of all programs, on torch and on gradwire."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.torch_programs"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("example", WORKERS)
def test_the_output_is_the_same_as_on_torch(example: str, results: Any) -> None:
    ours = results[example]["gradwire"]
    assert isinstance(ours, list), ours
    assert len(ours) >= 3
    assert ours == results[example]["torch"]


def test_all_examples_are_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == WORKERS.keys()
