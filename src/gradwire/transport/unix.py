"""Between processes of one machine: a unix socket, and shared memory for large tensors.

The listener has a random name in Linux's abstract name space: it leaves no file behind, and a
process in another network name space, a container say, cannot reach it. So connecting *is* the
probe for "same machine": it works, or the caller takes the next transport.

The connecting side sends two descriptors along with its proof: one end of a socket pair over which
segments of shared memory are passed, in both directions, and a piece of memory into which the
listener writes what it was told, to show that sharing memory works.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from gradwire.errors import AuthenticationError, ConnectionClosed
from gradwire.transport.base import Address, Connection, Greeting
from gradwire.transport.framing import FORGET, FrameReader, pack_prefix
from gradwire.transport.listening import StreamListener, close_quietly, shake_hands
from gradwire.transport.poller import Poller
from gradwire.transport.segments import SEGMENT_BYTES, SegmentReceiver, SegmentSender
from gradwire.transport.stream import StreamConnection, wait_for

_PROBE = 4096
_ANSWER = b"gradwire shares this memory"


@dataclass(frozen=True)
class UnixTransport:
    """Listens under a name that nobody can guess."""

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
        sock.listen(256)
        return UnixListener(sock, Address(self.name, place), self, me, poller, accepted)

    def connect(self, place: str, me: Greeting, them: Greeting, timeout: float) -> UnixConnection:
        sock = socket.socket(socket.AF_UNIX)
        channel, their_channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.settimeout(timeout)
            sock.connect("\0" + place)
            probe = os.memfd_create("gradwire-probe", os.MFD_CLOEXEC)
            try:
                os.ftruncate(probe, _PROBE)
                passed = (their_channel.fileno(), probe)
                shake_hands(sock, self.token, me, them.incarnation, passed)
                if os.pread(probe, len(_ANSWER), 0) != _ANSWER:
                    raise ConnectionRefusedError("memory cannot be shared with that worker")
            finally:
                os.close(probe)
            return UnixConnection(sock, channel, them, self)
        except BaseException:
            sock.close()
            channel.close()
            raise
        finally:
            their_channel.close()


class UnixConnection(StreamConnection):
    """Frames over a unix socket, large tensors through shared memory beside it."""

    def __init__(
        self,
        sock: socket.socket,
        channel: socket.socket,
        peer: Greeting,
        transport: UnixTransport,
    ):
        channel.setblocking(False)
        self._channel = channel
        self._segment_bytes = transport.segment_bytes
        self._sender = SegmentSender(channel)
        self._receiver = SegmentReceiver(channel)
        super().__init__(sock, peer, transport.max_bytes, transport.stall_limit)

    def _make_reader(self, max_bytes: int) -> FrameReader:
        return FrameReader(max_bytes, self._receiver.get, self._receiver.forget)

    def _place(self, buffer: Tensor, size: int) -> int:
        return self._sender.put(buffer) if size >= self._segment_bytes else 0

    def _forgotten(self) -> list[int]:
        return self._sender.take_forgotten()

    def trim(self) -> None:
        super().trim()
        self._sender.trim()
        # Told at once only where that cannot block; else the next frame with buffers tells.
        if not self._sender.forgets or not self._writing.acquire(blocking=False):
            return
        try:
            if not self._closed and wait_for(self._sock, writable=True, timeout=0):
                entries = [(FORGET, segment) for segment in self._sender.take_forgotten()]
                if entries:  # else a frame that was just sent has told
                    self._write([pack_prefix(0, entries)], None)
        except ConnectionClosed:
            pass  # whoever reads this connection finds out and tells
        finally:
            self._end_writing()

    def _release(self) -> None:
        super()._release()
        self._sender.close()  # first: threads that are about to send may still use the channel
        self._receiver.close()
        self._channel.close()


class UnixListener(StreamListener):
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

    def read_guest(self, sock: socket.socket, size: int) -> tuple[bytes, list[int]]:
        data, descriptors, _, _ = socket.recv_fds(sock, size, 2)
        return data, descriptors

    def make_connection(
        self, sock: socket.socket, peer: Greeting, descriptors: list[int]
    ) -> UnixConnection:
        try:
            if len(descriptors) != 2:
                raise AuthenticationError("the caller did not offer to share memory")
            with mmap.mmap(descriptors[1], _PROBE) as memory:
                memory[: len(_ANSWER)] = _ANSWER
            channel = socket.socket(fileno=descriptors[0])
            descriptors = descriptors[1:]
            return UnixConnection(sock, channel, peer, self._transport)
        finally:
            for descriptor in descriptors:
                close_quietly(descriptor)
