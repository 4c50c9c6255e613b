"""The command line of ``python -m conformance``, which runs torch's tests of its RPC on
gradwire."""

from __future__ import annotations

import argparse
import sys
import time
import zlib
from collections import Counter

from conformance import suite
from conformance.expectations import differences
from conformance.running import Outcome, Test, run
from gradwire.testing import hide_gpus


def main() -> int:
    options = _parser().parse_args()
    hide_gpus()
    loaded = suite.load(options.plain_torch)
    tests = [
        Test(group, name)
        for group, classes in loaded.items()
        for name in suite.test_names(classes)
        if _is_wanted(group, name, options)
    ]
    if options.list:
        print("\n".join(map(str, tests)))
        return 0
    started = time.monotonic()
    outcomes: list[Outcome] = []
    for outcome in run(loaded, tests * options.times, options.jobs):
        outcomes.append(outcome)
        if options.verbose or not (outcome.passed or str(outcome.test) in differences()):
            print(f"{outcome.result:8} {outcome.seconds:5.1f} s  {outcome.test}", flush=True)
            if not outcome.passed and not options.quiet:
                print(outcome.output, flush=True)
    _summarize(outcomes, time.monotonic() - started)
    expected = {} if options.plain_torch else differences()
    return _compare(outcomes, expected)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m conformance")
    parser.add_argument("classes", nargs="*", help="classes of tests (default: all)")
    parser.add_argument(
        "-k", dest="words", help="only tests with one of these words, separated by commas"
    )
    parser.add_argument(
        "--third", action="store_true", help="only a third of the tests, always the same ones"
    )
    parser.add_argument(
        "-j", dest="jobs", type=int, default=3, help="run this many tests at the same time"
    )
    parser.add_argument("--times", type=int, default=1, help="run every test this many times")
    parser.add_argument(
        "-v", dest="verbose", action="store_true", help="also list the tests that pass"
    )
    parser.add_argument(
        "-q", dest="quiet", action="store_true", help="do not show the output of failed tests"
    )
    parser.add_argument("--list", action="store_true", help="list the tests, do not run them")
    parser.add_argument("--plain-torch", action="store_true", help="run the tests on torch itself")
    return parser


def _is_wanted(group: str, name: str, options: argparse.Namespace) -> bool:
    if options.third and zlib.crc32(f"{group}.{name}".encode()) % 3:
        return False
    return (not options.classes or group in options.classes) and (
        not options.words or any(word in name for word in options.words.split(","))
    )


def _summarize(outcomes: list[Outcome], seconds: float) -> None:
    passed = Counter(outcome.test.group for outcome in outcomes if outcome.passed)
    total = Counter(outcome.test.group for outcome in outcomes)
    for group, count in total.items():
        print(f"{group:34} {passed[group]:4} of {count}")
    print(f"{'':34} {passed.total():4} of {total.total()} in {seconds:.0f} s")


def _compare(outcomes: list[Outcome], expected: dict[str, object]) -> int:
    """Return the exit code: 0 if exactly the expected tests fail."""
    unexpected = [o for o in outcomes if not o.passed and str(o.test) not in expected]
    obsolete = [o for o in outcomes if o.passed and str(o.test) in expected]
    for outcome in unexpected:
        print(f"{outcome.result}: {outcome.test}")
    for outcome in obsolete:
        print(f"passed, but is listed in expected_differences.toml: {outcome.test}")
    return 1 if unexpected or obsolete else 0


if __name__ == "__main__":
    sys.exit(main())
