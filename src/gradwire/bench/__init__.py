"""Measure gradwire against torch, or against another version of gradwire: ``gradwire bench SUITE``.

`cases` defines how a suite is described, `side_by_side` runs suites, and `tables` shows the
results. Each suite is a module of its own: with its cases, which are the single measurements, and
its contestants, which are the libraries to compare. Only the contestants' processes import torch.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib import import_module
from typing import Any

from gradwire._core.gpus import hide_gpus
from gradwire.bench import side_by_side, versions
from gradwire.bench.cases import Case, Suite
from gradwire.bench.competitors import add_competitors
from gradwire.bench.tables import table

#: The suites by name, and the module of each.
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
    competitors: bool = False,
    only: str = "",
    against: str | None = None,
) -> int:
    """Run a suite, print its table, and write all samples to `json_file` if given.

    `only` selects the cases whose name contains this text. With `competitors`, the libraries Ray
    and Monarch are measured too, in the cases that they support. `against` is the folder of another
    checkout: this gradwire is then compared with the one in that folder instead of with torch.
    Return 0 if every contestant (a library that is measured) finished every case.

    >>> main("rpc", rounds=5, quick=False)       # doctest: +SKIP
    """
    whole: Suite = import_module(SUITES[suite]).SUITE
    if against is not None:
        if suite not in versions.SUITES:
            return _usage_error(f"--against measures {' and '.join(versions.SUITES)}, not {suite}")
        if competitors:
            return _usage_error("--against compares two versions of gradwire: no --competitors")
        try:
            whole = versions.compare_versions(whole, against)
        except FileNotFoundError as error:
            return _usage_error(str(error))
    chosen = whole.only(only)
    if not chosen.cases:
        names = "".join(f"\n  {case.name}" for case in whole.cases)
        return _usage_error(f"{suite} has no case with {only!r} in its name. Its cases:{names}")
    # The contestants fork workers. After a backward pass in a process that sees a GPU, a process
    # forked from it cannot run one. No suite needs a GPU, because all suites measure the CPU.
    hide_gpus()
    conditions = side_by_side.conditions(rounds, quick)
    print(f"{chosen.title}\n{', '.join(f'{k} {v}' for k, v in conditions.items())}\n", flush=True)
    if competitors:
        chosen, missing = add_competitors(chosen)
        print("".join(f"{line}\n" for line in missing), flush=True)
    try:
        outcome = side_by_side.run(chosen, rounds, quick)
    except KeyboardInterrupt:
        return 130
    print(table(chosen, outcome), flush=True)
    if against is not None:
        print(f"\n{versions.slower_rows(chosen, outcome)}", flush=True)
    if json_file:
        with open(json_file, "w") as file:
            cases = {case.name: _description(case) for case in chosen.cases}
            json.dump({"suite": suite, **conditions, "cases": cases, **asdict(outcome)}, file)
    failures = [reason for failed in outcome.failures.values() for reason in failed.values()]
    for reason in dict.fromkeys(failures):
        print(f"gradwire: {reason}", file=sys.stderr)
    return 1 if failures else 0


def _usage_error(text: str) -> int:
    print(f"gradwire: {text}", file=sys.stderr)
    return 2


def _description(case: Case) -> dict[str, Any]:
    """Return what the JSON file of samples records about a case: its unit and its place in a
    plot."""
    return {"unit": case.unit, **(asdict(case.point) if case.point else {})}
