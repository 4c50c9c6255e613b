"""Run a whole group of workers in one process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from gradwire._core.group.membership import LocalMembership
from gradwire._core.transport.base import Transport
from gradwire._core.transport.registry import TransportSettings, make_transport
from gradwire.options import Options
from gradwire.worker import Worker

#: The time limit in seconds for the shutdown of the workers.
_SHUTDOWN_SECONDS = 30.0


def transports_named(name: str, token: bytes = b"the token of a cluster") -> list[Transport]:
    """Return a list with the transport of this name, to pass to `cluster`. The name is
    "in_process", "unix" or "tcp".

    >>> [transport.name for transport in transports_named("tcp")]
    ['tcp']
    """
    return [make_transport(name, TransportSettings(token))]


@contextmanager
def cluster(
    size: int,
    *,
    transports: list[Transport] | None = None,
    options: Options | None = None,
    name: str = "worker{}",
    graceful: bool = True,
) -> Iterator[list[Worker]]:
    """Run a group of `size` workers in this process until the block ends.

        >>> with cluster(2) as (a, b):
        ...     a.rpc_sync("worker1", max, args=(1, 2))
        2

    The format string `name` gives each worker a name with its id, by default "worker0", "worker1"
    and so on. All workers use the same `transports`. By default, messages do not leave the process.
    At the end of the block, each worker waits until all workers have finished their work, unless
    `graceful` is False or the block has raised an exception. Within the block, `with worker:` makes
    a worker the current one and does not end it.
    """
    shared = transports if transports is not None else transports_named("in_process")
    membership = LocalMembership(size)
    workers: list[Worker] = []
    try:
        for worker_id in range(size):
            worker = Worker(
                name.format(worker_id),
                worker_id,
                size,
                options,
                membership=membership,
                transports=shared,
            )
            # A worker shuts down when its last open `with` block ends. Count `cluster` as one more
            # open block, so that the worker lives until `cluster` shuts it down.
            worker._blocks += 1
            workers.append(worker)
        yield workers
    except BaseException:
        graceful = False
        raise
    finally:
        if workers:
            with ThreadPoolExecutor(len(workers), "cluster-shutdown") as threads:
                shutdowns = [
                    threads.submit(worker.shutdown, graceful, _SHUTDOWN_SECONDS)
                    for worker in workers
                ]
            for shutdown in shutdowns:
                shutdown.result()
