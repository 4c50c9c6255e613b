"""The outcome of a contest as a table."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from statistics import median

from gradwire.bench.contest import Case, Outcome, Steps, Suite

#: Of case and contestant: the median of every round, or nothing if it failed in one of them.
Medians = dict[str, dict[str, list[float]]]
#: What can be said of a case with several contestants; others than these two come behind.
COLUMNS = ["", "torch", "gradwire", "torch / gradwire", "aim", "gradwire / floor"]


def table(suite: Suite, outcome: Outcome) -> str:
    """Medians over all rounds, with the lowest and highest median of a round in brackets.

    Ratios compare turns of one round. In ``torch / gradwire`` more is better, and ``aim`` is what
    it is to reach; in ``gradwire / floor`` less is better, and 1 would be perfect.
    """
    medians = {
        case: {
            who: [] if who in outcome.failures[case] else [median(s) for s in rounds]
            for who, rounds in of_case.items()
        }
        for case, of_case in outcome.samples.items()
    }
    several = [case for case in suite.cases if len(case.contestants) > 1]
    compared = [_compared(case, medians) for case in several]
    used = {column for row in compared for column in row}
    columns = [*(c for c in COLUMNS if c in used), *sorted(used - {*COLUMNS})]
    growing = [case for case in several if case.steps]
    sections = [
        [columns, *([row.get(column, "") for column in columns] for row in compared)]
        if compared
        else [],
        [["each", "torch", "gradwire"], *(_steps(case, medians) for case in growing)]
        if growing
        else [],
        [_alone(case, medians) for case in suite.cases if len(case.contestants) == 1],
    ]
    return "\n\n".join("\n".join(_aligned(rows)) for rows in sections if rows)


def _compared(case: Case, medians: Medians) -> dict[str, str]:
    """The cells of a case, by column."""
    torch, gradwire, *others = case.contestants
    of_case = medians[case.name]
    ratios = _ratios(of_case[torch], of_case[gradwire])
    row = {
        "": case.name,
        "torch": _with_spread(of_case[torch], case.show),
        "gradwire": _with_spread(of_case[gradwire], case.show),
        "torch / gradwire": _with_spread(ratios, "{:.2f}".format),
    }
    if case.aim is not None:
        reached = bool(ratios) and median(ratios) >= case.aim
        row["aim"] = f"{case.aim:g}" if reached else f"{case.aim:g} missed"
    if case.floor is not None:
        [values] = medians[case.floor.case].values()
        floors = [case.floor.times * value for value in values]
        row["gradwire / floor"] = _with_spread(_ratios(of_case[gradwire], floors), "{:.2f}".format)
    return row | {who: _with_spread(of_case[who], case.show) for who in others}


def _steps(case: Case, medians: Medians) -> list[str]:
    """What one step of a case took."""
    assert case.steps
    steps = case.steps
    return [case.name, *(_of_one_step(values, steps) for values in medians[case.name].values())]


def _alone(case: Case, medians: Medians) -> list[str]:
    [values] = medians[case.name].values()
    steps = [_of_one_step(values, case.steps)] if case.steps else []
    return [case.name, _with_spread(values, case.show), *steps]


def _of_one_step(values: list[float], steps: Steps) -> str:
    return _with_spread([value / steps.count for value in values], steps.show)


def _ratios(these: list[float], those: list[float]) -> list[float]:
    """Round by round; none if one side failed."""
    return [a / b for a, b in zip(these, those, strict=True)] if these and those else []


def _with_spread(values: list[float], show: Callable[[float], str]) -> str:
    if not values:
        return "failed"
    low, high = sorted((show(min(values)), show(max(values))), key=_number)
    return f"{show(median(values))} ({low.split()[0]} .. {high.split()[0]})"


def _number(text: str) -> float:
    return float(text.split()[0])


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in rows
    ]
