"""torch's own tests pass on gradwire, except those that are listed with a reason.

They run in a process of their own, because a process that forks must not have threads. This is a
third of the tests; `make conformance` runs all.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conformance.expectations import differences

ROOT = Path(__file__).parent.parent


@pytest.mark.timeout(400)
def test_the_tests_of_torch_pass() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "conformance", "--third"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=390,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]


def test_few_tests_differ() -> None:
    assert len(differences()) <= 7


LIBRARY_TESTS = """
import multiprocessing
from torch.distributed import rpc

def test_same():
    assert rpc.is_available()

def test_differs():
    assert rpc.RRef.__module__.startswith("torch")

def test_differs_in_a_process_that_it_does_not_look_at():
    process = multiprocessing.get_context("fork").Process(target=test_differs)
    process.start()
    process.join()
"""


def test_the_tests_of_a_library_are_compared_on_torch_and_on_gradwire(tmp_path: Path) -> None:
    (tmp_path / "test_library.py").write_text(LIBRARY_TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "conformance.libraries", "--rootdir", tmp_path, tmp_path, "-q"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.splitlines()[-3:] == [
        "test_library.py::test_differs: passed on torch, failed on gradwire",
        "test_library.py::test_differs_in_a_process_that_it_does_not_look_at: passed on torch, "
        "passed, processes ended with [1] on gradwire",
        "3 tests, 3 pass on torch, 1 have the same result on gradwire",
    ]
