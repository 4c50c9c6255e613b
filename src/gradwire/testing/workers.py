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
from gradwire.transport.tcp import TcpTransport
from gradwire.worker import Worker


def transports_named(name: str, token: bytes = b"a cluster's secret") -> list[Transport]:
    """The transport of that name, to be shared by the workers of a cluster."""
    if name == "memory":
        return [MemoryNetwork()]
    if name == "tcp":
        return [TcpTransport(token)]
    if name == "unix":
        from gradwire.transport.unix import UnixTransport

        return [UnixTransport(token)]
    raise ValueError(f"no transport is called {name!r}")


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
