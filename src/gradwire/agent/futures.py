"""Futures: torch's, that can also be awaited, keep exception types and speak up when dropped."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import weakref
from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, cast

import torch

logger = logging.getLogger("gradwire")

T = TypeVar("T")
S = TypeVar("S")


class Waiting(Protocol):
    """How to wait for a future without standing in the way of what completes it."""

    def wait(self, future: Future[Any]) -> None:
        """Return when the future is done."""


class Future(torch.futures.Future, Generic[T]):  # type: ignore[type-arg]
    """The result of a call that may not have come back yet.

    A `torch.futures.Future` in every respect (`torch.futures.wait_all` takes it), and in addition
    it can be awaited, ``await rpc_async(...)``, and an error that nobody ever looked at is logged
    when the future is dropped.

        >>> future = Future()
        >>> doubled = future.then(lambda f: 2 * f.value())
        >>> future.set_result(21)
        >>> doubled.wait()
        42
    """

    _waiting: Waiting | None
    _failure: _Failure | None = None

    def __init__(self, waiting: Waiting | None = None, name: object = "a call"):
        super().__init__()
        self._waiting = waiting
        #: Made into text only for errors.
        self._name = name
        self._callbacks: list[Callable[[], None]] = []
        self._hooks: list[Callable[[], None]] = []
        #: Empty once somebody completes it.
        self._open = [True]

    def __str__(self) -> str:
        return str(self._name)

    def wait(self) -> T:
        """Block until the future is done; return its value or raise its error."""
        if self._waiting is not None and not self.done():
            self._waiting.wait(self)
        return cast(T, super().wait())

    def set_result(self, result: T) -> None:
        """Complete the future with a value."""
        self.complete(result, None)
        self.run_callbacks()

    def set_exception(self, result: BaseException) -> None:
        """Complete the future with an error."""
        self.complete(None, result)
        self.run_callbacks()

    def complete(self, value: Any, error: BaseException | None) -> None:
        """Complete the future; its callbacks wait for `run_callbacks`."""
        try:
            self._open.pop()  # of several threads one gets it
        except IndexError:
            raise RuntimeError(
                f"Future can only be marked completed once: that of {self._name} is done already"
            ) from None
        try:
            if error is not None:
                self._failure = _Failure(error)
                # C++ callers, `torch.futures.wait_all` among them, look at the value through this
                # too. They get no hold on the error itself: its traceback leads to frames that lead
                # here, and the garbage collector does not see what C++ holds.
                unwrap = partial(_raise_failure, weakref.ref(self._failure), repr(error))
                self._set_unwrap_func(unwrap)
                value = None
            super().set_result(value)
        except BaseException:
            if not self.done():  # an interrupt: somebody must be able to try again
                self._open.append(True)
            raise
        _run_all(self._hooks)

    def at_once(self, hook: Callable[[Future[T]], None]) -> None:
        """For gradwire itself: call `hook` on the very thread that completes the future, before
        anybody else learns of it. It must not need anything that a waiting thread may hold."""
        self._hooks.append(partial(hook, self))
        if self.done():
            _run_all(self._hooks)

    @property
    def has_callbacks(self) -> bool:
        return bool(self._callbacks)

    def run_callbacks(self) -> None:
        """Call those who asked to be called, each once; if the future is done."""
        if self.done():
            _run_all(self._callbacks)

    def _call_when_done(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)
        self.run_callbacks()

    def exception(self) -> BaseException | None:
        """The error of a future that is done; None when it has a value."""
        if self._failure is None:
            return None
        self._failure.seen = True
        return self._failure.error

    def expect_failure(self) -> None:
        """Do not log an error of this future that nobody looks at."""
        self._quiet = True

    _quiet = False

    def then(self, callback: Callable[[Future[T]], S]) -> Future[S]:
        """A future of what `callback` makes of this one, once it is done. The callback sees the
        context variables of the place where it was added."""
        _check_callback(callback)
        child: Future[S] = Future(self._waiting_for_child(), f"a callback of {self._name}")
        context = contextvars.copy_context()

        def run() -> None:
            try:
                child.set_result(context.run(callback, self))
            except BaseException as error:
                child.set_exception(error)

        self._call_when_done(run)
        return child

    def add_done_callback(self, callback: Callable[[Future[T]], None]) -> None:
        """Call `callback` with this future when it is done. What it raises is logged."""
        _check_callback(callback)
        context = contextvars.copy_context()

        def run() -> None:
            try:
                context.run(callback, self)
            except BaseException:  # an exit, too: who calls back has others to call
                logger.exception("error in a callback of %s", self._name)

        self._call_when_done(run)

    def _waiting_for_child(self) -> Waiting | None:
        return None if self._waiting is None else _Relay(self)

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done():
            loop = asyncio.get_running_loop()
            arrived = loop.create_future()

            def arrive() -> None:
                if not arrived.done():
                    arrived.set_result(None)

            def notify() -> None:
                try:
                    loop.call_soon_threadsafe(arrive)
                except RuntimeError:
                    pass  # the loop was closed: nobody waits any more

            self._call_when_done(notify)
            yield from arrived
        return cast(T, super().wait())

    def __del__(self) -> None:
        failure = self._failure
        if failure is not None and not failure.seen and not self._quiet:
            logger.error(
                "%s failed, and nobody looked at its result: %r",
                self._name,
                failure.error,
                exc_info=failure.error,
            )


def _check_callback(callback: Any) -> None:
    if not callable(callback):
        raise TypeError(
            f"incompatible function arguments. A callback takes a future, and {callback!r} cannot "
            "even be called"
        )


def _run_all(callbacks: list[Callable[[], None]]) -> None:
    """Run and remove; several threads may do so at once, and each callback still runs once."""
    while callbacks:
        try:
            callback = callbacks.pop(0)
        except IndexError:
            return
        callback()


class _Failure:
    """The error of a future, and whether anybody has looked at it."""

    __slots__ = ("__weakref__", "error", "seen")

    def __init__(self, error: BaseException):
        self.error = error
        self.seen = False


def _raise_failure(failure: weakref.ref[_Failure], text: str, _value: object) -> None:
    found = failure()
    if found is None:
        raise RuntimeError(text)
    found.seen = True
    raise found.error


class _Relay:
    """Waiting for a future that depends on another one."""

    def __init__(self, source: Future[Any]):
        self._source = source

    def wait(self, future: Future[Any]) -> None:
        waiting = self._source._waiting
        if waiting is None:
            return
        if not self._source.done():
            waiting.wait(self._source)
        # The callback may still be running on another thread, or be waiting itself.
        if not future.done():
            torch.futures.Future.wait(future)


def when_all(futures: Iterable[Any], then: Callable[[BaseException | None], None]) -> None:
    """Call `then` when all futures are done, with the first error found among them."""
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
