"""TCP: between machines, and on one machine where nothing faster works."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Callable
from dataclasses import dataclass

from gradwire.errors import SetupError
from gradwire.transport.base import Address, Connection, Greeting
from gradwire.transport.listening import StreamListener, shake_hands
from gradwire.transport.poller import Poller
from gradwire.transport.stream import StreamConnection

#: The simplest that systems have: it sends what it is given as long as nothing is lost.
_PLAIN_CONTROL = b"reno"


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
        _do_not_pace(sock)
        sock.setblocking(False)
        return StreamConnection(sock, peer, self.max_bytes, self.stall_limit)


def _do_not_pace(sock: socket.socket) -> None:
    """Within a machine there is no congestion. Some systems' way to deal with it, where it is the
    default (BBR), measures and paces all the same: large tensors take a fifth longer."""
    if hasattr(socket, "TCP_CONGESTION"):
        with contextlib.suppress(OSError):  # the connection may have ended already
            if sock.getsockname()[0] == sock.getpeername()[0]:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _PLAIN_CONTROL)


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
