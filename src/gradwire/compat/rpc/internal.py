"""What torch keeps in ``torch.distributed.rpc.internal``: pickling, and the names of calls."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from gradwire import current
from gradwire.errors import RemoteError
from gradwire.wire.values import add_passenger

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


class _InternalRPCPickler:
    """Turns values into bytes and tensors, as they travel between workers."""

    def serialize(self, value: Any) -> tuple[bytes, list[Tensor]]:
        encoded = current.worker().agent.codec.encode(value)
        # References in it go with the message that is being written, and there must be one.
        for passenger in encoded.passengers:
            add_passenger(passenger)
        return encoded.payload, encoded.buffers

    def deserialize(self, payload: bytes, tensors: Sequence[Tensor]) -> Any:
        return current.worker().agent.codec.decode(payload, tensors)[0]


_internal_rpc_pickler = _InternalRPCPickler()
serialize = _internal_rpc_pickler.serialize
deserialize = _internal_rpc_pickler.deserialize


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """What a call is called in a profile."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"
