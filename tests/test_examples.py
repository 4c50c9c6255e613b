"""The examples run and print what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(workers: int, script: str) -> str:
    command = [sys.executable, "-m", "gradwire", "run", "-n", str(workers), str(EXAMPLES / script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_first_example_shows_the_gradients_of_both_workers() -> None:
    assert sorted(run(2, "first_gradient.py").splitlines()) == [
        "[worker 0] gradient of x: tensor([3., 4.])",
        "[worker 1] gradient of weight: tensor([1., 2.])",
    ]


def test_the_quickstart_trains_like_one_process() -> None:
    table = run(3, "quickstart.py").splitlines()
    rows = [re.split(r"\s+", line) for line in table if re.match(r"\[worker 0\] +\d+ ", line)]
    assert [int(row[2]) for row in rows] == [1, *range(10, 130, 10)]
    losses = [float(row[5]) for row in rows]
    assert losses[-1] < losses[0] / 10
    difference = re.search(r"largest difference.*: (\S+)$", table[-1])
    assert difference is not None
    assert float(difference[1]) < 1e-4
