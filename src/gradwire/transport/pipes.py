"""Two pipes in the place of a socket: little data gets through them in half the time.

A pipe cannot be shut down, and it ends when the last process has closed it, which may be a forked
child that knows nothing of it. So the socket stays: it says when the other end is gone.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import stat
from collections.abc import Sequence

from gradwire.errors import AuthenticationError

Bytes = bytes | bytearray | memoryview
#: (where to read, where to write)
Ends = tuple[int, int]


def make_pipes() -> tuple[Ends, Ends]:
    """The ends for here, and those for the other side."""
    here_in, there_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        there_in, here_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        os.close(here_in)
        os.close(there_out)
        raise
    return (here_in, here_out), (there_in, there_out)


def check_ends(incoming: int, outgoing: int) -> None:
    """Whether these are what `make_pipes` makes; strangers may send anything."""
    for descriptor, way in ((incoming, os.O_RDONLY), (outgoing, os.O_WRONLY)):
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
        if not is_pipe or flags & os.O_ACCMODE != way or not flags & os.O_NONBLOCK:
            raise AuthenticationError("the caller did not offer pipes")


class Pipes:
    """Used like a socket."""

    def __init__(self, sock: socket.socket, ends: Ends):
        self.sock = sock
        self.incoming, self.outgoing = ends
        # One for each of the two threads that may ask.
        self._reader_gone, self._writer_gone = select.poll(), select.poll()
        self._reader_gone.register(sock, 0)
        self._writer_gone.register(sock, 0)

    def fileno(self) -> int:
        """Where to read."""
        return self.incoming

    def setblocking(self, flag: bool) -> None:
        self.sock.setblocking(flag)

    def recv_into(self, memory: memoryview) -> int:
        try:
            return os.readv(self.incoming, (memory,))
        except BlockingIOError:
            if not self._writer_gone.poll(0):
                raise
        try:
            return os.readv(self.incoming, (memory,))  # it may have sent something before it went
        except BlockingIOError:
            return 0

    def send(self, data: Bytes) -> int:
        try:
            return os.write(self.outgoing, data)
        except BlockingIOError:
            self._check_reader()
            raise

    def sendmsg(self, parts: Sequence[Bytes]) -> int:
        try:
            return os.writev(self.outgoing, parts)
        except BlockingIOError:
            self._check_reader()
            raise

    def _check_reader(self) -> None:
        if self._reader_gone.poll(0):
            raise BrokenPipeError("the peer closed the connection")

    def shutdown(self, how: int) -> None:
        self.sock.shutdown(how)

    def close(self) -> None:
        self.sock.close()
        for descriptor in {self.incoming, self.outgoing} - {-1}:
            os.close(descriptor)
        self.incoming = self.outgoing = -1
