"""Memory that open contexts and pending calls take, in both workers together.

Two processes are made for each look: in those that have done this before, memory is free already.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from gradwire.bench import autograd
from gradwire.bench.groups import Meet, in_group, joined
from gradwire.bench.rpc import KB

#: How many are open while the memory is looked at, after so many that fill what is free anyway.
OPEN, OPEN_BEFORE = 1000, 300


def memory_growth(open_some: Callable[[Any, int], Any], package: str) -> float:
    """Bytes that two workers grow by, together, for each of what `open_some(package, count)`
    opens in the first of them and keeps open."""

    def member(rank: int, meet: Meet) -> int:
        joined(package, rank, 2)
        kept = []
        if rank == 0:
            kept.append(open_some(package, OPEN_BEFORE))
        meet()
        before = resident()
        meet()
        if rank == 0:
            kept.append(open_some(package, OPEN))
        meet()
        return resident() - before

    growth: int = sum(in_group(2, member))
    return growth / OPEN


def memory_of_contexts(package: str, count: int) -> list[float]:
    return [memory_growth(open_contexts, package) for _ in range(count)]


def memory_of_calls(package: str, count: int) -> list[float]:
    return [memory_growth(start_calls, package) for _ in range(count)]


def open_contexts(package: str, count: int) -> Any:
    """Contexts with one call each. A thread has one at a time, so each gets its own."""
    import torch

    rpc, contexts = import_module(f"{package}.rpc"), import_module(f"{package}.autograd")
    x = torch.ones(4, requires_grad=True)
    kept = []

    def enter() -> None:
        context = contexts.context()
        context.__enter__()
        kept.append((context, rpc.rpc_sync("worker1", autograd.expert, args=(x, x))))

    for _ in range(count):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    if len(kept) < count:
        raise RuntimeError("a context could not be opened")
    return kept


def start_calls(package: str, count: int) -> Any:
    """Calls that are not answered, and that the other worker is known to have."""
    rpc = import_module(f"{package}.rpc")
    before = rpc.rpc_sync("worker1", number_kept_waiting)
    futures = [rpc.rpc_async("worker1", keep_waiting) for _ in range(count)]
    while rpc.rpc_sync("worker1", number_kept_waiting) < before + count:
        time.sleep(0.01)
    return futures


def keep_waiting() -> Any:
    import torch

    future: Any = torch.futures.Future()
    KEPT_WAITING.append(future)
    return future


def number_kept_waiting() -> int:
    return len(KEPT_WAITING)


#: Futures of answers that never come.
KEPT_WAITING: list[Any] = []
# What `async_execution` of either library does to a function; they could not share it otherwise.
setattr(keep_waiting, "_wrapped_async_rpc_function", keep_waiting)  # noqa: B010


def resident() -> int:
    """Bytes of memory that this process has. Linux counts them when it is asked for this, and
    estimates them elsewhere."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    [kilobytes] = [line.split()[1] for line in lines if line.startswith("Rss:")]
    return int(kilobytes) * KB
