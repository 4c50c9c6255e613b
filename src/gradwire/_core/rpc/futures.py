"""Futures: torch's futures with three additions. They can be awaited, they raise an error with its
original type, and they log an error that the program never looked at.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import itertools
import logging
import sys
import weakref
from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, cast

import torch

logger = logging.getLogger("gradwire")

T = TypeVar("T")
S = TypeVar("S")


class Waitable(Protocol):
    """An object with a method that a thread calls to wait for a future, instead of blocking in
    torch. In this method the thread may do work itself, for example read the answer from the
    connection."""

    def wait(self, future: Future[Any]) -> None:
        """Return when `future` is done."""

    def age(self) -> float | None:
        """Return how many seconds ago the call was made, or None if that is not known."""


class Future(torch.futures.Future, Generic[T]):  # type: ignore[type-arg]
    """The result of a call that may still be running.

    It is a `torch.futures.Future`, so `torch.futures.wait_all` accepts it. It can also be awaited:
    ``await rpc_async(...)``. If a future with an error is dropped before anything has looked at the
    error, the error is logged.

        >>> future = Future()
        >>> doubled = future.then(lambda f: 2 * f.value())
        >>> future.set_result(21)
        >>> doubled.wait()
        42
    """

    _source: Waitable | None
    _failure: _Failure | None = None

    def __init__(self, source: Waitable | None = None, name: object = "a call"):
        super().__init__()
        #: The object whose method `wait` a thread calls to wait for this future. If this is None,
        #: the thread blocks in torch.
        self._source = source
        #: An object whose text names this future in errors. It is converted to text only for an
        #: error, because the conversion costs time.
        self._name = name
        self._callbacks: list[Callable[[], None]] = []
        self._hooks: list[Callable[[], None]] = []
        #: Has one item until the future is completed. Removing it is atomic, so that only one
        #: thread completes the future.
        self._open = [True]

    def __str__(self) -> str:
        return str(self._name)

    def __repr__(self) -> str:
        state, age = self.state, None if self._source is None else self._source.age()
        if state == "pending" and age is not None:
            state = f"pending for {age:.1f} s"
        return f"<Future of {self._name}, {state}>"

    @property
    def state(self) -> str:
        """The state of the future as text: pending, done, or failed with the type of the error.
        Reading this property does not count as looking at the error, so an error that the program
        ignores is still logged."""
        if not self.done():
            return "pending"
        failure = self._failure
        return "done" if failure is None else f"failed with {type(failure.error).__name__}"

    def rename(self, name: object) -> None:
        """Set the object whose text names this future in errors. Only gradwire itself calls
        this."""
        self._name = name

    def completed_by(self, source: Waitable) -> None:
        """Set the object whose `wait` a thread calls to wait for this future. Only gradwire itself
        calls this method, right after the future is created."""
        self._source = self._name = source

    def wait(self) -> T:
        """Block until the future is done; return its value or raise its error."""
        if self._source is not None and not self.done():
            self._source.wait(self)
        try:
            return cast(T, super().wait())
        except Exception as error:
            raise self._as_raised_here(error)

    def _as_raised_here(self, error: Exception) -> BaseException:
        """Return an error of this future without the frames of torch and of `_raise_failure`."""
        return error if self._failure is None else self._failure.as_raised()

    def set_result(self, result: T) -> None:
        """Complete the future with a value."""
        self.complete(result, None)
        self.run_callbacks()

    def set_exception(self, result: BaseException) -> None:
        """Complete the future with an error."""
        self.complete(None, result)
        self.run_callbacks()

    def complete(self, value: Any, error: BaseException | None) -> None:
        """Complete the future, but do not run its callbacks; `run_callbacks` does that."""
        try:
            # Only one thread can remove the item. In any other thread, `pop` raises IndexError.
            self._open.pop()
        except IndexError:
            raise RuntimeError(
                f"Future can only be marked completed once: that of {self._name} is done already"
            ) from None
        try:
            if error is not None:
                self._failure = _Failure(error)
                # Torch's C++ code, for example in `torch.futures.wait_all`, calls `unwrap` to raise
                # the error. The future in C++ owns `unwrap`, and the error may lead back to the
                # future: its traceback refers to frames, and a frame may refer to the future.
                # Python's garbage collector cannot break a cycle through C++. So `unwrap` has only
                # a weak reference to the object that holds the error.
                unwrap = partial(_raise_failure, weakref.ref(self._failure), repr(error))
                self._set_unwrap_func(unwrap)
                value = None
            super().set_result(value)
        except BaseException:
            # If an interrupt came before the future was completed, the item of `_open` is put back,
            # so that another thread can complete the future.
            if not self.done():
                self._open.append(True)
            raise
        _run_all(self._hooks)

    def at_once(self, hook: Callable[[Future[T]], None]) -> None:
        """Call `hook` on the thread that completes the future, before the callbacks run. The hook
        must not take a lock that a thread may hold while it waits for the future. Only gradwire
        itself calls this."""
        self._hooks.append(partial(hook, self))
        if self.done():
            _run_all(self._hooks)

    @property
    def has_callbacks(self) -> bool:
        return bool(self._callbacks)

    def run_callbacks(self) -> None:
        """Call each callback once, if the future is done."""
        if self.done():
            _run_all(self._callbacks)

    def _call_when_done(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)
        self.run_callbacks()

    def exception(self) -> BaseException | None:
        """Return the error of a future that is done, or None if the future has a value."""
        if self._failure is None:
            return None
        self._failure.seen = True
        return self._failure.error

    def expect_failure(self) -> None:
        """Do not log an error of this future, even if the future is dropped before the program has
        looked at the error."""
        self._quiet = True

    _quiet = False

    def then(self, callback: Callable[[Future[T]], S]) -> Future[S]:
        """Return a future of the result of `callback`. `callback` is called with this future when
        this future is done. It runs with the context variables that the caller of `then` has now.

        >>> future.then(lambda f: f.value() + 1).wait()      # doctest: +SKIP
        """
        _check_callback(callback)
        child: Future[S] = Future(self._source_of_child(), f"a callback of {self._name}")
        context = contextvars.copy_context()

        def run() -> None:
            try:
                child.set_result(context.run(callback, self))
            except BaseException as error:
                child.set_exception(error)

        self._call_when_done(run)
        return child

    def add_done_callback(self, callback: Callable[[Future[T]], None]) -> None:
        """Call `callback` with this future when it is done. An error in the callback is logged.

        >>> future.add_done_callback(lambda f: print(f.value()))      # doctest: +SKIP
        """
        _check_callback(callback)
        context = contextvars.copy_context()

        def run() -> None:
            try:
                context.run(callback, self)
            except BaseException:
                # Even a SystemExit is only logged, because the remaining callbacks must still run.
                logger.exception("error in a callback of %s", self._name)

        self._call_when_done(run)

    def _source_of_child(self) -> Waitable | None:
        return None if self._source is None else _Relay(self)

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done():
            loop = asyncio.get_running_loop()
            done = loop.create_future()

            def set_done() -> None:
                if not done.done():
                    done.set_result(None)

            def notify() -> None:
                try:
                    loop.call_soon_threadsafe(set_done)
                except RuntimeError:
                    pass  # The event loop is closed, so no coroutine awaits this future any more.

            self._call_when_done(notify)
            yield from done
        try:
            return cast(T, super().wait())
        except Exception as error:
            raise self._as_raised_here(error)

    def __del__(self) -> None:
        failure = self._failure
        if failure is not None and not failure.seen and not self._quiet:
            logger.error(
                "%s failed, and nobody looked at its result: %r",
                self._name,
                failure.error,
                exc_info=failure.error,
            )


@atexit.register
def _log_nothing_after_an_interrupt() -> None:
    """If Ctrl-C has ended the program, its last futures are not logged. The other workers are
    mostly interrupted too, so that all open calls fail."""
    if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
        Future._quiet = True


def _check_callback(callback: Any) -> None:
    if not callable(callback):
        raise TypeError(
            f"incompatible function arguments. A callback takes a future, and {callback!r} cannot "
            "even be called"
        )


def _run_all(callbacks: list[Callable[[], None]]) -> None:
    """Run and remove the callbacks. Each callback runs once, even if several threads call this
    function at the same time."""
    while callbacks:
        try:
            callback = callbacks.pop(0)
        except IndexError:
            return
        callback()


class _Failure:
    """The error of a future, and whether the program has looked at the error."""

    __slots__ = ("__weakref__", "error", "seen", "trace")

    def __init__(self, error: BaseException):
        self.error = error
        #: The traceback that the error came with.
        self.trace = error.__traceback__
        self.seen = False

    def as_raised(self) -> BaseException:
        """Return the error with the traceback that it came with. Otherwise it would also show the
        frames of the places where it was raised before."""
        return self.error.with_traceback(self.trace)


def _raise_failure(failure: weakref.ref[_Failure], text: str, _value: object) -> None:
    strong = failure()
    if strong is None:
        raise RuntimeError(text)
    strong.seen = True
    raise strong.as_raised()


class _Relay:
    """Waits for a future that `then` has returned. It first waits until the parent (the future
    whose `then` was called) is done, then until the callback has run."""

    def __init__(self, parent: Future[Any]):
        self._parent = parent

    def wait(self, future: Future[Any]) -> None:
        source = self._parent._source
        if source is None:
            return
        if not self._parent.done():
            source.wait(self._parent)
        # The parent is done, but its callback may still be running on another thread.
        if not future.done():
            torch.futures.Future.wait(future)

    def age(self) -> float | None:
        source = self._parent._source
        return None if source is None else source.age()


def when_all(futures: Iterable[Any], then: Callable[[BaseException | None], None]) -> None:
    """Call `then` with one argument when all futures are done: None if all have succeeded,
    otherwise the error of the first failed future in the list."""
    waiting = list(futures)
    if not waiting:
        then(None)
        return
    left = itertools.count(len(waiting) - 1, -1)

    def finish(_done: object) -> None:
        if next(left) == 0:
            errors = (future.exception() for future in waiting)
            then(next((error for error in errors if error is not None), None))

    for future in waiting:
        future.add_done_callback(finish)
