"""How costs grow: with the size of messages, with the number of workers, of calls that wait and of
contexts that are open. And what a worker costs before it does anything.

Sizes are measured between two processes that stay; the rest in groups of processes that are made
for one turn.
"""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import chain, cycle, islice, pairwise
from typing import Any

from gradwire.bench import autograd
from gradwire.bench.contest import Case, Contestant, Point, Suite
from gradwire.bench.groups import Meet, in_group, joined
from gradwire.bench.memory import memory_of_calls, memory_of_contexts
from gradwire.bench.rpc import (
    KB,
    MB,
    caller,
    calls_per_second,
    echoes,
    noop,
)
from gradwire.bench.timing import microseconds, milliseconds, seconds_each

GB = 1 << 30
SIZES = [1, 16, 256, *(4**n for n in range(6, 15)), GB]
PEERS = [1, 2, 4, 8, 16, 32]
#: Calls that are measured together.
BATCH = 500
#: Calls under way at the same time, to all peers together.
WINDOW = 1024
#: Calls until a worker is connected and has all that it needs only once.
WARM_UP = 20
#: What a user of gradwire imports, after torch. `import gradwire` alone imports nothing.
IMPORT = """
import time, torch
begin = time.perf_counter()
import gradwire.rpc, gradwire.autograd
print(time.perf_counter() - begin)
"""


# -- in groups


def caller_cpu(package: str, count: int) -> list[float]:
    """CPU seconds of the calling process per call, all of its threads."""
    return cpu_per_call(lambda _call: time.process_time(), package, count)


def callee_cpu(package: str, count: int) -> list[float]:
    """CPU seconds of the called process."""
    return cpu_per_call(lambda call: call(time.process_time), package, count)


def cpu_per_call(look: Callable[[Any], float], package: str, count: int) -> list[float]:
    def member(rank: int, meet: Meet) -> list[float]:
        call = partial(joined(package, rank, 2).rpc_sync, "worker1")
        looks = []
        if rank == 0:
            for _ in range(1 + count):
                for _ in range(BATCH):
                    call(noop)
                looks.append(look(call))
        meet()
        return [(end - begin) / BATCH for begin, end in pairwise(looks)]

    samples: list[float] = in_group(2, member)[0]
    return samples


def meetings(size: int, package: str, count: int) -> list[float]:
    """Seconds from the moment when all could begin until all are in."""

    def member(rank: int, meet: Meet) -> tuple[float, float]:
        meet()
        begin = time.monotonic()
        joined(package, rank, size)
        return begin, time.monotonic()

    samples = []
    for _ in range(count):
        begins, ends = zip(*in_group(size, member), strict=True)
        samples.append(max(ends) - min(begins))
    return samples


def hammered(clients: int, package: str) -> list[list[float]]:
    """How long the calls took that clients made to one worker at the same time, by client."""

    def member(rank: int, meet: Meet) -> list[float]:
        rpc = joined(package, rank, clients + 1)
        meet()
        samples = []
        if rank != 0:
            samples = seconds_each(lambda: rpc.rpc_sync("worker0", noop), BATCH, WARM_UP)
        meet()
        return samples

    return in_group(clients + 1, member)[1:]


def hammering(clients: int, package: str, count: int) -> list[float]:
    """Seconds per call that the worker serves."""
    calls = clients * BATCH
    return [max(map(sum, hammered(clients, package))) / calls for _ in range(count)]


def slowest_of_hammering(clients: int, package: str, count: int) -> list[float]:
    """The time that 99 of 100 calls do not exceed."""
    found = [sorted(chain.from_iterable(hammered(clients, package))) for _ in range(count)]
    return [samples[int(0.99 * len(samples))] for samples in found]


def backward(calls: int, package: str, count: int) -> list[float]:
    """Seconds of the backward pass alone, through a chain of calls."""

    def member(rank: int, meet: Meet) -> list[float]:
        joined(package, rank, 2)
        library = autograd.library(package)
        program = partial(autograd.chain, calls)
        samples = autograd.backward_alone(program, library, count) if rank == 0 else []
        meet()
        return samples

    samples: list[float] = in_group(2, member)[0]
    return samples


def spreading(peers: int, package: str, count: int) -> list[float]:
    """Seconds per call of one worker that calls all others, with many calls under way."""

    def member(rank: int, meet: Meet) -> list[float]:
        import torch

        rpc = joined(package, rank, peers + 1)
        names = [f"worker{n + 1}" for n in range(peers)]

        def window() -> None:
            to = islice(cycle(names), WINDOW)
            torch.futures.wait_all([rpc.rpc_async(name, noop) for name in to])

        meet()
        samples = seconds_each(window, count, 1) if rank == 0 else []
        meet()
        return samples

    return [seconds / WINDOW for seconds in in_group(peers + 1, member)[0]]


# -- one process


def imports(_package: str, count: int) -> list[float]:
    """Seconds that a new process needs beyond torch."""
    command = [sys.executable, "-c", IMPORT]
    return [float(subprocess.check_output(command)) for _ in range(count)]


# -- who takes part


@contextmanager
def ready_to_fork(package: str, _rank: int) -> Iterator[str]:
    """All is imported, and nothing has begun."""
    warnings.simplefilter("ignore")
    import_module(f"{package}.rpc")
    import_module(f"{package}.autograd")
    yield package


# -- in words


def kilobytes(value: float) -> str:
    return f"{value / 1e3:.1f} KB"


def in_words(size: int) -> str:
    for unit, name in ((GB, "GB"), (MB, "MB"), (KB, "KB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


# -- all of it

GROUPS = ("torch in groups", "gradwire in groups")


def latency_case(size: int) -> Case:
    count = max(2, min(300, 64 * MB // size))
    show = microseconds if size < MB else milliseconds
    point = Point("size", size)
    return Case(f"echo of {in_words(size)}", partial(echoes, size), count, show, 1, point=point)


def backward_case(calls: int, count: int) -> Case:
    name = f"backward of {calls:,} chained call{'s' if calls > 1 else ''}"
    measure, point = partial(backward, calls), Point("backward", calls)
    return Case(name, measure, count, milliseconds, 1, GROUPS, point=point)


def peers_case(peers: int) -> Case:
    name = f"calls to {peers} worker{'s' if peers > 1 else ''}, {WINDOW} at a time"
    measure, point = partial(spreading, peers), Point("peers", peers)
    return Case(name, measure, 5, calls_per_second, 1, GROUPS, point=point)


def group_case(
    name: str, measure: Callable[[Any, int], list[float]], show: Callable[[float], str], **how: Any
) -> Case:
    return Case(name, measure, how.pop("count", 1), show, 1, GROUPS, **how)


SUITE = Suite(
    "how costs grow, on this machine",
    (
        Contestant("torch", partial(caller, "torch.distributed.rpc")),
        Contestant("gradwire", partial(caller, "gradwire.rpc")),
        Contestant(GROUPS[0], partial(ready_to_fork, "torch.distributed"), processes=1),
        Contestant(GROUPS[1], partial(ready_to_fork, "gradwire"), processes=1),
    ),
    (
        *(latency_case(size) for size in SIZES),
        *(backward_case(calls, count) for calls, count in {1: 50, 10: 20, 100: 5, 1000: 2}.items()),
        *(peers_case(peers) for peers in PEERS),
        group_case("calls of 8 workers to one", partial(hammering, 8), calls_per_second, aim=4),
        group_case(
            "calls of 8 workers to one, p99", partial(slowest_of_hammering, 8), microseconds, aim=1
        ),
        group_case("CPU time of a call, caller", caller_cpu, microseconds, count=3),
        group_case("CPU time of a call, called", callee_cpu, microseconds, count=3),
        group_case("memory of an open context", memory_of_contexts, kilobytes, unit="B"),
        group_case("memory of a pending call", memory_of_calls, kilobytes, unit="B"),
        group_case("init_rpc of 2 workers", partial(meetings, 2), milliseconds, count=3, aim=1),
        group_case("init_rpc of 16 workers", partial(meetings, 16), milliseconds, aim=1),
        Case("import of gradwire, after torch", imports, 2, milliseconds, 1, GROUPS[1:]),
    ),
)
