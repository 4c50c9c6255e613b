"""TCP: between machines, and on one machine where nothing faster works."""

from __future__ import annotations

import contextlib
import ipaddress
import platform
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

from gradwire.errors import SetupError
from gradwire.transport.base import Address, Connection, Greeting
from gradwire.transport.listening import StreamListener, shake_hands
from gradwire.transport.poller import Poller
from gradwire.transport.stream import Stream, StreamConnection

#: On one machine what is under way should fit into the caches of its cores: a large tensor takes a
#: third less time than with what the system chooses, which is right for networks.
_LOOPBACK_BUFFER = 256 << 10
_ON_LINUX = platform.system() == "Linux"
#: Seconds and microseconds, as Linux has them: a tick of its clock, which is 1 to 10 ms. (A leader
#: that is held up is relieved before that.)
_A_MOMENT = struct.pack("ll", 0, 1000)


@dataclass(frozen=True)
class TcpTransport:
    """Listens on one address: loopback unless the options name another."""

    token: bytes
    host: str = "127.0.0.1"
    max_bytes: int = 1 << 40
    stall_limit: float = 30.0
    name: str = "tcp"

    def listen(
        self, me: Greeting, poller: Poller, accepted: Callable[[Connection], None]
    ) -> TcpListener:
        try:
            family, kind, protocol, _, where = socket.getaddrinfo(
                self.host, 0, type=socket.SOCK_STREAM
            )[0]
            sock = socket.socket(family, kind, protocol)
        except OSError as error:
            raise self._cannot_listen(error) from error
        try:
            sock.bind(where)
        except OSError as error:
            sock.close()
            raise self._cannot_listen(error) from error
        sock.listen(256)
        host, port = sock.getsockname()[:2]
        address = Address(self.name, f"{host}|{port}")
        return TcpListener(sock, address, self, me, poller, accepted)

    def _cannot_listen(self, error: OSError) -> SetupError:
        return SetupError(
            f"cannot listen on host {self.host!r}: {error}. The option host (or the variable "
            "GRADWIRE_HOST) must be an address of this machine that the other workers reach"
        )

    def connect(self, place: str, me: Greeting, them: Greeting, timeout: float) -> StreamConnection:
        host, port = place.split("|")
        sock = socket.create_connection((host, int(port)), timeout)
        try:
            shake_hands(sock, self.token, me, them.incarnation)
            return self.connection(sock, them)
        except BaseException:
            sock.close()
            raise

    def connection(self, sock: socket.socket, peer: Greeting) -> StreamConnection:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return StreamConnection(_as_stream(sock), peer, self.max_bytes, self.stall_limit)


def _as_stream(sock: socket.socket) -> Stream:
    sock.setblocking(False)
    with contextlib.suppress(OSError):  # it may have ended already
        if is_loopback(sock.getpeername()[0]):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOOPBACK_BUFFER)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _LOOPBACK_BUFFER)
            if _ON_LINUX:
                return _PatientSocket(sock)
    return sock


class _PatientSocket:
    """Reads what is there; but when it sends, the system waits a moment for room before it says
    that there is none. With little room, a large tensor takes a tenth less time than when every
    bit of it is reported first; with much, as networks need it, more."""

    def __init__(self, sock: socket.socket):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _A_MOMENT)
        sock.setblocking(True)
        self._sock = sock
        self.fileno = sock.fileno
        self.send = sock.send
        self.sendmsg = sock.sendmsg
        self.shutdown = sock.shutdown
        self.close = sock.close

    def recv_into(self, memory: memoryview) -> int:
        return self._sock.recv_into(memory, 0, socket.MSG_DONTWAIT)


class TcpListener(StreamListener):
    def __init__(
        self,
        sock: socket.socket,
        address: Address,
        transport: TcpTransport,
        me: Greeting,
        poller: Poller,
        accepted: Callable[[Connection], None],
    ):
        self._transport = transport
        super().__init__(sock, address, transport.token, me, poller, accepted)

    def make_connection(
        self,
        sock: socket.socket,
        peer: Greeting,
        descriptors: list[int],  # noqa: ARG002
    ) -> StreamConnection:
        return self._transport.connection(sock, peer)


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine alone."""
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(a).split("%")[0]).is_loopback for a in addresses)
