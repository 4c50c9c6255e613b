"""Plots of what a contest wrote to its file: ``gradwire plot scale.json --into docs/plots``.

They have no background and few colours, so that they can be read on white and on black.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

#: Of torch and gradwire, and of all else.
COLOURS, GREY = ("#e8710a", "#2f81f7"), "#7d848d"
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "gradwire",  # the same samples give the same file
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "grid.color": GREY,
    "grid.alpha": 0.25,
}


@dataclass(frozen=True)
class Plot:
    """A file with a curve for torch and one for gradwire, through the cases whose point is in the
    plot `of`, beginning at `first_x`. `value(x, sample)` is what is drawn."""

    file: str
    of: str
    title: str
    x_label: str
    x_words: Callable[[float], str]
    y_words: Callable[[float], str]
    x_ticks: Sequence[float]
    value: Callable[[float, float], float] = lambda _x, sample: sample
    y_log: bool = False
    first_x: float = 1


@dataclass(frozen=True)
class Curve:
    """The median over all rounds at each x, and the lowest and highest of a round."""

    x: list[float]
    middle: list[float]
    low: list[float]
    high: list[float]


def main(files: Sequence[str], folder: str) -> int:
    """Draw all that the files have samples for, into a folder. Returns 0 if there was something.

    >>> main(["scale.json"], "docs/plots")     # doctest: +SKIP
    """
    if find_spec("matplotlib") is None:
        print('gradwire: to draw, pip install "gradwire[plots]"', file=sys.stderr)
        return 1
    contests = [json.loads(Path(file).read_text()) for file in files]
    drawn = 0
    for plot in PLOTS:
        curves = [curves for contest in contests if (curves := find_curves(plot, contest))]
        for found in curves[-1:]:  # of several measurements, the last
            Path(folder).mkdir(parents=True, exist_ok=True)
            draw(plot, found, Path(folder) / plot.file)
            print(Path(folder) / plot.file)
            drawn += 1
    if not drawn:
        print("gradwire: nothing in these files can be drawn", file=sys.stderr)
    return 0 if drawn else 1


def find_curves(plot: Plot, contest: dict[str, Any]) -> list[Curve]:
    """That of torch and that of gradwire, through the cases that both could do."""
    points = sorted(
        (case["x"], name)
        for name, case in contest["cases"].items()
        if case.get("plot") == plot.of
        and case["x"] >= plot.first_x
        and not contest["failures"][name]
    )
    if not points:
        return []
    return [_curve(plot, contest["samples"], points, contestant) for contestant in (0, 1)]


def _curve(
    plot: Plot, samples: dict[str, Any], points: list[tuple[float, str]], contestant: int
) -> Curve:
    by_round = [
        [plot.value(x, median(turn)) for turn in [*samples[name].values()][contestant]]
        for x, name in points
    ]
    return Curve(
        [x for x, _ in points],
        [*map(median, by_round)],
        [*map(min, by_round)],
        [*map(max, by_round)],
    )


def draw(plot: Plot, curves: Sequence[Curve], file: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, NullFormatter

    with matplotlib.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(5.2, 3.2), layout="constrained")
        for curve, name, colour in zip(curves, ("torch", "gradwire"), COLOURS, strict=True):
            axes.plot(curve.x, curve.middle, marker="o", markersize=4, label=name, color=colour)
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.2, linewidth=0)
        axes.set_xscale("log")
        if plot.y_log:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set_xticks(plot.x_ticks, [*map(plot.x_words, plot.x_ticks)])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: plot.y_words(y)))
        axes.grid(visible=True)
        axes.set_axisbelow(True)
        axes.set_title(plot.title)
        axes.set_xlabel(plot.x_label)
        axes.legend(frameon=False)
        figure.savefig(file, transparent=True, metadata={"Date": None})
        pyplot.close(figure)


# -- in words


def of_bytes(size: float) -> str:
    return _with_unit(size, 1024, ("B", "KB", "MB", "GB"))


def of_time(seconds: float) -> str:
    return _with_unit(seconds * 1e6, 1000, ("µs", "ms", "s"))


def of_rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:g} GB/s"


def of_calls(per_second: float) -> str:
    return f"{per_second / 1e3:g} k/s"


def _with_unit(number: float, step: int, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if number < step:
            return f"{number:g} {unit}"
        number /= step
    return f"{number:g} {units[-1]}"


# -- all of them

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30
PLOTS = (
    Plot(
        "latency.svg",
        "size",
        "A tensor there and back",
        "size",
        of_bytes,
        of_time,
        [1, KB, MB, GB],
        y_log=True,
    ),
    Plot(
        "throughput.svg",
        "size",
        "Throughput of a tensor there and back",
        "size",
        of_bytes,
        of_rate,
        [4 * KB, 64 * KB, MB, 16 * MB, 256 * MB],
        lambda size, seconds: 2 * size / seconds,
        first_x=4 * KB,
    ),
    Plot(
        "peers.svg",
        "peers",
        "Calls of one worker to others",
        "other workers",
        "{:g}".format,
        of_calls,
        [1, 2, 4, 8, 16, 32],
        lambda _peers, seconds: 1 / seconds,
    ),
    Plot(
        "backward.svg",
        "backward",
        "Backward through a chain of calls, per call",
        "calls",
        "{:,}".format,
        of_time,
        [1, 10, 100, 1000],
        lambda calls, seconds: seconds / calls,
    ),
)
