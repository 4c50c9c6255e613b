"""Unix sockets whose other end may be a stranger, a process that does not know the group's token.

A stranger can attach file descriptors to the bytes that it sends. If this process does not take the
descriptors, the kernel closes them: when a thread reads the bytes, or when a thread closes the
socket without having read the bytes. This can block the thread for as long as the stranger likes,
for example if a descriptor is a socket with SO_LINGER and unsent bytes.

Since Linux 6.16, a socket can refuse descriptors: the stranger's send then fails. This module sets
the option for that, SO_PASSRIGHTS. Older kernels do not know it. For them, this module

- reads only bytes without descriptors. It looks at the bytes first, with MSG_PEEK, which leaves the
  descriptors where they are;
- starts a separate thread to close a socket that still has unread bytes.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
from collections import deque
from contextlib import suppress

from gradwire.errors import AuthenticationError

#: The socket option SO_PASSRIGHTS of Linux 6.16. Python's `socket` module has no name for it.
PASSRIGHTS = 83
#: The process id, user id and group id that SO_PEERCRED returns.
_CREDENTIALS = struct.Struct("iII")
#: A worker that ends waits at most this long for sockets that are being closed.
_LAST_CLOSE_SECONDS = 1.0
#: If this many sockets wait to be closed, a listener accepts no more clients.
MAX_WAITING = 128


def prepare(sock: socket.socket) -> None:
    """Set up a socket before anything is read from it."""
    # Without this option, a read discards an urgent byte (MSG_OOB) that MSG_PEEK does not show.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)


def take_descriptors(sock: socket.socket, allowed: bool) -> None:
    """Set whether the other side can send descriptors to a unix socket. The clients of a listening
    socket inherit this when they connect, before they are accepted."""
    # Kernels before Linux 6.16 do not know the option. They accept descriptors always.
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, PASSRIGHTS, allowed)


def user_of_peer(sock: socket.socket) -> int:
    """Return the id of the user whose process has connected, or listens, at the other end."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return int(user)


def receive(sock: socket.socket, size: int) -> bytes:
    """Like `sock.recv`, but raise AuthenticationError before a byte with descriptors is read."""
    data, _, flags, _ = sock.recvmsg(size, 0, socket.MSG_PEEK)
    # `recvmsg` was called without a buffer for descriptors, so it sets this flag if there are any.
    if flags & socket.MSG_CTRUNC:
        raise AuthenticationError(
            "the other side sent file descriptors before it has proven that it knows the token"
        )
    return sock.recv(len(data)) if data else b""


class SocketCloser:
    """Closes sockets without blocking the calling thread. A socket that refuses descriptors, or
    that has no unread bytes, is closed at once. All other sockets are closed by a separate thread,
    which ends when none is left."""

    def __init__(self) -> None:
        self._waiting: deque[int] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        #: Whether the thread will look for more sockets to close.
        self._runs = False

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= MAX_WAITING

    def close(self, sock: socket.socket) -> None:
        """End a connection, and close its socket."""
        # After the shutdown, no more bytes can arrive. So if the socket is empty now, it is still
        # empty when it is closed.
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        if _refuses_descriptors(sock) or _is_empty(sock):
            sock.close()
        else:
            self._close_later(sock)

    def close_listening(self, sock: socket.socket) -> None:
        """Close a listening socket, and the connections that were not accepted yet."""
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        try:
            while True:
                client, _ = sock.accept()
                prepare(client)
                self.close(client)
        except OSError as error:
            # After the shutdown, `accept` fails with EINVAL when all waiting clients were accepted.
            if error.errno == errno.EINVAL:
                sock.close()
            else:
                self._close_later(sock)

    def finish(self) -> None:
        """Wait until all sockets are closed, but no longer than _LAST_CLOSE_SECONDS."""
        thread = self._thread
        if thread is not None:
            thread.join(_LAST_CLOSE_SECONDS)

    def abandon(self) -> None:
        """Close the file descriptors that a forked child process has inherited. Forget the closing
        thread, which the child has not inherited, so that the child can use this object again."""
        self._lock, self._thread, self._runs = threading.Lock(), None, False
        while self._waiting:
            with suppress(OSError):
                os.close(self._waiting.popleft())

    def _close_later(self, sock: socket.socket) -> None:
        with self._lock:
            self._waiting.append(sock.detach())
            if self._runs:
                return
            thread = threading.Thread(target=self._run, name="gradwire-closer", daemon=True)
            # If the system allows no more threads, the socket stays in `_waiting`. The next call of
            # this method tries again to start a thread.
            with suppress(RuntimeError):
                thread.start()
                self._thread, self._runs = thread, True

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._runs = False
                    return
                descriptor = self._waiting.popleft()
            with suppress(OSError):
                os.close(descriptor)


def _refuses_descriptors(sock: socket.socket) -> bool:
    """Return whether a socket refuses descriptors. Such a socket has refused them always."""
    try:
        return not sock.getsockopt(socket.SOL_SOCKET, PASSRIGHTS)
    except OSError:
        return False


def _is_empty(sock: socket.socket) -> bool:
    """Return whether a socket has no unread bytes. The socket must have been shut down, so that no
    more bytes can arrive."""
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        # The connection was reset, or it never existed. Then there is nothing to read.
        return True
