"""The right to read a connection."""

from __future__ import annotations

import threading


class Reading:
    """One thread at a time has it."""

    __slots__ = ("_free", "_reader")

    def __init__(self) -> None:
        #: Whoever takes what is in there has it. (Nobody waits for it, and a lock takes longer.)
        self._free = [True]
        #: The thread that has it, as soon as it could make a note of that.
        self._reader = 0

    def begin(self) -> bool:
        """Whether this thread has it from now on."""
        try:
            self._free.pop()
        except IndexError:
            return False
        self._reader = threading.get_ident()
        return True

    def end(self) -> None:
        self._reader = 0
        self._free.append(True)

    def stop(self) -> bool:
        """For a thread that was interrupted and does not know: end it. Whether it had it, or may
        have had it without a note of that."""
        reader = self._reader
        if reader == threading.get_ident():
            self.end()
            return True
        return reader == 0 and not self._free
