"""Draw the samples that ``gradwire bench --json`` has written: ``gradwire plot scale.json``.

The plots have no background and few colours, so that they are readable on white and on black.
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

#: The colours of the curves of torch and gradwire, and the colour of text and axes.
COLOURS, GREY = ("#e8710a", "#2f81f7"), "#7d848d"
STYLE = {
    "svg.fonttype": "none",  # Write text as text, not as outlines of letters.
    # Without a fixed salt, the ids in an SVG file are random, and every run writes another file.
    "svg.hashsalt": "gradwire",
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
    """A file with one curve for torch and one for gradwire. Both go through the cases that belong
    to the plot named `plot`, from x = `first_x` on. The y coordinate is `value(x, sample)`."""

    file: str
    plot: str
    title: str
    x_label: str
    format_x: Callable[[float], str]
    format_y: Callable[[float], str]
    x_ticks: Sequence[float]
    value: Callable[[float, float], float] = lambda _x, sample: sample
    y_log: bool = False
    first_x: float = 1


@dataclass(frozen=True)
class Curve:
    """A curve. Each round of measurements gives one result at each x, the median of its samples.
    The curve has the median of these results, the lowest and the highest."""

    x: list[float]
    middle: list[float]
    low: list[float]
    high: list[float]


def main(files: Sequence[str], folder: str) -> int:
    """Draw every plot that the files have samples for. Return 0 if at least one plot was drawn.

    >>> main(["scale.json"], "docs/plots")     # doctest: +SKIP
    """
    if find_spec("matplotlib") is None:
        print('gradwire: to draw, pip install "gradwire[plots]"', file=sys.stderr)
        return 1
    outcomes = [json.loads(Path(file).read_text()) for file in files]
    drawn = 0
    for plot in PLOTS:
        candidates = [curves for outcome in outcomes if (curves := curves_of(plot, outcome))]
        # If several files have samples for this plot, draw only those of the last file.
        for curves in candidates[-1:]:
            Path(folder).mkdir(parents=True, exist_ok=True)
            draw(plot, curves, Path(folder) / plot.file)
            print(Path(folder) / plot.file)
            drawn += 1
    if not drawn:
        print(
            "gradwire: no plot has samples in these files: measure the suite scale", file=sys.stderr
        )
    return 0 if drawn else 1


def curves_of(plot: Plot, outcome: dict[str, Any]) -> list[Curve]:
    """Return the curves of torch and gradwire, through the cases that both libraries have finished,
    or an empty list if there are none."""
    points = sorted(
        (case["x"], name)
        for name, case in outcome["cases"].items()
        if case.get("plot") == plot.plot
        and case["x"] >= plot.first_x
        and not outcome["failures"][name]
    )
    if not points:
        return []
    return [_curve(plot, outcome["samples"], points, contestant) for contestant in (0, 1)]


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
        axes.set_xticks(plot.x_ticks, [*map(plot.format_x, plot.x_ticks)])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: plot.format_y(y)))
        axes.grid(visible=True)
        axes.set_axisbelow(True)
        axes.set_title(plot.title)
        axes.set_xlabel(plot.x_label)
        axes.legend(frameon=False)
        figure.savefig(file, transparent=True, metadata={"Date": None})
        pyplot.close(figure)


# -- formatting


def format_bytes(size: float) -> str:
    return _with_unit(size, 1024, ("B", "KB", "MB", "GB"))


def format_time(seconds: float) -> str:
    return _with_unit(seconds * 1e6, 1000, ("µs", "ms", "s"))


def format_rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:g} GB/s"


def format_calls(per_second: float) -> str:
    return f"{per_second / 1e3:g} k/s"


def _with_unit(number: float, step: int, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if number < step:
            return f"{number:g} {unit}"
        number /= step
    return f"{number:g} {units[-1]}"


# -- the plots

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30
PLOTS = (
    Plot(
        "latency.svg",
        "size",
        "A tensor there and back",
        "size",
        format_bytes,
        format_time,
        [1, KB, MB, GB],
        y_log=True,
    ),
    Plot(
        "throughput.svg",
        "size",
        "Throughput of a tensor there and back",
        "size",
        format_bytes,
        format_rate,
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
        format_calls,
        [1, 2, 4, 8, 16, 32],
        lambda _peers, seconds: 1 / seconds,
    ),
    Plot(
        "backward.svg",
        "backward",
        "Backward through a chain of calls, per call",
        "calls",
        "{:,}".format,
        format_time,
        [1, 10, 100, 1000],
        lambda calls, seconds: seconds / calls,
    ),
)
