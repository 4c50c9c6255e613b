"""Compare this gradwire with the gradwire of another checkout: ``gradwire bench rpc --against``.

A suite of benchmarks normally compares torch with gradwire. Here the same suite compares two
versions of gradwire: "before" is the gradwire of the other checkout, and "now" is this gradwire.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median

from gradwire.bench.cases import Case, Contestant, Suite
from gradwire.bench.side_by_side import Outcome
from gradwire.bench.tables import medians_of, ratios

#: Only these suites can measure another version of gradwire: their measuring code uses only the
#: public functions of gradwire, which the other version has too.
SUITES = ("autograd", "rpc")
#: A case is reported as slower if its time now, divided by its time before, exceeds this.
TOLERANCE = 1.05


def compare_versions(suite: Suite, checkout: str) -> Suite:
    """Return a suite that compares the gradwire of `checkout`, called "before", with this gradwire,
    called "now".

    The new suite omits the cases that do not measure gradwire, and the lower bounds that such cases
    measure. It also omits the aims, because an aim is a ratio of torch to gradwire.

    Raises FileNotFoundError if the folder `checkout` holds no ``src/gradwire``.
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
    """Make two names from the name of a contestant that uses gradwire. The first is for the
    gradwire of the other checkout ("before"), the second for this gradwire ("now")."""
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
