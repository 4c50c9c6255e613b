"""Looking again before going to sleep.

A thread that sleeps is slow to wake: its core goes to sleep too, and comes back cold. An answer
over a local socket takes less time than that. So a thread that was answered soon the last time
looks for the next answer a few times before it sleeps; one that had to wait for long does not, and
nobody is looked for in vain more than once in a row. Between looks it offers its core to others.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

T = TypeVar("T")

#: What comes within this time of being waited for comes soon...
SOON_SECONDS = 800e-6
#: ... and is looked for this long the next time.
LOOK_SECONDS = 400e-6

_give_way: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


class Eager:
    """Waits for one thing that comes again and again. For one thread at a time."""

    __slots__ = ("_soon",)

    def __init__(self) -> None:
        self._soon = False

    def wait(self, look: Callable[[float | None], T], timeout: float | None) -> T:
        """What `look(timeout)` gives, where `look(0)` looks without waiting."""
        start = perf_counter()
        if self._soon and timeout != 0:
            while True:
                found = look(0)
                if found:
                    return found
                if perf_counter() - start > LOOK_SECONDS:
                    break
                _give_way()
        found = look(timeout)
        self._soon = perf_counter() - start < SOON_SECONDS
        return found
