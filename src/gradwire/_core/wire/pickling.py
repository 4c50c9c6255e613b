"""Values as pickles whose tensors and large arrays travel outside of the pickle.

A `ValuePickler` writes pickles, and `unpickle` reads them. A reducer is a function that tells
pickle how to encode an object. This module has reducers for tensors, registered types and torch's
operators. A pickle refers by module and name to the functions that rebuild these objects, so both
workers must run the same version of this module.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradwire._core.torch_internals import OPERATOR_TYPES
from gradwire._core.wire import tensors as wire_tensors
from gradwire._core.wire.closures import closure_pickler
from gradwire._core.wire.encoding import (
    Decoding,
    Encoded,
    Piece,
    current_decoding,
    receive_dense,
    thread_state,
)
from gradwire._core.wire.tensors import describe_dense
from gradwire.errors import EncodingError

_Parameter = torch.nn.Parameter
_loads = pickle.loads
_memory_of = wire_tensors.memory_of


class ValuePickler:
    """Pickles the values that one worker sends."""

    def __init__(self, *, closures: bool):
        #: The function to call with each tensor that requires gradients but is pickled in torch's
        #: own way. Gradwire cannot send back the gradients of such a tensor.
        self.on_untracked_tensor: Callable[[Tensor], None] = lambda _tensor: None
        self._reducers = _Reducers(self._reduce_tensor)
        self._pickler_type = closure_pickler() if closures else pickle.Pickler

    def register_type(self, cls: type, name: str, reduce: Callable[[Any], Any]) -> None:
        """Pickle instances of exactly `cls` as a name and the value that `reduce` returns."""
        self._reducers[cls] = partial(_reduce_registered, name, reduce)

    def pickle(self, value: Any, encoding: Encoded) -> list[Piece]:
        """Return the pickle of a value. A long pickle has several pieces."""
        # Make a new pickler for each value. To use a pickler again, its memo (its table of pickled
        # objects) would have to be cleared. This may free a tensor, which may release the
        # interpreter lock. A garbage collection in another thread could then crash on the memo.
        pieces = _Pieces()
        pickler = self._pickler_type(pieces, 5, buffer_callback=encoding.add_array)
        pickler.dispatch_table = self._reducers
        pickler.memo = _primed_pickler.memo
        encoding.as_current(pickler.dump, value)
        pieces[0] = b"".join((_PREFIX, pieces[0]))
        return pieces

    def _reduce_tensor(self, tensor: Tensor) -> Any:
        encoding = thread_state.encoding
        assert encoding is not None
        cls = type(tensor)
        if cls is Tensor or cls is _Parameter:
            reduced: Any = None
            described = describe_dense(tensor, encoding.buffers)
            if described is not None:
                reduced = _load_dense, described
                if cls is not Tensor:
                    elements, code, shape, flags, *strides = described
                    flags |= wire_tensors.PARAMETER
                    reduced = _load_dense, (elements, code, shape, flags, *strides)
                    if tensor.__dict__:
                        # Pickle the attributes, which may be tensors, after the parameter. So the
                        # receiver rebuilds all tensors in the order in which the sender lists them.
                        reduced += tensor.__dict__, None, None, _set_attributes
            elif cls is Tensor:
                parts = wire_tensors.describe_sparse_or_meta(tensor)
                reduced = None if parts is None else (_load_sparse_or_meta, parts)
            # `reduced` is None for a parameter that is not dense. Torch's own reducer then pickles
            # the parameter as a plain tensor with the same data, and pickle calls this method again
            # for the plain tensor.
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
            self.on_untracked_tensor(tensor)
        # Torch's own reducer handles subclasses of Tensor and rare memory layouts.
        return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]


def unpickle(pickled: bytes | memoryview, decoding: Decoding) -> Any:
    """Return the value in a pickle that a `ValuePickler` has made, usually on another worker."""
    outer, thread_state.decoding = thread_state.decoding, decoding
    try:
        # NumPy arrays and tensors take their buffers from one iterator, since the sender has put
        # the buffers of both into one list.
        arrays = map(_memory_of, decoding.buffers)
        return _loads(pickled, buffers=arrays)
    finally:
        thread_state.decoding = outer


# -- reducers and the functions that undo them


class _Reducers(dict[type, Callable[[Any], Any]]):
    """A pickler's dispatch table, in which all subclasses of Tensor share one reducer."""

    def __init__(self, reduce_tensor: Callable[[Tensor], Any]):
        super().__init__(dict.fromkeys((Tensor, _Parameter), reduce_tensor))
        super().update(dict.fromkeys(OPERATOR_TYPES, _reduce_operator))
        self._reduce_tensor = reduce_tensor

    def __missing__(self, cls: type) -> Any:
        return self._reduce_tensor if issubclass(cls, Tensor) else copyreg.dispatch_table[cls]


def _load_dense(
    elements: bytes | None,
    code: int,
    shape: tuple[int, ...],
    flags: int,
    strides: tuple[int, ...] | None = None,
) -> Tensor:
    decoding = current_decoding()
    return receive_dense(
        decoding.buffers, decoding.on_receive, elements, code, shape, flags, strides
    )


def _set_attributes(tensor: Tensor, attributes: dict[str, Any]) -> None:
    tensor.__dict__.update(attributes)


def _load_sparse_or_meta(*parts: Any) -> Tensor:
    tensor = wire_tensors.rebuild_sparse_or_meta(*parts)
    on_receive = current_decoding().on_receive
    return on_receive(tensor) if tensor.requires_grad and on_receive is not None else tensor


def _reduce_registered(name: str, reduce: Callable[[Any], Any], obj: Any) -> Any:
    return _load_registered, (name, reduce(obj))


def _load_registered(name: str, reduced: Any) -> Any:
    return current_decoding().rebuilders[name](reduced)


# An operator of torch, such as `torch.ops.aten.add.Tensor`, is sent as its name in `torch.ops`.
def _reduce_operator(operator: Any) -> Any:
    return _load_operator, (str(operator),)


def _load_operator(name: str) -> Any:
    """Return the operator with this name: `torch.ops.aten.add.Tensor` for "aten.add.Tensor"."""
    result: Any = torch.ops
    for part in name.split("."):
        result = getattr(result, part)
    return result


# -- the beginning of every pickle

# Pickle normally looks up the function `_load_dense` by name. For a small tensor, this takes most
# of the time of pickling and unpickling. To avoid it, the function has a number, `_EXTENSION_CODE`,
# in pickle's extension registry. Each pickle begins with opcodes that store the function as entry 0
# of the memo, the table of objects to which the pickle refers by number. Every pickler starts with
# a copy of the memo of `_primed_pickler`, so it refers to the function as entry 0.
_EXTENSION_CODE = 0x67726164
copyreg.add_extension(__name__, _load_dense.__name__, _EXTENSION_CODE)
_PREFIX = pickle.EXT4 + _EXTENSION_CODE.to_bytes(4, "little") + pickle.MEMOIZE + pickle.POP
_primed_pickler = pickle.Pickler(io.BytesIO(), 5)
_primed_pickler.memo = {id(_load_dense): (0, _load_dense)}

#: The first byte of every pickle made here. No value encoded by `marshal` begins with this byte.
PICKLE_MARK = _PREFIX[0]


class _Pieces(list[Piece]):
    """A file object that collects the pieces of a pickle. It copies a piece only if the memory of
    the piece may still change."""

    __slots__ = ()

    def write(self, piece: bytes | bytearray | pickle.PickleBuffer) -> None:
        if type(piece) is bytes:
            self.append(piece)
        elif type(piece) is pickle.PickleBuffer and (raw := piece.raw()).readonly:
            self.append(raw)
        else:
            self.append(bytes(piece))
