"""Connections over byte streams: the common part of the unix and the tcp transport.

A `Stream` carries the bytes: it is a socket, or an object used like one. `StreamConnection` sends
frames through a stream, and turns the received bytes into frames.
"""

from __future__ import annotations

import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from time import monotonic, perf_counter
from typing import Any, Protocol

from torch import Tensor

from gradwire._core.transport.base import AT_ONCE, Greeting
from gradwire._core.transport.framing import (
    HEAD_AS_BUFFER,
    HEAD_INLINE,
    PREFIX,
    RETIRED,
    Entry,
    FrameReader,
    pack_prefix,
)
from gradwire._core.transport.poller import Poller
from gradwire._core.transport.read_token import ReadToken
from gradwire._core.transport.spin import SpinThenSleep
from gradwire._core.wire.frames import Bytes, Frame
from gradwire._core.wire.tensors import memory_of
from gradwire.errors import ConnectionClosed, SendTimeout

#: If the head of a frame is of this size or larger, it is sent in the same way as the buffers.
_LARGE_HEAD = 1 << 16
#: The most pieces of memory that one system call sends. Operating systems allow 1024.
_MAX_PARTS = 512
#: How long the reading thread goes on reading a large frame that arrives in many pieces. The thread
#: does not return to the poller after each piece, because the return takes longer than receiving
#: the next piece.
_FILLING_SECONDS = 0.002
#: How long the reading thread waits for the next piece of a large frame before it returns to the
#: poller.
_GAP_SECONDS = 0.0002
#: If the peer takes no data for this long, the sending thread calls the callback `blocked`.
_SLOW_SECONDS = 0.001
#: The longest timeout that `select.poll` accepts. If a caller wants to wait longer, the wait ends
#: after this time, and the caller waits again.
_LONGEST_MILLISECONDS = (1 << 31) - 1
#: How often a thread that waits for its turn to send checks whether the connection is closed.
_CLOSED_CHECK_SECONDS = 1.0
_pack_prefix = PREFIX.pack
#: Whether one system call can send several pieces of memory. On Windows, Python has no `sendmsg`.
_CAN_GATHER = hasattr(socket.socket, "sendmsg")


class Stream(Protocol):
    """Carries bytes: a non-blocking socket, or an object used like one.

    `recv_into`, `send` and `sendmsg` raise BlockingIOError instead of blocking. The descriptor that
    `fileno` returns must be readable whenever `recv_into` would not block.
    """

    def fileno(self) -> int: ...

    def recv_into(self, memory: memoryview, /) -> int: ...

    def send(self, data: Bytes, /) -> int: ...

    def sendmsg(self, parts: Sequence[Bytes], /) -> int: ...

    def shutdown(self, how: int, /) -> Any: ...

    def close(self) -> Any: ...


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else min(max(0.0, seconds) * 1000, _LONGEST_MILLISECONDS)


def wait_for(stream: Stream, *, writable: bool, timeout: float | None) -> bool:
    """Block until a stream is ready. Return False after `timeout` seconds; None waits for ever."""
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(stream, select.POLLOUT if writable else select.POLLIN)
        return bool(poll.poll(_milliseconds(timeout)))
    reads, writes = ([], [stream]) if writable else ([stream], [])
    return any(select.select(reads, writes, [], timeout))


def _as_bytes(held: Frame | bytes) -> bytes:
    """Return the bytes of something that a connection keeps back: a small frame, or the rest of a
    frame."""
    if isinstance(held, bytes):
        return held
    return _pack_prefix(len(held.head), 0, 0) + held.head


class StreamConnection:
    """A connection that sends frames through a stream and receives frames from it.

    `close` shuts the stream down, but its file descriptor stays open until no thread is in a system
    call on it. If the descriptor were closed earlier, a new connection could get the same
    descriptor number, and a thread in a system call would read or write the wrong connection.
    """

    def __init__(self, stream: Stream, peer: Greeting, max_bytes: int, stall_limit: float):
        self.peer = peer
        self._stream = stream
        self._stall_limit = stall_limit
        self._read_token = ReadToken()
        self.begin_reading = self._read_token.begin
        #: The lock held by the thread that writes to the stream.
        self._write_lock = threading.Lock()
        #: What is kept back, in the order in which it must be sent: frames, and in front of them
        #: perhaps the rest of a frame that was sent in part, as bytes. Any thread may append
        #: or withdraw a frame. Any other use of this queue requires the write lock.
        self._held: deque[Frame | bytes] = deque()
        self.last_taken = 0.0
        #: The lock held while the file descriptor is closed. It is reentrant, because while a
        #: thread holds it, the garbage collector may run a destructor that uses this connection.
        self._release_lock = threading.RLock()
        #: The lock held while the poller is told to arm, disarm or remove the file descriptor. No
        #: other thread may close the descriptor meanwhile, because a new descriptor could then get
        #: the same number. The lock is reentrant, because while a thread holds it, the garbage
        #: collector may run a destructor that uses this connection.
        self._poller_lock = threading.RLock()
        self._closed = False
        self._poller: Poller | None = None
        self._read_spin, self._write_spin = SpinThenSleep(), SpinThenSleep()
        self._readable = self._writable = None
        self._fd = stream.fileno()
        if hasattr(select, "poll"):
            self._readable, self._writable = select.poll(), select.poll()
            self._register(self._readable, self._writable)
        self._reader = self._make_reader(max_bytes)

    def _register(self, readable: select.poll, writable: select.poll) -> None:
        """Register the stream with the poll objects for reading and for writing."""
        readable.register(self._fd, select.POLLIN)
        writable.register(self._fd, select.POLLOUT)

    def _make_reader(self, max_bytes: int) -> FrameReader:
        return FrameReader(max_bytes)

    # -- sending

    def send(
        self, frame: Frame, blocked: Callable[[], object] | None = None, deadline: float = inf
    ) -> None:
        size = len(frame.head)
        if size < _LARGE_HEAD and not frame.buffers and not frame.rest:
            self._transmit([_pack_prefix(size, 0, 0) + frame.head], blocked, deadline)
            return
        entries: list[Entry] = []
        parts = self._parts(frame, entries)
        try:
            self._transmit(parts, blocked, deadline)
        except SendTimeout as timeout:
            if timeout.withdrawn:
                self._take_back(entries)
            raise

    def _transmit(
        self, parts: list[Bytes], blocked: Callable[[], object] | None, deadline: float
    ) -> None:
        if not self._write_lock.acquire(False):
            if blocked is not None:
                blocked()
                blocked = None
            self._wait_for_turn(deadline)
        try:
            self._write(parts, blocked, deadline)
        finally:
            self._end_writing()

    def _wait_for_turn(self, deadline: float) -> None:
        """Wait for the write lock, and acquire it."""
        while True:
            left = max(0.0, deadline - monotonic())
            if self._write_lock.acquire(timeout=min(left, _CLOSED_CHECK_SECONDS)):
                return
            # Do not wait for ever. A writing thread that was interrupted may have closed the
            # connection without releasing the write lock.
            if self._closed:
                raise ConnectionClosed("the connection is closed")
            if left <= _CLOSED_CHECK_SECONDS:
                raise SendTimeout(withdrawn=True)

    def hold(self, frame: Frame) -> int:
        if frame.buffers or frame.rest or len(frame.head) >= _LARGE_HEAD or self._closed:
            return 0
        self._held.append(frame)
        # The result is the number of frames kept back. If another thread has already sent all of
        # them, this number is 0. Return 1 then: 0 would tell the caller to send the frame again.
        return len(self._held) or 1

    def flush(self, blocked: Callable[[], object] | None = None, deadline: float = inf) -> None:
        if self._held:
            self._transmit([], blocked, deadline)

    def withdraw(self, is_wanted: Callable[[Frame], bool]) -> bool:
        for frame in list(self._held):
            if isinstance(frame, Frame) and is_wanted(frame):
                try:
                    self._held.remove(frame)
                except ValueError:
                    return False  # Another thread has just taken the frame to send it.
                return True
        return False

    def try_send(self, frame: Frame) -> bool:
        if not self._write_lock.acquire(False):
            return False
        try:
            if self._closed:
                raise ConnectionClosed("the connection is closed")
            if self._wait_writable(0):
                self._write([_pack_prefix(len(frame.head), 0, 0) + frame.head], None, AT_ONCE)
            return True
        except SendTimeout:
            return False
        finally:
            self._end_writing()

    def _end_writing(self) -> None:
        self._write_lock.release()
        if self._closed:
            self._release_if_unused()

    def _parts(self, frame: Frame, entries: list[Entry]) -> list[Bytes]:
        """Return the parts of a frame that go into the stream. If the connection has shared memory,
        copy large buffers there instead. Append the entries of the frame's table to `entries`."""
        inline: list[Bytes] = []
        for buffer in frame.buffers:
            size = buffer.numel() * buffer.element_size()
            segment = self._put_in_segment(buffer, size)
            entries.append((size, segment))
            if not segment:
                inline.append(memory_of(buffer.contiguous()))
        head: Bytes = frame.head
        head_place = HEAD_INLINE
        if frame.rest or len(head) >= _LARGE_HEAD:
            pieces = [head, *frame.rest]
            size = sum(map(len, pieces))
            segment = self._put_pieces_in_segment(pieces, size)
            entries.append((size, segment))
            if not segment:
                inline += pieces
            head, head_place = b"", HEAD_AS_BUFFER
        entries.extend((RETIRED, segment) for segment in self._take_retired())
        return [pack_prefix(len(head), entries, head_place) + head, *inline]

    def _put_in_segment(self, buffer: Tensor, size: int) -> int:  # noqa: ARG002
        """Copy a buffer into a segment, a piece of shared memory, and return the segment's number.
        Return 0 if the buffer must go through the stream."""
        return 0

    def _put_pieces_in_segment(self, pieces: Sequence[Bytes], size: int) -> int:  # noqa: ARG002
        """Copy pieces of bytes one after the other into one segment of shared memory, and return
        the segment's number. Return 0 if the pieces must go through the stream."""
        return 0

    def _take_retired(self) -> list[int]:
        """Return the numbers of the segments of shared memory that this side no longer uses. The
        next frame tells the peer to unmap these segments."""
        return []

    def _take_back(self, entries: Sequence[Entry]) -> None:
        """Undo what `_parts` has done with shared memory for a frame that was withdrawn. `entries`
        is the frame's table."""

    def _write(
        self, parts: list[Bytes], blocked: Callable[[], object] | None, deadline: float
    ) -> None:
        """Send what is kept back, then the pieces of a new frame in `parts`. The caller holds the
        write lock. Raise SendTimeout at the deadline, as `Connection.send` describes."""
        # The number of bytes at the front of `parts` that were kept back and are still to be sent.
        # If this number is negative, a part of the new frame has been sent already.
        held_bytes = 0
        try:
            while True:
                if self._held and not held_bytes:
                    held = self._take_held()
                    parts.insert(0, b"".join(map(_as_bytes, held)))
                    held_bytes = len(parts[0])
                if not parts:
                    return
                if self._closed:
                    raise ConnectionClosed("the connection is closed")
                first = parts[0]
                try:
                    if len(parts) == 1 or not _CAN_GATHER:
                        sent = self._stream.send(first)
                    else:
                        sent = self._stream.sendmsg(parts[:_MAX_PARTS])
                except BlockingIOError:
                    if held_bytes > 0:
                        # Put the unsent frames back into `_held`, so that other threads can
                        # withdraw them while this thread waits.
                        del parts[0]
                        self._put_back(held, held_bytes)
                        held_bytes = 0
                    if blocked is not None and not self._wait_writable(_SLOW_SECONDS):
                        blocked()
                        blocked = None
                    if blocked is None and not self._wait_for_peer(deadline):
                        if held_bytes < 0:
                            # Copy the rest of the frame, because the caller may change the
                            # frame's tensors after this method has raised the error.
                            self._held.appendleft(b"".join(parts))
                        raise SendTimeout(withdrawn=not held_bytes) from None
                    self.last_taken = monotonic()
                    continue
                if sent == len(first) and len(parts) == 1:
                    return
                held_bytes -= sent
                while parts and sent >= len(parts[0]):
                    sent -= len(parts.pop(0))
                if sent:
                    parts[0] = memoryview(parts[0])[sent:]
        except SendTimeout:
            raise
        except ConnectionClosed:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise ConnectionClosed(f"the connection broke: {error}") from error
        except BaseException:
            # An interrupt may have ended the write in the middle of a frame. The peer would take
            # the next frame for the rest of this one, so close the connection.
            self.close()
            raise

    def _wait_writable(self, seconds: float) -> bool:
        """Wait until the stream accepts more data. Return False after `seconds` seconds."""
        if self._writable is None:
            return wait_for(self._stream, writable=True, timeout=seconds)
        return bool(self._write_spin.wait(self._writable.poll, _milliseconds(seconds)))

    def _wait_for_peer(self, deadline: float) -> bool:
        """Wait until the stream accepts more data. Return False at the deadline. Raise
        ConnectionClosed if the peer takes no data for too long."""
        left = deadline - monotonic()
        if self._wait_writable(min(left, self._stall_limit)):
            return True
        if left <= self._stall_limit:
            return False
        raise ConnectionClosed(f"the peer has not taken any data for {self._stall_limit:g} s")

    def _take_held(self) -> list[Frame | bytes]:
        """Return what is kept back, and keep nothing back any longer."""
        held = []
        try:
            while True:
                held.append(self._held.popleft())
        except IndexError:
            return held

    def _put_back(self, held: list[Frame | bytes], unsent: int) -> None:
        """Keep back again the part of `held` that was not sent: its last `unsent` bytes. The list
        `held` comes from `_take_held`."""
        while unsent:
            item = held.pop()
            data = _as_bytes(item)
            self._held.appendleft(item if len(data) <= unsent else data[-unsent:])
            unsent = max(0, unsent - len(data))

    # -- receiving

    def end_reading(self) -> None:
        self._read_token.end()
        if self._closed:
            self._release_if_unused()

    def stop_reading(self) -> bool:
        was_reader = self._read_token.stop()
        if self._closed:
            self._release_if_unused()
        return was_reader

    def receive(self) -> list[Frame]:
        reader = self._reader
        deadline = 0.0
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
                # An interrupt may have lost bytes that were read from the stream. What follows
                # could not be parsed, so close the connection.
                self.close()
                raise
            if count < len(target):
                if not reader.is_filling:
                    return []
                deadline = deadline or perf_counter() + _FILLING_SECONDS
                if perf_counter() > deadline or not self.wait(_GAP_SECONDS):
                    return []

    def wait(self, timeout: float | None) -> bool:
        if self._closed:
            return True
        if self._readable is not None:
            return bool(self._read_spin.wait(self._readable.poll, _milliseconds(timeout)))
        return wait_for(self._stream, writable=False, timeout=timeout)

    def attach(self, poller: Poller, callback: Callable[[], None]) -> None:
        self._poller = poller
        poller.add(self._fd, callback)

    def arm(self) -> None:
        if self._poller is not None:
            with self._poller_lock:
                if not self._closed:
                    self._poller.arm(self._fd)

    def disarm(self) -> None:
        if self._poller is not None:
            with self._poller_lock:
                if not self._closed:
                    self._poller.disarm(self._fd)

    # -- ending

    def trim(self) -> None:
        self._reader.buffers.trim()

    def close(self) -> None:
        with self._poller_lock:
            if self._closed:
                return
            self._closed = True
            if self._poller is not None:
                self._detach(self._poller)
        try:
            self._stream.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._release_if_unused()

    def abandon(self) -> None:
        self._closed = True
        self._stream.close()

    def _detach(self, poller: Poller) -> None:
        poller.remove(self._fd)

    def _release_if_unused(self) -> None:
        """Close the file descriptor, unless another thread is using it. That thread then calls this
        method when it has finished."""
        with self._release_lock:
            if not self._read_token.begin():
                return
            if self._write_lock.acquire(False):
                self._release()
                self._write_lock.release()
            self._read_token.end()

    def _release(self) -> None:
        self._stream.close()
