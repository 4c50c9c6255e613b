"""Frames on a byte stream.

    frame  = prefix | table | head | bytes of the buffers that travel in the stream
    prefix = length of head u64 | number of table entries u32 | where the head is u32
    table  = per buffer: length u64 | segment u64

A segment of 0 means that the buffer's bytes follow in the stream; any other number names a piece
of shared memory that holds them. An entry of length FORGET says that a segment is gone. A large
head goes the way of buffers: it is the last of them (HEAD_BESIDE) and has no length of its own.

`FrameReader` does no reading itself: it says where the next bytes go and turns them into frames.
Large heads and buffers are received straight into the memory they will stay in.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from torch import Tensor

from gradwire.errors import ConnectionClosed
from gradwire.transport.buffers import Buffers
from gradwire.wire.frames import Frame
from gradwire.wire.tensors import memory_of

PREFIX = struct.Struct("<QII")
ENTRY = struct.Struct("<QQ")
FORGET = (1 << 64) - 1
HEAD_HERE, HEAD_BESIDE = 0, 1

#: A frame's buffers are counted before any memory is set aside for them.
MAX_ENTRIES = 1 << 20
_PREFIX_SIZE = PREFIX.size
_unpack_prefix = PREFIX.unpack_from
_CHUNK = 1 << 16

Entry = tuple[int, int]


def pack_prefix(head_length: int, entries: Sequence[Entry], where: int = HEAD_HERE) -> bytes:
    """What goes before the head."""
    return PREFIX.pack(head_length, len(entries), where) + b"".join(
        ENTRY.pack(length, segment) for length, segment in entries
    )


class FrameReader:
    """Bytes in, frames out."""

    def __init__(
        self,
        max_bytes: int,
        shared: Callable[[int, int], Tensor] | None = None,
        forget: Callable[[int], None] | None = None,
    ):
        self._max_bytes = max_bytes
        self._shared = shared
        self._forget = forget
        self.memory = Buffers()
        self._chunk = bytearray(_CHUNK)
        self._view = memoryview(self._chunk)
        self._start = self._end = 0
        # A frame too large for the chunk: what is still to be filled, and the frame when it is.
        self._unfilled: list[memoryview] = []
        self._large: Frame | None = None
        #: Where the next bytes belong.
        self.target = self._view

    @property
    def is_filling(self) -> bool:
        """Whether the rest of something large must come next."""
        return bool(self._unfilled)

    def advance(self, count: int) -> list[Frame]:
        """So many bytes were put there: returns the frames that are complete."""
        frames = self._fill(count) if self._unfilled else self._parse(self._end + count)
        if self._unfilled:
            self.target = self._unfilled[-1]
        else:
            self.target = self._view[self._end :] if self._end else self._view
        return frames

    def _fill(self, count: int) -> list[Frame]:
        rest = self._unfilled[-1][count:]
        if rest:
            self._unfilled[-1] = rest
            return []
        self._unfilled.pop()
        if self._unfilled:
            return []
        assert self._large is not None
        large, self._large = self._large, None
        return [large]

    def _parse(self, end: int) -> list[Frame]:
        frames: list[Frame] = []
        start = self._start
        while end - start >= _PREFIX_SIZE:
            head_length, entries, where = _unpack_prefix(self._chunk, start)
            body = start + _PREFIX_SIZE
            after = body + head_length
            if entries or where or after > end or head_length > self._max_bytes:
                self._start, self._end = start, end
                goes_on = self._parse_large(head_length, entries, where, frames)
                start, end = self._start, self._end
                if not goes_on:
                    break
            else:
                frames.append(Frame(self._chunk[body:after]))
                start = after
        if start == end:
            self._start = self._end = 0
            return frames
        self._start, self._end = start, end
        if end - start < _PREFIX_SIZE:
            self._make_room(_PREFIX_SIZE)
        return frames

    def _parse_large(self, head_length: int, count: int, where: int, frames: list[Frame]) -> bool:
        """Take a frame that has buffers, or is not all in the chunk. False when more bytes must
        come."""
        if head_length > self._max_bytes or count > MAX_ENTRIES:
            raise ConnectionClosed(
                f"a frame claims {head_length} bytes and {count} buffers; "
                f"the limit is {self._max_bytes} bytes"
            )
        if where > HEAD_BESIDE or (where == HEAD_BESIDE and (head_length or not count)):
            raise ConnectionClosed("a frame has no head, or two")
        start, have = self._start, self._end - self._start
        body = start + _PREFIX_SIZE
        if not count:
            if _PREFIX_SIZE + head_length <= len(self._chunk):
                return self._make_room(_PREFIX_SIZE + head_length)
            self._start_large(head_length, (), body)
            return self._finish_large(frames)
        table_end = _PREFIX_SIZE + count * ENTRY.size
        if have < table_end:
            return self._make_room(table_end)
        entries = [
            ENTRY.unpack_from(self._chunk, body + index * ENTRY.size) for index in range(count)
        ]
        if sum(length for length, _ in entries if length != FORGET) > self._max_bytes:
            raise ConnectionClosed(f"a frame's buffers exceed the limit of {self._max_bytes} bytes")
        self._start_large(head_length, entries, start + table_end)
        if where == HEAD_BESIDE:
            self._take_head_from_buffers()
        return self._finish_large(frames)

    def _start_large(self, head_length: int, entries: Sequence[Entry], body: int) -> None:
        """Set memory aside for a frame and fill it with what the chunk has of it."""
        try:
            head = bytearray(head_length)
        except MemoryError as error:
            raise ConnectionClosed(f"there is no memory for {head_length} bytes") from error
        buffers: list[Tensor] = []
        places = [memoryview(head)]
        for length, segment in entries:
            if length == FORGET:
                if self._forget is not None:
                    self._forget(segment)
            elif segment:
                if self._shared is None:
                    raise ConnectionClosed("a frame names shared memory where none is in use")
                buffers.append(self._shared(segment, length))
            else:
                buffers.append(self.memory.get(length))
                places.append(memory_of(buffers[-1]))
        self._start = body
        self._unfilled = []
        for place in places:
            taken = min(len(place), self._end - self._start)
            place[:taken] = self._view[self._start : self._start + taken]
            self._start += taken
            if taken < len(place):
                self._unfilled.append(place[taken:])
        self._unfilled.reverse()
        self._large = Frame(head, buffers)

    def _take_head_from_buffers(self) -> None:
        assert self._large is not None
        if not self._large.buffers:
            raise ConnectionClosed("a frame has no head")
        *buffers, head = self._large.buffers
        self._large = Frame(memory_of(head), buffers)

    def _finish_large(self, frames: list[Frame]) -> bool:
        """Hand over the frame just started if the chunk held all of it."""
        if self._unfilled:
            return False
        assert self._large is not None
        if self._large.head or self._large.buffers:  # else it only said what to forget
            frames.append(self._large)
        self._large = None
        return self._start < self._end

    def _make_room(self, needed: int) -> bool:
        """See to it that a piece of `needed` bytes fits into the chunk. Always False."""
        rest = self._end - self._start
        if needed > len(self._chunk):
            grown = bytearray(max(needed, 2 * len(self._chunk)))
            grown[:rest] = self._view[self._start : self._end]
            self._chunk, self._view = grown, memoryview(grown)
        elif self._start:
            self._view[:rest] = bytes(self._view[self._start : self._end])
        self._start, self._end = 0, rest
        return False
