"""Many workers in one process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from gradwire.agent.roster import LocalRoster
from gradwire.config import Options
from gradwire.transport.base import Transport
from gradwire.transport.memory import MemoryNetwork
from gradwire.worker import Worker


@contextmanager
def cluster(
    size: int,
    *,
    transports: list[Transport] | None = None,
    options: Options | None = None,
    name: str = "worker{}",
    graceful: bool = True,
) -> Iterator[list[Worker]]:
    """`size` workers of one group in this process; all end when the block does.

        >>> with cluster(2) as (a, b):
        ...     a.rpc_sync("worker1", max, args=(1, 2))
        2

    They talk through memory unless other `transports` are given, one list for all of them.
    """
    network: Any = transports if transports is not None else [MemoryNetwork()]
    roster = LocalRoster(size)
    workers: list[Worker] = []
    try:
        for id in range(size):
            workers.append(
                Worker(name.format(id), id, size, options, roster=roster, transports=network)
            )
        yield workers
    except BaseException:
        graceful = False
        raise
    finally:
        if workers:
            with ThreadPoolExecutor(len(workers), "cluster-shutdown") as threads:
                endings = [threads.submit(worker.shutdown, graceful, 30.0) for worker in workers]
            for ending in endings:
                ending.result()
