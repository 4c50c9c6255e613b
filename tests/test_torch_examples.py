"""Programs written for torch give the same results on gradwire.

They run in processes forked from this one, which has imported torch: doing that in each would take
most of the time.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import secrets
import sys
import types
import warnings
from pathlib import Path

import pytest

from gradwire import compat
from gradwire.launch import environment, free_port
from tests.processes import processes

EXAMPLES = Path(__file__).parent.parent / "examples" / "torch"
WORKERS = {
    "first_steps": 2,
    "parameter_server": 4,
    "batched_updates": 3,
    "pipeline": 3,
    "remote_embedding": 2,
    "reinforcement": 3,
    "split_learning": 3,
    "data_parallel": 4,
}


@pytest.fixture(autouse=True, scope="module")
def _import_once() -> None:
    """What every process would import anew: all of torch's RPC, and of gradwire's in its place."""
    compat.install()
    compat.uninstall()
    importlib.import_module("torch._dynamo")


def results_of(example: str, package: str) -> list[str]:
    """What the workers of an example write, by rank, on the RPC of torch or gradwire."""
    script, size, token = EXAMPLES / f"{example}.py", WORKERS[example], secrets.token_hex(32)
    others_done, working = os.pipe()
    with free_port() as port:

        def worker(rank: int) -> str:
            warnings.resetwarnings()
            warnings.simplefilter("ignore")
            if package == "gradwire":
                compat.install()
            os.environ.update(environment(rank, size, port, token))
            sys.argv = [str(script)]
            program = sys.modules["__main__"] = types.ModuleType("__main__")
            with contextlib.redirect_stdout(io.StringIO()) as written:
                exec(compile(script.read_text(), script, "exec"), program.__dict__)
            assert program.rpc.RRef.__module__.startswith(package)
            os.close(working)
            if rank == 0:  # hosts the place where the others meet, and leave torch's group
                os.read(others_done, 1)
            return written.getvalue()

        with processes(*(lambda rank=rank: worker(rank) for rank in range(size))) as started:
            os.close(working)
            results = [one.result() for one in started]
            os.close(others_done)
            return [line for result in results for line in result.splitlines()]


@pytest.mark.parametrize("example", WORKERS)
def test_the_results_are_those_of_torch(example: str) -> None:
    ours = results_of(example, "gradwire")
    assert len(ours) >= 3
    assert ours == results_of(example, "torch")


def test_all_examples_are_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == WORKERS.keys()
