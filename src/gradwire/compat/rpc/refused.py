"""Functions of torch that gradwire cannot provide.

A program can import them, so that a program that never calls them runs. A call raises an error that
says what to use instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_CALLS = "call rpc_sync, rpc_async or remote of torch.distributed.rpc instead"
_PROFILING = (
    "work on other workers is not profiled. Use torch.profiler on each worker, with a program that "
    "starts and stops it there"
)
_TORCHSCRIPT = "TorchScript does not know gradwire's references, so it cannot save them"
_GROUPS = "a worker joins its group in init_rpc and leaves it in shutdown"


def _refused(name: str, advice: str) -> Callable[..., Any]:
    """Return a function that raises an error with this advice at each call."""

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(f"gradwire has no {name}: {advice}")

    refuse.__name__ = refuse.__qualname__ = name
    return refuse


_invoke_rpc = _refused("_invoke_rpc", _CALLS)
_invoke_rpc_builtin = _refused("_invoke_rpc_builtin", _CALLS)
_invoke_rpc_python_udf = _refused("_invoke_rpc_python_udf", _CALLS)
_invoke_rpc_torchscript = _refused("_invoke_rpc_torchscript", _CALLS)
_invoke_remote_builtin = _refused("_invoke_remote_builtin", _CALLS)
_invoke_remote_python_udf = _refused("_invoke_remote_python_udf", _CALLS)
_invoke_remote_torchscript = _refused("_invoke_remote_torchscript", _CALLS)

_enable_server_process_global_profiler = _refused(
    "_enable_server_process_global_profiler", _PROFILING
)
_disable_server_process_global_profiler = _refused(
    "_disable_server_process_global_profiler", _PROFILING
)
_server_process_global_profile = _refused("_server_process_global_profile", _PROFILING)
_set_profiler_node_id = _refused("_set_profiler_node_id", _PROFILING)


class RemoteProfilerManager:
    """In torch, this class names the calls in profiles of other workers."""

    set_current_profiling_key = staticmethod(
        _refused("RemoteProfilerManager.set_current_profiling_key", _PROFILING)
    )


_enable_jit_rref_pickle = _refused("_enable_jit_rref_pickle", _TORCHSCRIPT)
_disable_jit_rref_pickle = _refused("_disable_jit_rref_pickle", _TORCHSCRIPT)

_group_membership_management = _refused("_group_membership_management", _GROUPS)
_update_group_membership = _refused("_update_group_membership", _GROUPS)
