"""Contestants that take turns at the same tasks.

Each contestant is a group of processes that is started once and then driven over pipes: "do this
case", "here are the samples". Only one of them works at any time, and which one goes first changes
from round to round, so that whatever else the machine does hits them alike. One that fails or does
not answer is out for that case, and is started anew for the next.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import platform
import secrets
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from gradwire.launch import die_with_parent, environment, free_port

#: Seconds until a contestant that does not answer is given up: to start, to do a case, to end.
START_SECONDS, CASE_SECONDS, END_SECONDS = 90.0, 180.0, 10.0
#: Of case, contestant, round: the samples, in the unit of the case.
Samples = dict[str, dict[str, list[list[float]]]]


@dataclass(frozen=True)
class Contestant:
    """Who is measured. Each of its processes enters `join(rank)`; that of rank 0 is asked to do the
    cases with what `join` yields. One that starts processes of its own, which the contest cannot
    stop while others have their turn, is not `lasting`: it is started for each turn."""

    name: str
    join: Callable[[int], AbstractContextManager[Any]]
    processes: int = 2
    lasting: bool = True


@dataclass(frozen=True)
class Steps:
    """The equal steps a case consists of. What one of them took is shown too: among cases that
    differ in length only, that says how the time grows with it."""

    count: int
    show: Callable[[float], str]


@dataclass(frozen=True)
class Floor:
    """What the machine itself needs for the like: `times` what it takes to do another case."""

    case: str
    times: float = 1


@dataclass(frozen=True)
class Point:
    """The place of a case in a plot: at `x`, on the curves of its contestants."""

    plot: str
    x: float


@dataclass(frozen=True)
class Case:
    """What is measured. `measure(tools, count)` gives `count` samples, of which less is better;
    warming up is up to it. `show` puts a sample into words. A contestant that takes more than
    `limit` seconds for its turn is given up. With two contestants or more, the second is to be
    `aim` times as good as the first; those that `peers` may join are for others too."""

    name: str
    measure: Callable[[Any, int], list[float]]
    count: int
    show: Callable[[float], str]
    quick_count: int = 3
    contestants: tuple[str, ...] = ("torch", "gradwire")
    steps: Steps | None = None
    limit: float = CASE_SECONDS
    unit: str = "s"
    aim: float | None = None
    floor: Floor | None = None
    point: Point | None = None
    peers: bool = False


@dataclass(frozen=True)
class Suite:
    """Cases and who is to do them. All of it must be picklable: functions of modules, partials."""

    title: str
    contestants: tuple[Contestant, ...]
    cases: tuple[Case, ...]

    def only(self, words: str) -> Suite:
        """The cases that have these words in their names, with their floors."""
        found = {case.name for case in self.cases if words in case.name}
        found |= {case.floor.case for case in self.cases if case.name in found and case.floor}
        return replace(self, cases=tuple(case for case in self.cases if case.name in found))


class BenchError(RuntimeError):
    """A contestant failed or did not answer in time."""


@dataclass(frozen=True)
class Outcome:
    """What came out: samples, and who failed at which case and why."""

    samples: Samples
    failures: dict[str, dict[str, str]]


def hold(suite: Suite, rounds: int, quick: bool) -> Outcome:
    """Let the contestants take turns at every case, `rounds` times."""
    samples: Samples = {case.name: {who: [] for who in case.contestants} for case in suite.cases}
    failures: dict[str, dict[str, str]] = {case.name: {} for case in suite.cases}
    with ExitStack() as until_the_end:
        teams = _Teams(suite.contestants, until_the_end)
        for round in range(rounds):
            for case in suite.cases:
                order = case.contestants if round % 2 == 0 else reversed(case.contestants)
                count = min(case.quick_count, case.count) if quick else case.count
                for who in order:
                    if who in failures[case.name]:
                        continue
                    try:
                        samples[case.name][who].append(teams.turn(who, case, count))
                    except BenchError as error:
                        failures[case.name][who] = str(error)
            _progress(f"round {round + 1} of {rounds}")
    _progress("")
    return Outcome(samples, failures)


class _Teams:
    """The contestants, each started when it is first needed. One that cannot be started fails at
    everything."""

    def __init__(self, contestants: Sequence[Contestant], until_the_end: ExitStack):
        self._contestants = {contestant.name: contestant for contestant in contestants}
        self._until_the_end = until_the_end
        self._running: dict[str, _Team] = {}
        self._not_started: dict[str, BenchError] = {}

    def turn(self, who: str, case: Case, count: int) -> list[float]:
        lasting = self._contestants[who].lasting
        with ExitStack() as turn:
            team = self._running.get(who) or self._start(
                who, self._until_the_end if lasting else turn
            )
            try:
                return team.do(case, count)
            except BenchError:
                team.kill()  # whatever it was at would spoil what follows
                self._running.pop(who, None)
                raise

    def _start(self, who: str, until: ExitStack) -> _Team:
        if who in self._not_started:
            raise self._not_started[who]
        try:
            team = until.enter_context(_running(self._contestants[who]))
        except BenchError as error:
            self._not_started[who] = error
            raise
        if self._contestants[who].lasting:
            self._running[who] = team
        return team


class _Team:
    """A contestant's processes. They are stopped except in their turn: torch's threads look for
    work all the time, and would take the cores from whoever is being measured."""

    def __init__(self, name: str, processes: Sequence[BaseProcess], line: Connection):
        self._name = name
        self._processes = processes
        self._line = line

    def do(self, case: Case, count: int) -> list[float]:
        """Their turn at a case."""
        self.signal("SIGCONT")
        try:
            with contextlib.suppress(OSError):  # if nobody is there, waiting for the answer tells
                self._line.send((case, count))
            return _answer(self._line, f"{self._name}, {case.name}", case.limit)
        finally:
            self.signal("SIGSTOP")

    def signal(self, name: str) -> None:
        number = getattr(signal, name, None)
        for process in self._processes:
            if number is not None and process.is_alive() and process.pid is not None:
                os.kill(process.pid, number)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(END_SECONDS)


@contextlib.contextmanager
def _running(contestant: Contestant) -> Iterator[_Team]:
    """The contestant's processes, started and stopped where they stand."""
    spawn = multiprocessing.get_context("spawn")
    token = secrets.token_hex(32)
    processes, lines = [], []
    with free_port() as port:
        try:
            for rank in range(contestant.processes):
                line, theirs = spawn.Pipe()
                place: dict[str, str] = {}
                if contestant.processes > 1:  # else it may start others, which have their own
                    place = environment(rank, contestant.processes, port, token)
                process = spawn.Process(
                    target=_take_part, args=(contestant, rank, place, theirs), daemon=True
                )
                process.start()
                theirs.close()  # so that the end of the process is the end of the line
                processes.append(process)
                lines.append(line)
            for rank, line in enumerate(lines):
                _answer(line, f"{contestant.name}, process {rank}, starting", START_SECONDS)
            team = _Team(contestant.name, processes, lines[0])
            team.signal("SIGSTOP")
            yield team
            team.signal("SIGCONT")
            # A closed line sends them home; they leave together, so all are told before any is
            # waited for.
            for line in lines:
                line.close()
            for rank, process in enumerate(processes):
                process.join(END_SECONDS)
                if process.exitcode == -signal.SIGABRT:
                    whose = f"{contestant.name}, process {rank}"
                    print(f"{whose}: aborted when it was to end", file=sys.stderr)
        finally:
            for process in processes:
                process.kill()
                process.join(END_SECONDS)


def _take_part(contestant: Contestant, rank: int, place: dict[str, str], line: Connection) -> None:
    """What each process of a contestant does."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends us
    os.environ.update(place)
    with contestant.join(rank) as tools:
        line.send([])
        with contextlib.suppress(EOFError):
            while True:
                case, count = line.recv()
                try:
                    line.send(case.measure(tools, count))
                except Exception:
                    line.send(traceback.format_exc())


def _answer(line: Connection, what: str, seconds: float) -> list[float]:
    if not line.poll(seconds):
        raise BenchError(f"{what}: no answer after {seconds:g} s")
    try:
        answer: list[float] | str = line.recv()
    except (EOFError, OSError):
        raise BenchError(f"{what}: its process died; see above") from None
    if isinstance(answer, str):
        raise BenchError(f"{what}:\n{answer}")
    return answer


def facts(rounds: int, quick: bool) -> dict[str, Any]:
    """Under which conditions the numbers were measured."""
    return {
        "torch": version("torch"),
        "gradwire": version("gradwire"),
        "Python": platform.python_version(),
        "CPUs": os.cpu_count(),
        "rounds": rounds,
        "quick": quick,
    }


def _progress(text: str) -> None:
    """A line that is overwritten by the next, for somebody who watches."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
