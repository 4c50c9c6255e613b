"""Many contexts, a fifth of them failing, and what is left of them: nothing.

    python -m gradwire.testing.soak --contexts 10000 [--transport unix]
    python -m gradwire.testing.soak --planning 1000000

The first counts what gradwire and torch still hold while and after the contexts come and go, and
exits with 1 if anything is left. The second measures how long planning a pass takes per node of the
graph.
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

from gradwire import autograd, current, rpc
from gradwire.config import Options
from gradwire.errors import CallError
from gradwire.gradients.context import Context
from gradwire.gradients.functions import Recv, Send
from gradwire.gradients.graph import Plan, make_roots
from gradwire.gradients.passes import Pass
from gradwire.testing.faults import Fault, FaultyTransport
from gradwire.testing.pairs import shared_memory
from gradwire.testing.workers import cluster, transports_named
from gradwire.wire.messages import Kind
from gradwire.worker import Worker

_WORKERS = 3
#: Elements of the tensors: large enough to show in the memory if one were kept per context, and to
#: travel through shared memory.
_SIZE = 10_000
_LOOKS = 10
_CONTEXTS_PER_LOOK = 100
#: Memory may grow by so much per context: what is remembered of released ones, and noise.
_BYTES_PER_CONTEXT = 2048
#: What the threads of workers did last they hold until they do something else.
_LAST_THINGS = 24
_PATIENCE = 60.0
#: Torch frees a chain of nodes that Python has seen recursively; with more than some 50,000 of them
#: that takes more stack than there is.
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
    """Goes through a third worker, and has a gate in its backward."""
    y = rpc.rpc_sync("worker2", double, args=(x,)) * x
    refused: Tensor = _Refuses.apply(y) if refuse else y  # type: ignore[no-untyped-call]
    return refused


def refuse(_x: Tensor) -> Tensor:
    raise Refused("in forward")


# -- what becomes of a context


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


Way = Callable[[Tensor, int, FaultyTransport], None]
_GOOD: list[Way] = [_succeeds, _succeeds, _succeeds, _is_not_differentiated]
_BAD: list[Way] = [
    _refused_in_backward,
    _refused_in_forward,
    _loses_a_message,
    _loses_a_connection,
    _is_left_too_early,
]


def _ways() -> Iterator[Way]:
    """Four that go well, one that fails, and so on."""
    for bad in itertools.cycle(_BAD):
        yield from _GOOD
        yield bad


# -- what is left


@dataclass(frozen=True)
class Census:
    """What there is in this process."""

    contexts: int
    passes: int
    #: The ends of differentiable messages, each of which holds a part of a graph.
    ends: int
    tensors: int
    threads: int
    segments: int
    memory: int

    @classmethod
    def take(cls) -> Census:
        gc.collect()
        kinds = Counter(type(found) for found in gc.get_objects())
        return cls(
            kinds[Context],
            kinds[Pass],
            kinds[Send] + kinds[Recv],
            kinds[Tensor],
            threading.active_count(),
            len(shared_memory()),
            _memory(),
        )

    def __str__(self) -> str:
        return (
            f"{self.contexts:5} contexts {self.passes:5} passes {self.ends:5} ends "
            f"{self.tensors:5} tensors {self.threads:3} threads {self.segments:3} segments "
            f"{self.memory / 2**20:8.1f} MiB"
        )


def _memory() -> int:
    """The resident memory of this process, where it can be known."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def soak(contexts: int, transport: str, tell: Callable[[str], None] = print) -> list[str]:
    """Let so many contexts come and go; returns complaints about what is left."""
    before = Census.take()
    curve: list[int] = []
    complaints: list[str] = []
    with _workers(transport) as (workers, network):
        ways = _ways()
        x = torch.rand(_SIZE, requires_grad=True)
        _run(10, ways, x, network)  # what is made once, like connections and caches
        _wait_until_released(workers)
        at_rest = Census.take()
        tell(f"{0:7}: {at_rest}")
        done = 0
        looks = max(1, min(_LOOKS, contexts // _CONTEXTS_PER_LOOK))
        for look in range(1, looks + 1):
            _run(contexts * look // looks - done, ways, x, network)
            done = contexts * look // looks
            _wait_until_released(workers)
            found = Census.take()
            curve.append(found.memory)
            tell(f"{done:7}: {found}")
            for what in ("contexts", "passes", "ends", "tensors"):
                was, is_now = getattr(at_rest, what), getattr(found, what)
                if is_now > was + _LAST_THINGS:
                    complaints.append(f"after {done} contexts there are {is_now - was} {what} more")
    del x
    after = Census.take()
    tell(f"  after: {after}")
    for what in ("contexts", "passes", "ends", "threads", "segments"):
        if getattr(after, what) > getattr(before, what):
            complaints.append(f"workers have left {what} behind: {after} instead of {before}")
    grown = (curve[-1] - curve[0]) / max(1, contexts)
    if contexts >= 1000 and grown > _BYTES_PER_CONTEXT:
        complaints.append(f"memory grows by {grown:.0f} bytes per context")
    return complaints


@contextmanager
def _workers(transport: str) -> Iterator[tuple[list[Worker], FaultyTransport]]:
    network = FaultyTransport(transports_named(transport)[0], [])
    options = Options(heartbeat_interval=0.5)
    with cluster(_WORKERS, transports=[network], options=options, graceful=False) as workers:
        token = current.enter(workers[0])
        try:
            yield workers, network
        finally:
            current.exit(token)


def _run(contexts: int, ways: Iterator[Way], x: Tensor, network: FaultyTransport) -> None:
    for way in itertools.islice(ways, contexts):
        try:
            with autograd.context() as context_id:
                way(x, context_id, network)
        except (Refused, CallError):
            if way not in _BAD:
                raise
        network.clear()


def _wait_until_released(workers: Sequence[Worker]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while any(len(worker.contexts) for worker in workers):
        if time.monotonic() > deadline:
            return  # the census tells
        time.sleep(0.01)


# -- planning


def measure_planning(nodes: int) -> float:
    """Microseconds per node to plan a pass over a graph of so many nodes."""
    x = torch.ones((), requires_grad=True)
    total = x * 1
    for _ in range(0, nodes, _CHAIN):
        y = x * 1
        for _ in range(_CHAIN - 2):
            y = y.neg()
        total = total + y
    roots = make_roots([total])
    gc.collect()  # what is due of that anyway is not part of planning
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
    parser.add_argument("--transport", choices=["memory", "unix", "tcp"], default="unix")
    parser.add_argument("--planning", type=int, metavar="NODES", help="measure planning instead")
    options = parser.parse_args(arguments)
    if options.planning:
        for nodes in (options.planning // 100, options.planning // 10, options.planning):
            print(f"{nodes:9} nodes: {measure_planning(max(_CHAIN, nodes)):.2f} µs per node")
        return 0
    started = time.monotonic()
    complaints = soak(options.contexts, options.transport)
    for complaint in complaints:
        print(f"LEAK {complaint}")
    seconds = time.monotonic() - started
    print(f"{options.contexts} contexts in {seconds:.1f} s, {len(complaints)} leaks")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
