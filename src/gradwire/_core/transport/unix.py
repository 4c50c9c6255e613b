"""The transport between processes of one Linux machine: pipes, and shared memory for large tensors.

The listener's socket has a random name in Linux's abstract namespace. So it leaves no file behind,
and processes in another network namespace, such as a container, cannot reach it. To find out
whether a peer is on the same machine, a client just connects. If that fails, the client tries the
next transport.

The client sends four file descriptors along with its proof that it belongs to the group:

- one end of a socket pair, the *channel*, over which both sides pass the file descriptors of
  segments, the pieces of shared memory that carry large tensors;
- a *probe*, a piece of memory into which the listener writes a fixed text. If the client can read
  the text there, the two processes can share memory;
- the listener's ends of two pipes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from gradwire._core.transport.base import Address, Connection, Greeting
from gradwire._core.transport.framing import RETIRED, FrameReader, pack_prefix
from gradwire._core.transport.listener import (
    BACKLOG,
    MAX_DESCRIPTORS,
    StreamListener,
    close_quietly,
    shake_hands,
)
from gradwire._core.transport.pipes import Pipes, check_pipe_ends, make_pipes
from gradwire._core.transport.poller import Poller
from gradwire._core.transport.shared_memory import SEGMENT_BYTES, SegmentReceiver, SegmentSender
from gradwire._core.transport.stream import StreamConnection
from gradwire._core.wire.frames import Bytes
from gradwire.errors import AuthenticationError, ConnectionClosed

_PROBE_SIZE = 4096
_PROBE_TEXT = b"gradwire shares this memory"


@dataclass(frozen=True)
class UnixTransport:
    """Connects processes of one Linux machine. Each listener has a random name, which nobody can
    guess."""

    token: bytes
    max_bytes: int = 1 << 40
    stall_limit: float = 30.0
    segment_bytes: int = SEGMENT_BYTES
    name: str = "unix"

    def listen(
        self, me: Greeting, poller: Poller, accepted: Callable[[Connection], None]
    ) -> UnixListener:
        place = f"gradwire-{secrets.token_hex(16)}"
        sock = socket.socket(socket.AF_UNIX)
        sock.bind("\0" + place)
        sock.listen(BACKLOG)
        return UnixListener(sock, Address(self.name, place), self, me, poller, accepted)

    def connect(self, place: str, me: Greeting, them: Greeting, timeout: float) -> UnixConnection:
        with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as always:
            sock = on_failure.enter_context(socket.socket(socket.AF_UNIX))
            channel, their_channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            on_failure.enter_context(channel)
            always.enter_context(their_channel)
            ends, their_ends = make_pipes()
            for descriptor in their_ends:
                always.callback(os.close, descriptor)
            pipes = Pipes(sock, ends)
            on_failure.callback(pipes.close)
            probe = os.memfd_create("gradwire-probe", os.MFD_CLOEXEC)
            always.callback(os.close, probe)
            os.ftruncate(probe, _PROBE_SIZE)
            sock.settimeout(timeout)
            _wait_for_room(sock, "\0" + place, timeout)
            passed = (their_channel.fileno(), probe, *their_ends)
            shake_hands(sock, self.token, me, them.incarnation, passed)
            if os.pread(probe, len(_PROBE_TEXT), 0) != _PROBE_TEXT:
                raise OSError(f"worker {them.name!r} and this process cannot share memory")
            on_failure.pop_all()
            return UnixConnection(pipes, channel, them, self)


def _wait_for_room(sock: socket.socket, address: str, timeout: float) -> None:
    """Connect a socket. If the listener has no room for more clients, wait for it: the system does
    not wait, if the socket has a timeout."""
    deadline = time.monotonic() + timeout
    pause = 0.0005
    while True:
        try:
            sock.connect(address)
            return
        except BlockingIOError:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("too many clients wait to be accepted there") from None
            time.sleep(min(pause, left))
            pause = min(2 * pause, 0.05)


class UnixConnection(StreamConnection):
    """Sends small frames through pipes, and large tensors and large heads through shared memory."""

    #: Whether the poller has reported that the peer closed the connection. The leader ignores such
    #: a report if another thread is reading the connection, and the poller reports only once. So
    #: if this attribute is True, `arm` and `disarm` ask the poller for another report.
    _hangup_reported = False

    def __init__(
        self,
        pipes: Pipes,
        channel: socket.socket,
        peer: Greeting,
        transport: UnixTransport,
    ):
        pipes.sock.setblocking(False)
        channel.setblocking(False)
        self._pipes = pipes
        self._channel = channel
        self._segment_bytes = transport.segment_bytes
        self._sender = SegmentSender(channel)
        self._receiver = SegmentReceiver(channel)
        super().__init__(pipes, peer, transport.max_bytes, transport.stall_limit)

    def _register(self, readable: select.poll, writable: select.poll) -> None:
        readable.register(self._pipes.incoming, select.POLLIN)
        writable.register(self._pipes.outgoing, select.POLLOUT)
        for poll in (readable, writable):
            # After the handshake, this socket carries no data: it only shows that the peer has
            # closed the connection. With the event mask 0, the poll objects report nothing else.
            poll.register(self._pipes.sock, 0)

    def attach(self, poller: Poller, callback: Callable[[], None]) -> None:
        def on_hangup() -> None:
            self._hangup_reported = True
            callback()

        with self._poller_lock:
            super().attach(poller, callback)
            if not self._closed:
                poller.add(self._pipes.sock.fileno(), on_hangup)

    def arm(self) -> None:
        super().arm()
        if self._hangup_reported:
            self._watch_for_hangup()

    def disarm(self) -> None:
        super().disarm()
        if self._hangup_reported:
            self._watch_for_hangup()

    def _watch_for_hangup(self) -> None:
        with self._poller_lock:
            self._hangup_reported = False
            if self._poller is not None and not self._closed:
                self._poller.disarm(self._pipes.sock.fileno())

    def abandon(self) -> None:
        super().abandon()
        self._channel.close()

    def _detach(self, poller: Poller) -> None:
        super()._detach(poller)
        poller.remove(self._pipes.sock.fileno())

    def _make_reader(self, max_bytes: int) -> FrameReader:
        return FrameReader(max_bytes, self._receiver.get, self._receiver.unmap)

    def _put_in_segment(self, buffer: Tensor, size: int) -> int:
        return self._sender.put(buffer) if size >= self._segment_bytes else 0

    def _put_pieces_in_segment(self, pieces: Sequence[Bytes], size: int) -> int:
        return self._sender.put_pieces(pieces, size) if size >= self._segment_bytes else 0

    def _take_retired(self) -> list[int]:
        return self._sender.take_retired()

    def trim(self) -> None:
        super().trim()
        self._sender.trim()
        # Tell the peer now which segments this side has retired (will not use again), if that does
        # not block. Otherwise the next frame with buffers will tell the peer.
        if not self._sender.has_retired or not self._write_lock.acquire(False):
            return
        try:
            if not self._closed and self._wait_writable(0):
                entries = [(RETIRED, segment) for segment in self._sender.take_retired()]
                # If another thread has just sent the notices about retired segments together with a
                # frame, nothing is left to send here.
                if entries:
                    self._write([pack_prefix(0, entries)], None)
        except ConnectionClosed:
            # The thread that reads this connection will notice that it is closed, and will fail the
            # calls that have not been answered yet.
            pass
        finally:
            self._end_writing()

    def _release(self) -> None:
        super()._release()
        # Another thread may be about to send a new segment through the channel. So close the sender
        # of segments before the channel: a closed sender makes no new segments.
        self._sender.close()
        self._receiver.close()
        self._channel.close()


class UnixListener(StreamListener):
    """Accepts the connections that other workers open to this worker."""

    def __init__(
        self,
        sock: socket.socket,
        address: Address,
        transport: UnixTransport,
        me: Greeting,
        poller: Poller,
        accepted: Callable[[Connection], None],
    ):
        self._transport = transport
        super().__init__(sock, address, transport.token, me, poller, accepted)

    def read_handshake(self, sock: socket.socket, size: int) -> tuple[bytes, list[int]]:
        data, descriptors, _, _ = socket.recv_fds(sock, size, MAX_DESCRIPTORS)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        return data, descriptors

    def make_connection(
        self, sock: socket.socket, peer: Greeting, descriptors: list[int]
    ) -> UnixConnection:
        try:
            if len(descriptors) != MAX_DESCRIPTORS:
                raise AuthenticationError("the client sent too few descriptors")
            _, probe, incoming, outgoing = descriptors
            with mmap.mmap(probe, _PROBE_SIZE) as memory:
                memory[: len(_PROBE_TEXT)] = _PROBE_TEXT
            check_pipe_ends(incoming, outgoing)
            channel = socket.socket(fileno=descriptors[0])
            descriptors = [probe]
            return UnixConnection(Pipes(sock, (incoming, outgoing)), channel, peer, self._transport)
        finally:
            for descriptor in descriptors:
                close_quietly(descriptor)
