"""Gradients: gradwire and torch's distributed autograd, each with its defaults, between two
processes on this machine.

Every program is written once, over a way to call a function on a worker, so both run the same code;
and so does a single process, which says what the gradients must be: a turn begins by comparing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from typing import Any

from gradwire.bench import byhand, rpc
from gradwire.bench.contest import Case, Contestant, Floor, Steps, Suite
from gradwire.bench.timing import microseconds, milliseconds, seconds_each

#: `call(worker, function, *arguments)`
Call = Callable[..., Any]
NODES = 10_000


@cache
def rpc_of(package: str) -> Any:
    return import_module(f"{package}.rpc")


def remotely(package: str, to: str, function: Callable[..., Any], *args: Any) -> Any:
    return rpc_of(package).rpc_sync(to, function, args=args)


def locally(_to: str, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


# -- what is called


def expert(x: Any, weight: Any) -> Any:
    return (x * weight).relu()


def relay(call: Call, x: Any, weight: Any) -> Any:
    """Back to the first worker: a third process would add threads that look for work, torch's all
    the time, to two that are measured."""
    return call("worker0", expert, x, weight)


@cache
def linear() -> Any:
    """The same parameters in every process, but not the same tensors."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Linear(64, 64)


def apply_linear(x: Any) -> Any:
    return linear()(x)


# -- what is differentiated


@dataclass(frozen=True)
class Program:
    """`loss(call)` computes a loss from the leaves. With `keeps_graph`, part of the graph was there
    before and is used again."""

    leaves: list[Any]
    loss: Callable[[Call], Any]
    keeps_graph: bool = False


def leaf(value: float, *shape: int) -> Any:
    import torch

    return torch.full(shape, value, requires_grad=True)


def chain(length: int) -> Program:
    x, weight = leaf(1.0, 4), leaf(1.0, 4)

    def loss(call: Call) -> Any:
        h = x
        for _ in range(length):
            h = call("worker1", expert, h, weight)
        return h.sum()

    return Program([x, weight], loss)


def trunk(layers: int) -> Program:
    x, weight = leaf(1.0, 4), leaf(0.01, 4)  # small, for it grows with every layer

    def loss(call: Call) -> Any:
        h = x
        for _ in range(layers):
            h = h + call("worker1", expert, h, weight)
        return h.sum()

    return Program([x, weight], loss)


def call_back() -> Program:
    x, weight = leaf(1.0, 4), leaf(1.0, 4)
    return Program([x, weight], lambda call: call("worker1", relay, call, x, weight).sum())


def remote_parameters() -> Program:
    x = leaf(1.0, 4096, 64)  # 1 MB
    return Program([x], lambda call: call("worker1", apply_linear, x).sum())


def large_local_graph(nodes: int) -> Program:
    x, weight = leaf(1.0, 4), leaf(1.0, 4)
    h = x
    for _ in range(nodes // 2):
        h = expert(h, weight)  # two nodes
    return Program(
        [x, weight], lambda call: call("worker1", expert, h, weight).sum(), keeps_graph=True
    )


# -- what is measured


@dataclass(frozen=True)
class Library:
    autograd: Any
    call: Call


def forward_and_backward(make: Callable[[], Program], library: Library, count: int) -> list[float]:
    """All that a step costs its caller, leaving the context included."""
    program = make()
    check(program, library)

    def step() -> None:
        with library.autograd.context() as context_id:
            loss = program.loss(library.call)
            library.autograd.backward(context_id, [loss], program.keeps_graph)

    return seconds_each(step, count, count // 5)  # the check was a first step


def backward_alone(make: Callable[[], Program], library: Library, count: int) -> list[float]:
    program = make()
    check(program, library)
    samples = []
    for _ in range(count):
        with library.autograd.context() as context_id:
            loss = program.loss(library.call)
            backward = partial(library.autograd.backward, context_id, [loss])
            samples += seconds_each(backward, 1, 0)
    return samples


def in_one_process(make: Callable[[], Program], _tools: Any, count: int) -> list[float]:
    program = make()
    return seconds_each(partial(local_gradients, program), count, count // 5)


def check(program: Program, library: Library) -> None:
    """Wrong gradients are not worth measuring."""
    with library.autograd.context() as context_id:
        loss = program.loss(library.call)
        library.autograd.backward(context_id, [loss], program.keeps_graph)
        found = library.autograd.get_gradients(context_id)
        for tensor, gradient in zip(program.leaves, local_gradients(program), strict=True):
            if not found[tensor].allclose(gradient):
                raise AssertionError(f"{found[tensor]}, in one process {gradient}")


def local_gradients(program: Program) -> Any:
    import torch

    return torch.autograd.grad(
        program.loss(locally), program.leaves, retain_graph=program.keeps_graph
    )


# -- who takes part


def library(package: str) -> Library:
    return Library(import_module(f"{package}.autograd"), partial(remotely, package))


@contextmanager
def worker(package: str, rank: int) -> Iterator[Library]:
    with rpc.worker(f"{package}.rpc", rank):
        yield library(package)


# -- in words


def per_call(seconds: float) -> str:
    return f"{microseconds(seconds)} per call"


def per_layer(seconds: float) -> str:
    return f"{microseconds(seconds)} per layer"


def per_node(seconds: float) -> str:
    return f"{seconds * 1e6:.2f} µs per node"


# -- all of it


def growing(
    name: str,
    make: Callable[[int], Program],
    show: Callable[[float], str],
    counts: dict[int, int],
    aim: float,
    floors: dict[int, Floor] | None = None,
) -> list[Case]:
    """The same program in several sizes, from small to large, each with the count of its samples;
    and how much of the largest, which has no aim, is backward."""
    cases = [
        Case(
            name.format(size),
            partial(forward_and_backward, partial(make, size)),
            count,
            milliseconds,
            quick_count=1,
            steps=Steps(size, show),
            aim=aim,
            floor=(floors or {}).get(size),
        )
        for size, count in counts.items()
    ]
    size, largest = [*counts][-1], replace(cases[-1], aim=None)
    measure = partial(backward_alone, partial(make, size))
    alone = replace(largest, name=f"{largest.name}, backward alone", measure=measure)
    return [*cases[:-1], largest, alone]


#: Chained calls with nothing but what they cannot do without, by their number.
BY_HAND = {
    length: Case(
        f"{'one call' if length == 1 else f'{length} chained calls'} by hand",
        partial(byhand.chained, length),
        count,
        microseconds if length == 1 else milliseconds,
        quick_count=1,
        contestants=("by hand",),
    )
    for length, count in {1: 200, 10: 30, 100: 12}.items()
}
FLOORS = {length: Floor(case.name) for length, case in BY_HAND.items()}


LARGE_GRAPH = Case(
    f"one call on top of {NODES:,} local nodes",
    partial(forward_and_backward, partial(large_local_graph, NODES)),
    10,
    milliseconds,
    quick_count=1,
    steps=Steps(NODES, per_node),
)

SUITE = Suite(
    "gradients through calls between two processes on this machine, forward and backward",
    (
        Contestant("torch", partial(worker, "torch.distributed")),
        Contestant("gradwire", partial(worker, "gradwire")),
        Contestant("by hand", partial(byhand.line, expert), processes=1),
        Contestant("one process", nullcontext, processes=1),
    ),
    (
        Case(
            "one call",
            partial(forward_and_backward, partial(chain, 1)),
            200,
            microseconds,
            aim=5,
            floor=FLOORS[1],
        ),
        *BY_HAND.values(),
        Case("a call that calls back", partial(forward_and_backward, call_back), 100, microseconds),
        *growing("{:,} chained calls", chain, per_call, {10: 30, 100: 12, 1000: 2}, 5, FLOORS),
        *growing(
            "residual trunk of {} remote experts", trunk, per_layer, {16: 30, 64: 15, 256: 3}, 4
        ),
        Case(
            "1 MB through a linear layer there",
            partial(forward_and_backward, remote_parameters),
            30,
            milliseconds,
        ),
        LARGE_GRAPH,
        replace(
            LARGE_GRAPH,
            name=f"{NODES:,} nodes in one process",
            measure=partial(in_one_process, partial(large_local_graph, NODES)),
            contestants=("one process",),
        ),
    ),
)
