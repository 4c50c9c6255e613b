"""The functions and classes of ``torch.distributed.rpc``, implemented by gradwire."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlparse

from gradwire._core.group.rendezvous import open_store
from gradwire._core.ids import WorkerInfo
from gradwire.compat import autograd as dist_autograd
from gradwire.compat.rpc import (
    _utils,
    api,
    backend_registry,
    constants,
    functions,
    internal,
    options,
    rref_proxy,
    server_process_global_profiler,
)
from gradwire.compat.rpc.agents import (
    RpcAgent,
    TensorPipeAgent,
    _cleanup_python_rpc_handler,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _reset_current_rpc_agent,
    _set_and_start_rpc_agent,
    _set_rpc_timeout,
    enable_gil_profiling,
    get_rpc_timeout,
)
from gradwire.compat.rpc.api import (
    AllGatherStates,
    PyRRef,
    RRef,
    _all_gather,
    _barrier,
    _delete_all_user_and_unforked_owner_rrefs,
    _destroy_rref_context,
    _require_initialized,
    _wait_all,
    _wait_all_workers,
    get_worker_info,
    logger,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from gradwire.compat.rpc.backend_registry import (
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)
from gradwire.compat.rpc.constants import (
    _DEFAULT_INIT_METHOD,
    _DEFAULT_NUM_WORKER_THREADS,
    _DEFAULT_RPC_TIMEOUT_SEC,
    _UNSET_RPC_TIMEOUT,
)
from gradwire.compat.rpc.options import (
    RpcBackendOptions,
    TensorPipeRpcBackendOptions,
    _is_tensorpipe_available,
    _TensorPipeRpcBackendOptionsBase,
)
from gradwire.compat.rpc.refused import (
    RemoteProfilerManager,
    _disable_jit_rref_pickle,
    _disable_server_process_global_profiler,
    _enable_jit_rref_pickle,
    _enable_server_process_global_profiler,
    _invoke_remote_builtin,
    _invoke_remote_python_udf,
    _invoke_remote_torchscript,
    _invoke_rpc_builtin,
    _invoke_rpc_python_udf,
    _invoke_rpc_torchscript,
    _server_process_global_profile,
    _set_profiler_node_id,
)
from gradwire.compat.rpc.rref import current_user_rrefs
from gradwire.options import Options

__all__ = [
    "AllGatherStates",
    "BackendType",
    "RRef",
    "TensorPipeRpcBackendOptions",
    "backend_registered",
    "construct_rpc_backend_options",
    "get_worker_info",
    "init_backend",
    "init_rpc",
    "is_available",
    "register_backend",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]


def __getattr__(name: str) -> Any:
    if name == "BackendType":
        # Read `BackendType` each time, because every new backend replaces the enumeration.
        return backend_registry.BackendType
    raise AttributeError(f"module 'torch.distributed.rpc' has no attribute {name!r}")


def is_available() -> bool:
    return True


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Make this process a worker and wait until the group is complete."""
    if backend is not None and not isinstance(backend, backend_registry._Backend):
        raise TypeError("Argument backend must be a member of BackendType")
    backend_options = rpc_backend_options
    if backend_options is not None and not isinstance(backend_options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if backend is None:
        backend = _backend_of(backend_options)
    if backend_options is None:
        backend_options = construct_rpc_backend_options(backend)
    if not world_size and rank < 0:
        _check_environment(backend_options.init_method)
    store, rank, world_size = open_store(
        backend_options.init_method, rank, world_size, Options.init_timeout
    )
    dist_autograd._init(rank)
    _init_rpc_backend(backend, store, name, rank, world_size, backend_options)


def _backend_of(backend_options: Any) -> Any:
    """Return the backend to which these options belong, or gradwire's if they are None."""
    backends = backend_registry.BackendType
    if backend_options is None:
        return backends.TENSORPIPE
    for backend in backends:
        if type(construct_rpc_backend_options(backend)) is type(backend_options):
            return backend
    raise TypeError(f"Could not infer backend for options {backend_options}")


def _check_environment(init_method: str) -> None:
    if urlparse(init_method).scheme != "env":
        raise ValueError(f"rank parameter missing: init_rpc needs a rank with {init_method!r}")
    if "RANK" not in os.environ:
        raise ValueError(
            "init_rpc was given no rank, and the environment variable RANK expected in its place "
            "is not set"
        )


def _init_rpc_backend(
    backend: Any = None,
    store: Any = None,
    name: str | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    if _is_current_rpc_agent_set():
        raise RuntimeError("RPC is already initialized")
    agent = init_backend(
        backend or backend_registry.BackendType.TENSORPIPE,
        store=store,
        name=name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc_backend_options,
    )
    api._init_rpc_states(agent)


# -- inspection


def _rref_context_get_debug_info() -> dict[str, str]:
    counts = _get_current_rpc_agent().runtime.rrefs.debug_info()
    numbers = {
        "num_owner_rrefs": counts["num_owner_rrefs"],
        "num_forks": counts["num_forks"],
        "num_pending_users": sum(rref.is_pending() for rref in current_user_rrefs()),
        "num_pending_futures": counts["num_pending_messages"],
    }
    return {key: str(number) for key, number in numbers.items()}


@_require_initialized
def _get_debug_info() -> dict[str, str]:
    return {
        **_rref_context_get_debug_info(),
        **_get_current_rpc_agent().get_debug_info(),
        **dist_autograd._get_debug_info(),
    }
