"""Whole programs: those of `examples/torch`, as they are, on torch and on gradwire.

Each is started anew for every turn, with ``gradwire run`` and with ``gradwire run --torch``, which
is the only difference. A program takes as its argument how many steps it does between two lines of
its output, and what is measured is the time between lines: not the start, nor the first steps, nor
the end.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from gradwire.bench.contest import Case, Contestant, Suite
from gradwire.launch import die_with_parent

FOLDER = Path("examples", "torch")


@dataclass(frozen=True)
class Program:
    """One of the examples. Between lines it does as many steps as it is told, once for each of `by`
    workers."""

    name: str
    workers: int
    steps: int
    by: int = 1


def place_of_programs() -> Path:
    """They are not part of the package: here is where they are in a checkout."""
    for root in (Path.cwd(), Path(__file__).parents[3]):
        if (root / FOLDER).is_dir():
            return root / FOLDER
    sys.exit(
        f"gradwire: there are no programs in {FOLDER}. They come with gradwire's sources, not with "
        "the package: run this in a checkout"
    )


def seconds_per_step(program: Program, options: list[str], count: int) -> list[float]:
    """The mean of a step, between each of the last lines."""
    script = place_of_programs() / f"{program.name}.py"
    run = [sys.executable, "-W", "ignore", "-m", "gradwire", "run", "-n", str(program.workers)]
    times = []
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            [*run, *options, str(script), str(program.steps)],
            stdout=subprocess.PIPE,
            stderr=errors,
            preexec_fn=die_with_parent,  # noqa: PLW1509, this process has one thread
        ) as running:
            assert running.stdout
            for _ in running.stdout:
                times.append(time.perf_counter())
        errors.seek(0)
        if running.returncode:
            raise RuntimeError(f"{program.name} failed:\n{errors.read()}")
    if len(times) <= count:
        raise RuntimeError(f"{program.name} has written {len(times)} lines, not {count + 1}")
    gaps = [after - before for before, after in pairwise(times)]
    return [gap / (program.steps * program.by) for gap in gaps[-count:]]


# -- who takes part


@contextmanager
def launcher(options: list[str], _rank: int) -> Iterator[list[str]]:
    """It starts the workers that do the work; what they are started with."""
    place_of_programs()
    yield options


# -- in words


def steps_per_second(seconds: float) -> str:
    return f"{1 / seconds:.1f} /s"


def case(name: str, program: Program) -> Case:
    return Case(name, partial(seconds_per_step, program), 2, steps_per_second, quick_count=1)


SUITE = Suite(
    "steps per second of the programs in examples/torch",
    (
        Contestant("torch", partial(launcher, []), processes=1),
        Contestant("gradwire", partial(launcher, ["--torch"]), processes=1),
    ),
    (
        case("first steps: a product, 2 workers", Program("first_steps", 2, 200)),
        case("parameter server, 3 trainers in turn", Program("parameter_server", 4, 100, by=3)),
        case("batched updates, 2 trainers", Program("batched_updates", 3, 500)),
        case("pipeline of 2 stages, 3 parts", Program("pipeline", 3, 80)),
        case("remote embedding and decoder", Program("remote_embedding", 2, 100)),
        case("reinforcement, episodes of 12 steps", Program("reinforcement", 3, 40)),
        case("split learning, 2 clinics in turn", Program("split_learning", 3, 60, by=2)),
        case("data parallel, remote embedding", Program("data_parallel", 4, 80)),
    ),
)
