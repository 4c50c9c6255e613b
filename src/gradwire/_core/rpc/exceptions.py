"""Sending exceptions, so that the receiver can raise them with the same type and state, and with
the remote traceback.

If the class of an exception defines its own constructor, the receiver does not call the
constructor, because it may need arguments that the exception has not kept. Instead the receiver
creates an empty object of the class and sets its attributes. If the class inherits the constructor
of a builtin exception, the receiver calls the class with the arguments of the exception. An
exception that cannot be rebuilt becomes a `RemoteError` with the name of its type and its text.
"""

from __future__ import annotations

import pickle
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gradwire._core.wire.codec import Codec
from gradwire._core.wire.encoding import Encoded
from gradwire.errors import CallError, RemoteError, RemoteTraceback


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception. (`BaseException.add_note` does this, but Python 3.10 lacks
    it.)"""
    try:
        error.__dict__["__notes__"] = [*getattr(error, "__notes__", ()), note]
    except Exception:
        pass  # The class does not allow new attributes, so the note is left out.


def _format(error: BaseException) -> str:
    """Return the text of an exception with its traceback and its notes. (Python 3.10 does not
    format notes, so this function appends them.)"""
    try:
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        if sys.version_info < (3, 11):
            lines += [f"{note}\n" for note in getattr(error, "__notes__", ())]
    except Exception as trouble:
        return f"{type(error).__qualname__}, whose traceback cannot be formatted: {trouble!r}\n"
    return "".join(lines)


def encode_exception(codec: Codec, error: BaseException, where: str) -> Encoded:
    """Encode an exception. `where` names the call and the worker that raised it."""
    trace = _format(error)
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
        # The exception is a pickle inside a pickle. A worker that cannot import the class of the
        # exception can still decode the outer pickle, which has the name of the class, the text of
        # the exception and its traceback.
        encoded = codec.encode((summary, inner.whole_payload()))
        encoded.buffers, encoded.attachments = inner.buffers, inner.attachments
        return encoded
    return codec.encode((summary, None))


def detach(error: BaseException, where: str) -> BaseException:
    """Replace the traceback of an exception by its text, so that the exception can be stored. A
    traceback object would keep all its frames and their variables alive."""
    trace = _format(error)
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
    """Decode an exception that `worker` sent. `call` names the call that failed."""
    ((name, text, trace), parts), _ = codec.decode(payload)
    error = None
    if parts is not None:
        try:
            decoded, _ = codec.decode(parts, buffers)
            error = _rebuild(*decoded)
            if not isinstance(error, Exception):
                # A SystemExit or KeyboardInterrupt from the other worker would end this process, so
                # a RemoteError takes its place.
                error = None
        except Exception:
            # The class cannot be imported here, or its object cannot be created. So a RemoteError
            # takes the place of the exception.
            error = None
    if error is None:
        where = f"{call} on worker {worker!r} raised " if call else ""
        error = RemoteError(f"{where}{name}: {text}", worker=worker, call=call)
    if isinstance(error, CallError):
        # The function that this worker called did run. It raised this error because a call that
        # it made itself failed, and until now `may_have_run` was about that other call.
        error.may_have_run = True
    error.__cause__ = RemoteTraceback(trace)
    return error


def _uses_builtin_constructor(kind: type[BaseException]) -> bool:
    """Return whether this class inherits the constructor of a builtin exception. If so, an
    exception of this class is rebuilt by calling the class."""
    return kind.__init__ in _BUILTIN_INITS and kind.__new__ in _BUILTIN_NEWS


def _arguments(error: BaseException) -> tuple[Any, ...]:
    if _uses_builtin_constructor(type(error)):
        # `__reduce__` returns all arguments. (`args` of an OSError lacks the file name.)
        reduced = error.__reduce__()
        if isinstance(reduced, tuple) and reduced[0] is type(error):
            args: tuple[Any, ...] = reduced[1]
            return args
    return error.args


def _rebuild(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> Any:
    if _uses_builtin_constructor(kind):
        # Builtin exceptions have state that only their constructor can set, so it must be called.
        error = kind(*args)
    else:
        error = _new_without_init(kind, args)
        error.args = args
    error.__dict__.update(state)
    return error


def _new_without_init(kind: type[BaseException], args: tuple[Any, ...]) -> Any:
    """Create an exception without running its constructor. This works only with the `__new__` of
    one of the base classes: the builtin class that decides the memory layout. So try the base
    classes one after the other."""
    for base in kind.__mro__:
        try:
            return base.__new__(kind, *args)
        except TypeError:
            continue
    raise TypeError(f"an instance of {kind} cannot be created")


def _builtin_exceptions() -> list[type[BaseException]]:
    pending, builtin = [BaseException], []
    while pending:
        kind = pending.pop()
        builtin.append(kind)
        pending.extend(sub for sub in kind.__subclasses__() if sub.__module__ == "builtins")
    return builtin


_BUILTIN_INITS = {kind.__init__ for kind in _builtin_exceptions()}
_BUILTIN_NEWS = {kind.__new__ for kind in _builtin_exceptions()}


def _sendable(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of an exception. Each argument that cannot be pickled is replaced by its
    `repr`."""
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
        return "<str() of the exception failed>"
