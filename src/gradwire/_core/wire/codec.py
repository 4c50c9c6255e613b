"""`Codec`: turns values into payloads and buffers, and back.

A payload is a value encoded by Python's `marshal` (see `marshalling`) or, if `marshal` cannot
encode the value, a pickle (see `pickling`). In both, a small dense tensor is encoded as its
description and the bytes of its elements. The elements of a large tensor or NumPy array travel
beside the payload, as a buffer of their own.

Higher layers can register types of their own. They also learn which tensors of a value require
gradients, in an order that is the same for the sender and the receiver.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import resolve_name

from gradwire._core.torch_internals import OPERATOR_TYPES
from gradwire._core.tracebacks import worth_showing
from gradwire._core.wire import tensors as wire_tensors
from gradwire._core.wire.encoding import Decoding, Encoded, OnReceive, receive_dense
from gradwire._core.wire.marshalling import PAIR, Split, join, split_call, split_value
from gradwire._core.wire.messages import MARSHAL_VERSION
from gradwire._core.wire.pickling import PICKLE_MARK, ValuePickler, unpickle
from gradwire._core.wire.tensors import describe_dense
from gradwire.errors import EncodingError

F = TypeVar("F", bound=Callable[..., Any])

_BUILTIN_TYPES = (BuiltinFunctionType, MethodDescriptorType)
_REQUIRES_GRAD = wire_tensors.REQUIRES_GRAD
_is_inference_mode_enabled = torch.is_inference_mode_enabled


class Codec:
    """Encodes the values that one worker sends, and decodes the values that it receives."""

    def __init__(self, *, closures: bool = False):
        self._pickler = ValuePickler(closures=closures)
        self._closures = closures
        self._registered_types: dict[type, tuple[str, Callable[[Any], Any]]] = {}
        self._rebuilders: dict[str, Callable[[Any], Any]] = {}
        #: Tensor and the registered types. `marshal` cannot encode instances of these types. They
        #: are taken out of a value that is marshalled, and are encoded separately.
        self._detached_types: set[type] = {Tensor}

    def register_type(
        self,
        cls: type,
        name: str,
        reduce: Callable[[Any], Any],
        rebuild: Callable[[Any], Any],
    ) -> None:
        """Register how to send instances of exactly `cls`. `reduce` turns an instance into numbers,
        strings, bytes and tuples of these. The receiver must have registered a type under the
        same name. It passes the result of `reduce` to the function `rebuild` of that type.

        `reduce` may call `add_attachment` and `rebuild` may call `current_decoding`.
        """
        self._pickler.register_type(cls, name, reduce)
        self._registered_types[cls] = name, reduce
        self._detached_types.add(cls)
        self._rebuilders[name] = rebuild

    def on_untracked_tensor(self, callback: Callable[[Tensor], None]) -> None:
        """Set the function to call with each encoded tensor that requires gradients, but whose
        gradients gradwire cannot send back. An example is a tensor of a subclass. The callback may
        raise an error, so that the value is not sent."""
        self._pickler.on_untracked_tensor = callback

    # -- encoding

    def encode(self, value: Any) -> Encoded:
        """Encode any value."""
        return self._encode(value, split_value(value, self._detached_types))

    def encode_with_tensors(self, value: Any, tensors: Sequence[Tensor]) -> Encoded:
        """Encode the pair `(value, tensors)`. The value must consist of numbers, strings and bytes,
        and of tuples, lists, sets and dictionaries of these."""
        return self._encode(None, (PAIR, value, tensors))

    def encode_call(
        self,
        func: Callable[..., Any],
        args: Sequence[Any] | None,
        kwargs: dict[str, Any] | None,
    ) -> Encoded:
        """Encode a call. If that fails, the error names the argument that cannot be sent."""
        if args is None:
            args = ()
        elif type(args) is not tuple:
            args = _check_args(func, args)
        if kwargs is None:
            kwargs = {}
        elif type(kwargs) is not dict:
            kwargs = _check_kwargs(func, kwargs)
        try:
            # With the option `closures`, every call is pickled, because only the pickler knows
            # whether to send a function by name or by value.
            split = None if self._closures else split_call(func, args, kwargs, self._detached_types)
            return self._encode((func, args, kwargs), split)
        except Exception as error:
            text, cause = self._find_unsendable(func, args, kwargs, error)
            raise EncodingError(text) from worth_showing(cause)

    def _find_unsendable(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
    ) -> tuple[str, Exception]:
        """Find the part of a call because of which encoding has failed with `error`. Return a text
        that names the part, and the error of encoding this part."""
        for description, value in _parts_of_call(func, args, kwargs):
            try:
                self.encode(value).notify_attachments(None)
            except Exception as cause:
                # Python has set `__context__` to `error`. Remove it, because a traceback would show
                # the same failure twice.
                cause.__context__ = None
                advice = closures_advice(value, cause)
                return f"{description} cannot be sent: {cause}{advice}", cause
        call = as_written(func, args, kwargs)[0]
        return f"the call to {call} cannot be sent: {error}{closures_advice(func, error)}", error

    def _encode(self, value: Any, split: Split | None) -> Encoded:
        """Encode a value. If `split` is None, pickle the value. Otherwise encode its parts, which
        are given by `split`, with `marshal`."""
        encoded = Encoded()
        try:
            if split is None:
                encoded.payload, *encoded.rest = self._pickler.pickle(value, encoded)
            else:
                form, rest, detached = split
                descriptions: list[Any] = []
                for obj in detached:
                    described = (
                        describe_dense(obj, encoded.buffers) if type(obj) is Tensor else None
                    )
                    if described is None:
                        descriptions.append(self._describe_other(obj, encoded))
                        continue
                    descriptions.append(described)
                    if described[3] & _REQUIRES_GRAD:
                        encoded.differentiable.append(obj)
                encoded.payload = marshal.dumps((form, rest, descriptions), MARSHAL_VERSION)
        except BaseException:
            encoded.notify_attachments(None)
            raise
        return encoded

    def _describe_other(self, obj: Any, encoded: Encoded) -> list[Any] | bytes:
        """Return the description of an object that `marshal` cannot encode and that is not a dense
        tensor. For an instance of a registered type, the description is a list. For any other
        object, it is a pickle, as bytes. (The description of a dense tensor is a tuple. So the
        receiver can tell from the type of a description how to rebuild the object.)"""
        if type(obj) in self._registered_types:
            name, reduce = self._registered_types[type(obj)]
            return [name, encoded.as_current(reduce, obj)]
        return b"".join(self._pickler.pickle(obj, encoded))

    # -- decoding

    def decode(
        self,
        payload: bytes | memoryview,
        buffers: Sequence[Tensor] = (),
        on_receive: OnReceive | None = None,
        is_call: bool = False,
    ) -> tuple[Any, Sequence[Any]]:
        """Return a value, and the futures that must be done before the value may be used."""
        if _is_inference_mode_enabled():
            # The user has put this thread into torch's inference mode. Leave the mode, because
            # the message may be for another thread, which cannot use inference tensors as usual.
            with torch.inference_mode(False):
                return self.decode(payload, buffers, on_receive, is_call)
        remaining = iter(buffers)
        if payload[0] == PICKLE_MARK:
            decoding = Decoding(self._rebuilders, remaining, on_receive, is_call)
            return unpickle(payload, decoding), decoding.unconfirmed
        form, rest, descriptions = marshal.loads(payload)
        detached = []
        state: Decoding | None = None
        for description in descriptions:
            if type(description) is tuple:
                detached.append(receive_dense(remaining, on_receive, *description))
                continue
            state = state or Decoding(self._rebuilders, remaining, on_receive, is_call)
            if type(description) is list:
                name, reduced = description
                detached.append(state.as_current(self._rebuilders[name], reduced))
            else:
                detached.append(unpickle(description, state))
        return join(form, rest, detached), state.unconfirmed if state else ()


def call_name(func: Any) -> str:
    """Return the name of a callable for errors, logs and traces. A text is a name already. This
    function raises nothing, and calls no `__repr__` of the user's, which may be long."""
    if isinstance(func, str):
        return func
    if isinstance(func, partial):
        return f"partial({call_name(func.func)})"
    try:
        if type(func) in OPERATOR_TYPES:
            return f"torch.ops.{func}"
        name = getattr(func, "__qualname__", None) or func.__name__
        if isinstance(func, _BUILTIN_TYPES):
            # The `__qualname__` of `torch.add` is `_VariableFunctionsClass.add`, which users do
            # not know. `resolve_name` returns "torch.add".
            with suppress(Exception):
                name = resolve_name(func) or name
        return str(name)
    except Exception:
        return f"an object of class {type(func).__qualname__}"


#: Returns the name and the arguments of a call, as the program has written the call.
AsWritten = Callable[..., tuple[str, tuple[Any, ...], dict[str, Any]]]


def show_as(as_written: AsWritten) -> Callable[[F], F]:
    """Return a decorator for an internal function of gradwire. A program makes a call, and gradwire
    runs the internal function on the other worker instead, for example to call a method of a remote
    value. With the decorator, errors show what the program has written, and not the internal
    function. `as_written` gets the arguments of the internal function. It returns the name and the
    arguments that errors show."""

    def mark(func: F) -> F:
        func.as_written = as_written  # type: ignore[attr-defined]
        return func

    return mark


def as_written(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Return the name and the arguments of a call, as the program has written the call."""
    if isinstance(func, FunctionType) and hasattr(func, "as_written"):
        # The arguments may come from another worker, and may not fit the function. Then return the
        # function's own name below.
        with suppress(Exception):
            named: tuple[str, tuple[Any, ...], dict[str, Any]] = func.as_written(*args, **kwargs)
            return named
    return call_name(func), args, kwargs


def _check_args(func: Any, args: Any) -> tuple[Any, ...]:
    if isinstance(args, (tuple, list)):
        return tuple(args)
    raise EncodingError(
        f"args must be a tuple or a list of the arguments of {call_name(func)}, not "
        f"{type(args).__name__}. For one argument write args=(x,)"
    )


def _check_kwargs(func: Any, kwargs: Any) -> dict[str, Any]:
    if isinstance(kwargs, Mapping):
        return dict(kwargs)
    raise EncodingError(
        f"kwargs must be a dictionary of the named arguments of {call_name(func)}, not "
        f"{type(kwargs).__name__}"
    )


def _parts_of_call(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield pairs for the function of a call and for each argument. The first item of a pair is a
    description for an error text, the second is the function or argument."""
    called, args, kwargs = as_written(func, args, kwargs)
    yield f"the function {called}", func
    for position, value in enumerate(args):
        yield f"argument {position} of {called} (a {type(value).__name__})", value
    for key, value in kwargs.items():
        yield f"argument {key!r} of {called} (a {type(value).__name__})", value


def closures_advice(value: Any, error: Exception) -> str:
    """Return advice for an error text if the value, or a part of it, could not be sent because it
    is a local function or class. Otherwise return an empty text."""
    names = f"{getattr(value, '__qualname__', '')} {error}"
    if "<lambda>" in names or "<locals>" in names:
        return (
            ". Lambdas and functions defined inside functions are sent by value only with the "
            'option closures=True (pip install "gradwire[closures]"); or define it at the top '
            "level of a module"
        )
    return ""
