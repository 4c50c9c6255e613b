"""Memory for large buffers that arrive through a stream.

What comes fresh from the system is cleared first, page by page as it is written to, and that takes
longer than writing. So memory is kept when the tensors in it are gone, and used for the next ones.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from functools import partial

import torch
from torch import Tensor

from gradwire.errors import ConnectionClosed

#: Smaller ones are used again soon enough by the system's own allocator.
LARGE_BYTES = 1 << 18


def fresh_bytes(length: int) -> Tensor:
    """Memory for a buffer. An ordinary tensor whatever `inference_mode` or default device the
    thread that reads is in: the frame may be meant for another thread."""
    try:
        with torch.inference_mode(False):
            return torch.empty(length, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:
        raise ConnectionClosed(f"there is no memory for {length} bytes: {error}") from error


class Buffers:
    """The memory in which the buffers of one connection arrive. One thread at a time gets some."""

    def __init__(self) -> None:
        #: By capacity, what nobody uses; and the least of it that there was since the last trim.
        self._spare: dict[int, list[memoryview]] = {}
        self._unneeded: dict[int, int] = {}
        #: Notice of the end of what is in use.
        self._lent: dict[int, weakref.ref[memoryview]] = {}

    def get(self, length: int) -> Tensor:
        """A tensor of that many bytes; the memory comes back when nothing is in it any more."""
        if length < LARGE_BYTES:
            return fresh_bytes(length)
        step = 1 << (length.bit_length() - 4)
        capacity = -(-length // step) * step  # few sizes serve all
        spare = self._spare.setdefault(capacity, [])
        try:
            memory = spare.pop()
        except IndexError:
            memory = _new_memory(capacity)
        self._unneeded[capacity] = min(self._unneeded.get(capacity, 0), len(spare))
        # torch keeps this very object alive as long as the tensor's memory is in use.
        piece = memory[:length]
        lent = weakref.ref(piece, partial(self._take_back, memory))
        self._lent[id(lent)] = lent
        with torch.inference_mode(False):
            return torch.frombuffer(piece, dtype=torch.uint8)

    def _take_back(self, memory: memoryview, lent: weakref.ref[memoryview]) -> None:
        del self._lent[id(lent)]
        self._spare.setdefault(len(memory), []).append(memory)

    def trim(self) -> None:
        """Give back the memory that was not needed since the last time."""
        for capacity, spare in list(self._spare.items()):
            del spare[: self._unneeded.get(capacity, 0)]
            self._unneeded[capacity] = len(spare)


def _new_memory(capacity: int) -> memoryview:
    try:
        if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
            return memoryview(mmap.mmap(-1, capacity))
        memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, MemoryError) as error:
        raise ConnectionClosed(f"there is no memory for {capacity} bytes: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the system may not offer that
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
