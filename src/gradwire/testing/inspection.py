"""Functions for tests. They choose the worker that `gradwire.rpc` acts for, and look at the private
parts of workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from gradwire._core import current
from gradwire._core.runtime import Runtime
from gradwire.worker import Worker


@contextmanager
def acting_as(worker: Worker) -> Iterator[Worker]:
    """Let the functions of `gradwire.rpc` act for this worker inside the block. The worker is not
    shut down at the end of the block.

    >>> with cluster(2) as (a, b), acting_as(b):        # doctest: +SKIP
    ...     assert rpc.get_worker_info().name == "worker1"
    """
    token = current.enter(worker._runtime)
    try:
        yield worker
    finally:
        current.leave(token)


def runtime_of(worker: Worker) -> Runtime:
    """Return the internal `Runtime` of a worker. Later versions of gradwire may change its
    attributes without notice.

    >>> runtime_of(worker).contexts.all()               # doctest: +SKIP
    """
    return worker._runtime


def open_contexts(workers: Iterable[Worker]) -> int:
    """Return how many autograd contexts exist on these workers.

    >>> with cluster(2) as workers:                     # doctest: +SKIP
    ...     assert open_contexts(workers) == 0
    """
    return sum(len(runtime_of(worker).contexts) for worker in workers)


def waiting_at_gates(workers: Iterable[Worker]) -> int:
    """Return how many threads of these workers wait, in the middle of a backward pass, for a
    gradient that another worker has to send.

    >>> with cluster(2) as workers:                     # doctest: +SKIP
    ...     assert waiting_at_gates(workers) == 0
    """
    return sum(len(runtime_of(worker).engine.gate_waits) for worker in workers)
