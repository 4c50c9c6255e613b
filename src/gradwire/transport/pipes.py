"""Two pipes in the place of a socket: little data gets through them in half the time.

A pipe cannot be shut down, and it ends when the last process has closed it, which may be a forked
child that knows nothing of it. So the socket stays: it says when the other end is gone.
"""

from __future__ import annotations

import fcntl
import io
import os
import select
import socket
import stat
from collections.abc import Sequence

from gradwire.errors import AuthenticationError
from gradwire.wire.frames import Bytes

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
    """Used like a socket that does not block."""

    def __init__(self, sock: socket.socket, ends: Ends):
        self.sock = sock
        self.incoming, self.outgoing = io.FileIO(ends[0], "rb"), io.FileIO(ends[1], "wb")
        # Both say whether the other end is gone: one to who reads, one to who writes.
        self._reader_asks, self._writer_asks = select.poll(), select.poll()
        self._reader_asks.register(sock, 0)
        self._writer_asks.register(sock, 0)

    def fileno(self) -> int:
        """Where to read."""
        return self.incoming.fileno()

    def recv_into(self, memory: memoryview) -> int:
        count: int | None = self.incoming.readinto(memory)
        if count is None and self._reader_asks.poll(0):
            # It may have sent something before it went.
            count = self.incoming.readinto(memory) or 0
        if count is None:
            raise BlockingIOError
        return count

    def send(self, data: Bytes) -> int:
        count: int | None = self.outgoing.write(data)
        if count is None:
            self._check_reader()
            raise BlockingIOError
        return count

    def sendmsg(self, parts: Sequence[Bytes]) -> int:
        try:
            return os.writev(self.outgoing.fileno(), parts)
        except BlockingIOError:
            self._check_reader()
            raise

    def _check_reader(self) -> None:
        if self._writer_asks.poll(0):
            raise BrokenPipeError("the peer closed the connection")

    def shutdown(self, how: int) -> None:
        self.sock.shutdown(how)

    def close(self) -> None:
        self.sock.close()
        self.incoming.close()
        self.outgoing.close()
