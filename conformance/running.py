"""Runs tests, a few at a time, each in a process of its own that cannot outlive its time."""

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

from conformance.suite import PATIENCE

_PASSED, _FAILED, _SKIPPED = 0, 1, 2
_WORDS = {_PASSED: "passed", _FAILED: "failed", _SKIPPED: "skipped"}
#: torch's harness ends a test at PATIENCE and says where its processes stand; this is for when it
#: does not come to that.
_DEADLINE = PATIENCE + 20.0
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
        self.since = time.monotonic()
        self._log = Path(folder) / f"{test}.{next(_numbers)}.log"
        self.pid = os.fork()
        if self.pid == 0:
            _run_here(tests, test.name, self._log)

    def look(self) -> Outcome | None:
        """What became of it, once it is over. It is ended when its time is."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        seconds = time.monotonic() - self.since
        if pid == 0 and seconds < _DEADLINE:
            return None
        self._kill()
        if pid == 0:
            os.waitpid(self.pid, 0)
            result = "hung"
        else:
            code = os.waitstatus_to_exitcode(status)
            result = _WORDS.get(code, f"died ({code})")
        return Outcome(self.test, result, seconds, self._log.read_text(errors="replace"))

    def _kill(self) -> None:
        """End the test and every process it has started."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _run_here(tests: type, name: str, log: Path) -> None:
    """Run one test in this forked process, and end."""
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


def run(suite: dict[str, type], tests: Sequence[Test], at_a_time: int) -> Iterator[Outcome]:
    """Run the tests; their outcomes as they come."""
    gc.collect()
    gc.freeze()  # what is here already need not be looked through, and copied, by every process
    waiting, running = list(reversed(tests)), list[Any]()
    with tempfile.TemporaryDirectory() as folder:
        # The meeting places that torch's harness leaves behind go with the folder.
        tempfile.tempdir = folder
        try:
            while waiting or running:
                while waiting and len(running) < at_a_time:
                    test = waiting.pop()
                    running.append(_Running(test, suite[test.group], folder))
                time.sleep(0.02)
                for one in list(running):
                    outcome = one.look()
                    if outcome is not None:
                        running.remove(one)
                        yield outcome
        finally:
            tempfile.tempdir = None
            for one in running:
                one._kill()
                os.waitpid(one.pid, 0)
