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
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, TypeVar

from torch import Tensor

from gradwire._core.ids import WorkerInfo
from gradwire._core.tracebacks import format_error, format_frames
from gradwire._core.wire.codec import Codec
from gradwire._core.wire.encoding import Encoded
from gradwire.errors import CallError, RemoteError, RemoteTraceback

F = TypeVar("F", bound=Callable[..., Any])


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception. (`BaseException.add_note` does this, but Python 3.10 lacks
    it.)"""
    try:
        error.__dict__["__notes__"] = [*getattr(error, "__notes__", ()), note]
    except Exception:
        pass  # The class does not allow new attributes, so the note is left out.


def add_place(error: BaseException, func: Any, call: str, worker: str) -> None:
    """Add a note that names the call, and the worker, in which an exception was raised. `func` is
    the called function, or its name."""
    if not (isinstance(func, FunctionType) and hasattr(func, "adds_place")):
        add_note(error, f"in the call of {call} on worker {worker!r}")


def adds_place(func: F) -> F:
    """Mark a function of gradwire that adds its own note to the errors it raises. `add_place` then
    adds none, because its note would name an internal function that the user has not called."""
    func.adds_place = True  # type: ignore[attr-defined]
    return func


def _traceback_text(error: BaseException, what: str, worker: WorkerInfo) -> str:
    """Return the traceback of an exception as text. The exception was raised on the worker
    `worker`; `what` says by which function.

    The exception may have come to `worker` as the error of a call to a third worker. Then the text
    has the frames on `worker` first and the frames on the third worker after them, as if all were
    frames of one process."""
    where = f'{what} on worker "{worker.name}" (id {worker.id}) raised:\n\n'
    try:
        cause, trace = error.__cause__, error.__traceback__
    except Exception:
        cause = None  # The exception's class forbids reading these attributes.
    if not isinstance(cause, RemoteTraceback):
        return where + format_error(error)
    frames = format_frames(trace)
    here = f"{where}Traceback (most recent call last):\n{frames}\n" if frames else ""
    return here + cause.text


def encode_exception(codec: Codec, error: BaseException, what: str, worker: WorkerInfo) -> Encoded:
    """Encode an exception that `what`, usually a function, has raised on a worker."""
    trace = _traceback_text(error, what, worker)
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    summary = (name, _text(error), trace)
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


def detach(error: BaseException, what: str, worker: WorkerInfo) -> None:
    """Replace the traceback of an exception by its text, so that the exception can be stored. A
    traceback object would keep all its frames and their variables alive. `what` has raised the
    exception on a worker."""
    trace = _traceback_text(error, what, worker)
    error.__traceback__ = error.__context__ = None
    error.__cause__ = RemoteTraceback(trace)


def decode_exception(
    codec: Codec,
    payload: bytes | memoryview,
    buffers: Sequence[Tensor],
    worker: str,
    *,
    call: str = "",
    func: Any = None,
) -> BaseException:
    """Decode an exception that `worker` sent. `call` names the call that failed. If it was the call
    of a user function, `func` is that function or its name, and a note names the call."""
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
    elif func is not None:
        add_place(error, func, call, worker)
    if isinstance(error, CallError):
        # The function that this worker called made a call itself, and that inner call failed. In
        # the error that arrived, `may_have_run` is about the inner call. From here on it is about
        # the call of this worker, whose function did run.
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
