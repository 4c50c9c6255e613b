"""What torch keeps in ``torch.distributed.rpc.internal``: pickling, and the names of calls."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire import current
from gradwire.errors import NotInitializedError, RemoteError
from gradwire.ids import WorkerInfo
from gradwire.wire.values import Codec, Passenger, add_passenger, call_name

__all__ = ["PythonUDF", "RPCExecMode", "RemoteException", "deserialize", "serialize"]


class RPCExecMode(enum.Enum):
    """How a function is called."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A call, as a value."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


RemoteException = RemoteError


class _Enclosed:
    """A passenger inside of bytes that are in a message: whoever answers that has not read them."""

    def __init__(self, passenger: Passenger):
        self._passenger = passenger

    def left(self, to: WorkerInfo | None) -> None:
        self._passenger.left(to)

    def answered(self, by: WorkerInfo) -> None:
        pass

    def lost(self, by: WorkerInfo) -> None:
        pass


class _InternalRPCPickler:
    """Turns values into bytes and tensors, as they travel between workers."""

    def serialize(self, value: Any) -> tuple[bytes, list[Tensor]]:
        encoded = _codec().encode(value)
        # References in it go with the message that is being written, and there must be one.
        for passenger in encoded.passengers:
            add_passenger(_Enclosed(passenger))
        return encoded.whole_payload(), encoded.buffers

    def deserialize(self, payload: bytes, tensors: Sequence[Tensor]) -> Any:
        return _codec().decode(payload, tensors)[0]


def _codec() -> Codec:
    try:
        codec: Codec = current.worker().agent.codec
    except NotInitializedError:
        codec = Codec()
    return codec


_internal_rpc_pickler = _InternalRPCPickler()
serialize = _internal_rpc_pickler.serialize
deserialize = _internal_rpc_pickler.deserialize


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """What a call is called in a profile."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"


def builtin_name(function: Any) -> str | None:
    """The name of a builtin operator, "aten::add" for `torch.add`; None for other functions."""
    name: str | None = torch.jit._builtins._find_builtin(function)  # type: ignore[no-untyped-call]
    return name


_not_recorded = contextlib.nullcontext()


def _recorded(
    mode: RPCExecMode, function: Any, to: WorkerInfo
) -> contextlib.AbstractContextManager[Any]:
    """Shows a call in the profile of the caller, while one is made."""
    if not torch._C._autograd._profiler_enabled():
        return _not_recorded
    name = builtin_name(function) or call_name(function)
    key = _build_rpc_profiling_key(mode, name, current.worker().name, to.name)
    return torch.autograd.profiler.record_function(key)
