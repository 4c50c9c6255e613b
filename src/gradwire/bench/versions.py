"""Compare this gradwire with the gradwire of another checkout: ``gradwire bench rpc --against``.

The suite keeps its cases and changes its contestants, the versions or libraries that are compared:
the gradwire of the other checkout, called "before", takes the place of torch, and this gradwire is
called "now".
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median

from gradwire.bench.cases import Case, Contestant, Suite
from gradwire.bench.side_by_side import Outcome
from gradwire.bench.tables import medians_of, ratios

#: The suites whose measuring code uses only the public functions of gradwire.
SUITES = ("autograd", "rpc")
#: A case is reported as slower if its time now, divided by its time before, exceeds this.
TOLERANCE = 1.05


def compare_versions(suite: Suite, checkout: str) -> Suite:
    """Return the suite with the contestants "before" and "now" in the place of torch and gradwire.
    Leave out the cases that do not measure gradwire, and all aims and lower bounds.

    Raises FileNotFoundError if the folder holds no ``src/gradwire``.
    """
    source = Path(checkout).resolve() / "src"
    if not (source / "gradwire" / "__init__.py").exists():
        raise FileNotFoundError(f"{checkout} is no checkout of gradwire: no src/gradwire in it")
    contestants: list[Contestant] = []
    for contestant in suite.contestants:
        if "gradwire" in contestant.name:
            before, now = _names(contestant.name)
            contestants.append(replace(contestant, name=before, source=str(source)))
            contestants.append(replace(contestant, name=now))
    cases = [
        replace(
            case,
            contestants=_names(case.contestants[1]),
            aim=None,
            floor=None,
            open_to_competitors=False,
        )
        for case in suite.cases
        if len(case.contestants) > 1
    ]
    title = f"{suite.title}; before: {checkout}"
    return Suite(title, tuple(contestants), tuple(cases), compared=("before", "now"))


def _names(gradwire: str) -> tuple[str, str]:
    """Return the names of the two contestants that replace the contestant of this name."""
    return gradwire.replace("gradwire", "before"), gradwire.replace("gradwire", "now")


def slower_rows(suite: Suite, outcome: Outcome) -> str:
    """Return a text that lists the cases that have become slower by more than TOLERANCE. The median
    over all rounds decides."""
    medians = medians_of(outcome)
    lines = [line for case in suite.cases for line in _slowdown(case, medians[case.name])]
    if not lines:
        return f"no case is slower by more than {TOLERANCE - 1:.0%}"
    return "\n".join([f"slower by more than {TOLERANCE - 1:.0%}:", *lines])


def _slowdown(case: Case, medians: dict[str, list[float]]) -> list[str]:
    before, now = (medians[name] for name in case.contestants)
    slowdowns = ratios(now, before)
    if not slowdowns or median(slowdowns) <= TOLERANCE:
        return []
    low, middle, high = (
        f"{value - 1:+.0%}" for value in (min(slowdowns), median(slowdowns), max(slowdowns))
    )
    return [f"  {case.name}: {middle} ({low} .. {high})"]
