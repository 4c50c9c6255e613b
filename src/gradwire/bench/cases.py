"""Suites of measurements: the cases to measure, and the contestants (the libraries) to compare.

The classes here only describe suites; `side_by_side` runs them. The descriptions are sent to the
contestants' processes as pickles, so the functions in a description must be importable by name:
functions of a module, or partials of such functions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

#: The default time limit in seconds for a turn: one measurement of a case with one library.
CASE_SECONDS = 180.0


@dataclass(frozen=True)
class Contestant:
    """A library that is measured, and the processes it runs in.

    Every process enters the context manager `join(rank)`. The process of rank 0 measures the cases,
    with the value that `join` yields. Between turns, while other contestants are measured, the
    processes stay alive but are suspended by the signal SIGSTOP. A contestant that starts further
    processes, which do not get this signal, sets `restart_each_turn`. With a `source`, the
    processes import gradwire from that folder.
    """

    name: str
    join: Callable[[int], AbstractContextManager[Any]]
    processes: int = 2
    restart_each_turn: bool = False
    source: str | None = None


@dataclass(frozen=True)
class Steps:
    """The number of equal steps in a case, and the function that formats the time per step. The
    table shows that time too: if it is the same in cases of different lengths, the cost grows in
    proportion to the length."""

    count: int
    show: Callable[[float], str]


@dataclass(frozen=True)
class Floor:
    """A lower bound for the time of a case. The bound is the time of another case, multiplied by
    `times`. That other case, with the name `case`, uses no RPC library."""

    case: str
    times: float = 1


@dataclass(frozen=True)
class Point:
    """The place of a case in a plot: the name of the plot and the x coordinate. The y coordinate
    comes from the samples of each contestant."""

    plot: str
    x: float


@dataclass(frozen=True)
class Case:
    """One measurement, and the names of the contestants (the libraries) to measure.

    `measure(tools, count)` does a warm-up and returns `count` samples in `unit`; smaller is better.
    `tools` is the value that the contestant's `join` yields. `show` formats a sample. The processes
    of a contestant that needs more than `time_limit` seconds are killed. The first two contestants
    are compared: the second should be `aim` times as good as the first. With `open_to_competitors`,
    the libraries in the module `competitors` can be measured in this case too.
    """

    name: str
    measure: Callable[[Any, int], list[float]]
    count: int
    show: Callable[[float], str]
    quick_count: int = 3
    contestants: tuple[str, ...] = ("torch", "gradwire")
    steps: Steps | None = None
    time_limit: float = CASE_SECONDS
    unit: str = "s"
    aim: float | None = None
    floor: Floor | None = None
    point: Point | None = None
    open_to_competitors: bool = False


@dataclass(frozen=True)
class Suite:
    """Cases and their contestants (the libraries to compare). `compared` names the two columns of
    the table that show the first two contestants of each case."""

    title: str
    contestants: tuple[Contestant, ...]
    cases: tuple[Case, ...]
    compared: tuple[str, str] = ("torch", "gradwire")

    def only(self, words: str) -> Suite:
        """Return the suite with only the cases whose name contains `words`, and with the cases that
        set a lower bound for them."""
        chosen = {case.name for case in self.cases if words in case.name}
        chosen |= {case.floor.case for case in self.cases if case.name in chosen and case.floor}
        return replace(self, cases=tuple(case for case in self.cases if case.name in chosen))
