"""The command line of the fuzzer."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from gradwire.testing.fuzz.crews import Summary, Task, run_crews
from gradwire.testing.fuzz.generator import make_program

_PROGRESS_SECONDS = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run programs; 0 when all came to the same in one process and on workers."""
    options = _parser().parse_args(arguments)
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
            options.transport or ("unix" if options.processes else "memory"),
            options.timeout,
        )
        for number in range(options.load)
    ]
    started = time.monotonic()
    summary = run_crews(tasks, _Progress())
    for failure in summary.failures:
        print(f"\nFAILED {failure}")
    print(f"\n{_sentence(summary)} in {time.monotonic() - started:.1f} s")
    return 1 if summary.failures else 0


class _Progress:
    """Says from time to time how far it has got."""

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
        description="Compare gradients of random programs: on workers and in one process.",
    )
    parser.add_argument("--programs", type=int, default=1000, metavar="N")
    parser.add_argument("--workers", type=int, default=3, metavar="K")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the first program")
    parser.add_argument("--processes", action="store_true", help="one process per worker")
    parser.add_argument("--transport", choices=["memory", "unix", "tcp"])
    parser.add_argument(
        "--load",
        type=int,
        default=1,
        metavar="N",
        help="share the programs out to N groups at once",
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="for one program"
    )
    parser.add_argument("--show", action="store_true", help="print the programs, do not run them")
    return parser
