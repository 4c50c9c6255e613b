"""Large tensors, and long heads, between processes of one machine: copied once, mapped by the
receiver.

The sender owns a *segment*: an anonymous, sealed piece of shared memory. It copies a tensor in and
names the segment in a frame; the receiver's tensor lies over the same memory. When that tensor
dies, the receiver clears the flag in the segment's first byte, and the sender may fill it again:
no message goes back, and filling warm pages is several times faster than filling fresh ones.

A segment has no name in any file system. It reaches the receiver as a descriptor over a socket,
once, and the kernel frees it with the last process that maps it, however that process ends.
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
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from gradwire.errors import ConnectionClosed
from gradwire.wire.frames import Bytes

#: Tensors from this size on travel in segments.
SEGMENT_BYTES = 1 << 13
#: A sender that has this many segments out sends further tensors through the pipe.
MAX_SEGMENTS = 1024

_HEADER = 64  # the flag, and room to keep the data aligned
_ANNOUNCE = struct.Struct("<QQ")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_PATIENCE_MS = 10_000
#: From this size on it is faster to copy with two threads.
_MUCH = 32 << 20
_LEVEL2_CACHE_SIZE = 191  # as glibc numbers it; Python has no name for it


def _piece() -> int:
    """How much to copy at once: nearly what fits into a core's own cache. Up to there some
    processors copy without reading first what is overwritten, which is several times faster where
    that lies in the cache of the core that has read it."""
    with suppress(OSError):
        cache = os.sysconf(_LEVEL2_CACHE_SIZE)
        if cache >= 256 << 10:  # it is known
            return min(cache // 8 * 7, 4 << 20)
    return 448 << 10


_PIECE = _piece()


def _capacity(size: int) -> int:
    """Powers of two, so that few sizes serve all; pages never touched cost nothing."""
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
    """Shared memory as bytes, mapped until the last view of it is gone.

    Python's own mmap keeps a descriptor per mapping, and there can be more segments than
    descriptors.
    """
    address = _libc.mmap(
        None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0
    )
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map shared memory: {os.strerror(number)}")
    memory = (ctypes.c_ubyte * size).from_address(address)
    unmap = weakref.finalize(memory, _libc.munmap, address, size)
    unmap.atexit = False  # tensors may outlive the interpreter's other business
    return memoryview(memory).cast("B")


def _copy(target: int, source: int, size: int) -> None:
    """Copy memory, piece by piece."""
    if size >= _MUCH:
        _copy_with_help(target, source, size)
        return
    for start in range(0, size, _PIECE):
        ctypes.memmove(target + start, source + start, min(_PIECE, size - start))


def _copy_with_help(target: int, source: int, size: int) -> None:
    """The same, together with a second thread, which begins at the end: so each finds in its cache
    what it copied the last time. If it gets no core it is waited for at most for one piece. (Of
    torch's own threads each has to do its share.)"""
    starts = deque(range(0, size, _PIECE))
    helping = threading.Lock()

    def copy_pieces(take: Callable[[], int]) -> None:
        with suppress(IndexError):  # all of them are taken
            while True:
                start = take()
                ctypes.memmove(target + start, source + start, min(_PIECE, size - start))

    def help_out() -> None:
        with helping:
            copy_pieces(starts.pop)

    try:
        with suppress(RuntimeError):  # there are too many threads
            start_new_thread(help_out, ())
        copy_pieces(starts.popleft)
    finally:
        starts.clear()  # after an interrupt: no more of them
        try:
            helping.acquire()  # the memory must not go while the helper copies
        except BaseException:  # an interrupt
            helping.acquire()
            raise


class _Segment:
    """A piece of shared memory this process writes to."""

    def __init__(self, number: int, capacity: int):
        self.number = number
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
        with torch.inference_mode(False):  # others fill it later
            self._bytes = torch.frombuffer(self.memory, dtype=torch.uint8, offset=_HEADER)

    @property
    def free(self) -> bool:
        return self.memory[0] == 0

    def fill(self, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if tensor.is_contiguous():
            _copy(self._bytes.data_ptr(), tensor.data_ptr(), size)
        else:
            self._bytes[:size].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())

    def fill_with(self, pieces: Sequence[Bytes]) -> None:
        start = _HEADER
        for piece in pieces:
            if type(piece) is bytes:  # then nobody has to wait for it
                source = ctypes.cast(ctypes.c_char_p(piece), ctypes.c_void_p).value or 0
                _copy(self._bytes.data_ptr() + start - _HEADER, source, len(piece))
            else:
                self.memory[start : start + len(piece)] = piece
            start += len(piece)


class SegmentSender:
    """The segments that carry tensors from here to one other process."""

    def __init__(self, channel: socket.socket):
        self._channel = channel
        self._lock = threading.Lock()
        self._by_capacity: dict[int, list[_Segment]] = {}
        self._forgotten: list[int] = []
        self._count = 0
        self._next = 1

    def put(self, tensor: Tensor) -> int:
        """Copy a tensor into a segment and return its number; 0 when there is none to be had."""
        return self._fill(tensor.numel() * tensor.element_size(), lambda s: s.fill(tensor))

    def put_pieces(self, pieces: Sequence[Bytes], size: int) -> int:
        """The same with bytes, one piece after the other."""
        return self._fill(size, lambda s: s.fill_with(pieces))

    def _fill(self, size: int, fill: Callable[[_Segment], None]) -> int:
        segment = self._take(size)
        if segment is None:
            return 0
        try:
            fill(segment)
        except BaseException:
            segment.memory[0] = 0  # nobody will hear of it
            raise
        return segment.number

    def _take(self, size: int) -> _Segment | None:
        """A segment that nobody uses."""
        capacity = _capacity(size)
        with self._lock:
            segments = self._by_capacity.setdefault(capacity, [])
            # The one used last is the one still in the cache.
            segment = next((s for s in reversed(segments) if s.free), None)
            if segment is not None:
                segment.memory[0] = 1
                segment.idle = False
        return segment or self._new(capacity)

    def _new(self, capacity: int) -> _Segment | None:
        with self._lock:
            if self._count >= MAX_SEGMENTS:
                return None
            try:
                segment = _Segment(self._next, capacity)
            except OSError:
                return None
            try:
                # Never blocks: a receiver reads the channel only when a frame names a segment.
                announcement = _ANNOUNCE.pack(segment.number, capacity)
                socket.send_fds(self._channel, [announcement], [segment.descriptor])
            except OSError:
                return None
            finally:
                os.close(segment.descriptor)
            segment.memory[0] = 1
            self._next += 1
            self._count += 1
            self._by_capacity[capacity].append(segment)
            return segment

    def trim(self) -> None:
        """Give up the segments that have been free since the last time."""
        with self._lock:
            for capacity, segments in self._by_capacity.items():
                gone = [s for s in segments if s.free and s.idle]
                self._forgotten.extend(s.number for s in gone)
                self._count -= len(gone)
                kept = [s for s in segments if s not in gone]
                for segment in kept:
                    segment.idle = segment.free
                self._by_capacity[capacity] = kept

    @property
    def forgets(self) -> bool:
        """Whether there is something the receiver has not been told to forget."""
        return bool(self._forgotten)

    def take_forgotten(self) -> list[int]:
        """The segments the receiver must be told to forget."""
        if not self._forgotten:
            return []
        with self._lock:
            forgotten, self._forgotten = self._forgotten, []
            return forgotten

    def close(self) -> None:
        with self._lock:
            self._by_capacity.clear()
            self._count = MAX_SEGMENTS


class _Mapped:
    """A piece of shared memory this process reads from."""

    def __init__(self, descriptor: int, capacity: int):
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ConnectionClosed("the peer sent shared memory that it could take away again")
        if os.fstat(descriptor).st_size != capacity:
            raise ConnectionClosed("the peer sent shared memory of another size than it said")
        self._memory = _map(descriptor, capacity)
        self._process = os.getpid()
        self._in_use: weakref.ref[memoryview] | None = None

    def tensor(self, length: int) -> Tensor:
        """The bytes as a tensor; the segment returns to its sender when the tensor dies."""
        if not 0 < length <= len(self._memory) - _HEADER:
            raise ConnectionClosed(f"the peer named {length} bytes of a smaller segment")
        # torch keeps this very object alive as long as the tensor's memory is in use.
        piece = self._memory[_HEADER : _HEADER + length]
        self._in_use = weakref.ref(piece, self._free)
        if torch.is_inference_mode_enabled():  # the thread that reads may read for another one
            with torch.inference_mode(False):
                return torch.frombuffer(piece, dtype=torch.uint8)
        return torch.frombuffer(piece, dtype=torch.uint8)

    def _free(self, _ref: object) -> None:
        if os.getpid() == self._process:  # a forked child drops its tensor, not ours
            self._memory[0] = 0


class SegmentReceiver:
    """The segments in which tensors arrive from one other process."""

    def __init__(self, channel: socket.socket):
        self._channel = channel
        self._mapped: dict[int, _Mapped] = {}

    def get(self, number: int, length: int) -> Tensor:
        """The tensor in a segment that a frame has named."""
        while number not in self._mapped:
            self._accept()
        return self._mapped[number].tensor(length)

    def forget(self, number: int) -> None:
        self._mapped.pop(number, None)

    def _accept(self) -> None:
        """Map the next segment; it was sent before the frame that names it."""
        readable = select.poll()
        readable.register(self._channel, select.POLLIN)
        if not readable.poll(_PATIENCE_MS):
            raise ConnectionClosed("the peer named shared memory that it did not send")
        data, descriptors, _, _ = socket.recv_fds(self._channel, _ANNOUNCE.size, 1)
        try:
            if len(data) != _ANNOUNCE.size or len(descriptors) != 1:
                raise ConnectionClosed("the peer named shared memory that it did not send")
            number, capacity = _ANNOUNCE.unpack(data)
            self._mapped[number] = _Mapped(descriptors[0], capacity)
        except OSError as error:
            raise ConnectionClosed(f"shared memory cannot be mapped: {error}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def close(self) -> None:
        self._mapped.clear()
