"""Random programs whose gradients across workers must equal those of one process.

A program is data: bodies of steps that compute, use parameters of the worker they run on, and call
other bodies on other workers. `run_body` runs it either way; the only difference is what a call
does. Locally a call runs the body on copies of its arguments, which is what a remote call means.

    python -m gradwire.testing.fuzz --programs 1000 --workers 3 [--seed 0]
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire import autograd, current, rpc
from gradwire.testing.workers import cluster, transports_named
from gradwire.worker import Worker

PARAMETERS = 3
_SIZE = 3


@dataclass(frozen=True)
class Step:
    """One step of a body: an operation on variables, given by their positions."""

    action: str
    inputs: tuple[int, ...] = ()
    number: int = 0
    body: Body | None = None


@dataclass(frozen=True)
class Body:
    """Runs on a worker, with its arguments as the first variables, and returns some of them."""

    worker: int
    steps: tuple[Step, ...]
    returns: tuple[int, ...]


# -- making programs


def make_program(dice: random.Random, workers: int) -> Body:
    """A program that starts on worker 0; its results are what the loss is made of."""
    return _make_body(dice, 0, workers, arguments=0, depth=3)


def _make_body(dice: random.Random, worker: int, workers: int, arguments: int, depth: int) -> Body:
    steps: list[Step] = []
    count = arguments

    def pick(most: int) -> tuple[int, ...]:
        # Variables of late steps more often, so that programs have depth.
        return tuple(
            max(dice.randrange(count), dice.randrange(count)) for _ in range(dice.randint(1, most))
        )

    if not count or dice.random() < 0.7:
        steps.append(Step("parameter", number=dice.randrange(PARAMETERS)))
        count += 1
    for _ in range(dice.randint(1, 7)):
        chance = dice.random()
        if chance < 0.15:
            steps.append(Step("parameter", number=dice.randrange(PARAMETERS)))
            count += 1
        elif chance < 0.6 and depth:
            inputs = pick(3)
            to = dice.randrange(workers)
            body = _make_body(dice, to, workers, len(inputs), depth - 1)
            how = dice.choice(["sync", "async", "remote", "unused"])
            steps.append(Step(how, inputs, 0, body))
            count += 0 if how == "unused" else len(body.returns)
        else:
            action = dice.choice(
                ["add", "mul", "sin", "view", "inplace", "detach", "no_grad", "cat", "constant"]
            )
            steps.append(Step(action, pick(2)))
            count += 1
    returns = tuple(dice.randrange(count) for _ in range(dice.randint(0 if depth < 3 else 1, 3)))
    return Body(worker, tuple(steps), returns)


# -- running programs

Parameters = Callable[[int], Sequence[Tensor]]
Call = Callable[[Body, str, list[Tensor]], "list[Tensor] | None"]


def run_body(body: Body, arguments: Sequence[Tensor], parameters: Parameters, call: Call) -> Any:
    variables = list(arguments)
    for step in body.steps:
        inputs = [variables[position] for position in step.inputs]
        if step.body is not None:
            results = call(step.body, step.action, inputs)
            if results is not None:
                variables.extend(results)
        elif step.action == "parameter":
            variables.append(parameters(body.worker)[step.number])
        else:
            variables.append(_compute(step.action, inputs))
    return [variables[position] for position in body.returns]


def _compute(action: str, inputs: list[Tensor]) -> Tensor:
    first, last = inputs[0], inputs[-1]
    if action == "add":
        return first + last
    if action == "mul":
        return first * last.tanh()
    if action == "sin":
        return first.sin()
    if action == "view":
        return first.view(_SIZE, 1).t().reshape(-1)
    if action == "inplace":
        copy = first * 1.0
        copy.mul_(0.5)
        copy[0].add_(last[1].detach())
        return copy
    if action == "detach":
        return first.detach()
    if action == "no_grad":
        with torch.no_grad():
            return first * 2
    if action == "cat":
        return torch.cat([first[:1], last[1:]])
    return torch.full((_SIZE,), 0.3, dtype=torch.float64)


def make_parameters(seed: int, workers: int) -> list[list[Tensor]]:
    maker = torch.Generator().manual_seed(seed)
    return [
        [
            torch.randn(_SIZE, generator=maker, dtype=torch.float64).requires_grad_()
            for _ in range(PARAMETERS)
        ]
        for _ in range(workers)
    ]


def loss_of(results: Sequence[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for position, result in enumerate(results, 1):
        total = total + (result * position).sum()
    return total


def local_gradients(program: Body, seed: int, workers: int) -> list[list[Tensor | None]] | None:
    """By worker and parameter; None when the loss does not depend on any."""
    parameters = make_parameters(seed, workers)

    def call(body: Body, how: str, arguments: list[Tensor]) -> list[Tensor] | None:
        results = run_body(body, _copies(arguments), parameters.__getitem__, call)
        return None if how == "unused" else _copies(results)

    loss = loss_of(run_body(program, (), parameters.__getitem__, call))
    if not loss.requires_grad:
        return None
    flat = [parameter for group in parameters for parameter in group]
    found = torch.autograd.grad(loss, flat, allow_unused=True)
    return [list(found[n : n + PARAMETERS]) for n in range(0, len(flat), PARAMETERS)]


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """What arrives when these are sent: copies, and one copy for one tensor however often."""
    made: dict[int, Tensor] = {}
    for tensor in tensors:
        made.setdefault(id(tensor), tensor.clone())
    return [made[id(tensor)] for tensor in tensors]


# -- running them on workers

_parameters: dict[int, list[Tensor]] = {}


def remote_body(body: Body, arguments: list[Tensor]) -> list[Tensor]:
    results: list[Tensor] = run_body(body, arguments, _parameters.__getitem__, remote_call)
    return results


def remote_call(body: Body, how: str, arguments: list[Tensor]) -> list[Tensor] | None:
    results: list[Tensor]
    if how == "sync":
        results = rpc.rpc_sync(body.worker, remote_body, args=(body, arguments))
    elif how == "remote":
        results = rpc.remote(body.worker, remote_body, args=(body, arguments)).to_here()
    else:
        future = rpc.rpc_async(body.worker, remote_body, args=(body, arguments))
        results = future.wait()
        if how == "unused":
            return None
    return results


def gradients_here(context_id: int) -> list[Tensor | None]:
    found = autograd.get_gradients(context_id)
    return [found.get(parameter) for parameter in _parameters[rpc.get_worker_info().id]]


def distributed_gradients(program: Body, workers: int) -> list[list[Tensor | None]]:
    with autograd.context() as context_id:
        loss = loss_of(remote_body(program, []))
        autograd.backward(context_id, [loss])
        return [rpc.rpc_sync(id, gradients_here, args=(context_id,)) for id in range(workers)]


def check(seed: int, workers: list[Worker]) -> bool:
    """Run the program of a seed both ways. False when it has no gradients to compare; raises
    AssertionError when they differ."""
    program = make_program(random.Random(seed), len(workers))
    expected = local_gradients(program, seed, len(workers))
    if expected is None:
        return False
    for id, group in enumerate(make_parameters(seed, len(workers))):
        _parameters[id] = group
    token = current.enter(workers[0])
    try:
        found = distributed_gradients(program, len(workers))
    finally:
        current.exit(token)
    for id in range(len(workers)):
        for position in range(PARAMETERS):
            want, got = expected[id][position], found[id][position]
            same = (want is None or not want.any()) and got is None
            if not same:
                assert want is not None, f"seed {seed}: a gradient too many on worker {id}"
                assert got is not None, f"seed {seed}: no gradient for {position} on worker {id}"
                assert torch.allclose(want, got), f"seed {seed}: gradients differ on worker {id}"
    return True


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare gradients of random programs.")
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transport", default="memory", choices=["memory", "unix", "tcp"])
    options = parser.parse_args(arguments)
    compared = 0
    with cluster(options.workers, transports=transports_named(options.transport)) as workers:
        for seed in range(options.seed, options.seed + options.programs):
            compared += check(seed, workers)
            if (seed + 1) % 500 == 0:
                print(f"{seed + 1 - options.seed} programs, {compared} with gradients: all equal")
    print(f"{options.programs} programs, {compared} with gradients: all equal")


if __name__ == "__main__":
    main()
