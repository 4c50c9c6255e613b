"""Runs the programs of examples/torch, on torch and on gradwire: python -m tests.torch_programs

Their workers are forked from this process, which has imported torch and done nothing else: torch's
own RPC does not work in a process forked from one that has used autograd. Writes as JSON what each
has written, or the error.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import secrets
import sys
import types
from pathlib import Path

import torch

from gradwire import compat
from gradwire.launch import environment, free_port
from tests.processes import processes

EXAMPLES = Path(__file__).parent.parent / "examples" / "torch"
#: How many workers each of them needs.
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


def results_of(example: str, package: str) -> list[str]:
    """What the workers of an example write, by rank, on the RPC of torch or gradwire."""
    script, size, token = EXAMPLES / f"{example}.py", WORKERS[example], secrets.token_hex(32)
    others_done, working = os.pipe()
    with free_port() as port:

        def worker(rank: int) -> str:
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
            results, errors = [], []
            for one in started:
                try:
                    results.append(one.result())
                except AssertionError as error:  # which of them was the first is not known here
                    errors.append(str(error))
            os.close(others_done)
            assert not errors, "\n".join(errors)
            return [line for result in results for line in result.splitlines()]


def main() -> None:
    torch.set_num_threads(1)  # a forked process hangs in OpenMP when its parent has used threads
    # What every worker would import anew: all of torch's RPC, and of gradwire's in its place.
    compat.install()
    compat.uninstall()
    importlib.import_module("torch._dynamo")
    found: dict[str, dict[str, list[str] | str]] = {}
    for example in sys.argv[1:] or WORKERS:
        found[example] = {}
        for package in ("torch", "gradwire"):
            try:
                found[example][package] = results_of(example, package)
            except AssertionError as error:
                found[example][package] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
