"""The suite ``programs``: the unchanged programs in `examples/torch`, on torch and on gradwire.

Each measurement starts a program anew, with the command ``gradwire run``. The programs use torch's
RPC, and this command alone does not change that. With its option ``--torch``, gradwire takes the
place of torch's RPC. Nothing else differs. The argument of a program is the number of steps between
two lines of its output. The time between lines is measured, so the start of the program, its first
steps and its end do not count.
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

from gradwire.bench.cases import Case, Contestant, Suite
from gradwire.launch import die_with_parent

FOLDER = Path("examples", "torch")


@dataclass(frozen=True)
class Program:
    """One of the example programs, and how much work it does in a round.

    In each round, a number of workers (`trainers`) train one after the other, and each does a
    number of steps (`steps`). At the end of a round the program prints a line."""

    name: str
    workers: int
    steps: int
    trainers: int = 1


def programs_folder() -> Path:
    """Return the folder of the programs. A checkout of gradwire has this folder, the installed
    package does not."""
    for root in (Path.cwd(), Path(__file__).parents[3]):
        if (root / FOLDER).is_dir():
            return root / FOLDER
    sys.exit(
        f"gradwire: there are no programs in {FOLDER}. The installed package does not have them: "
        "run this in a checkout"
    )


def seconds_per_step(program: Program, options: list[str], count: int) -> list[float]:
    """Run a program. Return the mean seconds per step between two successive lines of its output,
    for each of the last `count` pairs of lines."""
    script = programs_folder() / f"{program.name}.py"
    run = [sys.executable, "-W", "ignore", "-m", "gradwire", "run", "-n", str(program.workers)]
    times = []
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            [*run, *options, str(script), str(program.steps)],
            stdout=subprocess.PIPE,
            stderr=errors,
            preexec_fn=die_with_parent,  # noqa: PLW1509, safe: this process has one thread
        ) as running:
            assert running.stdout
            for _ in running.stdout:
                times.append(time.perf_counter())
        errors.seek(0)
        if running.returncode:
            raise RuntimeError(f"{program.name} failed:\n{errors.read()}")
    if len(times) <= count:
        raise RuntimeError(f"{program.name} has written {len(times)} lines instead of {count + 1}")
    gaps = [after - before for before, after in pairwise(times)]
    return [gap / (program.steps * program.trainers) for gap in gaps[-count:]]


# -- contestants


@contextmanager
def launcher(options: list[str], _rank: int) -> Iterator[list[str]]:
    """Yield the options of ``gradwire run`` with which `seconds_per_step` starts programs. Start no
    workers here, because each measurement starts its own."""
    programs_folder()
    yield options


# -- formatting


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
        case(
            "parameter server, 3 trainers in turn", Program("parameter_server", 4, 100, trainers=3)
        ),
        case("batched updates, 2 trainers", Program("batched_updates", 3, 500)),
        case("pipeline of 2 stages, 3 parts", Program("pipeline", 3, 80)),
        case("remote embedding and decoder", Program("remote_embedding", 2, 100)),
        case("reinforcement, episodes of 12 steps", Program("reinforcement", 3, 40)),
        case("split learning, 2 clinics in turn", Program("split_learning", 3, 60, trainers=2)),
        case("data parallel, remote embedding", Program("data_parallel", 4, 80)),
    ),
)
