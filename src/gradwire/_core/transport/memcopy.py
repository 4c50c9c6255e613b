"""Fast copies of much memory: in pieces that fit into a cache, and with a second thread.

To divide work into pieces that fit into a cache is called cache blocking (Lam, Rothberg and Wolf
1991). Its usual purpose is to use cached data again, but here it has another one. If a copy is
larger than about a core's own cache, some processors read the memory before they overwrite it. This
makes the copy several times slower if the memory lies in the cache of another core, which has read
it before. In a smaller copy, these processors do not read the memory first.
"""

from __future__ import annotations

import ctypes
import os
import threading
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable
from contextlib import suppress

#: For copies of this size and larger, a second thread saves time.
_TWO_THREADS_BYTES = 32 << 20
#: With this argument, `os.sysconf` returns the size of the level 2 cache on systems with glibc.
#: The number is written here because `os.sysconf_names` does not list it.
_SC_LEVEL2_CACHE_SIZE = 191


def _choose_piece_bytes() -> int:
    """Return how many bytes to copy at once: 7/8 of a core's own cache, up to a limit. If the size
    of the cache is unknown, return a value for a common size."""
    with suppress(OSError):
        cache = os.sysconf(_SC_LEVEL2_CACHE_SIZE)
        # If the system reports less than 256 KiB, it does not know the size of the cache.
        if cache >= 256 << 10:
            return min(cache // 8 * 7, 4 << 20)
    return 448 << 10


_PIECE_BYTES = _choose_piece_bytes()


def copy(target: int, source: int, size: int) -> None:
    """Copy `size` bytes between two addresses.

    The caller must keep the memory at both addresses alive. An interrupt, such as Ctrl-C, may end
    the copy early, but never while the second thread is still copying.
    """
    if size >= _TWO_THREADS_BYTES:
        _copy_with_helper(target, source, size)
        return
    for start in range(0, size, _PIECE_BYTES):
        ctypes.memmove(target + start, source + start, min(_PIECE_BYTES, size - start))


def _copy_with_helper(target: int, source: int, size: int) -> None:
    """Copy with a second thread.

    This thread copies pieces from the front, and the second thread copies pieces from the back. So
    when the same memory is copied again, each thread copies nearly the same bytes as before, and
    finds them in its cache. If the second thread gets no core, this thread copies nearly
    everything, and waits at the end for one piece at most. (torch's own threads are not used: they
    divide the work evenly, so the slowest thread would determine the time.)
    """
    starts = deque(range(0, size, _PIECE_BYTES))
    helper_runs = threading.Lock()

    def copy_pieces(take: Callable[[], int]) -> None:
        # `take` raises IndexError when no piece is left.
        with suppress(IndexError):
            while True:
                start = take()
                ctypes.memmove(target + start, source + start, min(_PIECE_BYTES, size - start))

    def help_copying() -> None:
        with helper_runs:
            copy_pieces(starts.pop)

    try:
        # If the system allows no further thread, this thread copies all pieces.
        with suppress(RuntimeError):
            start_new_thread(help_copying, ())
        copy_pieces(starts.popleft)
    finally:
        # After an interrupt, some pieces may be left. Then the second thread must not copy them.
        starts.clear()
        try:
            # Wait until the second thread no longer uses the memory.
            helper_runs.acquire()
        except BaseException:
            # An interrupt has ended the wait, so wait again.
            helper_runs.acquire()
            raise
