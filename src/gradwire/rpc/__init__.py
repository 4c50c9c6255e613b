"""Calls between workers, under the names of ``torch.distributed.rpc``.

Every function here is a thin layer over a method of the current `gradwire.Worker`.

    >>> from gradwire import rpc                                         # doctest: +SKIP
    >>> rpc.init_rpc("worker0", rank=0, world_size=2)                    # doctest: +SKIP
    >>> rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))      # doctest: +SKIP
    tensor([2., 2.])
    >>> rpc.shutdown()                                                   # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gradwire import current
from gradwire.agent.futures import Future
from gradwire.config import UNSET_TIMEOUT, Options
from gradwire.errors import SetupError
from gradwire.ids import WorkerInfo
from gradwire.refs.rref import RRef
from gradwire.rpc import functions
from gradwire.worker import To, Worker

__all__ = [
    "Future",
    "Options",
    "RRef",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "functions",
    "get_worker_info",
    "get_worker_infos",
    "init_rpc",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

#: The same options under the name torch gives them.
TensorPipeRpcBackendOptions = Options


def init_rpc(
    name: str,
    backend: Any = None,  # noqa: ARG001
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Make this process a worker and wait until the group is complete.

    Without rank and world size, torchrun's environment variables say them. With an `init_method`
    in the options and no `world_size`, the group is open: workers join and leave as they like.

        >>> init_rpc("worker0", rank=0, world_size=2)     # doctest: +SKIP
    """
    if current.process_default() is not None:
        raise SetupError(
            f"this process is worker {current.process_default().name!r} already; call shutdown() "
            "first, or use gradwire.Worker for several workers in a process"
        )
    current.set_process_default(Worker(name, rank, world_size, rpc_backend_options))


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """End the current worker; see `Worker.shutdown`.

    >>> shutdown()          # doctest: +SKIP
    """
    current.worker().shutdown(graceful, timeout)


def rpc_sync(
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> Any:
    """Run a function on a worker and return its result.

    >>> rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))      # doctest: +SKIP
    tensor([2., 2.])
    """
    return current.worker().rpc_sync(to, func, args or (), kwargs, timeout)


def rpc_async(
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> Future[Any]:
    """Run a function on a worker; its result comes in a future, which can also be awaited.

    >>> future = rpc_async("worker1", torch.add, args=(torch.ones(2), 1))   # doctest: +SKIP
    >>> future.wait()                                                       # doctest: +SKIP
    tensor([2., 2.])
    """
    future: Future[Any] = current.worker().rpc_async(to, func, args or (), kwargs, timeout)
    return future


def remote(
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> RRef[Any]:
    """Run a function on a worker, leave its result there and return a reference to it.

    >>> rref = remote("worker1", torch.nn.Linear, args=(4, 2))     # doctest: +SKIP
    >>> rref.rpc_sync().forward(torch.ones(4))                     # doctest: +SKIP
    """
    rref: RRef[Any] = current.worker().remote(to, func, args or (), kwargs, timeout)
    return rref


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Who a worker is; without a name, the current one.

    >>> get_worker_info("worker1")     # doctest: +SKIP
    WorkerInfo(id=1, name=worker1)
    """
    info: WorkerInfo = current.worker().worker_info(worker_name)
    return info


def get_worker_infos() -> list[WorkerInfo]:
    """Everybody in the group.

    >>> [info.name for info in get_worker_infos()]    # doctest: +SKIP
    ['worker0', 'worker1']
    """
    infos: list[WorkerInfo] = current.worker().worker_infos()
    return infos
