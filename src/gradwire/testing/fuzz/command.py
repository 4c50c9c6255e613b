"""The command line of the fuzzer, which tests gradwire with random programs."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from gradwire._core.gpus import hide_gpus
from gradwire._core.transport.registry import known_names
from gradwire.testing.fuzz.generator import make_program
from gradwire.testing.fuzz.worker_groups import Summary, Task, run_groups

_PROGRESS_SECONDS = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run random programs, or print them with ``--show``. Return 0 if every program gave the same
    results and gradients on workers as in one process."""
    options = _parser().parse_args(arguments)
    hide_gpus()
    if options.show:
        for seed in range(options.seed, options.seed + options.programs):
            print(make_program(seed, options.workers), end="\n\n")
        return 0
    seeds = range(options.seed, options.seed + options.programs)
    tasks = [
        Task(
            seeds[number :: options.load],
            options.workers,
            options.processes,
            options.transport or ("unix" if options.processes else "in_process"),
            options.timeout,
        )
        for number in range(options.load)
    ]
    started = time.monotonic()
    summary = run_groups(tasks, _Progress())
    for failure in summary.failures:
        print(f"\nFAILED {failure}")
    print(f"\n{_sentence(summary)} in {time.monotonic() - started:.1f} s")
    return 1 if summary.failures else 0


class _Progress:
    """Prints, every few seconds, how many programs have run and how they ended."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _PROGRESS_SECONDS

    def __call__(self, summary: Summary) -> None:
        if time.monotonic() > self._next:
            self._next = time.monotonic() + _PROGRESS_SECONDS
            print(_sentence(summary), flush=True)


def _sentence(summary: Summary) -> str:
    counts = ", ".join(f"{count} {verdict}" for verdict, count in summary.verdicts.most_common())
    return f"{summary.programs} programs: {counts or 'none'}; {len(summary.failures)} failures"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m gradwire.testing.fuzz",
        description="Compare the gradients of random programs: on workers and in one process.",
    )
    parser.add_argument("--programs", type=int, default=1000, metavar="N")
    parser.add_argument("--workers", type=int, default=3, metavar="K")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the first program")
    parser.add_argument("--processes", action="store_true", help="one process per worker")
    parser.add_argument(
        "--transport",
        choices=known_names(),
        help="default: unix with --processes, else in_process",
    )
    parser.add_argument(
        "--load",
        type=int,
        default=1,
        metavar="N",
        help="split the programs among N groups that run at the same time",
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="for one program"
    )
    parser.add_argument("--show", action="store_true", help="print the programs, do not run them")
    return parser
