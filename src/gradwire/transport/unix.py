"""Between processes of one machine: pipes, and shared memory for large tensors.

The listener has a random name in Linux's abstract name space: it leaves no file behind, and a
process in another network name space, a container say, cannot reach it. So connecting *is* the
probe for "same machine": it works, or the caller takes the next transport.

The connecting side sends four descriptors along with its proof: one end of a socket pair over which
segments of shared memory are passed, in both directions; a piece of memory into which the listener
writes what it was told, to show that sharing memory works; and the ends of two pipes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import select
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from gradwire.errors import AuthenticationError, ConnectionClosed
from gradwire.transport.base import Address, Connection, Greeting
from gradwire.transport.framing import FORGET, FrameReader, pack_prefix
from gradwire.transport.listening import (
    MAX_DESCRIPTORS,
    StreamListener,
    close_quietly,
    shake_hands,
)
from gradwire.transport.pipes import Pipes, check_ends, make_pipes
from gradwire.transport.poller import Poller
from gradwire.transport.segments import SEGMENT_BYTES, SegmentReceiver, SegmentSender
from gradwire.transport.stream import StreamConnection
from gradwire.wire.frames import Bytes

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
        with contextlib.ExitStack() as if_it_fails, contextlib.ExitStack() as theirs:
            sock = if_it_fails.enter_context(socket.socket(socket.AF_UNIX))
            channel, their_channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if_it_fails.enter_context(channel)
            theirs.enter_context(their_channel)
            ends, their_ends = make_pipes()
            for descriptor in their_ends:
                theirs.callback(os.close, descriptor)
            pipes = Pipes(sock, ends)
            if_it_fails.callback(pipes.close)
            probe = os.memfd_create("gradwire-probe", os.MFD_CLOEXEC)
            theirs.callback(os.close, probe)
            os.ftruncate(probe, _PROBE)
            sock.settimeout(timeout)
            sock.connect("\0" + place)
            passed = (their_channel.fileno(), probe, *their_ends)
            shake_hands(sock, self.token, me, them.incarnation, passed)
            if os.pread(probe, len(_ANSWER), 0) != _ANSWER:
                raise ConnectionRefusedError("memory cannot be shared with that worker")
            if_it_fails.pop_all()
            return UnixConnection(pipes, channel, them, self)


class UnixConnection(StreamConnection):
    """Small frames through pipes, what is large through shared memory."""

    #: The poller has said that the other end is gone, and would not say so again.
    _end_told = False

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

    def _watch(self, readable: select.poll, writable: select.poll) -> None:
        readable.register(self._pipes.incoming, select.POLLIN)
        writable.register(self._pipes.outgoing, select.POLLOUT)
        for poll in (readable, writable):
            poll.register(self._pipes.sock, 0)  # it says when the other end is gone

    def attach(self, poller: Poller, callback: Callable[[], None]) -> None:
        def notice() -> None:
            self._end_told = True
            callback()

        with self._registering:
            super().attach(poller, callback)
            if not self._closed:
                poller.add(self._pipes.sock.fileno(), notice)

    def arm(self) -> None:
        super().arm()
        if self._end_told:
            self._listen_for_end()

    def disarm(self) -> None:
        super().disarm()
        if self._end_told:
            self._listen_for_end()

    def _listen_for_end(self) -> None:
        with self._registering:
            self._end_told = False
            if self._poller is not None and not self._closed:
                self._poller.disarm(self._pipes.sock.fileno())

    def abandon(self) -> None:
        super().abandon()
        self._channel.close()

    def _detach(self, poller: Poller) -> None:
        super()._detach(poller)
        poller.remove(self._pipes.sock.fileno())

    def _make_reader(self, max_bytes: int) -> FrameReader:
        return FrameReader(max_bytes, self._receiver.get, self._receiver.forget)

    def _place(self, buffer: Tensor, size: int) -> int:
        return self._sender.put(buffer) if size >= self._segment_bytes else 0

    def _place_pieces(self, pieces: Sequence[Bytes], size: int) -> int:
        return self._sender.put_pieces(pieces, size) if size >= self._segment_bytes else 0

    def _forgotten(self) -> list[int]:
        return self._sender.take_forgotten()

    def trim(self) -> None:
        super().trim()
        self._sender.trim()
        # Told at once only where that cannot block; else the next frame with buffers tells.
        if not self._sender.forgets or not self._writing.acquire(False):
            return
        try:
            if not self._closed and self._wait_for_room(0):
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
        data, descriptors, _, _ = socket.recv_fds(sock, size, MAX_DESCRIPTORS)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        return data, descriptors

    def make_connection(
        self, sock: socket.socket, peer: Greeting, descriptors: list[int]
    ) -> UnixConnection:
        try:
            if len(descriptors) != MAX_DESCRIPTORS:
                raise AuthenticationError("the caller did not offer to share memory")
            _, probe, incoming, outgoing = descriptors
            with mmap.mmap(probe, _PROBE) as memory:
                memory[: len(_ANSWER)] = _ANSWER
            check_ends(incoming, outgoing)
            channel = socket.socket(fileno=descriptors[0])
            descriptors = [probe]
            return UnixConnection(Pipes(sock, (incoming, outgoing)), channel, peer, self._transport)
        finally:
            for descriptor in descriptors:
                close_quietly(descriptor)
