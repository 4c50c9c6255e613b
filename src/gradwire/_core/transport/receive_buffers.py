"""Memory for large buffers that arrive through a stream: a free list by size.

The system clears each page of new memory at the first write to the page, which takes longer than
the write itself. So a piece of memory is kept when the last tensor in it is freed, and is used
again for a later buffer.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from functools import partial

import torch
from torch import Tensor

from gradwire.errors import ConnectionClosed

#: Buffers smaller than this come from torch's allocator, which reuses their memory anyway.
LARGE_BYTES = 1 << 18


def fresh_bytes(length: int) -> Tensor:
    """Return a new tensor of `length` bytes.

    The tensor is an ordinary CPU tensor even if the calling thread is in torch's `inference_mode`
    or has set a default device, because the received frame may be for another thread.
    """
    try:
        with torch.inference_mode(False):
            return torch.empty(length, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:
        raise ConnectionClosed(f"there is no memory for {length} bytes: {error}") from error


class ReceiveBuffers:
    """The memory for the buffers that arrive on one connection. Only the thread that reads the
    connection calls `get`."""

    def __init__(self) -> None:
        #: The unused pieces of memory, by their size in bytes.
        self._spare: dict[int, list[memoryview]] = {}
        #: For each size, the number of pieces that were not used since the last call of `trim`.
        self._never_used: dict[int, int] = {}
        #: Weak references to the pieces in use, by the id of the reference. When the last tensor in
        #: a piece is freed, the callback of its reference makes the piece available again.
        self._in_use: dict[int, weakref.ref[memoryview]] = {}

    def get(self, length: int) -> Tensor:
        """Return a tensor of `length` bytes. Its memory is used again once all tensors that use it
        are freed."""
        if length < LARGE_BYTES:
            return fresh_bytes(length)
        # Round the length up, so that buffers of similar lengths can use the same piece of memory.
        # There are eight sizes between a power of two and the next one.
        step = 1 << (length.bit_length() - 4)
        capacity = -(-length // step) * step
        spare = self._spare.setdefault(capacity, [])
        try:
            memory = spare.pop()
        except IndexError:
            memory = _new_memory(capacity)
        self._never_used[capacity] = min(self._never_used.get(capacity, 0), len(spare))
        # torch keeps the object `piece` alive for as long as a tensor uses the memory. So when a
        # weak reference to `piece` dies, the memory is free.
        piece = memory[:length]
        reference = weakref.ref(piece, partial(self._take_back, memory))
        self._in_use[id(reference)] = reference
        with torch.inference_mode(False):
            return torch.frombuffer(piece, dtype=torch.uint8)

    def _take_back(self, memory: memoryview, reference: weakref.ref[memoryview]) -> None:
        del self._in_use[id(reference)]
        self._spare.setdefault(len(memory), []).append(memory)

    def trim(self) -> None:
        """Free the memory that was not used since the last call of `trim`."""
        for capacity, spare in list(self._spare.items()):
            del spare[: self._never_used.get(capacity, 0)]
            self._never_used[capacity] = len(spare)


def _new_memory(capacity: int) -> memoryview:
    try:
        # Windows has no MAP_PRIVATE.
        if not hasattr(mmap, "MAP_PRIVATE"):
            return memoryview(mmap.mmap(-1, capacity))
        memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, MemoryError) as error:
        raise ConnectionClosed(f"there is no memory for {capacity} bytes: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # The kernel may have been built without huge pages. Then it uses ordinary pages.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
