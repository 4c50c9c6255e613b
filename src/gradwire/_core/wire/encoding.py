"""The state of one encoding (`Encoded`) and of one decoding (`Decoding`).

The functions that encode or rebuild an instance of a registered type (see `Codec.register_type`)
use `add_attachment`, `is_encoding` and `current_decoding` to find the state of the encoding or
decoding that is in progress in their thread.
"""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from gradwire._core.ids import WorkerInfo
from gradwire._core.wire import tensors as wire_tensors
from gradwire._core.wire.frames import Frame
from gradwire._core.wire.tensors import rebuild_dense
from gradwire.errors import EncodingError

#: A piece of an encoded value. The bytes of a piece never change.
Piece = bytes | memoryview

#: A function that `decode` calls with each received tensor that requires gradients, in the order in
#: which the sender encoded these tensors. It returns the tensor to use in place of its argument.
OnReceive = Callable[[Tensor], Tensor]

_REQUIRES_GRAD = wire_tensors.REQUIRES_GRAD


class Attachment(Protocol):
    """An object in a message that must learn what happens to the message. Remote references (RRefs)
    use attachments.

    The function that encodes the object calls `add_attachment`. The channel that sends the message
    later calls the methods below.
    """

    def sent(self, to: WorkerInfo | None) -> None:
        """This is called when the message was sent to the worker `to`. If it is called with None,
        the message will never be sent. If the message is held back and later withdrawn, this is
        called twice: once with the worker, and once with None."""

    def answered(self, by: WorkerInfo) -> None:
        """This is called when the worker `by` has answered the call that contained the object. This
        method may be called before `sent`."""

    def lost(self, by: WorkerInfo) -> None:
        """This is called when the connection to the worker `by` ended before that worker answered
        the call that contained the object."""


class Encoded(Frame):
    """An encoded value, ready to be sent, and the objects found in it while it was encoded.

    `payload` has the encoded value or, if it is long, its first piece; `rest` has the other pieces.
    Some pieces are not copies, but memory that belongs to the value. The sender puts a message
    header in front of `payload` and stores the result in `head`, the first part of the frame.
    """

    __slots__ = ("attachments", "differentiable", "payload")

    buffers: list[Tensor]

    def __init__(self) -> None:
        self.head = b""
        self.payload: Piece = b""
        self.rest: Sequence[Piece] = ()
        #: The elements of large tensors and NumPy arrays, which travel beside the payload, in the
        #: order in which the tensors and arrays were encoded.
        self.buffers = []
        #: The tensors that require gradients, in the order in which they were encoded.
        self.differentiable: list[Tensor] = []
        #: The objects in the value to notify when the message is sent, answered or lost.
        self.attachments: list[Attachment] = []

    def as_current(self, function: Callable[[Any], Any], argument: Any) -> Any:
        """Call a function and return its result. While the function runs, this object is the
        thread's current encoding: `add_attachment` adds attachments to it."""
        outer, thread_state.encoding = thread_state.encoding, self
        try:
            return function(argument)
        finally:
            thread_state.encoding = outer

    def add_array(self, memory: pickle.PickleBuffer) -> bool:
        """Move the memory of a large NumPy array out of the pickle, into `buffers`. The pickler
        calls this as its `buffer_callback`. Return True if the memory must stay in the pickle."""
        raw = memory.raw()
        array = getattr(sys.modules.get("numpy"), "ndarray", ())
        # Read-only memory stays in the pickle, because torch makes tensors from writable memory
        # only. The memory of an object that is not a NumPy array stays in the pickle too. Pickle
        # restores this memory as bytes or a bytearray, but a buffer would arrive as memory of
        # another type, which the object may not accept.
        if raw.readonly or len(raw) <= wire_tensors.INLINE_BYTES or not isinstance(raw.obj, array):
            return True
        self.buffers.append(wire_tensors.bytes_tensor(raw))
        return False

    def whole_payload(self) -> bytes:
        """Return the encoded value in one piece."""
        return b"".join((self.payload, *self.rest))

    def notify_attachments(self, to: WorkerInfo | None) -> None:
        """Tell each attachment that the message was sent to the worker `to`. If `to` is None, tell
        it that the message will never be sent. A second call does nothing."""
        attachments, self.attachments = self.attachments, []
        for attachment in attachments:
            attachment.sent(to)


class Decoding:
    """The state of decoding one value, for the functions that rebuild the objects in the value."""

    __slots__ = ("buffers", "is_call", "on_receive", "rebuilders", "unconfirmed")

    def __init__(
        self,
        rebuilders: Mapping[str, Callable[[Any], Any]],
        buffers: Iterator[Tensor],
        on_receive: OnReceive | None,
        is_call: bool,
    ):
        #: The functions that rebuild instances of registered types, by the names of the types.
        self.rebuilders = rebuilders
        #: The buffers of the message that have not been used yet, in the order in which the sender
        #: encoded their tensors and arrays.
        self.buffers = buffers
        self.on_receive = on_receive
        #: Whether the value is a call, to which the sender expects an answer.
        self.is_call = is_call
        #: The futures that must be done before the value may be used. A function that rebuilds an
        #: instance of a registered type may append futures to this list.
        self.unconfirmed: list[Any] = []

    def as_current(self, function: Callable[[Any], Any], argument: Any) -> Any:
        """Call a function and return its result. Meanwhile `current_decoding` returns this
        object in this thread."""
        outer, thread_state.decoding = thread_state.decoding, self
        try:
            return function(argument)
        finally:
            thread_state.decoding = outer


class _ThreadState(threading.local):
    decoding: Decoding | None = None
    encoding: Encoded | None = None


#: The encoding and the decoding that are in progress in the calling thread.
thread_state = _ThreadState()


def current_decoding() -> Decoding:
    """Return the decoding in progress in this thread."""
    if thread_state.decoding is None:
        raise EncodingError("this pickle was made by gradwire and can only be decoded by a worker")
    return thread_state.decoding


def is_encoding() -> bool:
    """Whether this thread is encoding a message, and not pickling for another purpose."""
    return thread_state.encoding is not None


def add_attachment(attachment: Attachment) -> None:
    """Have an object notified when the message that this thread is encoding is sent, answered or
    lost."""
    if thread_state.encoding is None:
        raise EncodingError("this can only be sent to a worker, not pickled elsewhere")
    thread_state.encoding.attachments.append(attachment)


def receive_dense(
    buffers: Iterator[Tensor],
    on_receive: OnReceive | None,
    elements: bytes | None,
    code: int,
    shape: tuple[int, ...],
    flags: int,
    strides: tuple[int, ...] | None = None,
) -> Tensor:
    """Rebuild a dense tensor from its description. If `elements` is None, use the next buffer as
    the elements. If the tensor requires gradients, return what `on_receive` returns for it."""
    tensor = rebuild_dense(
        next(buffers) if elements is None else elements, code, shape, flags, strides
    )
    return on_receive(tensor) if flags & _REQUIRES_GRAD and on_receive is not None else tensor
