"""Measuring gradwire against torch: ``gradwire bench SUITE``.

`contest` runs and compares, without knowing what; every suite is a module of its own that says who
takes part and what they are asked to do. Only the contestants' processes import torch.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib import import_module
from typing import Any

from gradwire.bench import contest
from gradwire.bench.peers import invite
from gradwire.bench.tables import table

#: The suites, and the modules they are in.
SUITES = {
    "autograd": "gradwire.bench.autograd",
    "programs": "gradwire.bench.programs",
    "rpc": "gradwire.bench.rpc",
    "scale": "gradwire.bench.scale",
}


def main(
    suite: str,
    rounds: int,
    quick: bool,
    json_file: str | None = None,
    peers: bool = False,
    only: str = "",
) -> int:
    """Run a suite, or `only` the cases that have these words in their names, print its table and
    write all samples to a file if one is named. With `peers`, others than torch take part where
    they can. Returns 0 if all contestants could do all cases.

    >>> main("rpc", rounds=5, quick=False)       # doctest: +SKIP
    """
    whole: contest.Suite = import_module(SUITES[suite]).SUITE
    chosen = whole.only(only)
    if not chosen.cases:
        names = "".join(f"\n  {case.name}" for case in whole.cases)
        why = f"{suite} has no case with {only!r} in its name. Its cases:{names}"
        print(f"gradwire: {why}", file=sys.stderr)
        return 2
    conditions = contest.facts(rounds, quick)
    print(f"{chosen.title}\n{', '.join(f'{k} {v}' for k, v in conditions.items())}\n", flush=True)
    if peers:
        chosen, missing = invite(chosen)
        print("".join(f"{line}\n" for line in missing), flush=True)
    try:
        outcome = contest.hold(chosen, rounds, quick)
    except KeyboardInterrupt:
        return 130
    print(table(chosen, outcome), flush=True)
    if json_file:
        with open(json_file, "w") as file:
            cases = {case.name: _described(case) for case in chosen.cases}
            json.dump({"suite": suite, **conditions, "cases": cases, **asdict(outcome)}, file)
    failures = [why for failed in outcome.failures.values() for why in failed.values()]
    for why in dict.fromkeys(failures):
        print(f"gradwire: {why}", file=sys.stderr)
    return 1 if failures else 0


def _described(case: contest.Case) -> dict[str, Any]:
    """What a file says of a case besides its samples."""
    return {"unit": case.unit, **(asdict(case.point) if case.point else {})}
