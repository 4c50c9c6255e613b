"""The two sides of setting up a connection over a socket: shaking hands, and listening.

Whoever connects is a guest until it has proven that it belongs to the group. All of that happens
in callbacks of the poller; no thread waits for a stranger.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable

from gradwire.errors import AuthenticationError
from gradwire.transport.base import Address, Connection, Greeting
from gradwire.transport.handshake import SECOND, WELCOME, ClientHandshake, ServerHandshake
from gradwire.transport.poller import Poller

logger = logging.getLogger("gradwire")

#: Strangers have this long to prove that they belong here, and so many of them may try at once.
GUEST_SECONDS = 10.0
MAX_GUESTS = 128
#: What the connecting side of any transport sends along with its proof.
MAX_DESCRIPTORS = 4


def shake_hands(
    sock: socket.socket, token: bytes, me: Greeting, them: str, descriptors: tuple[int, ...] = ()
) -> None:
    """The connecting side of the handshake, on a socket that has a timeout. The descriptors go
    along with the last message."""
    handshake = ClientHandshake(token, me, them)
    sock.sendall(handshake.first())
    third = handshake.third(_read_exactly(sock, SECOND))
    if descriptors:
        sent = socket.send_fds(sock, [third], list(descriptors))
        sock.sendall(third[sent:])
    else:
        sock.sendall(third)
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


class _Guest:
    """Someone who has connected and has proven nothing yet."""

    def __init__(self, sock: socket.socket, listener: StreamListener):
        self.sock = sock
        self.since = time.monotonic()
        self._listener = listener
        self._handshake = ServerHandshake(listener.token, listener.me.incarnation)
        self._data = b""
        self._descriptors: list[int] = []

    def on_readable(self) -> None:
        try:
            self._read()
        except (OSError, ValueError, AuthenticationError):
            self._listener.dismiss(self)

    def _read(self) -> None:
        handshake = self._handshake
        try:
            # Descriptors come along with ordinary bytes, so look for them in every read.
            wanted = handshake.needed - len(self._data)
            data, descriptors = self._listener.read_guest(self.sock, wanted)
        except BlockingIOError:
            self._listener.poller.arm(self.sock.fileno())
            return
        self._descriptors.extend(descriptors)
        if len(self._descriptors) > MAX_DESCRIPTORS:
            raise ConnectionError("a stranger must not fill this process with descriptors")
        if not data:
            raise ConnectionError("gone before the handshake was done")
        self._data += data
        if len(self._data) == handshake.needed:
            answer = handshake.feed(self._data)
            self._data = b""
            if handshake.greeting is not None:
                self._listener.admit(self, handshake.greeting, self.take_descriptors(), answer)
                return
            if answer:
                self.sock.send(answer)  # a few bytes: an empty send buffer takes them whole
        self._listener.poller.arm(self.sock.fileno())

    def take_descriptors(self) -> list[int]:
        descriptors, self._descriptors = self._descriptors, []
        return descriptors


class StreamListener:
    """Accepts connections on a listening socket and hands on those that prove themselves."""

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
        self._guests: dict[_Guest, None] = {}  # oldest first
        self._lock = threading.Lock()
        self._closed = False
        #: Nobody can be accepted: there are no descriptors. Looked at again by `trim`.
        self._short = False
        sock.setblocking(False)
        poller.add(sock.fileno(), self._on_readable)
        poller.arm(sock.fileno())

    def _on_readable(self) -> None:
        welcomed = False
        try:
            while not self._closed:
                sock, _ = self._sock.accept()
                self._short = False
                self._welcome(sock)
                welcomed = True
        except (BlockingIOError, ConnectionError):
            pass
        except OSError as error:
            # Out of descriptors. (The system says so before it looks whether anybody is at the
            # door, so it means nothing once one was welcomed.) Strangers give way first. If there
            # are none, listening on would only tell the same again and again: `trim` does it.
            if not welcomed and not self._dismiss_older_than(0.0):
                self._note_shortage(error)
                return
        if not self._closed:
            self.poller.arm(self._sock.fileno())

    def _note_shortage(self, error: OSError) -> None:
        if not self._short and not self._closed:
            logger.warning(
                "worker %s cannot accept connections: %s. It tries again now and then",
                self.me.name,
                error,
            )
        self._short = True

    def _welcome(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        guest = _Guest(sock, self)
        with self._lock:
            if self._closed:
                sock.close()
                return
            crowd = len(self._guests) >= MAX_GUESTS
            oldest = next(iter(self._guests)) if crowd else None
            self._guests[guest] = None
            self.poller.add(sock.fileno(), guest.on_readable)
        if oldest is not None:
            self.dismiss(oldest)
        self.poller.arm(sock.fileno())

    def read_guest(self, sock: socket.socket, size: int) -> tuple[bytes, list[int]]:
        return sock.recv(size), []

    def make_connection(
        self, sock: socket.socket, peer: Greeting, descriptors: list[int]
    ) -> Connection:
        raise NotImplementedError

    def admit(
        self, guest: _Guest, greeting: Greeting, descriptors: list[int], answer: bytes
    ) -> None:
        """A guest has proven to be one of the group."""
        if not self._let_go(guest):
            for descriptor in descriptors:
                close_quietly(descriptor)
            return
        try:
            connection = self.make_connection(guest.sock, greeting, descriptors)
        except BaseException:
            guest.sock.close()
            raise
        try:
            guest.sock.send(answer)
        except OSError:
            connection.close()  # it left just now
            return
        self._accepted(connection)

    def dismiss(self, guest: _Guest) -> None:
        if self._let_go(guest):
            for descriptor in guest.take_descriptors():
                close_quietly(descriptor)
            guest.sock.close()

    def _let_go(self, guest: _Guest) -> bool:
        """Whether the guest was still one; then the caller decides what becomes of it."""
        with self._lock:
            if guest not in self._guests:
                return False
            del self._guests[guest]
            self.poller.remove(guest.sock.fileno())
            return True

    def trim(self, patience: float = GUEST_SECONDS) -> None:
        """Dismiss the guests that have been silent for too long. After a shortage, try again."""
        self._dismiss_older_than(patience)
        with self._lock:
            if self._short and not self._closed:
                self.poller.arm(self._sock.fileno())

    def _dismiss_older_than(self, patience: float) -> bool:
        """Whether there were any guests to dismiss."""
        limit = time.monotonic() - patience
        with self._lock:
            late = [guest for guest in self._guests if guest.since <= limit]
        for guest in late:
            self.dismiss(guest)
        return bool(late)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            guests = list(self._guests)
        for guest in guests:
            self.dismiss(guest)
        self.poller.remove(self._sock.fileno())
        self._sock.close()

    def abandon(self) -> None:
        self._closed = True
        for guest in list(self._guests):
            for descriptor in guest.take_descriptors():
                close_quietly(descriptor)
            guest.sock.close()
        self._sock.close()


def close_quietly(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.close(descriptor)
