"""Measuring gradwire against torch: ``gradwire bench SUITE``.

`contest` runs and compares, without knowing what; every suite is a module of its own that says who
takes part and what they are asked to do. Only the contestants' processes import torch.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module

from gradwire.bench import contest

#: The suites, and the modules they are in.
SUITES = {"rpc": "gradwire.bench.rpc"}


def main(suite: str, rounds: int, quick: bool, json_file: str | None) -> int:
    """Run a suite, print its table and write all samples to a file if one is named.

    >>> main("rpc", rounds=5, quick=False, json_file=None)       # doctest: +SKIP
    """
    chosen: contest.Suite = import_module(SUITES[suite]).SUITE
    conditions = contest.facts(rounds, quick)
    print(f"{chosen.title}\n{', '.join(f'{k} {v}' for k, v in conditions.items())}\n", flush=True)
    try:
        samples = contest.hold(chosen, rounds, quick)
    except contest.BenchError as error:
        print(f"gradwire: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(contest.table(chosen, samples))
    if json_file:
        with open(json_file, "w") as file:
            json.dump({"suite": suite, **conditions, "unit": "s", "samples": samples}, file)
    return 0
