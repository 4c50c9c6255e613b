"""Calls between workers, with the names of ``torch.distributed.rpc``.

Each function here calls a method of the current worker; see `gradwire.Worker`.

    >>> from gradwire import rpc                                         # doctest: +SKIP
    >>> rpc.init_rpc("worker0", rank=0, world_size=2)                    # doctest: +SKIP
    >>> rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))      # doctest: +SKIP
    tensor([2., 2.])
    >>> rpc.shutdown()                                                   # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gradwire._core import current
from gradwire._core.ids import To, WorkerInfo
from gradwire._core.rpc.futures import Future
from gradwire._core.rref.rref import RRef
from gradwire._core.runtime import Runtime, current_runtime
from gradwire.errors import SetupError
from gradwire.options import UNSET_TIMEOUT, Options
from gradwire.rpc import functions

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

#: ``torch.distributed.rpc`` uses this name for the class of the options.
TensorPipeRpcBackendOptions = Options


def init_rpc(
    name: str,
    backend: Any = None,  # noqa: ARG001
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Make this process a worker and wait until the group is complete.

    If `rank` and `world_size` are not given, they come from torchrun's environment variables. If
    the options have an `init_method` other than "env://" and there is no `world_size`, the group is
    open: workers join and leave at any time.

        >>> init_rpc("worker0", rank=0, world_size=2)     # doctest: +SKIP
    """
    existing = current.process_default()
    if existing is not None:
        raise SetupError(
            f"this process is worker {existing.info.name!r} already: call shutdown() first, or use "
            "gradwire.Worker for several workers in one process"
        )
    current.set_process_default(Runtime(name, rank, world_size, rpc_backend_options))


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """End the current worker; see `Worker.shutdown`.

    >>> shutdown()          # doctest: +SKIP
    """
    current_runtime().shutdown(graceful, timeout)


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
    return current_runtime().calls.rpc_sync(to, func, args, kwargs, timeout)


def rpc_async(
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> Future[Any]:
    """Run a function on a worker and return a future of its result. The future can be awaited.

    >>> future = rpc_async("worker1", torch.add, args=(torch.ones(2), 1))   # doctest: +SKIP
    >>> future.wait()                                                       # doctest: +SKIP
    tensor([2., 2.])
    """
    return current_runtime().calls.rpc_async(to, func, args, kwargs, timeout)


def remote(
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> RRef[Any]:
    """Run a function on a worker, keep the result there and return a reference to the result.

    >>> rref = remote("worker1", torch.nn.Linear, args=(4, 2))     # doctest: +SKIP
    >>> rref.rpc_sync().forward(torch.ones(4))                     # doctest: +SKIP
    """
    return current_runtime().rrefs.remote(to, func, args, kwargs, timeout)


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Return the name and the id of a worker. Without a name, return those of the current worker.

    >>> get_worker_info("worker1")     # doctest: +SKIP
    WorkerInfo(id=1, name=worker1)
    """
    return current_runtime().worker_info(worker_name)


def get_worker_infos() -> list[WorkerInfo]:
    """Return the workers of the group, the current one included.

    >>> [info.name for info in get_worker_infos()]    # doctest: +SKIP
    ['worker0', 'worker1']
    """
    return current_runtime().worker_infos()
