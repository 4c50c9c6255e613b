"""Run the programs of examples/torch, on torch and on gradwire: python -m tests.torch_programs

Prints the output of each program, or its error, as JSON. The workers are forked from this process,
which only imports torch: torch's RPC does not work in a process forked from one that has used
autograd.
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
#: The number of workers of each program.
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


def output_of(example: str, package: str) -> list[str]:
    """Run an example on torch or gradwire. Return the lines of its workers, by rank."""
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
            if rank == 0:  # it hosts the store, which the others need until they have left
                os.read(others_done, 1)
            return written.getvalue()

        with processes(*(lambda rank=rank: worker(rank) for rank in range(size))) as started:
            os.close(working)
            results, errors = [], []
            for process in started:
                try:
                    results.append(process.result())
                except AssertionError as error:  # collect all: the first failure is not known
                    errors.append(str(error))
            os.close(others_done)
            assert not errors, "\n".join(errors)
            return [line for result in results for line in result.splitlines()]


def main() -> None:
    torch.set_num_threads(1)  # a forked process hangs in OpenMP when its parent has used threads
    # Import the modules that every worker would otherwise import after the fork.
    compat.install()
    compat.uninstall()
    importlib.import_module("torch._dynamo")
    outputs: dict[str, dict[str, list[str] | str]] = {}
    for example in sys.argv[1:] or WORKERS:
        outputs[example] = {}
        for package in ("torch", "gradwire"):
            try:
                outputs[example][package] = output_of(example, package)
            except AssertionError as error:
                outputs[example][package] = str(error)
    print(json.dumps(outputs))


if __name__ == "__main__":
    main()
