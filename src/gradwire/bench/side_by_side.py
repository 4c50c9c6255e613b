"""Measure contestants in turns, side by side.

A contestant is a library that is measured. It has a group of processes, which is started once and
then told over sockets which case to measure. Only one contestant runs at any time, and the order
changes from round to round, so that other load on the machine affects all contestants alike. A
contestant that fails at a case, or does not answer, does not measure this case again. Its processes
are started anew for its next case.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import platform
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gradwire._version import __version__
from gradwire.bench.cases import Case, Contestant, Suite
from gradwire.launch import die_with_parent, environment, free_port

#: How long to wait for a contestant's processes to start, and to end.
START_SECONDS, END_SECONDS = 90.0, 10.0
#: `samples[case][contestant]` has a list of samples for each round, in the unit of the case.
Samples = dict[str, dict[str, list[list[float]]]]

_PROGRAM = Path(__file__).with_name("contestant_process.py")


class BenchError(RuntimeError):
    """A contestant (a library that is measured) failed or did not answer in time."""


@dataclass(frozen=True)
class Outcome:
    """The samples of all cases, and `failures[case][contestant]`: the reason why a contestant
    failed at a case."""

    samples: Samples
    failures: dict[str, dict[str, str]]


def run(suite: Suite, rounds: int, quick: bool) -> Outcome:
    """Measure all cases `rounds` times. In each round, the contestants of a case measure the case
    one after the other. With `quick`, take fewer samples."""
    samples: Samples = {case.name: {name: [] for name in case.contestants} for case in suite.cases}
    failures: dict[str, dict[str, str]] = {case.name: {} for case in suite.cases}
    with ExitStack() as whole_run:
        contestants = _Contestants(suite.contestants, whole_run)
        for number in range(rounds):
            for case in suite.cases:
                order = case.contestants if number % 2 == 0 else reversed(case.contestants)
                count = min(case.quick_count, case.count) if quick else case.count
                for name in order:
                    if name in failures[case.name]:
                        continue
                    try:
                        samples[case.name][name].append(contestants.turn(name, case, count))
                    except BenchError as error:
                        failures[case.name][name] = str(error)
            _show_progress(f"round {number + 1} of {rounds}")
    _show_progress("")
    return Outcome(samples, failures)


class _Contestants:
    """Starts each contestant when it has its first case to measure. A contestant that cannot be
    started is not tried again: it fails at all its cases."""

    def __init__(self, contestants: Sequence[Contestant], whole_run: ExitStack):
        self._contestants = {contestant.name: contestant for contestant in contestants}
        self._whole_run = whole_run
        self._running: dict[str, _RunningContestant] = {}
        self._failed_to_start: dict[str, BenchError] = {}

    def turn(self, name: str, case: Case, count: int) -> list[float]:
        restart = self._contestants[name].restart_each_turn
        with ExitStack() as turn:
            running = self._running.get(name) or self._start(
                name, turn if restart else self._whole_run
            )
            try:
                return running.measure(case, count)
            except BenchError:
                # Kill the processes, which might disturb the next contestant.
                running.kill()
                self._running.pop(name, None)
                raise

    def _start(self, name: str, lifetime: ExitStack) -> _RunningContestant:
        if name in self._failed_to_start:
            raise self._failed_to_start[name]
        try:
            running = lifetime.enter_context(_started(self._contestants[name]))
        except BenchError as error:
            self._failed_to_start[name] = error
            raise
        if not self._contestants[name].restart_each_turn:
            self._running[name] = running
        return running


class _RunningContestant:
    """The processes of a contestant. While another contestant is measured, they are suspended by
    the signal SIGSTOP. Otherwise torch's threads, which poll all the time, would take the cores
    from the contestant that is measured."""

    def __init__(
        self, name: str, processes: Sequence[subprocess.Popen[bytes]], connection: Connection
    ) -> None:
        self._name = name
        self._processes = processes
        self._connection = connection

    def measure(self, case: Case, count: int) -> list[float]:
        """Resume the processes, let them measure a case, and suspend them again. Return the
        samples."""
        self.signal("SIGCONT")
        try:
            # If the process has died, sending fails. Ignore this error, because `_receive` raises a
            # BenchError for a dead process.
            with contextlib.suppress(OSError):
                self._connection.send((case, count))
            return _receive(self._connection, f"{self._name}, {case.name}", case.time_limit)
        finally:
            self.signal("SIGSTOP")

    def signal(self, name: str) -> None:
        """Send the signal of this name to every process, if the system has such a signal."""
        number = getattr(signal, name, None)
        for process in self._processes:
            if number is not None and process.poll() is None:
                process.send_signal(number)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait(END_SECONDS)


@contextlib.contextmanager
def _started(contestant: Contestant) -> Iterator[_RunningContestant]:
    """Start the contestant's processes, and yield them suspended by SIGSTOP. After the block,
    resume them, ask them to shut down, and kill those that do not end in time."""
    token = secrets.token_hex(32)
    processes: list[subprocess.Popen[bytes]] = []
    connections: list[Connection] = []
    with free_port() as port:
        try:
            for rank in range(contestant.processes):
                variables: dict[str, str] = {}
                # A contestant with a single process may start a group of workers itself. So do not
                # set the environment variables that would make this process a member of another
                # group.
                if contestant.processes > 1:
                    variables = environment(rank, contestant.processes, port, token)
                process, connection = _start_process(contestant, rank, variables)
                processes.append(process)
                connections.append(connection)
            for rank, connection in enumerate(connections):
                _receive(connection, f"{contestant.name}, process {rank}, starting", START_SECONDS)
            running = _RunningContestant(contestant.name, processes, connections[0])
            running.signal("SIGSTOP")
            yield running
            running.signal("SIGCONT")
            # A process shuts down when its connection is closed, and then waits for the other
            # processes. So close all connections before waiting for any process.
            for connection in connections:
                connection.close()
            for rank, process in enumerate(processes):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_SECONDS)
                if process.returncode == -signal.SIGABRT:
                    text = f"{contestant.name}, process {rank}: aborted while it was shutting down"
                    print(text, file=sys.stderr)
        finally:
            for connection in connections:
                connection.close()
            for process in processes:
                process.kill()
                process.wait(END_SECONDS)


def _start_process(
    contestant: Contestant, rank: int, variables: dict[str, str]
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start one process of a contestant, with the `sys.path` of this process. Return the new
    process and a connection to it."""
    connection, theirs = multiprocessing.Pipe()
    # Close the new process's end of the connection here. Then only that process has it open, and
    # the connection ends when the process ends.
    with theirs:
        process = subprocess.Popen(
            [sys.executable, str(_PROGRAM), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **variables},
            pass_fds=[theirs.fileno()],
            preexec_fn=die_with_parent,  # noqa: PLW1509, this process has one thread
        )
    # If the process has died already, `send` fails. The error is ignored here, because `_receive`
    # will report the dead process.
    with contextlib.suppress(OSError):
        connection.send((sys.path, contestant.source))
        connection.send((contestant, rank))
    return process, connection


def _receive(connection: Connection, waiting_for: str, seconds: float) -> list[float]:
    """Return the samples that a process sends. Raise BenchError if the process fails, dies or does
    not answer in time."""
    if not connection.poll(seconds):
        raise BenchError(f"{waiting_for}: no answer after {seconds:g} s")
    try:
        answer: list[float] | str = connection.recv()
    except (EOFError, OSError):
        raise BenchError(f"{waiting_for}: its process died; see above") from None
    if isinstance(answer, str):
        raise BenchError(f"{waiting_for}:\n{answer}")
    return answer


def conditions(rounds: int, quick: bool) -> dict[str, Any]:
    """Return the conditions of the measurements: versions, the number of CPUs, and options."""
    return {
        "torch": version("torch"),
        "gradwire": __version__,
        "Python": platform.python_version(),
        "CPUs": os.cpu_count(),
        "rounds": rounds,
        "quick": quick,
    }


def _show_progress(text: str) -> None:
    """On a terminal, show a line that the next call overwrites."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
