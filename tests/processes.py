"""Real worker processes for tests, forked so that torch is imported once.

`group` starts them and talks to them over pipes: each runs the given function and reports its
result. A process that does not end by itself is killed, and the test fails.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gradwire import rpc

PATIENCE = 60.0


class Process:
    """A forked process that runs `body` and reports what it returned."""

    def __init__(self, body: Callable[[], Any]):
        self._result, theirs = multiprocessing.Pipe(duplex=False)
        self.pid = os.fork()
        if self.pid == 0:
            _run_child(body, theirs)
        theirs.close()
        self._status: int | None = None

    def has_result(self) -> bool:
        """Return whether `result` would return at once."""
        return self._result.poll(0)

    def result(self) -> Any:
        """Return the result of the body, or raise AssertionError with its traceback."""
        if not self._result.poll(PATIENCE):
            self.kill()
            raise AssertionError(f"process {self.pid} has not ended after {PATIENCE:g} s")
        try:
            ok, value = self._result.recv()
        except EOFError:
            raise AssertionError(f"process {self.pid} died: status {self.wait()}") from None
        self.wait()
        if not ok:
            raise AssertionError(f"in process {self.pid}:\n{value}")
        return value

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def wait(self) -> int:
        if self._status is None:
            _, self._status = os.waitpid(self.pid, 0)
        return self._status

    def close(self) -> None:
        self.kill()
        self._result.close()


def _run_child(body: Callable[[], Any], report: Connection) -> None:
    try:
        try:
            answer = (True, body())
            pickle.dumps(answer)
        except BaseException:
            answer = (False, traceback.format_exc())
        report.send(answer)
    finally:
        os._exit(0)


@contextmanager
def processes(*bodies: Callable[[], Any]) -> Iterator[list[Process]]:
    started: list[Process] = []
    try:
        for body in bodies:
            started.append(Process(body))
        yield started
    finally:
        for process in started:
            process.close()


@contextmanager
def rendezvous_file() -> Iterator[str]:
    """Yield an init_method for a group of processes: a file in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        yield f"file://{folder}/store"


@contextmanager
def group(
    size: int, body: Callable[[int], Any], *, shut_down: bool = True, **options: Any
) -> Iterator[list[Process]]:
    """Start `size` worker processes, named worker0, worker1 and so on. Each runs `body(rank)`."""
    with rendezvous_file() as place:

        def worker(rank: int) -> Callable[[], Any]:
            def run() -> Any:
                rpc.init_rpc(
                    f"worker{rank}",
                    rank=rank,
                    world_size=size,
                    rpc_backend_options=rpc.Options(init_method=place, **options),
                )
                result = body(rank)
                if shut_down:
                    rpc.shutdown(timeout=PATIENCE / 2)
                return result

            return run

        with processes(*(worker(rank) for rank in range(size))) as started:
            yield started


def run_group(size: int, body: Callable[[int], Any], **options: Any) -> list[Any]:
    """Run a group to its end. Return the results by rank."""
    with group(size, body, **options) as started:
        return [process.result() for process in started]


def freeze(pid: int) -> None:
    """Stop a process. Return when all its threads are stopped."""

    def is_stopped() -> bool:
        states = [task.read_text().rpartition(")")[2].split()[0] for task in tasks.glob("*/stat")]
        return set(states) == {"T"}

    tasks = Path(f"/proc/{pid}/task")
    os.kill(pid, signal.SIGSTOP)
    until(is_stopped, "all threads are stopped")


def until(condition: Callable[[], bool], what: str) -> None:
    """Poll a condition that another thread or process will make true."""
    deadline = time.monotonic() + PATIENCE
    pause = 0.001
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
