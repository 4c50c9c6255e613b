"""Two pipes used like a socket, because small messages take half the time through pipes.

A pipe cannot be shut down: it stays open until every process with a copy of its file descriptor has
closed that copy, and a forked child process may keep one for ever. So the socket that was used for
the handshake stays open beside the pipes. It shows when the peer has closed the connection.
"""

from __future__ import annotations

import fcntl
import io
import os
import select
import socket
import stat
from collections.abc import Sequence

from gradwire._core.wire.frames import Bytes
from gradwire.errors import AuthenticationError

#: The two file descriptors of one side: the first is for reading, the second for writing.
PipeEnds = tuple[int, int]


def make_pipes() -> tuple[PipeEnds, PipeEnds]:
    """Make two pipes. Return the ends for this side and the ends for the peer."""
    here_in, there_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        there_in, here_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        os.close(here_in)
        os.close(there_out)
        raise
    return (here_in, here_out), (there_in, there_out)


def check_pipe_ends(incoming: int, outgoing: int) -> None:
    """Raise AuthenticationError unless these two file descriptors, which a client sent, are pipe
    ends like those that `make_pipes` makes."""
    for descriptor, mode in ((incoming, os.O_RDONLY), (outgoing, os.O_WRONLY)):
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
        if not is_pipe or flags & os.O_ACCMODE != mode or not flags & os.O_NONBLOCK:
            raise AuthenticationError("the client sent no usable pipes")


class Pipes:
    """A `Stream` (see `stream`) over two pipes."""

    def __init__(self, sock: socket.socket, ends: PipeEnds):
        self.sock = sock
        self.incoming, self.outgoing = io.FileIO(ends[0], "rb"), io.FileIO(ends[1], "wb")
        # These poll objects report only whether the peer has closed the connection. Two threads
        # must not use a poll object at once, so the reading and the writing thread have one each.
        self._hangup_for_reader, self._hangup_for_writer = select.poll(), select.poll()
        self._hangup_for_reader.register(sock, 0)
        self._hangup_for_writer.register(sock, 0)

    def fileno(self) -> int:
        """Return the file descriptor to read from."""
        return self.incoming.fileno()

    def recv_into(self, memory: memoryview) -> int:
        count: int | None = self.incoming.readinto(memory)
        if count is None and self._hangup_for_reader.poll(0):
            # The read above found no bytes, and the peer has closed the connection. Between the
            # read and the close, the peer may have written more bytes. So read once more.
            count = self.incoming.readinto(memory) or 0
        if count is None:
            raise BlockingIOError
        return count

    def send(self, data: Bytes) -> int:
        count: int | None = self.outgoing.write(data)
        if count is None:
            self._check_peer()
            raise BlockingIOError
        return count

    def sendmsg(self, parts: Sequence[Bytes]) -> int:
        try:
            return os.writev(self.outgoing.fileno(), parts)
        except BlockingIOError:
            self._check_peer()
            raise

    def _check_peer(self) -> None:
        if self._hangup_for_writer.poll(0):
            raise BrokenPipeError("the peer closed the connection")

    def shutdown(self, how: int) -> None:
        self.sock.shutdown(how)

    def close(self) -> None:
        self.sock.close()
        self.close_ends()

    def close_ends(self) -> None:
        """Close the pipes, but not the socket."""
        self.incoming.close()
        self.outgoing.close()
