"""Measure the memory of open contexts and pending calls, in both workers together.

Every sample needs two new processes. A process that was measured before holds free memory. New
objects would use that memory, and the process would not grow.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from gradwire.bench import autograd
from gradwire.bench.process_groups import Barrier, join_group, run_in_group
from gradwire.bench.rpc import KB

#: How many contexts or calls are opened between the two measurements of memory, and how many before
#: the first one. The latter use up the memory that the processes had allocated but did not use.
OPEN, OPEN_BEFORE = 1000, 300


def memory_growth(open_some: Callable[[Any, int], Any], package: str) -> float:
    """Return by how many bytes the processes of two workers grow, together, for each context or
    call that is open. `open_some(package, count)` opens `count` of them in the first worker, and
    returns objects that keep them open."""

    def member(rank: int, barrier: Barrier) -> int:
        join_group(package, rank, 2)
        kept = []
        if rank == 0:
            kept.append(open_some(package, OPEN_BEFORE))
        barrier()
        before = resident()
        barrier()
        if rank == 0:
            kept.append(open_some(package, OPEN))
        barrier()
        return resident() - before

    growth: int = sum(run_in_group(2, member))
    return growth / OPEN


def memory_of_contexts(package: str, count: int) -> list[float]:
    return [memory_growth(open_contexts, package) for _ in range(count)]


def memory_of_calls(package: str, count: int) -> list[float]:
    return [memory_growth(start_calls, package) for _ in range(count)]


def open_contexts(package: str, count: int) -> Any:
    """Open contexts, and make one call in each. Every context is opened in a thread of its own,
    because a thread has only one context at a time. Return the contexts and the results."""
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
    """Start calls that are never answered, and wait until the other worker has received them.
    Return the futures of the calls."""
    rpc = import_module(f"{package}.rpc")
    before = rpc.rpc_sync("worker1", number_unanswered)
    futures = [rpc.rpc_async("worker1", never_answer) for _ in range(count)]
    while rpc.rpc_sync("worker1", number_unanswered) < before + count:
        time.sleep(0.01)
    return futures


def never_answer() -> Any:
    import torch

    future: Any = torch.futures.Future()
    UNANSWERED.append(future)
    return future


def number_unanswered() -> int:
    return len(UNANSWERED)


#: On the called worker: the futures of the calls that are never answered.
UNANSWERED: list[Any] = []
# The decorator `async_execution` of either library sets this attribute. It is set by hand here,
# because the same function is called with both libraries.
setattr(never_answer, "_wrapped_async_rpc_function", never_answer)  # noqa: B010


def resident() -> int:
    """Return the resident memory of this process in bytes. Linux shows the exact number in
    `/proc/self/smaps_rollup`, and estimates in other files."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    [kilobytes] = [line.split()[1] for line in lines if line.startswith("Rss:")]
    return int(kilobytes) * KB
