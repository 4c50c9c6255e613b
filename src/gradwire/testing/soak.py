"""Open and close many autograd contexts, of which a fifth fail, and check that nothing leaks.

    python -m gradwire.testing.soak --contexts 10000 [--transport unix]
    python -m gradwire.testing.soak --planning 1000000

The first command counts the objects, threads and memory that gradwire and torch hold during and
after the contexts, and exits with 1 if there is a leak. The second measures how long planning a
backward pass takes per node of the graph.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire import autograd, rpc
from gradwire._core import current
from gradwire._core.autograd.backward_pass import BackwardPass
from gradwire._core.autograd.boundary import Recv, Send
from gradwire._core.autograd.context import Context
from gradwire._core.autograd.plan import Plan, make_roots
from gradwire._core.transport.registry import known_names
from gradwire._core.wire.messages import Kind
from gradwire.errors import CallError
from gradwire.options import Options
from gradwire.testing.cluster import cluster, transports_named
from gradwire.testing.connection_pairs import shared_memory
from gradwire.testing.faults import Fault, FaultyTransport
from gradwire.testing.inspection import open_contexts, runtime_of
from gradwire.worker import Worker

_WORKERS = 3
#: The number of elements of a tensor. A tensor of this size is sent through shared memory, and a
#: leak of one tensor per context is visible in the memory of the process.
_SIZE = 10_000
#: The largest number of censuses. A census counts everything that could leak.
_CENSUSES = 10
#: The least number of contexts between two censuses (counts of everything that could leak).
_CONTEXTS_PER_CENSUS = 100
#: By how many bytes the memory may grow per context before a leak is reported. Some growth is no
#: leak, because gradwire keeps records of released contexts, and measurements of memory vary.
_BYTES_PER_CONTEXT = 2048
#: By how much a number of objects may grow before a leak is reported. Some growth is no leak,
#: because idle threads of workers keep the objects that they used last.
_HELD_BY_IDLE_THREADS = 24
_RELEASE_SECONDS = 60.0
#: The number of autograd nodes in a chain. Chains must be short: if Python code has seen the nodes
#: of a chain, torch frees them by recursion, and about 50,000 nodes or more overflow the stack.
_CHAIN = 500


class Refused(Exception):
    """Raised by functions here that fail on purpose."""


class _Refuses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.clone()

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> Tensor:  # noqa: ARG004
        raise Refused("in backward")


def double(x: Tensor) -> Tensor:
    return x * 2


def relay(x: Tensor, refuse: bool) -> Tensor:
    """Call worker2. Because of this call, the backward pass through this function must wait
    halfway for a gradient from worker2."""
    y = rpc.rpc_sync("worker2", double, args=(x,)) * x
    refused: Tensor = _Refuses.apply(y) if refuse else y  # type: ignore[no-untyped-call]
    return refused


def refuse(_x: Tensor) -> Tensor:
    raise Refused("in forward")


# -- what happens in a context


def _succeeds(x: Tensor, context_id: int, _transport: FaultyTransport) -> None:
    loss = rpc.rpc_sync("worker1", relay, args=(x, False)).sum()
    autograd.backward(context_id, [loss])
    if not torch.equal(autograd.get_gradients(context_id)[x], 4 * x.detach()):
        raise AssertionError("wrong gradients")


def _is_not_differentiated(x: Tensor, _context_id: int, _transport: FaultyTransport) -> None:
    rpc.rpc_sync("worker1", relay, args=(x, False))


def _refused_in_backward(x: Tensor, context_id: int, _transport: FaultyTransport) -> None:
    autograd.backward(context_id, [rpc.rpc_sync("worker1", relay, args=(x, True)).sum()])


def _refused_in_forward(x: Tensor, _context_id: int, _transport: FaultyTransport) -> None:
    rpc.rpc_sync("worker1", refuse, args=(x,))


def _loses_a_message(x: Tensor, context_id: int, transport: FaultyTransport) -> None:
    loss = rpc.rpc_sync("worker1", relay, args=(x, False)).sum()
    transport.add(Fault("drop", kind=Kind.BACKWARD_AUTOGRAD_REQ, times=1))
    autograd.backward(context_id, [loss], timeout=0.02)


def _loses_a_connection(x: Tensor, context_id: int, transport: FaultyTransport) -> None:
    loss = rpc.rpc_sync("worker1", relay, args=(x, False)).sum()
    transport.add(Fault("cut", kind=Kind.BACKWARD_AUTOGRAD_REQ, times=1))
    autograd.backward(context_id, [loss])


def _is_left_too_early(x: Tensor, _context_id: int, _transport: FaultyTransport) -> None:
    rpc.rpc_async("worker1", relay, args=(x, False)).expect_failure()
    raise Refused("by the trainer")


Scenario = Callable[[Tensor, int, FaultyTransport], None]
_SUCCEEDING: list[Scenario] = [_succeeds, _succeeds, _succeeds, _is_not_differentiated]
_FAILING: list[Scenario] = [
    _refused_in_backward,
    _refused_in_forward,
    _loses_a_message,
    _loses_a_connection,
    _is_left_too_early,
]


def _scenarios() -> Iterator[Scenario]:
    """Yield functions without end, each to be called in a context of its own. After every four that
    succeed comes one that fails."""
    for failing in itertools.cycle(_FAILING):
        yield from _SUCCEEDING
        yield failing


# -- looking for leaks


@dataclass(frozen=True)
class Census:
    """The number of objects, threads, segments and bytes that this process holds."""

    contexts: int
    passes: int
    #: The records of messages with differentiable tensors, at the sender and at the receiver. Each
    #: record keeps a part of an autograd graph alive.
    boundaries: int
    tensors: int
    threads: int
    segments: int
    memory: int

    @classmethod
    def take(cls) -> Census:
        gc.collect()
        kinds = Counter(map(type, gc.get_objects()))
        return cls(
            kinds[Context],
            kinds[BackwardPass],
            kinds[Send] + kinds[Recv],
            kinds[Tensor],
            threading.active_count(),
            len(shared_memory()),
            _memory(),
        )

    def __str__(self) -> str:
        return (
            f"{self.contexts:5} contexts {self.passes:5} passes {self.boundaries:5} boundaries "
            f"{self.tensors:5} tensors {self.threads:3} threads {self.segments:3} segments "
            f"{self.memory / 2**20:8.1f} MiB"
        )


def _memory() -> int:
    """Return the resident memory of this process in bytes, or 0 if the system does not report
    it."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def soak(contexts: int, transport: str, report: Callable[[str], None] = print) -> list[str]:
    """Open and close this many contexts. Return a sentence for each leak."""
    before = Census.take()
    memory: list[int] = []
    leaks: list[str] = []
    with _workers(transport) as (workers, network):
        scenarios = _scenarios()
        x = torch.rand(_SIZE, requires_grad=True)
        # The first contexts open connections and fill caches, so run some before counting.
        _run(10, scenarios, x, network)
        _wait_until_released(workers)
        idle = Census.take()
        report(f"{0:7}: {idle}")
        done = 0
        censuses = max(1, min(_CENSUSES, contexts // _CONTEXTS_PER_CENSUS))
        for number in range(1, censuses + 1):
            _run(contexts * number // censuses - done, scenarios, x, network)
            done = contexts * number // censuses
            _wait_until_released(workers)
            census = Census.take()
            memory.append(census.memory)
            report(f"{done:7}: {census}")
            for what in ("contexts", "passes", "boundaries", "tensors"):
                more = getattr(census, what) - getattr(idle, what)
                if more > _HELD_BY_IDLE_THREADS:
                    leaks.append(f"after {done} contexts there are {more} more {what}")
    del x
    after = Census.take()
    report(f"  after: {after}")
    for what in ("contexts", "passes", "boundaries", "threads", "segments"):
        if getattr(after, what) > getattr(before, what):
            leaks.append(f"after shutdown there are {what} left: {after} instead of {before}")
    growth = (memory[-1] - memory[0]) / max(1, contexts)
    if contexts >= 1000 and growth > _BYTES_PER_CONTEXT:
        leaks.append(f"memory grows by {growth:.0f} bytes per context")
    return leaks


@contextmanager
def _workers(transport: str) -> Iterator[tuple[list[Worker], FaultyTransport]]:
    network = FaultyTransport(transports_named(transport)[0], [])
    options = Options(heartbeat_interval=0.5)
    with cluster(_WORKERS, transports=[network], options=options, graceful=False) as workers:
        token = current.enter(runtime_of(workers[0]))
        try:
            yield workers, network
        finally:
            current.leave(token)


def _run(contexts: int, scenarios: Iterator[Scenario], x: Tensor, network: FaultyTransport) -> None:
    for scenario in itertools.islice(scenarios, contexts):
        try:
            with autograd.context() as context_id:
                scenario(x, context_id, network)
        except (Refused, CallError):
            if scenario not in _FAILING:
                raise
        network.clear()


def _wait_until_released(workers: Sequence[Worker]) -> None:
    deadline = time.monotonic() + _RELEASE_SECONDS
    while open_contexts(workers):
        if time.monotonic() > deadline:
            return  # Raise no error: the next census counts the contexts that are still open.
        time.sleep(0.01)


# -- planning


def measure_planning(nodes: int) -> float:
    """Return the microseconds per node that gradwire takes to plan a backward pass over a graph of
    this many nodes."""
    x = torch.ones((), requires_grad=True)
    total = x * 1
    for _ in range(0, nodes, _CHAIN):
        y = x * 1
        for _ in range(_CHAIN - 2):
            y = y.neg()
        total = total + y
    roots = make_roots([total])
    gc.collect()  # Collect garbage now, so that a collection during the measurement is unlikely.
    times = []
    for _ in range(3):
        started = time.perf_counter()
        Plan().finish(roots)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6 / nodes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m gradwire.testing.soak", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--contexts", type=int, default=10_000, metavar="N")
    parser.add_argument("--transport", choices=known_names(), default="unix")
    parser.add_argument("--planning", type=int, metavar="NODES", help="measure planning instead")
    options = parser.parse_args(arguments)
    if options.planning:
        for nodes in (options.planning // 100, options.planning // 10, options.planning):
            print(f"{nodes:9} nodes: {measure_planning(max(_CHAIN, nodes)):.2f} µs per node")
        return 0
    started = time.monotonic()
    leaks = soak(options.contexts, options.transport)
    for leak in leaks:
        print(f"LEAK {leak}")
    seconds = time.monotonic() - started
    print(f"{options.contexts} contexts in {seconds:.1f} s, {len(leaks)} leaks")
    return 1 if leaks else 0


if __name__ == "__main__":
    sys.exit(main())
