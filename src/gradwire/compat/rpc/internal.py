"""The parts of ``torch.distributed.rpc.internal`` that encode values and that name calls in
profiles, implemented by gradwire."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire._core import current
from gradwire._core.ids import WorkerInfo
from gradwire._core.torch_internals import find_builtin, profiler_is_enabled
from gradwire._core.wire.codec import Codec, call_name
from gradwire._core.wire.encoding import Attachment, add_attachment
from gradwire.compat.rpc.agents import _get_current_rpc_agent
from gradwire.errors import NotInitializedError, RemoteError

__all__ = ["PythonUDF", "RPCExecMode", "RemoteException", "deserialize", "serialize"]


class RPCExecMode(enum.Enum):
    """The ways in which a program can call a function on another worker."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A function with its arguments."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


RemoteException = RemoteError


class _EnclosedAttachment:
    """An attachment (an object that must learn what happens to its message) of a value that
    `_InternalRPCPickler` has encoded as bytes.

    The program sends these bytes as a part of a message. The receiver may answer the message before
    it decodes the bytes, or may never decode them. So neither an answer nor a lost connection shows
    whether the receiver got the object. Therefore the attachment is not told of them.
    """

    def __init__(self, attachment: Attachment):
        self._attachment = attachment

    def sent(self, to: WorkerInfo | None) -> None:
        self._attachment.sent(to)

    def answered(self, by: WorkerInfo) -> None:
        pass

    def lost(self, by: WorkerInfo) -> None:
        pass


class _InternalRPCPickler:
    """Encodes values as bytes and tensors, in the form that workers send to each other, and decodes
    them."""

    def serialize(self, value: Any) -> tuple[bytes, list[Tensor]]:
        encoded = _codec().encode(value)
        # The encoded value becomes part of a message. Objects in the value that must learn what
        # happens to the message (attachments) are added to the message here. `add_attachment`
        # raises an error if no message is being encoded.
        for attachment in encoded.attachments:
            add_attachment(_EnclosedAttachment(attachment))
        return encoded.whole_payload(), encoded.buffers

    def deserialize(self, payload: bytes, tensors: Sequence[Tensor]) -> Any:
        return _codec().decode(payload, tensors)[0]


def _codec() -> Codec:
    try:
        codec: Codec = current.runtime().agent.codec
    except NotInitializedError:
        codec = Codec()
    return codec


_internal_rpc_pickler = _InternalRPCPickler()
serialize = _internal_rpc_pickler.serialize
deserialize = _internal_rpc_pickler.deserialize


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """Return the name under which torch's profiler shows a call."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"


def builtin_name(function: Any) -> str | None:
    """Return the name of a builtin operator, such as "aten::add" for `torch.add`, or None for any
    other function."""
    return find_builtin(function)


_not_profiled = contextlib.nullcontext()


def _profiled(
    mode: RPCExecMode, function: Any, to: WorkerInfo
) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager. If a profiler runs, the context manager records a call in the
    caller's profile."""
    if not profiler_is_enabled():
        return _not_profiled
    name = builtin_name(function) or call_name(function)
    key = _build_rpc_profiling_key(mode, name, current.runtime().info.name, to.name)
    return torch.autograd.profiler.record_function(key)
