"""What the unix and the tcp transport share: frames over a stream of bytes."""

from __future__ import annotations

import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Protocol

from torch import Tensor

from gradwire.errors import ConnectionClosed
from gradwire.transport.base import Greeting
from gradwire.transport.eager import Eager
from gradwire.transport.framing import (
    FORGET,
    HEAD_BESIDE,
    HEAD_HERE,
    PREFIX,
    Entry,
    FrameReader,
    pack_prefix,
)
from gradwire.transport.poller import Poller
from gradwire.transport.reading import Reading
from gradwire.wire.frames import Bytes, Frame
from gradwire.wire.tensors import memory_of

#: A head from this size on goes the way of buffers.
_LARGE_HEAD = 1 << 16
_MAX_PARTS = 512
#: Something large comes in many pieces. To go and do other things between them takes longer than
#: the pieces do, so whoever receives it stays with it for this long at a time, unless the next
#: piece does not come soon.
_FILLING_SECONDS = 0.002
_GAP_SECONDS = 0.0002
#: A peer that takes nothing for this long is slow. (One that reads makes room all the time.)
_PATIENCE_SECONDS = 0.001
#: The system takes no longer times; who waits longer looks again.
_LONGEST_MILLISECONDS = (1 << 31) - 1
#: How often a thread that waits for another one to have sent looks whether that makes sense.
_LOOK_SECONDS = 1.0
_pack_prefix = PREFIX.pack
_CAN_GATHER = hasattr(socket.socket, "sendmsg")  # not on Windows


class Stream(Protocol):
    """What bytes go through: a socket that does not block, or something that is used like one."""

    def fileno(self) -> int: ...

    def recv_into(self, memory: memoryview, /) -> int: ...

    def send(self, data: Bytes, /) -> int: ...

    def sendmsg(self, parts: Sequence[Bytes], /) -> int: ...

    def shutdown(self, how: int, /) -> Any: ...

    def close(self) -> Any: ...


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else min(max(0.0, seconds) * 1000, _LONGEST_MILLISECONDS)


def wait_for(stream: Stream, *, writable: bool, timeout: float | None) -> bool:
    """Block until a stream is ready, for `timeout` seconds or for ever."""
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(stream, select.POLLOUT if writable else select.POLLIN)
        return bool(poll.poll(_milliseconds(timeout)))
    reads, writes = ([], [stream]) if writable else ([stream], [])
    return any(select.select(reads, writes, [], timeout))


class StreamConnection:
    """Frames over a stream.

    It is shut down by `close`, and its descriptor is given back by the last thread that
    is still inside a system call on it: a number that is reused too early would be somebody else's
    connection.
    """

    def __init__(self, stream: Stream, peer: Greeting, max_bytes: int, stall_limit: float):
        self.peer = peer
        self._stream = stream
        self._stall_limit = stall_limit
        self._reading = Reading()
        self.begin_reading = self._reading.begin
        self._writing = threading.Lock()
        self._held: deque[bytes] = deque()
        #: (Reentrant: the garbage collector may run there, and functions of users that make calls.)
        self._disposing = threading.RLock()
        #: The poller knows the connection by a number that is another one's once it is closed.
        self._registering = threading.RLock()
        self._closed = False
        self._poller: Poller | None = None
        self._eager, self._eager_writing = Eager(), Eager()
        self._readable = self._writable = None
        self._fd = stream.fileno()
        if hasattr(select, "poll"):
            self._readable, self._writable = select.poll(), select.poll()
            self._watch(self._readable, self._writable)
        self._reader = self._make_reader(max_bytes)

    def _watch(self, readable: select.poll, writable: select.poll) -> None:
        """Have them say when something can be read, or written."""
        readable.register(self._fd, select.POLLIN)
        writable.register(self._fd, select.POLLOUT)

    def _make_reader(self, max_bytes: int) -> FrameReader:
        return FrameReader(max_bytes)

    # -- sending

    def send(self, frame: Frame, blocked: Callable[[], object] | None = None) -> None:
        size = len(frame.head)
        if size < _LARGE_HEAD and not frame.buffers and not frame.rest:
            self._transmit([_pack_prefix(size, 0, 0) + frame.head], blocked)
        else:
            self._transmit(self._parts(frame), blocked)

    def _transmit(self, parts: list[Bytes], blocked: Callable[[], object] | None = None) -> None:
        if not self._writing.acquire(False):
            if blocked is not None:
                blocked()
                blocked = None
            while not self._writing.acquire(timeout=_LOOK_SECONDS):
                if self._closed:  # whoever was writing was interrupted, and could not say so
                    raise ConnectionClosed("the connection is closed")
        try:
            self._write(parts, blocked)
        finally:
            self._end_writing()

    def hold(self, frame: Frame) -> int:
        if frame.buffers or frame.rest or len(frame.head) >= _LARGE_HEAD or self._closed:
            return 0
        self._held.append(PREFIX.pack(len(frame.head), 0, 0) + frame.head)
        return len(self._held) or 1  # another thread may have sent them already

    def flush(self, blocked: Callable[[], object] | None = None) -> None:
        if self._held:
            self._transmit([], blocked)

    def nudge(self, frame: Frame) -> bool:
        if not self._writing.acquire(False):
            return False
        try:
            if self._closed:
                raise ConnectionClosed("the connection is closed")
            if self._wait_for_room(0):
                self._write([PREFIX.pack(len(frame.head), 0, 0) + frame.head], None)
            return True
        finally:
            self._end_writing()

    def _end_writing(self) -> None:
        self._writing.release()
        if self._closed:
            self._dispose()

    def _parts(self, frame: Frame) -> list[Bytes]:
        """A frame as it goes into the stream, and what can be placed elsewhere there."""
        entries: list[Entry] = []
        inline: list[Bytes] = []
        for buffer in frame.buffers:
            size = buffer.numel() * buffer.element_size()
            segment = self._place(buffer, size)
            entries.append((size, segment))
            if not segment:
                inline.append(memory_of(buffer.contiguous()))
        head: Bytes = frame.head
        where = HEAD_HERE
        if frame.rest or len(head) >= _LARGE_HEAD:
            pieces = [head, *frame.rest]
            size = sum(map(len, pieces))
            segment = self._place_pieces(pieces, size)
            entries.append((size, segment))
            if not segment:
                inline += pieces
            head, where = b"", HEAD_BESIDE
        entries.extend((FORGET, segment) for segment in self._forgotten())
        return [pack_prefix(len(head), entries, where) + head, *inline]

    def _place(self, buffer: Tensor, size: int) -> int:  # noqa: ARG002
        """The segment that carries the buffer; 0 when it goes through the stream."""
        return 0

    def _place_pieces(self, pieces: Sequence[Bytes], size: int) -> int:  # noqa: ARG002
        """The segment that carries these pieces, one after the other; 0 as above."""
        return 0

    def _forgotten(self) -> list[int]:
        return []

    def _write(
        self,
        parts: list[Bytes],
        blocked: Callable[[], object] | None,
    ) -> None:
        """Send what was held back, then the parts. This thread has the right to write."""
        try:
            if self._held:
                parts.insert(0, self._take_held())
            while parts:
                if self._closed:
                    raise ConnectionClosed("the connection is closed")
                first = parts[0]
                try:
                    if len(parts) == 1 or not _CAN_GATHER:
                        sent = self._stream.send(first)
                    else:
                        sent = self._stream.sendmsg(parts[:_MAX_PARTS])
                except BlockingIOError:
                    if blocked is not None and not self._wait_for_room(_PATIENCE_SECONDS):
                        blocked()
                        blocked = None
                    if blocked is None and not self._wait_for_room(self._stall_limit):
                        raise ConnectionClosed(
                            f"the peer has not taken any data for {self._stall_limit:g} s"
                        ) from None
                    continue
                if sent == len(first) and len(parts) == 1:
                    return
                while parts and sent >= len(parts[0]):
                    sent -= len(parts.pop(0))
                if sent:
                    parts[0] = memoryview(parts[0])[sent:]
        except ConnectionClosed:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise ConnectionClosed(f"the connection broke: {error}") from error
        except BaseException:
            self.close()  # half a frame may be out: what follows would be misread
            raise

    def _wait_for_room(self, seconds: float) -> bool:
        """Wait until more can be sent; not for ever."""
        if self._writable is None:
            return wait_for(self._stream, writable=True, timeout=seconds)
        return bool(self._eager_writing.wait(self._writable.poll, _milliseconds(seconds)))

    def _take_held(self) -> bytes:
        held = []
        while self._held:
            held.append(self._held.popleft())
        return b"".join(held)

    # -- receiving

    def end_reading(self) -> None:
        self._reading.end()
        if self._closed:
            self._dispose()

    def stop_reading(self) -> bool:
        had_it = self._reading.stop()
        if self._closed:
            self._dispose()
        return had_it

    def receive(self) -> list[Frame]:
        reader = self._reader
        until = 0.0
        while True:
            if self._closed:
                raise ConnectionClosed("the connection is closed")
            target = reader.target
            try:
                count = self._stream.recv_into(target)
                if not count:
                    raise ConnectionClosed("the peer closed the connection")
                frames = reader.advance(count)
                if frames:
                    return frames
            except BlockingIOError:
                count = 0
            except OSError as error:
                raise ConnectionClosed(f"the connection broke: {error}") from error
            except ConnectionClosed:
                raise
            except BaseException:
                self.close()  # an interrupt: bytes may be lost between the socket and the reader
                raise
            if count < len(target):
                if not reader.is_filling:
                    return []
                until = until or perf_counter() + _FILLING_SECONDS
                if perf_counter() > until or not self.wait(_GAP_SECONDS):
                    return []

    def wait(self, timeout: float | None) -> bool:
        if self._closed:
            return True
        if self._readable is not None:
            return bool(self._eager.wait(self._readable.poll, _milliseconds(timeout)))
        return wait_for(self._stream, writable=False, timeout=timeout)

    def attach(self, poller: Poller, callback: Callable[[], None]) -> None:
        self._poller = poller
        poller.add(self._fd, callback)

    def arm(self) -> None:
        if self._poller is not None:
            with self._registering:
                if not self._closed:
                    self._poller.arm(self._fd)

    def disarm(self) -> None:
        if self._poller is not None:
            with self._registering:
                if not self._closed:
                    self._poller.disarm(self._fd)

    # -- ending

    def trim(self) -> None:
        self._reader.memory.trim()

    def close(self) -> None:
        with self._registering:
            if self._closed:
                return
            self._closed = True
            if self._poller is not None:
                self._detach(self._poller)
        try:
            self._stream.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._dispose()

    def abandon(self) -> None:
        self._closed = True
        self._stream.close()

    def _detach(self, poller: Poller) -> None:
        poller.remove(self._fd)

    def _dispose(self) -> None:
        """Give the descriptor back unless another thread is using it; that one will."""
        with self._disposing:
            if not self._reading.begin():
                return
            if self._writing.acquire(False):
                self._release()
                self._writing.release()
            self._reading.end()

    def _release(self) -> None:
        self._stream.close()
