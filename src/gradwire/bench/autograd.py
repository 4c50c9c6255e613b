"""The suite ``autograd``: gradients through calls between two processes on this machine, with
gradwire and with torch's distributed autograd. Both libraries use their default options.

A program gets the function that makes its remote calls as an argument, so both libraries run the
same code. With a function that makes the calls locally, the program gives the expected gradients.
Every measurement begins by comparing the library's gradients with these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from typing import Any

from gradwire.bench import by_hand, rpc
from gradwire.bench.cases import Case, Contestant, Floor, Steps, Suite
from gradwire.bench.timing import microseconds, milliseconds, seconds_each

#: The function that a program makes its calls with: `call(worker, function, *arguments)`.
Call = Callable[..., Any]
NODES = 10_000


@cache
def rpc_module(package: str) -> Any:
    return import_module(f"{package}.rpc")


def remotely(package: str, to: str, function: Callable[..., Any], *args: Any) -> Any:
    return rpc_module(package).rpc_sync(to, function, args=args)


def locally(_to: str, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


# -- the functions that are called


def expert(x: Any, weight: Any) -> Any:
    return (x * weight).relu()


def relay(call: Call, x: Any, weight: Any) -> Any:
    """Call worker0, the worker that has called this function. A call to a third process would be
    measured wrongly, because the polling threads of that process would take the cores from the
    other two processes."""
    return call("worker0", expert, x, weight)


@cache
def linear() -> Any:
    """Return a layer whose parameters have the same values in every process."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Linear(64, 64)


def apply_linear(x: Any) -> Any:
    return linear()(x)


# -- the programs that are differentiated


@dataclass(frozen=True)
class Program:
    """A computation to differentiate. `loss(call)` computes a loss from the leaves (the tensors
    that get a gradient) and makes its remote calls with `call`. With `keeps_graph`, a part of the
    autograd graph is built once, in advance. Every loss depends on it, so no backward pass may free
    it."""

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
    # Every layer multiplies `h` by 1 + weight. The weight is small, so that `h` does not overflow.
    x, weight = leaf(1.0, 4), leaf(0.01, 4)

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
    x = leaf(1.0, 4096, 64)  # This tensor takes 1 MB.
    return Program([x], lambda call: call("worker1", apply_linear, x).sum())


def large_local_graph(nodes: int) -> Program:
    x, weight = leaf(1.0, 4), leaf(1.0, 4)
    h = x
    # Divide by 2, because each call of `expert` adds two nodes to the autograd graph.
    for _ in range(nodes // 2):
        h = expert(h, weight)
    return Program(
        [x, weight], lambda call: call("worker1", expert, h, weight).sum(), keeps_graph=True
    )


# -- measurements


@dataclass(frozen=True)
class Library:
    autograd: Any
    call: Call


def forward_and_backward(make: Callable[[], Program], library: Library, count: int) -> list[float]:
    """Return the seconds of whole steps: the forward pass, the backward pass, and the end of the
    autograd context."""
    program = make()
    check(program, library)

    def step() -> None:
        with library.autograd.context() as context_id:
            loss = program.loss(library.call)
            library.autograd.backward(context_id, [loss], program.keeps_graph)

    # A few warm-up steps are enough, because `check` has already run one step.
    return seconds_each(step, count, count // 5)


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
    """Raise AssertionError if the library gives other gradients than torch in one process."""
    with library.autograd.context() as context_id:
        loss = program.loss(library.call)
        library.autograd.backward(context_id, [loss], program.keeps_graph)
        gradients = library.autograd.get_gradients(context_id)
        for tensor, expected in zip(program.leaves, local_gradients(program), strict=True):
            if not gradients[tensor].allclose(expected):
                raise AssertionError(
                    f"the gradient is {gradients[tensor]}, but in one process {expected}"
                )


def local_gradients(program: Program) -> Any:
    import torch

    return torch.autograd.grad(
        program.loss(locally), program.leaves, retain_graph=program.keeps_graph
    )


# -- contestants


def library(package: str) -> Library:
    return Library(import_module(f"{package}.autograd"), partial(remotely, package))


@contextmanager
def worker(package: str, rank: int) -> Iterator[Library]:
    with rpc.worker(f"{package}.rpc", rank):
        yield library(package)


# -- formatting


def per_call(seconds: float) -> str:
    return f"{microseconds(seconds)} per call"


def per_layer(seconds: float) -> str:
    return f"{microseconds(seconds)} per layer"


def per_node(seconds: float) -> str:
    return f"{seconds * 1e6:.2f} µs per node"


# -- the suite


def growing(
    name: str,
    make: Callable[[int], Program],
    show: Callable[[float], str],
    counts: dict[int, int],
    aim: float,
    floors: dict[int, Floor] | None = None,
) -> list[Case]:
    """Return cases that run one program in several sizes, from small to large. `counts` maps each
    size to its number of samples. `aim` is the ratio to reach: torch's time divided by gradwire's
    time. The largest size has no aim. A last case measures only the backward pass of the largest
    size."""
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


#: For each number of chained calls, a case that makes them without an RPC library (see `by_hand`).
BY_HAND = {
    length: Case(
        f"{'one call' if length == 1 else f'{length} chained calls'} by hand",
        partial(by_hand.chained, length),
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
        Contestant("by hand", partial(by_hand.connect, expert), processes=1),
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
