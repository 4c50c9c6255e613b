"""Values as a payload and the buffers beside it.

The payload is a pickle, but tensors are not pickled: a small one leaves its bytes in the stream, a
large one leaves them out and travels as a buffer of its own, and so does a large array of NumPy.
Plain values need no pickle at all.

Rooms above teach a `Codec` to send types of their own (`teach`), and see the tensors of a value
that require gradients in the order they were met, which is the same on both sides.
"""

from __future__ import annotations

import copyreg
import io
import marshal
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from gradwire.errors import EncodingError
from gradwire.ids import WorkerInfo
from gradwire.wire import tensors as wire_tensors
from gradwire.wire.closures import closure_pickler
from gradwire.wire.frames import Frame
from gradwire.wire.messages import MARSHAL_VERSION
from gradwire.wire.plain import PAIR, Parts, parts_of, parts_of_call, put_together
from gradwire.wire.tensors import describe, rebuild


class Passenger(Protocol):
    """Something in a message that has to know what becomes of it."""

    def left(self, to: WorkerInfo | None) -> None:
        """The message went to a worker, or did not leave."""

    def answered(self, by: WorkerInfo) -> None:
        """The call it went with was answered; perhaps before `left` is told."""

    def lost(self, by: WorkerInfo) -> None:
        """The connection ended on which the call would have been answered."""


#: Of a long payload: nobody can change it, or make it longer.
Piece = bytes | memoryview

#: Takes a tensor that was received and requires gradients, gives the one to use in its place. They
#: go through it in the order in which the sender met them.
Arrival = Callable[[Tensor], Tensor]

_REQUIRES_GRAD = wire_tensors.REQUIRES_GRAD
_Parameter = torch.nn.Parameter
_is_inference_mode_enabled = torch.is_inference_mode_enabled


class Encoded(Frame):
    """A value on its way out, and what came to light while it was encoded. Whoever sends it makes a
    head of the payload. The rest is more of that, if it is long: pieces, some of them parts of the
    value itself."""

    __slots__ = ("differentiable", "memories", "passengers", "payload")

    buffers: list[Tensor]

    def __init__(self) -> None:
        self.head = b""
        self.payload: Piece = b""
        self.rest: Sequence[Piece] = ()
        #: Of tensors, in the order they were met; then of other things, the last one first. (When a
        #: value is read, tensors come later than what is in them.)
        self.buffers = []
        #: The other things, while they are met.
        self.memories: list[Tensor] | None = None
        #: The tensors of the value that require gradients, in the order they were met.
        self.differentiable: list[Tensor] = []
        #: Told where the message went, or None when it did not leave; rooms above put them here.
        self.passengers: list[Passenger] = []

    def as_current(self, write: Callable[[Any], Any], what: Any) -> Any:
        outer, _current.encoding = _current.encoding, self
        try:
            return write(what)
        finally:
            _current.encoding = outer

    def take_memory(self, memory: pickle.PickleBuffer) -> bool:
        """Have a large array travel beside the pickle. True, as picklers want it, if memory goes
        into the pickle after all: what is small, what is read-only, which torch does not take, and
        what is of other types, which may mind whose memory it is that they arrive in."""
        raw = memory.raw()
        array = getattr(sys.modules.get("numpy"), "ndarray", ())
        if raw.readonly or len(raw) <= wire_tensors.INLINE_BYTES or not isinstance(raw.obj, array):
            return True
        if self.memories is None:
            self.memories = []
        self.memories.append(wire_tensors.over(raw))
        return False

    def whole_payload(self) -> bytes:
        return b"".join((self.payload, *self.rest))

    def tell_passengers(self, where: WorkerInfo | None) -> None:
        """Tell them, once."""
        passengers, self.passengers = self.passengers, []
        for passenger in passengers:
            passenger.left(where)


class Decoding:
    """What comes to light while a value is decoded."""

    __slots__ = ("_all_buffers", "_memories", "arrival", "buffers", "codec", "is_call", "unsettled")

    def __init__(
        self,
        codec: Codec,
        buffers: Sequence[Tensor],
        left: Iterator[Tensor],
        arrival: Arrival | None,
        is_call: bool,
    ):
        #: The codec that decodes, for functions that rebuild a taught type.
        self.codec = codec
        #: What was left out of the payload, in the order of `Encoded.buffers`: all of it, and what
        #: of it is left.
        self._all_buffers = buffers
        self.buffers = left
        self._memories: Iterator[memoryview] | None = None
        self.arrival = arrival
        #: Whether the sender will get an answer.
        self.is_call = is_call
        #: What must be waited for before the value may be used; rooms above append to it.
        self.unsettled: list[Any] = []

    def unpickle(self, payload: bytes | memoryview) -> Any:
        if not self._all_buffers:
            return self._as_current(pickle.loads, payload)
        if self._memories is None:
            self._memories = map(wire_tensors.memory_of, reversed(self._all_buffers))
        return self._as_current(partial(pickle.loads, buffers=self._memories), payload)

    def rebuild(self, thing: Any) -> Any:
        """What was taught, or pickled by itself."""
        if type(thing) is list:
            name, parts = thing
            return self._as_current(self.codec.builders[name], parts)
        return self.unpickle(thing)

    def _as_current(self, read: Callable[[Any], Any], what: Any) -> Any:
        outer, _current.decoding = _current.decoding, self
        try:
            return read(what)
        finally:
            _current.decoding = outer


def _rebuild_dense(
    buffers: Iterator[Tensor],
    arrival: Arrival | None,
    memory: Any,
    code: int,
    shape: tuple[int, ...],
    flags: int,
    strides: tuple[int, ...] | None = None,
) -> Tensor:
    """A tensor from what was sent of it; its memory, if None, travelled as a buffer."""
    tensor = rebuild(next(buffers) if memory is None else memory, code, shape, flags, strides)
    return arrival(tensor) if flags & _REQUIRES_GRAD and arrival is not None else tensor


class _Current(threading.local):
    decoding: Decoding | None = None
    encoding: Encoded | None = None


_current = _Current()


def add_passenger(passenger: Passenger) -> None:
    """While a taught type is taken apart: ask to be told what becomes of the message."""
    if _current.encoding is None:
        raise EncodingError("this can only be sent to a worker, not pickled elsewhere")
    _current.encoding.passengers.append(passenger)


def is_encoding() -> bool:
    """Whether this thread writes a message to a worker, and does not pickle for itself."""
    return _current.encoding is not None


def current_decoding() -> Decoding:
    """The decoding under way in this thread; for functions that rebuild taught types."""
    if _current.decoding is None:
        raise EncodingError("this pickle was made by gradwire and can only be decoded by a worker")
    return _current.decoding


class _Reducers(dict[type, Callable[[Any], Any]]):
    """How instances of a type are taken apart: found by the type alone, so that whatever needs no
    help from here costs nothing."""

    def __init__(self, reduce_tensor: Callable[[Tensor], Any]):
        super().__init__(dict.fromkeys((Tensor, _Parameter), reduce_tensor))
        super().update(dict.fromkeys(_OPERATORS, _reduce_operator))
        self._reduce_tensor = reduce_tensor

    def __missing__(self, kind: type) -> Any:
        return self._reduce_tensor if issubclass(kind, Tensor) else copyreg.dispatch_table[kind]


def _reduce_taught(name: str, take_apart: Callable[[Any], Any], obj: Any) -> Any:
    return _rebuild, (name, take_apart(obj))


def _reduce_operator(operator: Any) -> Any:
    return _operator, (str(operator),)


_OPERATORS = frozenset({torch._ops.OpOverload, torch._ops.OpOverloadPacket})


def _operator(name: str) -> Any:
    """`torch.ops.aten.add.Tensor` from "aten.add.Tensor"."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _rebuild(name: str, parts: Any) -> Any:
    return current_decoding().codec.builders[name](parts)


def _dense(
    memory: Any,
    code: int,
    shape: tuple[int, ...],
    flags: int,
    strides: tuple[int, ...] | None = None,
    attributes: Any = None,
) -> Tensor:
    decoding = current_decoding()
    arrival = decoding.arrival
    tensor = _rebuild_dense(decoding.buffers, arrival, memory, code, shape, flags, strides)
    if attributes:
        tensor.__dict__.update(attributes)
    return tensor


def _sparse(*parts: Any) -> Tensor:
    tensor = wire_tensors.put_together(*parts)
    arrival = current_decoding().arrival
    return arrival(tensor) if tensor.requires_grad and arrival is not None else tensor


# To look up a function by its name takes longer than the rest of a small tensor, on both sides. So
# the one that makes tensors goes by a number, and every value begins as if it had met it before.
_CODE = 0x67726164
copyreg.add_extension(__name__, _dense.__name__, _CODE)
_KNOWN = pickle.EXT4 + _CODE.to_bytes(4, "little") + pickle.MEMOIZE + pickle.POP
_PICKLED = _KNOWN[0]
_known = pickle.Pickler(io.BytesIO(), 5)
_known.memo = {id(_dense): (0, _dense)}


class _Pieces(list[Piece]):
    """A file for a pickler, which writes what is long as it is: if that cannot change, it need not
    be copied."""

    __slots__ = ()

    def write(self, piece: bytes | bytearray | pickle.PickleBuffer) -> None:
        if type(piece) is bytes:
            self.append(piece)
        elif type(piece) is pickle.PickleBuffer and (raw := piece.raw()).readonly:
            self.append(raw)
        else:
            self.append(bytes(piece))


class Codec:
    """Encodes and decodes the values of one worker."""

    def __init__(self, *, closures: bool = False):
        self.builders: dict[str, Callable[[Any], Any]] = {}
        #: Told of tensors that require gradients and are not among the `differentiable`.
        self.unrecorded: Callable[[Tensor], None] = lambda _tensor: None
        self._reducers = _Reducers(self._reduce_tensor)
        self._taught: dict[type, tuple[str, Callable[[Any], Any]]] = {}
        self._beside: set[type] = {Tensor}
        self._closures = closures
        self._pickler = closure_pickler() if closures else pickle.Pickler

    def teach(
        self,
        kind: type,
        name: str,
        take_apart: Callable[[Any], Any],
        rebuild: Callable[[Any], Any],
    ) -> None:
        """Send instances of exactly `kind` as the value `take_apart` makes of them, of numbers,
        strings, bytes and tuples of such; the codec on the other side that was taught the same
        `name` calls its `rebuild` with that value. While it does, `current_decoding` is where it
        can leave what must be waited for."""
        self._reducers[kind] = partial(_reduce_taught, name, take_apart)
        self._taught[kind] = name, take_apart
        self._beside.add(kind)
        self.builders[name] = rebuild

    def encode(self, value: Any) -> Encoded:
        return self._encode(value, parts_of(value, self._beside))

    def encode_plain(self, value: Any, tensors: Sequence[Tensor]) -> Encoded:
        """Encode a pair: a value of nothing but numbers, strings and bytes, and tuples, lists, sets
        and dictionaries of such; and tensors. (For messages that rooms above make themselves.)"""
        return self._encode(None, (PAIR, value, tensors))

    def _encode(self, value: Any, parts: Parts | None) -> Encoded:
        encoded = Encoded()
        try:
            if parts is None:
                encoded.payload, *encoded.rest = self._pickle(value, encoded)
            else:
                form, plain, things = parts
                beside: list[Any] = []
                for thing in things:
                    described = describe(thing, encoded.buffers) if type(thing) is Tensor else None
                    if described is None:
                        beside.append(self._describe_other(thing, encoded))
                        continue
                    beside.append(described)
                    if described[3] & _REQUIRES_GRAD:
                        encoded.differentiable.append(thing)
                encoded.payload = marshal.dumps((form, plain, beside), MARSHAL_VERSION)
            if encoded.memories:
                encoded.buffers += reversed(encoded.memories)
                encoded.memories = None
        except BaseException:
            encoded.tell_passengers(None)
            raise
        return encoded

    def _pickle(self, value: Any, encoding: Encoded) -> list[Piece]:
        """A value as a pickle; in pieces if that is long."""
        # One pickler for each value. To use one again its memory has to be cleared, and if a tensor
        # that is freed lets go of the interpreter then, a thread that collects garbage crashes.
        pieces = _Pieces()
        pickler = self._pickler(pieces, 5, buffer_callback=encoding.take_memory)
        pickler.dispatch_table = self._reducers
        pickler.memo = _known.memo
        encoding.as_current(pickler.dump, value)
        pieces[0] = b"".join((_KNOWN, pieces[0]))
        return pieces

    def _describe_other(self, thing: Any, encoding: Encoded) -> list[Any] | bytes:
        """What goes beside a plain value and is no dense tensor, in plain words: a list for what
        was taught, or a pickle. (A tensor is a tuple.)"""
        if type(thing) in self._taught:
            name, take_apart = self._taught[type(thing)]
            return [name, encoding.as_current(take_apart, thing)]
        return b"".join(self._pickle(thing, encoding))

    def _reduce_tensor(self, tensor: Tensor) -> Any:
        encoding = _current.encoding
        assert encoding is not None
        kind = type(tensor)
        if kind is Tensor or kind is _Parameter:
            reduced: Any = None
            described = describe(tensor, encoding.buffers)
            if described is not None:
                reduced = _dense, described
                if kind is not Tensor:
                    elements, code, shape, flags, *strides = described
                    flags |= wire_tensors.PARAMETER
                    strides = strides or [None]
                    reduced = _dense, (elements, code, shape, flags, *strides, tensor.__dict__)
            elif kind is Tensor:
                parts = wire_tensors.take_apart(tensor)
                reduced = None if parts is None else (_sparse, parts)
            # (Of other parameters torch sends the data, which comes by here again.)
            if reduced is not None:
                if tensor.requires_grad:
                    encoding.differentiable.append(tensor)
                return reduced
        if not tensor.is_cpu and not tensor.is_meta:
            raise EncodingError(
                f"a tensor on {tensor.device} cannot be sent: move it to the CPU first "
                "(tensor.cpu())"
            )
        if tensor.requires_grad:
            self.unrecorded(tensor)
        # Subclasses and rare layouts: as torch pickles them.
        return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]

    def decode(
        self,
        payload: bytes | memoryview,
        buffers: Sequence[Tensor] = (),
        arrival: Arrival | None = None,
        is_call: bool = False,
    ) -> tuple[Any, Sequence[Any]]:
        """A value, and what must be waited for before it is used."""
        if _is_inference_mode_enabled():
            # A thread may decode for others while it is in somebody's inference_mode.
            with torch.inference_mode(False):
                return self.decode(payload, buffers, arrival, is_call)
        left = iter(buffers)
        if payload[0] == _PICKLED:
            decoding = Decoding(self, buffers, left, arrival, is_call)
            return decoding.unpickle(payload), decoding.unsettled
        form, plain, described = marshal.loads(payload)
        things = []
        others: Decoding | None = None
        for thing in described:
            if type(thing) is tuple:
                things.append(_rebuild_dense(left, arrival, *thing))
            else:
                others = others or Decoding(self, buffers, left, arrival, is_call)
                things.append(others.rebuild(thing))
        return put_together(form, plain, things), others.unsettled if others else ()

    def encode_call(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Encoded:
        """Encode a call, and blame the right argument when that fails."""
        try:
            # (With closures, what is sent of a function is for that pickler to say.)
            parts = None if self._closures else parts_of_call(func, args, kwargs, self._beside)
            return self._encode((func, args, kwargs), parts)
        except Exception as error:
            for name, value in _named_parts(func, args, kwargs):
                try:
                    self.encode(value).tell_passengers(None)
                except Exception as cause:
                    raise EncodingError(
                        f"{name} cannot be sent: {cause}{_advice(value)}"
                    ) from cause
            raise EncodingError(f"the call to {call_name(func)} cannot be sent: {error}") from error


def call_name(func: Any) -> str:
    """The name of a callable as it appears in errors, logs and traces."""
    name = getattr(func, "__qualname__", None) or getattr(func, "__name__", None)
    return str(name) if name else repr(func)


def _named_parts(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    called = call_name(func)
    yield f"the function {called}", func
    for position, value in enumerate(args):
        yield f"argument {position} of {called} (a {type(value).__name__})", value
    for key, value in kwargs.items():
        yield f"argument {key!r} of {called} (a {type(value).__name__})", value


def _advice(value: Any) -> str:
    name = str(getattr(value, "__qualname__", ""))
    if "<lambda>" in name or "<locals>" in name:
        return (
            ". Lambdas and functions defined inside functions are sent by value only with the "
            'option closures=True (pip install "gradwire[closures]"); or define it at the top '
            "level of a module"
        )
    return ""
