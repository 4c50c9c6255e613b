"""The `gradwire` command.

gradwire run -n 4 train.py --epochs 3         start four workers on this machine
gradwire run --keep-going -n 4 train.py       when one fails, the others go on
gradwire run --torch -n 4 train.py            run a program written for torch's RPC on gradwire
gradwire bench rpc                            measure gradwire against torch's RPC
gradwire bench autograd                       ... against torch's distributed autograd
gradwire bench programs                       measure whole programs on torch and on gradwire
gradwire bench scale --json scale.json        measure how costs grow
gradwire bench rpc --against ../checkout      measure against another version of gradwire
gradwire plot scale.json --into plots         draw what `bench --json` has written
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from threading import TIMEOUT_MAX

from gradwire import bench, launch
from gradwire._core.token import token_from_environment
from gradwire._version import __version__
from gradwire.bench import plots
from gradwire.errors import SetupError
from gradwire.options import LOG_LEVELS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `gradwire` command and return its exit code. Without `arguments`, use the command
    line of this process.

    >>> main(["run", "-n", "2", "train.py"])      # doctest: +SKIP
    0
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.action == "run":
        return _run(parser, options)
    if options.action == "plot":
        return plots.main(options.files, options.into)
    return bench.main(
        options.suite,
        options.rounds,
        options.quick,
        options.json,
        options.competitors,
        options.only,
        options.against,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("gradwire", description="RPC for PyTorch workers.")
    parser.add_argument("--version", action="version", version=f"gradwire {__version__}")
    actions = parser.add_subparsers(dest="action", required=True, metavar="run | bench | plot")

    run = actions.add_parser(
        "run",
        help="start workers on this machine",
        description="Start N workers of a program on this machine. Each worker finds its rank in "
        "$RANK, and gradwire.rpc.init_rpc(name) finds everything else it needs.",
        usage="gradwire run -n N [--torch] [--keep-going] [--grace SECONDS] [--log-level LEVEL] "
        "[--] (script.py | -m module) [arguments...]",
    )
    run.add_argument(
        "-n",
        "--workers",
        type=_at_least_one,
        required=True,
        metavar="N",
        help="the number of workers",
    )
    run.add_argument(
        "--torch",
        action="store_true",
        help="the program is written for torch.distributed.rpc: run it on gradwire",
    )
    run.add_argument(
        "--grace",
        type=_seconds,
        metavar="SECONDS",
        help="kill a worker that was asked to end and has not ended after this long (default: "
        f"{launch.GRACE_SECONDS:g}, but {launch.INTERRUPT_GRACE_SECONDS:g} after Ctrl-C)",
    )
    run.add_argument(
        "--keep-going",
        action="store_true",
        help="when a worker fails, leave the others alone; the exit code still tells",
    )
    run.add_argument(
        "--log-level",
        type=str.upper,
        choices=LOG_LEVELS,
        metavar="LEVEL",
        help="the level of gradwire's log in the workers: debug, info, warning, error or critical",
    )
    run.add_argument("-m", dest="is_module", action="store_true", help="the program is a module")
    run.add_argument("command", nargs=argparse.REMAINDER, help="the program and its arguments")

    measure = actions.add_parser(
        "bench",
        help="measure gradwire against torch",
        description="Run the same cases on torch and on gradwire in turns, between processes on "
        "this machine, and compare the times. rpc: calls, and tensors sent and returned. "
        "autograd: gradients through calls, and how their cost grows with the number of calls. "
        "programs: the programs in examples/torch, in a checkout. scale: how costs grow with "
        "message size, workers, open contexts and pending calls.",
    )
    measure.add_argument("suite", choices=sorted(bench.SUITES))
    measure.add_argument(
        "--rounds",
        type=_at_least_one,
        default=5,
        metavar="R",
        help="turns of each contestant at each case (default: %(default)d)",
    )
    measure.add_argument(
        "--only", default="", metavar="WORDS", help="only the cases with these words in their names"
    )
    measure.add_argument(
        "--quick", action="store_true", help="few calls: tries the cases, does not measure them"
    )
    measure.add_argument(
        "--against",
        metavar="FOLDER",
        help="compare with the gradwire in another checkout, in the place of torch (rpc, autograd)",
    )
    measure.add_argument(
        "--competitors", action="store_true", help="measure Ray and Monarch too, if installed"
    )
    measure.add_argument("--json", metavar="FILE", help="write every sample to this file")

    draw = actions.add_parser(
        "plot",
        help="draw what bench measured",
        description="Draw the samples that `gradwire bench --json FILE` has written, as SVG files. "
        "The suite scale has everything that can be drawn. Needs matplotlib: gradwire[plots].",
    )
    draw.add_argument("files", nargs="+", metavar="FILE")
    draw.add_argument(
        "--into", default=".", metavar="FOLDER", help="where to put the files (default: here)"
    )
    return parser


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    command: list[str] = options.command
    if command[:1] == ["--"]:
        command = command[1:]
    if command[:1] == ["-m"]:
        options.is_module, command = True, command[1:]
    if not command:
        parser.error("run: name the script to run, or -m and the module")
    if options.is_module:
        command = ["-m", *command]
    elif not os.path.exists(command[0]):
        parser.error(f"run: there is no script {command[0]!r}")
    if options.torch:
        command = ["-m", "gradwire.compat", *command]
    try:
        token_from_environment()
    except SetupError as error:
        parser.error(f"run: {error}")
    return launch.run(
        command, options.workers, options.grace, options.keep_going, options.log_level
    )


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 <= number <= TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, not {text}")
    return number


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number
