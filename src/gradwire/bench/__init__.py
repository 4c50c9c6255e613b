"""Measuring gradwire against torch: ``gradwire bench SUITE``.

`contest` runs and compares, without knowing what; every suite is a module of its own that says who
takes part and what they are asked to do. Only the contestants' processes import torch.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib import import_module

from gradwire.bench import contest

#: The suites, and the modules they are in.
SUITES = {
    "autograd": "gradwire.bench.autograd",
    "programs": "gradwire.bench.programs",
    "rpc": "gradwire.bench.rpc",
}


def main(suite: str, rounds: int, quick: bool, json_file: str | None) -> int:
    """Run a suite, print its table and write all samples to a file if one is named. Returns 0 if
    all contestants could do all cases.

    >>> main("rpc", rounds=5, quick=False, json_file=None)       # doctest: +SKIP
    """
    chosen: contest.Suite = import_module(SUITES[suite]).SUITE
    conditions = contest.facts(rounds, quick)
    print(f"{chosen.title}\n{', '.join(f'{k} {v}' for k, v in conditions.items())}\n", flush=True)
    try:
        outcome = contest.hold(chosen, rounds, quick)
    except contest.BenchError as error:
        print(f"gradwire: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(contest.table(chosen, outcome), flush=True)
    if json_file:
        with open(json_file, "w") as file:
            json.dump({"suite": suite, **conditions, "unit": "s", **asdict(outcome)}, file)
    failures = [why for failed in outcome.failures.values() for why in failed.values()]
    for why in failures:
        print(f"gradwire: {why}", file=sys.stderr)
    return 1 if failures else 0
