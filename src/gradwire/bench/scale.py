"""The suite ``scale``: how costs grow with the size of messages and with the number of workers,
pending calls and open contexts. It also measures the import of gradwire and the start of workers.

Messages of different sizes are sent between two processes that keep running. Most other costs are
measured in groups of processes that are forked for one measurement.
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
from gradwire.bench.cases import Case, Contestant, Point, Suite
from gradwire.bench.memory_use import memory_of_calls, memory_of_contexts
from gradwire.bench.process_groups import Barrier, join_group, run_in_group
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
#: How many calls are made for one sample.
BATCH = 500
#: How many calls `calls_to_many` has in flight at the same time, to all workers together.
WINDOW = 1024
#: How many calls are made before the measured calls. The first calls take longer, because they open
#: connections and fill caches.
WARM_UP = 20
#: A program that prints the seconds for importing gradwire's main modules, `rpc` and `autograd`.
#: `import gradwire` alone does not load these modules.
IMPORT = """
import time, torch
begin = time.perf_counter()
import gradwire.rpc, gradwire.autograd
print(time.perf_counter() - begin)
"""


# -- measured in groups of processes


def caller_cpu(package: str, count: int) -> list[float]:
    """Return the CPU time in seconds that a call takes in the calling process, in all its
    threads."""
    return cpu_per_call(lambda _call: time.process_time(), package, count)


def callee_cpu(package: str, count: int) -> list[float]:
    """Return the CPU time in seconds that a call takes in the called process, in all its
    threads."""
    return cpu_per_call(lambda call: call(time.process_time), package, count)


def cpu_per_call(cpu_time: Callable[[Any], float], package: str, count: int) -> list[float]:
    def member(rank: int, barrier: Barrier) -> list[float]:
        call = partial(join_group(package, rank, 2).rpc_sync, "worker1")
        times = []
        if rank == 0:
            for _ in range(1 + count):
                for _ in range(BATCH):
                    call(noop)
                times.append(cpu_time(call))
        barrier()
        return [(end - begin) / BATCH for begin, end in pairwise(times)]

    samples: list[float] = run_in_group(2, member)[0]
    return samples


def start_up(size: int, package: str, count: int) -> list[float]:
    """Return the seconds that a group of `size` workers takes to start: from the moment when every
    process is ready to call init_rpc until init_rpc has returned in all processes."""

    def member(rank: int, barrier: Barrier) -> tuple[float, float]:
        barrier()
        begin = time.monotonic()
        join_group(package, rank, size)
        return begin, time.monotonic()

    samples = []
    for _ in range(count):
        begins, ends = zip(*run_in_group(size, member), strict=True)
        samples.append(max(ends) - min(begins))
    return samples


def time_calls_of_many(clients: int, package: str) -> list[list[float]]:
    """Let several clients call one worker at the same time; return the seconds of each call, by
    client."""

    def member(rank: int, barrier: Barrier) -> list[float]:
        rpc = join_group(package, rank, clients + 1)
        barrier()
        samples = []
        if rank != 0:
            samples = seconds_each(lambda: rpc.rpc_sync("worker0", noop), BATCH, WARM_UP)
        barrier()
        return samples

    return run_in_group(clients + 1, member)[1:]


def calls_of_many(clients: int, package: str, count: int) -> list[float]:
    """Return the seconds per call when several clients call one worker at the same time: the time
    of the slowest client, divided by the number of all calls."""
    calls = clients * BATCH
    return [max(map(sum, time_calls_of_many(clients, package))) / calls for _ in range(count)]


def slowest_calls_of_many(clients: int, package: str, count: int) -> list[float]:
    """Return the 99th percentile of the seconds per call when several clients call one worker."""
    percentiles = []
    for _ in range(count):
        samples = sorted(chain.from_iterable(time_calls_of_many(clients, package)))
        percentiles.append(samples[int(0.99 * len(samples))])
    return percentiles


def backward(calls: int, package: str, count: int) -> list[float]:
    """Return the seconds of the backward pass alone, through a chain of calls."""

    def member(rank: int, barrier: Barrier) -> list[float]:
        join_group(package, rank, 2)
        library = autograd.library(package)
        program = partial(autograd.chain, calls)
        samples = autograd.backward_alone(program, library, count) if rank == 0 else []
        barrier()
        return samples

    samples: list[float] = run_in_group(2, member)[0]
    return samples


def calls_to_many(peers: int, package: str, count: int) -> list[float]:
    """Return the seconds per call when one worker calls all others, with many calls in flight."""

    def member(rank: int, barrier: Barrier) -> list[float]:
        import torch

        rpc = join_group(package, rank, peers + 1)
        names = [f"worker{n + 1}" for n in range(peers)]

        def window() -> None:
            to = islice(cycle(names), WINDOW)
            torch.futures.wait_all([rpc.rpc_async(name, noop) for name in to])

        barrier()
        samples = seconds_each(window, count, 1) if rank == 0 else []
        barrier()
        return samples

    return [seconds / WINDOW for seconds in run_in_group(peers + 1, member)[0]]


# -- measured in one process


def imports(_package: str, count: int) -> list[float]:
    """Return the seconds to import gradwire in a new process that has imported torch."""
    command = [sys.executable, "-c", IMPORT]
    return [float(subprocess.check_output(command)) for _ in range(count)]


# -- contestants


@contextmanager
def ready_to_fork(package: str, _rank: int) -> Iterator[str]:
    """Import everything that the forked processes need. This must start no thread, because a forked
    process does not have the other threads of its parent."""
    warnings.simplefilter("ignore")
    import_module(f"{package}.rpc")
    import_module(f"{package}.autograd")
    yield package


# -- formatting


def kilobytes(value: float) -> str:
    return f"{value / 1e3:.1f} KB"


def with_unit(size: int) -> str:
    for unit, name in ((GB, "GB"), (MB, "MB"), (KB, "KB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


# -- the suite

GROUPS = ("torch in groups", "gradwire in groups")


def echo_case(size: int) -> Case:
    count = max(2, min(300, 64 * MB // size))
    show = microseconds if size < MB else milliseconds
    point = Point("size", size)
    return Case(f"echo of {with_unit(size)}", partial(echoes, size), count, show, 1, point=point)


def backward_case(calls: int, count: int) -> Case:
    name = f"backward of {calls:,} chained call{'s' if calls > 1 else ''}"
    measure, point = partial(backward, calls), Point("backward", calls)
    return Case(name, measure, count, milliseconds, 1, GROUPS, point=point)


def peers_case(peers: int) -> Case:
    name = f"calls to {peers} worker{'s' if peers > 1 else ''}, {WINDOW} at a time"
    measure, point = partial(calls_to_many, peers), Point("peers", peers)
    return Case(name, measure, 5, calls_per_second, 1, GROUPS, point=point)


def group_case(
    name: str,
    measure: Callable[[Any, int], list[float]],
    show: Callable[[float], str],
    **options: Any,
) -> Case:
    return Case(name, measure, options.pop("count", 1), show, 1, GROUPS, **options)


SUITE = Suite(
    "how costs grow, on this machine",
    (
        Contestant("torch", partial(caller, "torch.distributed.rpc")),
        Contestant("gradwire", partial(caller, "gradwire.rpc")),
        Contestant(GROUPS[0], partial(ready_to_fork, "torch.distributed"), processes=1),
        Contestant(GROUPS[1], partial(ready_to_fork, "gradwire"), processes=1),
    ),
    (
        *(echo_case(size) for size in SIZES),
        *(backward_case(calls, count) for calls, count in {1: 50, 10: 20, 100: 5, 1000: 2}.items()),
        *(peers_case(peers) for peers in PEERS),
        group_case("calls of 8 workers to one", partial(calls_of_many, 8), calls_per_second, aim=4),
        group_case(
            "calls of 8 workers to one, p99", partial(slowest_calls_of_many, 8), microseconds, aim=1
        ),
        group_case("CPU time of a call, caller", caller_cpu, microseconds, count=3),
        group_case("CPU time of a call, called", callee_cpu, microseconds, count=3),
        group_case("memory of an open context", memory_of_contexts, kilobytes, unit="B"),
        group_case("memory of a pending call", memory_of_calls, kilobytes, unit="B"),
        group_case("init_rpc of 2 workers", partial(start_up, 2), milliseconds, count=3, aim=1),
        group_case("init_rpc of 16 workers", partial(start_up, 16), milliseconds, aim=1),
        Case("import of gradwire, after torch", imports, 2, milliseconds, 1, GROUPS[1:]),
    ),
)
