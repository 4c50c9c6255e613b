"""Setting up connections over sockets: the client's handshake, and listening.

A client that has connected is a *pending handshake* until it has proven that it belongs to the
group. The listener runs all pending handshakes in callbacks of the poller, so no thread waits for a
client that is slow or malicious.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable

from gradwire._core.transport.base import Address, Connection, Greeting
from gradwire._core.transport.handshake import (
    CHALLENGE_SIZE,
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
#: How many file descriptors a client may send along with its proof.
MAX_DESCRIPTORS = 4


def shake_hands(
    sock: socket.socket,
    token: bytes,
    me: Greeting,
    server_incarnation: str,
    descriptors: tuple[int, ...] = (),
) -> None:
    """Run the client's side of the handshake, on a socket that has a timeout. The client's last
    message passes the file descriptors in `descriptors` to the server."""
    handshake = ClientHandshake(token, me, server_incarnation)
    sock.sendall(handshake.hello())
    response = handshake.response(_read_exactly(sock, CHALLENGE_SIZE))
    if descriptors:
        sent = socket.send_fds(sock, [response], list(descriptors))
        sock.sendall(response[sent:])
    else:
        sock.sendall(response)
    _read_exactly(sock, len(WELCOME))


def _read_exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
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
        self._descriptors: list[int] = []

    def on_readable(self) -> None:
        try:
            self._read()
        except (OSError, ValueError, AuthenticationError):
            self._listener.reject(self)

    def _read(self) -> None:
        handshake = self._handshake
        try:
            # Any read may return file descriptors, because they arrive attached to ordinary bytes.
            missing = handshake.needed - len(self._data)
            data, descriptors = self._listener.read_handshake(self.sock, missing)
        except BlockingIOError:
            self._listener.poller.arm(self.sock.fileno())
            return
        self._descriptors.extend(descriptors)
        if len(self._descriptors) > MAX_DESCRIPTORS:
            raise ConnectionError("the client sent more descriptors than a handshake has")
        if not data:
            raise ConnectionError("the client closed the connection during the handshake")
        self._data += data
        if len(self._data) == handshake.needed:
            answer = handshake.feed(self._data)
            self._data = b""
            if handshake.greeting is not None:
                self._listener.complete(self, handshake.greeting, self.take_descriptors(), answer)
                return
            if answer:
                # One call sends all bytes, because the send buffer is empty.
                self.sock.send(answer)
        self._listener.poller.arm(self.sock.fileno())

    def take_descriptors(self) -> list[int]:
        """Return the file descriptors received so far. The caller must close them."""
        descriptors, self._descriptors = self._descriptors, []
        return descriptors


class StreamListener:
    """Accepts clients on a listening socket, and reports a connection after each handshake."""

    def __init__(
        self,
        sock: socket.socket,
        address: Address,
        token: bytes,
        me: Greeting,
        poller: Poller,
        accepted: Callable[[Connection], None],
    ):
        self.address = address
        self.token = token
        self.me = me
        self.poller = poller
        self._accepted = accepted
        self._sock = sock
        #: The pending handshakes, oldest first. The dictionary is used as an ordered set.
        self._pending: dict[PendingHandshake, None] = {}
        self._lock = threading.Lock()
        self._closed = False
        #: True if the process has no free file descriptors. The poller then does not watch the
        #: listening socket until the next `trim`.
        self._out_of_descriptors = False
        sock.setblocking(False)
        poller.add(sock.fileno(), self._on_readable)
        poller.arm(sock.fileno())

    def _on_readable(self) -> None:
        has_accepted = False
        try:
            while not self._closed:
                sock, _ = self._sock.accept()
                self._out_of_descriptors = False
                self._start_handshake(sock)
                has_accepted = True
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
                self._pause(error)
                return
        if not self._closed:
            self.poller.arm(self._sock.fileno())

    def _pause(self, error: OSError) -> None:
        if not self._out_of_descriptors and not self._closed:
            logger.warning(
                "worker %s cannot accept connections: %s. It will try again at every heartbeat",
                self.me.name,
                error,
            )
        self._out_of_descriptors = True

    def _start_handshake(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        pending = PendingHandshake(sock, self)
        with self._lock:
            if self._closed:
                sock.close()
                return
            is_full = len(self._pending) >= MAX_PENDING
            oldest = next(iter(self._pending)) if is_full else None
            self._pending[pending] = None
            self.poller.add(sock.fileno(), pending.on_readable)
        if oldest is not None:
            self.reject(oldest)
        self.poller.arm(sock.fileno())

    def read_handshake(self, sock: socket.socket, size: int) -> tuple[bytes, list[int]]:
        """Return up to `size` bytes from a client, and the file descriptors that the client sent
        along with these bytes."""
        return sock.recv(size), []

    def make_connection(
        self, sock: socket.socket, peer: Greeting, descriptors: list[int]
    ) -> Connection:
        """Make the connection to a client that has completed its handshake."""
        raise NotImplementedError

    def complete(
        self, pending: PendingHandshake, greeting: Greeting, descriptors: list[int], answer: bytes
    ) -> None:
        """Accept a client that has proven that it belongs to the group."""
        if not self._remove(pending):
            for descriptor in descriptors:
                close_quietly(descriptor)
            return
        try:
            connection = self.make_connection(pending.sock, greeting, descriptors)
        except BaseException:
            pending.sock.close()
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
            for descriptor in pending.take_descriptors():
                close_quietly(descriptor)
            pending.sock.close()

    def _remove(self, pending: PendingHandshake) -> bool:
        """Remove a pending handshake. Return False if another thread has already removed it. If
        this returns True, the caller must use or close the client's socket."""
        with self._lock:
            if pending not in self._pending:
                return False
            del self._pending[pending]
            self.poller.remove(pending.sock.fileno())
            return True

    def trim(self, limit: float = HANDSHAKE_SECONDS) -> None:
        """Reject the handshakes that have been pending for more than `limit` seconds. If accepting
        stopped because file descriptors ran out, start to accept again."""
        self._reject_older_than(limit)
        with self._lock:
            if self._out_of_descriptors and not self._closed:
                self.poller.arm(self._sock.fileno())

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
        self._sock.close()

    def abandon(self) -> None:
        self._closed = True
        for pending in list(self._pending):
            for descriptor in pending.take_descriptors():
                close_quietly(descriptor)
            pending.sock.close()
        self._sock.close()


def close_quietly(descriptor: int) -> None:
    """Close a file descriptor. Ignore errors: the descriptor may be closed already."""
    with contextlib.suppress(OSError):
        os.close(descriptor)
