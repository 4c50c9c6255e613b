"""The read token: only the thread that holds it may read a connection."""

from __future__ import annotations

import threading


class ReadToken:
    """A lock that threads only try to take, and never wait for.

    The lock is a list with at most one element, because `list.pop` is atomic in CPython and faster
    than acquiring a lock of the `threading` module.
    """

    __slots__ = ("_free", "_holder")

    def __init__(self) -> None:
        #: This list has one element while no thread holds the token, and is empty otherwise.
        self._free = [True]
        #: The id of the thread that holds the token, or 0 if no thread holds it. It is also 0 for a
        #: moment after a thread has taken the token. So if `stop` finds 0 and the token is taken,
        #: it cannot know which thread has taken it.
        self._holder = 0

    def begin(self) -> bool:
        """Take the token. Return False if another thread holds it."""
        try:
            self._free.pop()
        except IndexError:
            return False
        self._holder = threading.get_ident()
        return True

    def end(self) -> None:
        """Give the token back."""
        self._holder = 0
        self._free.append(True)

    def stop(self) -> bool:
        """Give the token back in a thread that was interrupted, perhaps in the middle of `begin` or
        `end`. Return True if this thread held the token, or may have held it."""
        holder = self._holder
        if holder == threading.get_ident():
            self.end()
            return True
        return holder == 0 and not self._free
