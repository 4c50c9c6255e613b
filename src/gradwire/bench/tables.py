"""Show the outcome of a suite as a table."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from statistics import median

from gradwire.bench.cases import Case, Steps, Suite
from gradwire.bench.side_by_side import Outcome

#: `medians[case][contestant]` is a list with one number for each round: the median of the samples
#: in that round. The list is empty if the contestant (a library that is measured) failed at the
#: case.
Medians = dict[str, dict[str, list[float]]]


def table(suite: Suite, outcome: Outcome) -> str:
    """Return a table of the medians over all rounds, with the lowest and highest median of a round
    in parentheses.

    A ratio divides two results of the same round. For ``torch / gradwire`` larger is better, and
    ``aim`` is the ratio to reach. For ``gradwire / floor`` smaller is better: the floor is the
    lower bound that the machine sets, and a ratio of 1 is perfect.
    """
    medians = medians_of(outcome)
    first, second = suite.compared
    several = [case for case in suite.cases if len(case.contestants) > 1]
    rows = [_compared(case, medians, first, second) for case in several]
    used = {column for row in rows for column in row}
    fixed = ["", first, second, f"{first} / {second}", "aim", f"{second} / floor"]
    columns = [*(column for column in fixed if column in used), *sorted(used - {*fixed})]
    with_steps = [case for case in several if case.steps]
    sections = [
        [columns, *([row.get(column, "") for column in columns] for row in rows)] if rows else [],
        [["each", first, second], *(_per_step(case, medians) for case in with_steps)]
        if with_steps
        else [],
        [_alone(case, medians) for case in suite.cases if len(case.contestants) == 1],
    ]
    return "\n\n".join("\n".join(_aligned(lines)) for lines in sections if lines)


def medians_of(outcome: Outcome) -> Medians:
    """Return, for each case and contestant, a list with the median of each round's samples. A
    contestant is a library that is measured."""
    return {
        case: {
            name: [] if name in outcome.failures[case] else [median(turn) for turn in rounds]
            for name, rounds in contestants.items()
        }
        for case, contestants in outcome.samples.items()
    }


def ratios(numerators: list[float], denominators: list[float]) -> list[float]:
    """Divide the results of two contestants, round by round. Return an empty list if one of
    them failed."""
    if not numerators or not denominators:
        return []
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def _compared(case: Case, medians: Medians, first: str, second: str) -> dict[str, str]:
    """Return the table row of a case with several contestants. The row maps the title of a column
    to the text in that column."""
    reference, measured, *others = case.contestants
    values = medians[case.name]
    improvement = ratios(values[reference], values[measured])
    row = {
        "": case.name,
        first: _with_spread(values[reference], case.show),
        second: _with_spread(values[measured], case.show),
        f"{first} / {second}": _with_spread(improvement, "{:.2f}".format),
    }
    if case.aim is not None:
        reached = bool(improvement) and median(improvement) >= case.aim
        row["aim"] = f"{case.aim:g}" if reached else f"{case.aim:g} missed"
    if case.floor is not None:
        [floor_medians] = medians[case.floor.case].values()
        floors = [case.floor.times * value for value in floor_medians]
        above = ratios(values[measured], floors)
        row[f"{second} / floor"] = _with_spread(above, "{:.2f}".format)
    return row | {name: _with_spread(values[name], case.show) for name in others}


def _per_step(case: Case, medians: Medians) -> list[str]:
    """Return the table row that shows the time per step of a case."""
    assert case.steps
    steps = case.steps
    return [case.name, *(_one_step(values, steps) for values in medians[case.name].values())]


def _alone(case: Case, medians: Medians) -> list[str]:
    """Return the table row of a case with a single contestant."""
    [values] = medians[case.name].values()
    steps = [_one_step(values, case.steps)] if case.steps else []
    return [case.name, _with_spread(values, case.show), *steps]


def _one_step(values: list[float], steps: Steps) -> str:
    return _with_spread([value / steps.count for value in values], steps.show)


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
