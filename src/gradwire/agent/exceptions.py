"""Exceptions as values: they arrive with their type, their state and the remote traceback.

An exception is not rebuilt by calling its class, since classes with unusual constructors would
not survive that; it is made bare and given its state. What cannot be rebuilt at all becomes a
`RemoteError` that names its type and has its text.
"""

from __future__ import annotations

import pickle
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gradwire.errors import CallError, RemoteError, RemoteTraceback
from gradwire.wire.values import Codec, Encoded


def add_note(error: BaseException, note: str) -> None:
    """As `BaseException.add_note` does, which came with Python 3.11."""
    try:
        error.__dict__["__notes__"] = [*getattr(error, "__notes__", ()), note]
    except Exception:
        pass  # it does not let itself be looked into


def _formatted(error: BaseException) -> str:
    """The traceback with the notes, which Python 3.10 does not know."""
    try:
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        if sys.version_info < (3, 11):
            lines += [f"{note}\n" for note in getattr(error, "__notes__", ())]
    except Exception as trouble:
        return f"{type(error).__qualname__}, whose traceback cannot be read: {trouble!r}\n"
    return "".join(lines)


def encode_exception(codec: Codec, error: BaseException, where: str) -> Encoded:
    """An exception ready to be sent; `where` names the call and the worker it comes from."""
    trace = _formatted(error)
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    summary = (name, _text(error), f"{where}\n\n{trace}")
    for whole in (True, False):
        try:
            args = _arguments(error)
            notes = {"__notes__": error.__notes__} if hasattr(error, "__notes__") else {}
            state = dict(error.__dict__) if whole else notes
            inner = codec.encode((type(error), args if whole else _sendable(args), state))
        except Exception:
            continue
        # A pickle within a pickle: the summary can be read even where the class is unknown.
        encoded = codec.encode((summary, inner.whole_payload()))
        encoded.buffers, encoded.passengers = inner.buffers, inner.passengers
        return encoded
    return codec.encode((summary, None))


def detach(error: BaseException, where: str) -> BaseException:
    """The exception with its traceback as text, so that it can be kept: a traceback holds on to
    the frames of everything that was being done, and to all their variables."""
    trace = _formatted(error)
    error.__traceback__ = error.__context__ = None
    error.__cause__ = RemoteTraceback(f"{where}\n\n{trace}")
    return error


def decode_exception(
    codec: Codec,
    payload: bytes | memoryview,
    buffers: Sequence[Tensor],
    worker: str,
    *,
    call: str = "",
) -> BaseException:
    """The exception again, ready to be raised; `call` is what `worker` was called for."""
    ((name, text, trace), parts), _ = codec.decode(payload)
    error = None
    if parts is not None:
        try:
            decoded, _ = codec.decode(parts, buffers)
            error = _rebuild(*decoded)
            if not isinstance(error, Exception):
                error = None  # a remote exit or interrupt is not meant for this process
        except Exception:
            error = None  # its class is unknown here, or does not let itself be rebuilt
    if error is None:
        where = f"{call} on worker {worker!r} raised " if call else ""
        error = RemoteError(f"{where}{name}: {text}", worker=worker, call=call)
    if isinstance(error, CallError):
        error.may_have_run = True  # what did not run is further away; what was called here did
    error.__cause__ = RemoteTraceback(trace)
    return error


def _is_plain(kind: type[BaseException]) -> bool:
    """Whether calling the class with its arguments is how to rebuild an exception."""
    return kind.__init__ in _PLAIN_INITS and kind.__new__ in _PLAIN_NEWS


def _arguments(error: BaseException) -> tuple[Any, ...]:
    if _is_plain(type(error)):
        # OSError, for one, has more arguments than it shows in `args`.
        reduced = error.__reduce__()
        if isinstance(reduced, tuple) and reduced[0] is type(error):
            args: tuple[Any, ...] = reduced[1]
            return args
    return error.args


def _rebuild(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> Any:
    if _is_plain(kind):
        error = kind(*args)  # builtins keep part of their state where only they can put it
    else:
        error = _bare(kind, args)
        error.args = args
    error.__dict__.update(state)
    return error


def _bare(kind: type[BaseException], args: tuple[Any, ...]) -> Any:
    """An instance without its constructor having run. Of several builtin bases, only the one that
    decides the layout may make it."""
    for base in kind.__mro__:
        try:
            return base.__new__(kind, *args)
        except TypeError:
            continue
    raise TypeError(f"{kind} cannot be made")


def _builtin_exceptions() -> list[type[BaseException]]:
    found, seen = [BaseException], []
    while found:
        kind = found.pop()
        seen.append(kind)
        found.extend(sub for sub in kind.__subclasses__() if sub.__module__ == "builtins")
    return seen


_PLAIN_INITS = {kind.__init__ for kind in _builtin_exceptions()}
_PLAIN_NEWS = {kind.__new__ for kind in _builtin_exceptions()}


def _sendable(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with the text of those that cannot be sent."""
    sendable = []
    for arg in args:
        try:
            pickle.dumps(arg)
            sendable.append(arg)
        except Exception:
            sendable.append(repr(arg))
    return tuple(sendable)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "<its text cannot be made>"
