"""The transport between processes of one Linux machine: pipes, and shared memory for large tensors.

The listener's socket has a random name in Linux's abstract namespace. So it leaves no file behind,
and processes in another network namespace, such as a container, cannot reach it. To find out
whether a peer is on the same machine, a client just connects. If that fails, the client tries the
next transport.

File permissions do not apply to such a name, so processes of all users can connect. Therefore each
side first asks the system which user the other process belongs to. It refuses other users, unless
the option `allow_other_users` is set.

After the handshake, when both sides have proven that they belong to the group, the client sends
four file descriptors, and the listener answers READY. The client must not send descriptors earlier;
the module `strangers` explains why. The client sends:

- one end of a socket pair, the *channel*, over which both sides pass the file descriptors of
  segments, the pieces of shared memory that carry large tensors;
- a *probe*, a piece of memory into which the listener writes a fixed text. If the client can read
  the text there, the two processes can share memory;
- the listener's ends of two pipes.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from gradwire._core.transport.base import AT_ONCE, Address, CallLater, Connection, Greeting
from gradwire._core.transport.framing import RETIRED, Entry, FrameReader, pack_prefix
from gradwire._core.transport.handshake import READY
from gradwire._core.transport.listener import (
    BACKLOG,
    StreamListener,
    close_quietly,
    read_exactly,
    set_deadline,
    shake_hands,
)
from gradwire._core.transport.pipes import Pipes, check_pipe_ends, make_pipes
from gradwire._core.transport.poller import Poller
from gradwire._core.transport.shared_memory import SEGMENT_BYTES, SegmentReceiver, SegmentSender
from gradwire._core.transport.strangers import (
    SocketCloser,
    prepare,
    receive,
    take_descriptors,
    user_of_peer,
)
from gradwire._core.transport.stream import StreamConnection
from gradwire._core.wire.frames import Bytes
from gradwire.errors import AuthenticationError, ConnectionClosed, SendTimeout

logger = logging.getLogger("gradwire")

#: How many file descriptors a client sends after its handshake.
_DESCRIPTORS = 4
_PROBE_SIZE = 4096
_PROBE_TEXT = b"gradwire shares this memory"


@dataclass(frozen=True)
class UnixTransport:
    """Connects processes of one Linux machine. Each listener has a random name, which nobody can
    guess."""

    token: bytes = field(repr=False)
    max_bytes: int = 1 << 40
    stall_limit: float = 30.0
    segment_bytes: int = SEGMENT_BYTES
    allow_other_users: bool = False
    name: str = "unix"
    #: Closes sockets without blocking the calling thread. A plain `close` may block if the process
    #: at the other end is a stranger, one that does not know the group's token.
    closer: SocketCloser = field(
        default_factory=SocketCloser, init=False, repr=False, compare=False
    )

    def listen(
        self,
        me: Greeting,
        poller: Poller,
        accepted: Callable[[Connection], None],
        call_later: CallLater,
    ) -> UnixListener:
        place = f"gradwire-{secrets.token_hex(16)}"
        sock = socket.socket(socket.AF_UNIX)
        take_descriptors(sock, False)
        sock.bind("\0" + place)
        sock.listen(BACKLOG)
        address = Address(self.name, place)
        return UnixListener(sock, address, self, me, poller, accepted, call_later)

    def connect(self, place: str, me: Greeting, them: Greeting, timeout: float) -> UnixConnection:
        deadline = time.monotonic() + timeout
        with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as always:
            sock = socket.socket(socket.AF_UNIX)
            on_failure.callback(self.closer.close, sock)
            prepare(sock)
            # The listener never sends descriptors over this socket, only over the channel.
            take_descriptors(sock, False)
            channel, their_channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            on_failure.enter_context(channel)
            always.enter_context(their_channel)
            ends, their_ends = make_pipes()
            for descriptor in their_ends:
                always.callback(os.close, descriptor)
            pipes = Pipes(sock, ends)
            on_failure.callback(pipes.close_ends)
            probe = os.memfd_create("gradwire-probe", os.MFD_CLOEXEC)
            always.callback(os.close, probe)
            os.ftruncate(probe, _PROBE_SIZE)
            set_deadline(sock, deadline)
            _wait_for_room(sock, "\0" + place, deadline)
            if not self.admits(user := user_of_peer(sock)):
                raise AuthenticationError(
                    f"the process that listens there belongs to user {user}, and this process "
                    f"belongs to user {os.geteuid()}. To connect them over the transport unix, set "
                    "the option allow_other_users on both workers"
                )
            shake_hands(sock, self.token, me, them.incarnation, deadline, receive)
            passed = [their_channel.fileno(), probe, *their_ends]
            socket.send_fds(sock, [READY], passed)
            read_exactly(sock, len(READY), deadline)
            if os.pread(probe, len(_PROBE_TEXT), 0) != _PROBE_TEXT:
                raise OSError(f"worker {them.name!r} and this process cannot share memory")
            on_failure.pop_all()
            return UnixConnection(pipes, channel, them, self)

    def admits(self, user: int) -> bool:
        """Return whether this worker may be connected with the processes of a user."""
        return self.allow_other_users or user == os.geteuid()


def _wait_for_room(sock: socket.socket, address: str, deadline: float) -> None:
    """Connect a socket. If the listener's queue of new clients is full, try again until the queue
    has room. The system itself waits for room only if the socket has no timeout."""
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

    def _take_back(self, entries: Sequence[Entry]) -> None:
        for length, segment in entries:
            if length == RETIRED:
                self._sender.retire(segment)
            elif segment:
                self._sender.free(segment)

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
                    self._tell_retired(entries)
        except ConnectionClosed:
            # The thread that reads this connection will notice that it is closed, and will fail the
            # calls that have not been answered yet.
            pass
        finally:
            self._end_writing()

    def _tell_retired(self, entries: Sequence[Entry]) -> None:
        """Tell the peer which segments this side has retired, that is, will not use again. Do not
        wait, because the thread that calls `trim` has other connections to look after."""
        try:
            self._write([pack_prefix(0, entries)], None, AT_ONCE)
        except SendTimeout as timeout:
            if timeout.withdrawn:
                self._take_back(entries)
            raise

    def _release(self) -> None:
        super()._release()
        # Another thread may be about to send a new segment through the channel. So close the sender
        # of segments before the channel: a closed sender makes no new segments.
        self._sender.close()
        self._receiver.close()
        self._channel.close()


class UnixListener(StreamListener):
    """Accepts the connections that other workers open to this worker."""

    takes_descriptors = True

    def __init__(
        self,
        sock: socket.socket,
        address: Address,
        transport: UnixTransport,
        me: Greeting,
        poller: Poller,
        accepted: Callable[[Connection], None],
        call_later: CallLater,
    ):
        self._transport = transport
        #: The ids of the users whose processes this listener has refused. For each such user, it
        #: logs only one warning.
        self._refused: set[int] = set()
        super().__init__(sock, address, transport.token, me, poller, accepted, call_later)

    def has_room(self) -> bool:
        return not self._transport.closer.is_full

    def admits(self, sock: socket.socket) -> bool:
        prepare(sock)
        user = user_of_peer(sock)
        if self._transport.admits(user):
            return True
        if user not in self._refused:
            self._refused.add(user)
            logger.warning(
                "worker %s refuses processes of user %d, who is not the user of this worker. "
                "Workers of that user can connect over tcp, or set the option allow_other_users",
                self.me.name,
                user,
            )
        self.disconnect(sock)
        return False

    def receive(self, sock: socket.socket, size: int) -> bytes:
        return receive(sock, size)

    def allow_descriptors(self, sock: socket.socket) -> None:
        take_descriptors(sock, True)

    def disconnect(self, sock: socket.socket) -> None:
        self._transport.closer.close(sock)

    def _stop_listening(self, sock: socket.socket) -> None:
        self._transport.closer.close_listening(sock)
        self._transport.closer.finish()

    def abandon(self) -> None:
        super().abandon()
        self._transport.closer.abandon()

    def make_connection(self, sock: socket.socket, peer: Greeting) -> UnixConnection:
        _, descriptors, _, _ = socket.recv_fds(sock, len(READY), _DESCRIPTORS)
        try:
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
            if len(descriptors) != _DESCRIPTORS:
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
