"""The layout of frames in a byte stream, and the reader that parses them.

    frame  = prefix | table | head | bytes of the buffers that travel in the stream
    prefix = length of head u64 | number of table entries u32 | place of the head u32
    table  = per buffer: length u64 | segment u64

Segment 0 means that the bytes of the buffer follow in the stream. Any other number names a segment,
a piece of shared memory that holds the bytes. An entry of length RETIRED is no buffer: it tells the
receiver that the sender no longer uses the segment.

The last field of the prefix is usually HEAD_INLINE: the head follows the table. A large head
travels like a buffer instead: then the field is HEAD_AS_BUFFER, the last buffer is the head, and
the length of the head is given as 0.

`FrameReader` does no I/O itself. It tells its caller where to store the next bytes, and parses them
into frames. Large heads and buffers are received directly into their final memory, without another
copy.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from torch import Tensor

from gradwire._core.transport.receive_buffers import ReceiveBuffers
from gradwire._core.wire.frames import Frame
from gradwire._core.wire.tensors import memory_of
from gradwire.errors import ConnectionClosed

PREFIX = struct.Struct("<QII")
ENTRY = struct.Struct("<QQ")
RETIRED = (1 << 64) - 1
HEAD_INLINE, HEAD_AS_BUFFER = 0, 1

#: The most entries that the table of a received frame may have. The reader checks this limit before
#: it allocates memory for the table.
MAX_ENTRIES = 1 << 20
_PREFIX_SIZE = PREFIX.size
_unpack_prefix = PREFIX.unpack_from
_CHUNK_SIZE = 1 << 16

Entry = tuple[int, int]


def pack_prefix(head_length: int, entries: Sequence[Entry], head_place: int = HEAD_INLINE) -> bytes:
    """Return the bytes of a frame before its head: prefix and table."""
    return PREFIX.pack(head_length, len(entries), head_place) + b"".join(
        ENTRY.pack(length, segment) for length, segment in entries
    )


class FrameReader:
    """Turns received bytes into frames.

    The caller receives bytes into `target`, then reports their number to `advance`. Small frames
    are received into one block of memory, the *chunk*; its bytes from `_start` to `_end` are not
    parsed yet. A frame that does not fit into the chunk, a *large frame*, gets memory of its own,
    and the next bytes from the stream go there.
    """

    def __init__(
        self,
        max_bytes: int,
        map_segment: Callable[[int, int], Tensor] | None = None,
        unmap_segment: Callable[[int], None] | None = None,
    ):
        self._max_bytes = max_bytes
        self._map_segment = map_segment
        self._unmap_segment = unmap_segment
        self.buffers = ReceiveBuffers()
        self._chunk = bytearray(_CHUNK_SIZE)
        self._view = memoryview(self._chunk)
        self._start = self._end = 0
        #: The frame that is being received, if it is too large for the chunk (the block of memory
        #: for small frames), otherwise None.
        self._large: Frame | None = None
        #: The parts of the large frame's memory that are not filled yet, in reverse order.
        self._unfilled: list[memoryview] = []
        #: The memory into which the caller must receive the next bytes.
        self.target = self._view

    @property
    def is_filling(self) -> bool:
        """Whether the next bytes belong to a large frame whose first bytes have arrived."""
        return bool(self._unfilled)

    def advance(self, count: int) -> list[Frame]:
        """Process `count` bytes that the caller has received into `target`. Return the frames that
        are now complete."""
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
            head_length, entries, head_place = _unpack_prefix(self._chunk, start)
            body = start + _PREFIX_SIZE
            after = body + head_length
            if entries or head_place or after > end or head_length > self._max_bytes:
                self._start, self._end = start, end
                goes_on = self._parse_large(head_length, entries, head_place, frames)
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
            self._reserve(_PREFIX_SIZE)
        return frames

    def _parse_large(
        self, head_length: int, count: int, head_place: int, frames: list[Frame]
    ) -> bool:
        """Parse the start of a frame that has buffers or does not lie completely in the chunk.
        Return False if nothing more can be parsed until further bytes arrive."""
        if head_length > self._max_bytes or count > MAX_ENTRIES:
            raise ConnectionClosed(
                f"the peer announced a frame of {head_length} bytes and {count} buffers; "
                f"the limit is {self._max_bytes} bytes and {MAX_ENTRIES} buffers"
            )
        has_no_buffers = not count
        if head_place > HEAD_AS_BUFFER or (
            head_place == HEAD_AS_BUFFER and (head_length or has_no_buffers)
        ):
            raise ConnectionClosed("the peer sent a frame without a head, or with two")
        start, have = self._start, self._end - self._start
        body = start + _PREFIX_SIZE
        if has_no_buffers:
            if _PREFIX_SIZE + head_length <= len(self._chunk):
                self._reserve(_PREFIX_SIZE + head_length)
                return False
            self._start_large(head_length, (), body)
            return self._finish_large(frames)
        table_end = _PREFIX_SIZE + count * ENTRY.size
        if have < table_end:
            self._reserve(table_end)
            return False
        entries = [
            ENTRY.unpack_from(self._chunk, body + index * ENTRY.size) for index in range(count)
        ]
        if sum(length for length, _ in entries if length != RETIRED) > self._max_bytes:
            raise ConnectionClosed(
                f"the buffers of a frame exceed the limit of {self._max_bytes} bytes"
            )
        self._start_large(head_length, entries, start + table_end)
        if head_place == HEAD_AS_BUFFER:
            self._take_head_from_buffers()
        return self._finish_large(frames)

    def _start_large(self, head_length: int, entries: Sequence[Entry], body: int) -> None:
        """Allocate the memory of a large frame, and copy the bytes of the frame that are already in
        the chunk into that memory."""
        try:
            head = bytearray(head_length)
        except MemoryError as error:
            raise ConnectionClosed(f"there is no memory for {head_length} bytes") from error
        buffers: list[Tensor] = []
        parts = [memoryview(head)]
        for length, segment in entries:
            if length == RETIRED:
                if self._unmap_segment is not None:
                    self._unmap_segment(segment)
            elif segment:
                if self._map_segment is None:
                    raise ConnectionClosed(
                        "the peer named shared memory on a connection without shared memory"
                    )
                buffers.append(self._map_segment(segment, length))
            else:
                buffers.append(self.buffers.get(length))
                parts.append(memory_of(buffers[-1]))
        self._start = body
        self._unfilled = []
        for part in parts:
            taken = min(len(part), self._end - self._start)
            part[:taken] = self._view[self._start : self._start + taken]
            self._start += taken
            if taken < len(part):
                self._unfilled.append(part[taken:])
        self._unfilled.reverse()
        self._large = Frame(head, buffers)

    def _take_head_from_buffers(self) -> None:
        assert self._large is not None
        if not self._large.buffers:
            raise ConnectionClosed("the peer sent a frame without a head")
        *buffers, head = self._large.buffers
        self._large = Frame(memory_of(head), buffers)

    def _finish_large(self, frames: list[Frame]) -> bool:
        """Add the large frame to `frames` if it is complete. Return whether the chunk has more
        bytes to parse."""
        if self._unfilled:
            return False
        assert self._large is not None
        # A frame that has neither a head nor buffers carries no message, so the caller does not get
        # it. Such a frame only lists segments of shared memory that the sender no longer uses.
        if self._large.head or self._large.buffers:
            frames.append(self._large)
        self._large = None
        return self._start < self._end

    def _reserve(self, size: int) -> None:
        """Move the unparsed bytes to the start of the chunk, and enlarge the chunk to `size`."""
        rest = self._end - self._start
        if size > len(self._chunk):
            grown = bytearray(max(size, 2 * len(self._chunk)))
            grown[:rest] = self._view[self._start : self._end]
            self._chunk, self._view = grown, memoryview(grown)
        elif self._start:
            self._view[:rest] = bytes(self._view[self._start : self._end])
        self._start, self._end = 0, rest
