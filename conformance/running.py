"""Run a few tests at the same time, each in a process of its own that is killed at a deadline."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.suite import TEST_SECONDS

_PASSED, _FAILED, _SKIPPED = 0, 1, 2
_WORDS = {_PASSED: "passed", _FAILED: "failed", _SKIPPED: "skipped"}
#: torch's harness ends a test after TEST_SECONDS and shows the stacks of its processes. If the
#: harness itself hangs, the test is killed at this deadline.
_DEADLINE = TEST_SECONDS + 20.0
_numbers = itertools.count()


@dataclass(frozen=True)
class Test:
    group: str
    name: str

    def __str__(self) -> str:
        return f"{self.group}.{self.name}"


@dataclass(frozen=True)
class Outcome:
    test: Test
    result: str
    seconds: float
    output: str

    @property
    def passed(self) -> bool:
        return self.result == "passed"


class _Running:
    def __init__(self, test: Test, tests: type, folder: str):
        self.test = test
        self._started = time.monotonic()
        self._log = Path(folder) / f"{test}.{next(_numbers)}.log"
        self.pid = os.fork()
        if self.pid == 0:
            _run_here(tests, test.name, self._log)

    def poll(self) -> Outcome | None:
        """Return the outcome, or None while the test is running. Kill the test after the
        deadline."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        seconds = time.monotonic() - self._started
        if pid == 0 and seconds < _DEADLINE:
            return None
        self.kill()
        if pid == 0:
            os.waitpid(self.pid, 0)
            result = "hung"
        else:
            code = os.waitstatus_to_exitcode(status)
            result = _WORDS.get(code, f"died ({code})")
        return Outcome(self.test, result, seconds, self._log.read_text(errors="replace"))

    def kill(self) -> None:
        """Kill the test and the processes that it has started."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _run_here(tests: type, name: str, log: Path) -> None:
    """Run one test in this forked process, and exit."""
    code = _FAILED
    try:
        os.setsid()
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(target, descriptor)
        sys.stdout = sys.__stdout__ = os.fdopen(1, "w", buffering=1)
        sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1)
        result = unittest.TestResult()
        tests(name).run(result)
        for _, text in [*result.errors, *result.failures]:
            print(text)
        if result.wasSuccessful():
            code = _SKIPPED if result.skipped else _PASSED
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def run(suite: dict[str, type], tests: Sequence[Test], jobs: int) -> Iterator[Outcome]:
    """Run the tests, `jobs` at the same time. Yield each outcome when the test has ended."""
    gc.collect()
    gc.freeze()  # garbage collections in forked processes then copy fewer memory pages
    waiting, running = list(reversed(tests)), list[Any]()
    with tempfile.TemporaryDirectory() as folder:
        # torch's harness leaves its rendezvous files behind: they are deleted with the folder.
        tempfile.tempdir = folder
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    test = waiting.pop()
                    running.append(_Running(test, suite[test.group], folder))
                time.sleep(0.02)
                for test_process in list(running):
                    outcome = test_process.poll()
                    if outcome is not None:
                        running.remove(test_process)
                        yield outcome
        finally:
            tempfile.tempdir = None
            for test_process in running:
                test_process.kill()
                os.waitpid(test_process.pid, 0)
