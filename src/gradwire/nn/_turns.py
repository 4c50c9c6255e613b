"""Constructors of remote modules take turns.

A constructor takes the first values of its parameters from torch's global random generator, and may
seed the generator first. All workers of a process share this generator. If two constructors ran at
the same time, each would disturb the random numbers of the other. So one constructor runs at a time
in a process, in the order in which they were asked for.

A constructor may itself make remote modules. It gives up its turn while it waits for them.
Otherwise two constructors could wait for each other forever. When it continues, the generator is as
it was before the wait.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from gradwire._core import current

#: If the current code is part of a constructor: the turn of that constructor, which is the time in
#: which it may run. Otherwise None.
_current_turn: ContextVar[_Turn | None] = ContextVar("gradwire_constructor", default=None)


class _Queue:
    """The constructors of this process that run or wait, in the order in which they came."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: One event for each constructor. The event is set when it is the constructor's turn.
        self._events: deque[threading.Event] = deque()

    def enter(self) -> threading.Event:
        event = threading.Event()
        with self._lock:
            self._events.append(event)
            self._wake_first()
        return event

    def leave(self, event: threading.Event) -> None:
        with self._lock:
            self._events.remove(event)
            self._wake_first()

    def _wake_first(self) -> None:
        if self._events:
            self._events[0].set()


class _Turn:
    """The turn of one constructor."""

    def __init__(self) -> None:
        self._event: threading.Event | None = None

    def begin(self) -> None:
        """Wait until no other constructor runs in this process."""
        event = self._event = _queue.enter()
        if not event.is_set():
            # While this thread waits, another one serves the calls that arrive.
            with current.runtime().agent.executor.blocking():
                event.wait()

    def end(self) -> None:
        """Let the next constructor run."""
        event, self._event = self._event, None
        if event is not None:
            _queue.leave(event)


@contextmanager
def turn() -> Iterator[None]:
    """Return a context manager for the run of a constructor. It waits until no other constructor
    runs in this process."""
    mine = _Turn()
    token = _current_turn.set(mine)
    try:
        mine.begin()
        yield
    finally:
        mine.end()
        _current_turn.reset(token)


@contextmanager
def others_may_run() -> Iterator[None]:
    """Return a context manager for code that waits for a remote module. If the code belongs to a
    constructor, other constructors may run meanwhile."""
    mine = _current_turn.get()
    if mine is None:
        yield
        return
    generator_state = torch.get_rng_state()
    mine.end()
    try:
        yield
    finally:
        mine.begin()
        torch.set_rng_state(generator_state)


_queue = _Queue()


def _reset() -> None:
    global _queue
    _queue = _Queue()
    _current_turn.set(None)


if hasattr(os, "register_at_fork"):
    # The constructors of the parent process do not run in a forked child. So the child begins with
    # an empty queue.
    os.register_at_fork(after_in_child=_reset)
