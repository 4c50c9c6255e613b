"""The TCP transport: between machines, and within one machine where no faster transport works."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gradwire._core.transport.base import Address, CallLater, Connection, Greeting
from gradwire._core.transport.listener import BACKLOG, StreamListener, shake_hands
from gradwire._core.transport.poller import Poller
from gradwire._core.transport.stream import StreamConnection
from gradwire.errors import SetupError

#: A congestion control algorithm without pacing: it sends packets without pauses as long as no
#: packet is lost. All Linux systems have this algorithm.
_UNPACED_CONTROL = b"reno"


@dataclass(frozen=True)
class TcpTransport:
    """Connects workers over TCP. It listens on one address, which is loopback by default."""

    token: bytes = field(repr=False)
    host: str = "127.0.0.1"
    max_bytes: int = 1 << 40
    stall_limit: float = 30.0
    name: str = "tcp"

    def listen(
        self,
        me: Greeting,
        poller: Poller,
        accepted: Callable[[Connection], None],
        call_later: CallLater,
    ) -> TcpListener:
        try:
            family, kind, protocol, _, socket_address = socket.getaddrinfo(
                self.host, 0, type=socket.SOCK_STREAM
            )[0]
            sock = socket.socket(family, kind, protocol)
        except OSError as error:
            raise self._cannot_listen(error) from error
        try:
            sock.bind(socket_address)
        except OSError as error:
            sock.close()
            raise self._cannot_listen(error) from error
        sock.listen(BACKLOG)
        host, port = sock.getsockname()[:2]
        address = Address(self.name, f"{host}|{port}")
        return TcpListener(sock, address, self, me, poller, accepted, call_later)

    def _cannot_listen(self, error: OSError) -> SetupError:
        return SetupError(
            f"cannot listen on host {self.host!r}: {error}. Set the option host (or the variable "
            "GRADWIRE_HOST) to an address of this machine that the other workers can reach"
        )

    def connect(self, place: str, me: Greeting, them: Greeting, timeout: float) -> StreamConnection:
        host, port = place.split("|")
        deadline = time.monotonic() + timeout
        sock = socket.create_connection((host, int(port)), timeout)
        try:
            shake_hands(sock, self.token, me, them.incarnation, deadline)
            return self.connection(sock, them)
        except BaseException:
            sock.close()
            raise

    def connection(self, sock: socket.socket, peer: Greeting) -> StreamConnection:
        """Make the connection over a socket whose handshake is complete."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        _disable_pacing(sock)
        sock.setblocking(False)
        return StreamConnection(sock, peer, self.max_bytes, self.stall_limit)


def _disable_pacing(sock: socket.socket) -> None:
    """If both ends of a connection are on this machine, choose a congestion control that does not
    delay packets. With BBR, the default of some systems, large tensors take a fifth longer."""
    if hasattr(socket, "TCP_CONGESTION"):
        # The connection may have ended. The next read or write will notice that.
        with contextlib.suppress(OSError):
            if sock.getsockname()[0] == sock.getpeername()[0]:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _UNPACED_CONTROL)


class TcpListener(StreamListener):
    """Accepts the connections that other workers open to this worker."""

    def __init__(
        self,
        sock: socket.socket,
        address: Address,
        transport: TcpTransport,
        me: Greeting,
        poller: Poller,
        accepted: Callable[[Connection], None],
        call_later: CallLater,
    ):
        self._transport = transport
        super().__init__(sock, address, transport.token, me, poller, accepted, call_later)

    def make_connection(self, sock: socket.socket, peer: Greeting) -> StreamConnection:
        return self._transport.connection(sock, peer)


def is_loopback(host: str) -> bool:
    """Return whether a host name or address can be reached from this machine only."""
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(a).split("%")[0]).is_loopback for a in addresses)
