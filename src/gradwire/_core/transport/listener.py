"""Setting up connections over sockets: the client's handshake, and listening.

A client that has connected is a *pending handshake* until it has proven that it belongs to the
group. The listener runs all pending handshakes in callbacks of the poller, so no thread waits for a
client that is slow or malicious.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable

from gradwire._core.transport.base import Address, CallLater, Connection, Greeting
from gradwire._core.transport.handshake import (
    CHALLENGE_SIZE,
    READY,
    WELCOME,
    ClientHandshake,
    ServerHandshake,
)
from gradwire._core.transport.poller import Poller
from gradwire.errors import AuthenticationError

logger = logging.getLogger("gradwire")

#: How many clients may wait to be accepted. The system lowers this to its own limit, on Linux
#: net.core.somaxconn.
BACKLOG = 65535
#: How long a client may take for its handshake.
HANDSHAKE_SECONDS = 10.0
#: How many handshakes may be pending. If one more client connects, the client whose handshake has
#: been pending longest is rejected.
MAX_PENDING = 128
#: After this many seconds, a listener that could not accept clients tries again.
RETRY_SECONDS = 1.0
#: A listener that cannot accept clients warns at most once in this many seconds.
WARNING_SECONDS = 60.0

#: The type of a function `receive(sock, size)`, which returns up to `size` bytes from a socket.
Receive = Callable[[socket.socket, int], bytes]


def shake_hands(
    sock: socket.socket,
    token: bytes,
    me: Greeting,
    server_incarnation: str,
    deadline: float,
    receive: Receive = socket.socket.recv,
) -> None:
    """Run the client's side of the handshake. Raise TimeoutError if the server has not completed
    its side by `deadline`, a time of `time.monotonic`. The function `receive` reads from the
    socket."""
    handshake = ClientHandshake(token, me, server_incarnation)
    set_deadline(sock, deadline)
    # The messages of the client fit into the empty buffer of the socket, so no send waits.
    sock.sendall(handshake.hello())
    sock.sendall(handshake.response(read_exactly(sock, CHALLENGE_SIZE, deadline, receive)))
    read_exactly(sock, len(WELCOME), deadline, receive)


def set_deadline(sock: socket.socket, deadline: float) -> None:
    """Let the next operation on a socket end at the deadline."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    sock.settimeout(left)


def read_exactly(
    sock: socket.socket, size: int, deadline: float, receive: Receive = socket.socket.recv
) -> bytes:
    """Read `size` bytes from the server, with the function `receive`. Raise TimeoutError if they
    have not arrived by the deadline."""
    data = b""
    while len(data) < size:
        set_deadline(sock, deadline)
        piece = receive(sock, size - len(data))
        if not piece:
            raise AuthenticationError(
                "the other side ended the handshake: it has another token, or it is not a worker"
            )
        data += piece
    return data


class PendingHandshake:
    """A client that has connected and has not yet proven that it belongs to the group."""

    def __init__(self, sock: socket.socket, listener: StreamListener):
        self.sock = sock
        self.started = time.monotonic()
        self._listener = listener
        self._handshake = ServerHandshake(listener.token, listener.me.incarnation)
        self._data = b""

    def on_readable(self) -> None:
        try:
            if self._handshake.greeting is None:
                self._read()
            else:
                self._listener.complete(self, self._handshake.greeting, READY)
        except BlockingIOError:
            self._listener.poller.arm(self.sock.fileno())
        except (OSError, ValueError, AuthenticationError):
            self._listener.reject(self)

    def _read(self) -> None:
        handshake = self._handshake
        data = self._listener.receive(self.sock, handshake.needed - len(self._data))
        if not data:
            raise ConnectionError("the client closed the connection during the handshake")
        self._data += data
        if len(self._data) == handshake.needed:
            answer = handshake.feed(self._data)
            self._data = b""
            if handshake.greeting is not None:
                if not self._listener.takes_descriptors:
                    self._listener.complete(self, handshake.greeting, answer)
                    return
                self._listener.allow_descriptors(self.sock)
            if answer:
                # One call sends all bytes, because the send buffer is empty.
                self.sock.send(answer)
        self._listener.poller.arm(self.sock.fileno())


class StreamListener:
    """Accepts clients on a listening socket, and reports a connection after each handshake."""

    #: Whether a client sends file descriptors after its handshake. `make_connection` takes them.
    takes_descriptors = False

    def __init__(
        self,
        sock: socket.socket,
        address: Address,
        token: bytes,
        me: Greeting,
        poller: Poller,
        accepted: Callable[[Connection], None],
        call_later: CallLater,
    ):
        self.address = address
        self.token = token
        self.me = me
        self.poller = poller
        self._accepted = accepted
        self._call_later = call_later
        self._sock = sock
        #: The pending handshakes, oldest first. The dictionary is used as an ordered set.
        self._pending: dict[PendingHandshake, None] = {}
        self._lock = threading.Lock()
        self._closed = False
        #: Whether a call of `_reject_late` is scheduled.
        self._has_timer = False
        #: Before this time of `time.monotonic`, `_pause` logs no further warning.
        self._next_warning = -math.inf
        sock.setblocking(False)
        poller.add(sock.fileno(), self._on_readable)
        poller.arm(sock.fileno())

    def _on_readable(self) -> None:
        has_accepted = False
        try:
            while not self._closed:
                if not self.has_room():
                    self._pause("too many rejected clients are still being disconnected")
                    return
                sock, _ = self._sock.accept()
                has_accepted = True
                if self.admits(sock):
                    self._start_handshake(sock)
        except (BlockingIOError, ConnectionError):
            pass
        except OSError as error:
            # The process has no free file descriptors. `accept` then fails with this error whether
            # or not a client is waiting. If the loop above has accepted a client, perhaps no other
            # client is waiting, so ignore the error. If the loop has accepted no client, one is
            # waiting, so reject all pending handshakes to free their descriptors. If no handshake
            # is pending, stop watching the listening socket. Otherwise the poller would report the
            # waiting client again and again.
            if not has_accepted and not self._reject_older_than(0.0):
                self._pause(str(error))
                return
        if not self._closed:
            self.poller.arm(self._sock.fileno())

    def _pause(self, reason: str) -> None:
        """Accept no clients for RETRY_SECONDS. The poller does not watch the listening socket."""
        now = time.monotonic()
        if now >= self._next_warning and not self._closed:
            self._next_warning = now + WARNING_SECONDS
            logger.warning(
                "worker %s cannot accept connections: %s. It will try again every second",
                self.me.name,
                reason,
            )
        self._call_later(RETRY_SECONDS, self._resume)

    def _resume(self) -> None:
        with self._lock:
            if not self._closed:
                self.poller.arm(self._sock.fileno())

    def has_room(self) -> bool:
        """Return whether one more client may be accepted."""
        return True

    def admits(self, sock: socket.socket) -> bool:  # noqa: ARG002
        """Return whether a client that has connected may begin its handshake. If not, this method
        disconnects the client."""
        return True

    def _start_handshake(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        pending = PendingHandshake(sock, self)
        with self._lock:
            if self._closed:
                self.disconnect(sock)
                return
            is_full = len(self._pending) >= MAX_PENDING
            oldest = next(iter(self._pending)) if is_full else None
            self._pending[pending] = None
            self.poller.add(sock.fileno(), pending.on_readable)
            needs_timer, self._has_timer = not self._has_timer, True
        if oldest is not None:
            self.reject(oldest)
        self.poller.arm(sock.fileno())
        if needs_timer:
            self._call_later(HANDSHAKE_SECONDS, self._reject_late)

    def receive(self, sock: socket.socket, size: int) -> bytes:
        """Return up to `size` bytes from a client that may be a stranger."""
        return sock.recv(size)

    def allow_descriptors(self, sock: socket.socket) -> None:
        """Let a client that has proven that it belongs to the group send file descriptors."""

    def disconnect(self, sock: socket.socket) -> None:
        """Close the socket of a client that may be a stranger. Do not wait."""
        sock.close()

    def make_connection(self, sock: socket.socket, peer: Greeting) -> Connection:
        """Make the connection to a client that has completed its handshake."""
        raise NotImplementedError

    def complete(self, pending: PendingHandshake, greeting: Greeting, answer: bytes) -> None:
        """Accept a client that has proven that it belongs to the group."""
        if not self._remove(pending):
            return
        try:
            connection = self.make_connection(pending.sock, greeting)
        except BaseException:
            self.disconnect(pending.sock)
            raise
        try:
            pending.sock.send(answer)
        except OSError:
            # The client has disconnected in the meantime.
            connection.close()
            return
        self._accepted(connection)

    def reject(self, pending: PendingHandshake) -> None:
        """Disconnect a client that has not completed its handshake."""
        if self._remove(pending):
            self.disconnect(pending.sock)

    def _remove(self, pending: PendingHandshake) -> bool:
        """Remove a pending handshake. Return False if another thread has already removed it. If
        this returns True, the caller must use or close the client's socket."""
        with self._lock:
            if pending not in self._pending:
                return False
            del self._pending[pending]
            self.poller.remove(pending.sock.fileno())
            return True

    def _reject_late(self) -> None:
        """Reject the clients that take too long. If other clients are pending, schedule the next
        call of this method."""
        self._reject_older_than(HANDSHAKE_SECONDS)
        with self._lock:
            oldest = next(iter(self._pending), None)
            self._has_timer = oldest is not None
        if oldest is not None:
            left = oldest.started + HANDSHAKE_SECONDS - time.monotonic()
            self._call_later(max(0.0, left), self._reject_late)

    def _reject_older_than(self, limit: float) -> bool:
        """Reject the handshakes that have been pending for `limit` seconds or more. Return whether
        there were any."""
        latest_start = time.monotonic() - limit
        with self._lock:
            late = [pending for pending in self._pending if pending.started <= latest_start]
        for pending in late:
            self.reject(pending)
        return bool(late)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            all_pending = list(self._pending)
        for pending in all_pending:
            self.reject(pending)
        self.poller.remove(self._sock.fileno())
        self._stop_listening(self._sock)

    def _stop_listening(self, sock: socket.socket) -> None:
        """Close the listening socket."""
        sock.close()

    def abandon(self) -> None:
        self._closed = True
        for pending in list(self._pending):
            pending.sock.close()
        self._sock.close()


def close_quietly(descriptor: int) -> None:
    """Close a file descriptor. Ignore errors: the descriptor may be closed already."""
    with contextlib.suppress(OSError):
        os.close(descriptor)
