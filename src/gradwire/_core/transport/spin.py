"""Spin-then-sleep: poll for a short time before blocking.

A thread that blocks is slow to wake up: its core enters a sleep state and comes back with cold
caches, and on a busy virtual machine that may take half a millisecond. That is many times the
duration of a call over a local socket. Spinning for a limited time and then blocking is the
strategy of Karlin, Li, Manasse and Owicki (Empirical studies of competitive spinning for a
shared-memory multiprocessor, 1991); the adaptive mutexes of Linux and glibc use it for locks.

The strategy here differs from theirs in when a thread spins. A thread spins only if a recent wait
was short, so a thread that waits for rare events does not spin at all. After one long wait the
thread still spins, because the machine may have been busy: if this thread blocked, the peer that
waits for it would block too, and both would become slow. After MAX_FAILED_SPINS long waits in a row
the thread no longer spins. So when events become rare, the cost is SPIN_SECONDS of one core, at
most MAX_FAILED_SPINS times. Between polls the thread yields its core.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

T = TypeVar("T")

#: How many seconds a thread spins (polls in a loop) before it sleeps. A wait counts as short if it
#: takes less time than this.
SPIN_SECONDS = 0.001
#: A thread spins (polls in a loop) before it sleeps, but not after this many waits in a row that
#: took SPIN_SECONDS or longer.
MAX_FAILED_SPINS = 3

_yield_core: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


class SpinThenSleep:
    """Waits repeatedly for one kind of event. Only one thread at a time may use it."""

    __slots__ = ("_spins_left",)

    def __init__(self) -> None:
        #: The number of long waits after which the thread will stop spinning. A short wait sets
        #: this number to MAX_FAILED_SPINS. While it is 0, the thread sleeps without spinning.
        self._spins_left = 0

    def wait(self, poll: Callable[[float | None], T], timeout: float | None) -> T:
        """Return the result of `poll(timeout)`. If recent waits were short, first call `poll(0)` in
        a loop for a short time, and return its result if it is true."""
        start = perf_counter()
        if self._spins_left and timeout != 0:
            while True:
                result = poll(0)
                if result:
                    self._spins_left = MAX_FAILED_SPINS
                    return result
                if perf_counter() - start > SPIN_SECONDS:
                    break
                _yield_core()
        result = poll(timeout)
        if result and perf_counter() - start < SPIN_SECONDS:
            self._spins_left = MAX_FAILED_SPINS
        elif self._spins_left:
            self._spins_left -= 1
        return result
