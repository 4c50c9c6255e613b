"""Large tensors and long heads between processes of one machine: copied once, through shared
memory.

The sender owns *segments*, which are anonymous pieces of shared memory of a fixed size. It copies a
tensor into a segment and names the segment in a frame. The receiver maps the segment into its
address space, and the received tensor uses the memory of the segment directly.

Segments are recycled as in a buffer pool with one producer and one consumer. The first byte of a
segment is a flag: the sender sets it to 1 before it fills the segment, and the receiver sets it to
0 when its tensor is freed. Only the sender writes 1 and only the receiver writes 0, so the flag
needs no lock, and the receiver sends no message. (A ring buffer would not do, because tensors are
freed in any order.) Filling a recycled segment is several times faster than filling new memory.

A segment has no name in any file system. The sender passes its file descriptor to the receiver
once, over a socket. The kernel frees the segment when no process maps it any longer.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import select
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradwire._core.transport import memcopy
from gradwire._core.wire.frames import Bytes
from gradwire.errors import ConnectionClosed

#: Tensors of this size and larger travel in segments of shared memory.
SEGMENT_BYTES = 1 << 13
#: The most segments of shared memory that a sender makes. While all of them are in use, the sender
#: sends further tensors through the stream of the connection.
MAX_SEGMENTS = 1024

_FREE, _IN_USE = 0, 1
#: The number of bytes in a segment before the data. The first byte is the flag that tells whether
#: the segment is in use; the others only align the data.
_HEADER = 64
_ANNOUNCEMENT = struct.Struct("<QQ")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_ANNOUNCEMENT_MILLISECONDS = 10_000


def _capacity(size: int) -> int:
    """Return the size of a segment for `size` bytes of data: a power of two, so that tensors of
    similar sizes can use the segment. The unused rest takes no physical memory."""
    return 1 << max(16, (size + _HEADER - 1).bit_length())


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


def _map(descriptor: int, size: int) -> memoryview:
    """Map shared memory and return a view of it. The memory is unmapped when all views are freed.

    Python's own `mmap` would keep a file descriptor open for each mapping, and there can be more
    segments than a process may have descriptors.
    """
    address = _libc.mmap(
        None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0
    )
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map shared memory: {os.strerror(number)}")
    memory = (ctypes.c_ubyte * size).from_address(address)
    unmap = weakref.finalize(memory, _libc.munmap, address, size)
    # Do not unmap the memory while the interpreter exits, because tensors may still use it.
    unmap.atexit = False
    return memoryview(memory).cast("B")


class _Segment:
    """A piece of shared memory that this process writes to."""

    def __init__(self, number: int, capacity: int):
        self.number = number
        #: Whether the segment was free at the last call of `trim` and has not been used since.
        self.idle = False
        descriptor = os.memfd_create("gradwire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, capacity)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self.memory = _map(descriptor, capacity)
        except BaseException:
            os.close(descriptor)
            raise
        self.descriptor = descriptor
        # Leave torch's inference mode, because threads outside of this mode cannot write to a
        # tensor that was made in it.
        with torch.inference_mode(False):
            self._bytes = torch.frombuffer(self.memory, dtype=torch.uint8, offset=_HEADER)

    @property
    def free(self) -> bool:
        return self.memory[0] == _FREE

    def fill(self, tensor: Tensor) -> None:
        """Copy the elements of a tensor into the segment."""
        size = tensor.numel() * tensor.element_size()
        if tensor.is_contiguous():
            memcopy.copy(self._bytes.data_ptr(), tensor.data_ptr(), size)
        else:
            self._bytes[:size].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())

    def fill_with_pieces(self, pieces: Sequence[Bytes]) -> None:
        """Copy pieces of bytes into the segment, one after the other."""
        start = _HEADER
        for piece in pieces:
            # While `memcopy` copies, other threads can run. An assignment to a slice would hold the
            # interpreter lock.
            if type(piece) is bytes:
                source = ctypes.cast(ctypes.c_char_p(piece), ctypes.c_void_p).value or 0
                memcopy.copy(self._bytes.data_ptr() + start - _HEADER, source, len(piece))
            else:
                self.memory[start : start + len(piece)] = piece
            start += len(piece)


class SegmentSender:
    """The pieces of shared memory that carry data from this process to one peer."""

    def __init__(self, channel: socket.socket):
        self._channel = channel
        self._lock = threading.Lock()
        self._by_capacity: dict[int, list[_Segment]] = {}
        self._retired: list[int] = []
        self._count = 0
        self._next_number = 1

    def put(self, tensor: Tensor) -> int:
        """Copy a tensor into a segment. Return the segment's number, or 0 if no segment is free and
        no new one can be made."""
        return self._fill(tensor.numel() * tensor.element_size(), lambda s: s.fill(tensor))

    def put_pieces(self, pieces: Sequence[Bytes], size: int) -> int:
        """Copy pieces of bytes, `size` bytes in all, into one segment. Return the segment's number,
        or 0 if no segment is free and no new one can be made."""
        return self._fill(size, lambda s: s.fill_with_pieces(pieces))

    def _fill(self, size: int, fill: Callable[[_Segment], None]) -> int:
        segment = self._take(size)
        if segment is None:
            return 0
        try:
            fill(segment)
        except BaseException:
            # No frame will name this segment, so the receiver cannot free it. Free it here.
            segment.memory[0] = _FREE
            raise
        return segment.number

    def _take(self, size: int) -> _Segment | None:
        """Mark a segment for `size` bytes as in use, and return it: a free segment if there is one,
        otherwise a new one. Return None if no segment is free and no new one can be made."""
        capacity = _capacity(size)
        with self._lock:
            segments = self._by_capacity.setdefault(capacity, [])
            # Prefer the segment that was made last, since it is the likeliest to be in the cache.
            segment = next((s for s in reversed(segments) if s.free), None)
            if segment is not None:
                segment.memory[0] = _IN_USE
                segment.idle = False
        return segment or self._new(capacity)

    def _new(self, capacity: int) -> _Segment | None:
        with self._lock:
            if self._count >= MAX_SEGMENTS:
                return None
            try:
                segment = _Segment(self._next_number, capacity)
            except OSError:
                return None
            try:
                # The socket does not block: if it is full, `send_fds` raises an error. A blocking
                # `send_fds` could wait for ever, because the receiver reads from this socket only
                # when a frame names a new segment.
                announcement = _ANNOUNCEMENT.pack(segment.number, capacity)
                socket.send_fds(self._channel, [announcement], [segment.descriptor])
            except OSError:
                return None
            finally:
                os.close(segment.descriptor)
            segment.memory[0] = _IN_USE
            self._next_number += 1
            self._count += 1
            self._by_capacity[capacity].append(segment)
            return segment

    def free(self, number: int) -> None:
        """Free the segment with this number, because the frame that named it will not be sent."""
        with self._lock:
            for segments in self._by_capacity.values():
                for segment in segments:
                    if segment.number == number:
                        segment.memory[0] = _FREE

    def retire(self, number: int) -> None:
        """Undo `take_retired` for the segment with this number, because the frame that names it as
        retired was not sent."""
        with self._lock:
            self._retired.append(number)

    def trim(self) -> None:
        """Retire the segments that were not used since the last call of `trim`: this side does not
        use them again, and the receiver must unmap them."""
        with self._lock:
            for capacity, segments in self._by_capacity.items():
                retired = [s for s in segments if s.free and s.idle]
                self._retired.extend(s.number for s in retired)
                self._count -= len(retired)
                kept = [s for s in segments if s not in retired]
                for segment in kept:
                    segment.idle = segment.free
                self._by_capacity[capacity] = kept

    @property
    def has_retired(self) -> bool:
        """Whether `trim` has retired segments of which the receiver has not been told yet. This
        side does not use retired segments again."""
        return bool(self._retired)

    def take_retired(self) -> list[int]:
        """Return the numbers of the segments that `trim` has retired since the last call of this
        method. The caller must send the numbers to the receiver, which then unmaps the segments."""
        if not self._retired:
            return []
        with self._lock:
            retired, self._retired = self._retired, []
            return retired

    def close(self) -> None:
        with self._lock:
            self._by_capacity.clear()
            self._count = MAX_SEGMENTS


class _MappedSegment:
    """A piece of shared memory that this process reads from."""

    def __init__(self, descriptor: int, capacity: int):
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ConnectionClosed("the peer sent shared memory that is not sealed")
        if os.fstat(descriptor).st_size != capacity:
            raise ConnectionClosed("the peer sent shared memory of another size than announced")
        self._memory = _map(descriptor, capacity)
        self._process = os.getpid()
        self._in_use: weakref.ref[memoryview] | None = None

    def tensor(self, length: int) -> Tensor:
        """Return the first `length` bytes of the segment as a tensor. When all tensors that use
        this memory are freed, the sender can use the segment again."""
        if not 0 < length <= len(self._memory) - _HEADER:
            raise ConnectionClosed(
                f"the peer announced {length} bytes in a segment of {len(self._memory)} bytes"
            )
        # torch keeps the object `piece` alive for as long as a tensor uses the memory. So when the
        # weak reference to `piece` dies, the segment is free.
        piece = self._memory[_HEADER : _HEADER + length]
        self._in_use = weakref.ref(piece, self._free)
        # If this thread is in torch's inference mode, leave the mode. Otherwise the result would be
        # an inference tensor, but it may be for another thread, which is not in that mode.
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return torch.frombuffer(piece, dtype=torch.uint8)
        return torch.frombuffer(piece, dtype=torch.uint8)

    def _free(self, _ref: object) -> None:
        # A forked child process must not mark the segment as free, because its parent may use it.
        if os.getpid() == self._process:
            self._memory[0] = _FREE


class SegmentReceiver:
    """The pieces of shared memory in which data arrives from one peer."""

    def __init__(self, channel: socket.socket):
        self._channel = channel
        self._mapped: dict[int, _MappedSegment] = {}

    def get(self, number: int, length: int) -> Tensor:
        """Return the tensor of `length` bytes in the segment with this number."""
        while number not in self._mapped:
            self._map_next()
        return self._mapped[number].tensor(length)

    def unmap(self, number: int) -> None:
        """Unmap a segment that the sender will not use again."""
        self._mapped.pop(number, None)

    def _map_next(self) -> None:
        """Map the next segment whose file descriptor the sender has passed over the socket. The
        sender does so before it names the segment in a frame."""
        readable = select.poll()
        readable.register(self._channel, select.POLLIN)
        if not readable.poll(_ANNOUNCEMENT_MILLISECONDS):
            raise ConnectionClosed("the peer named a segment of shared memory that it did not send")
        data, descriptors, _, _ = socket.recv_fds(self._channel, _ANNOUNCEMENT.size, 1)
        try:
            if len(data) != _ANNOUNCEMENT.size or len(descriptors) != 1:
                raise ConnectionClosed(
                    "the peer named a segment of shared memory that it did not send"
                )
            number, capacity = _ANNOUNCEMENT.unpack(data)
            self._mapped[number] = _MappedSegment(descriptors[0], capacity)
        except OSError as error:
            raise ConnectionClosed(f"shared memory cannot be mapped: {error}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def close(self) -> None:
        self._mapped.clear()
