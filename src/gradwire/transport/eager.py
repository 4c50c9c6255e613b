"""Looking again before going to sleep.

A thread that sleeps is slow to wake: its core goes to sleep too, and comes back cold. In a virtual
machine whose host is busy it may take half a millisecond until it comes back at all, many times as
long as an answer over a local socket. So a thread that was answered soon the last time looks for
the next answer for a while before it sleeps. If one answer is late, that may be the machine's
doing: to sleep at once the next time would only make that one late too, and the other end, which
waits for us, would go to sleep over it. So only a thread that has looked in vain a few times in a
row stops looking. Between looks it offers its core to others. What it costs is a millisecond of a
core, three times at most, whenever answers stop coming soon.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

T = TypeVar("T")

#: What comes within this time of being waited for comes soon, and it is looked for this long.
LOOK_SECONDS = 0.001
#: After so many waits in a row for what did not come soon, it is not looked for any more.
PATIENCE = 3

_give_way: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


class Eager:
    """Waits for one thing that comes again and again. For one thread at a time."""

    __slots__ = ("_patience",)

    def __init__(self) -> None:
        self._patience = 0

    def wait(self, look: Callable[[float | None], T], timeout: float | None) -> T:
        """What `look(timeout)` gives, where `look(0)` looks without waiting."""
        start = perf_counter()
        if self._patience and timeout != 0:
            while True:
                found = look(0)
                if found:
                    self._patience = PATIENCE
                    return found
                if perf_counter() - start > LOOK_SECONDS:
                    break
                _give_way()
        found = look(timeout)
        if found and perf_counter() - start < LOOK_SECONDS:
            self._patience = PATIENCE
        elif self._patience:
            self._patience -= 1
        return found
