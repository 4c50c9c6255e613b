"""Strangers get nothing: no frame of theirs is read, and nothing of them stays."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import select
import socket
import struct
import tracemalloc
from collections.abc import Iterator

import pytest

from gradwire.errors import AuthenticationError, ConnectionClosed
from gradwire.testing.pairs import (
    CALLER,
    LISTENER,
    PATIENCE,
    Background,
    drive,
    open_descriptors,
    settle,
    take,
)
from gradwire.transport.base import Connection, Greeting
from gradwire.transport.handshake import (
    MAGIC,
    MAX_GREETING,
    NONCE,
    PROOF,
    SECOND,
    ClientHandshake,
    ServerHandshake,
)
from gradwire.transport.listening import MAX_DESCRIPTORS, MAX_GUESTS, StreamListener
from gradwire.transport.pipes import make_pipes
from gradwire.transport.poller import EpollPoller, Poller
from gradwire.transport.tcp import TcpTransport
from gradwire.transport.unix import UnixTransport
from gradwire.wire.frames import Frame

TOKEN = b"the group's secret"
CLAIM = struct.pack("<QII", 1 << 62, 0, 0)


class House:
    """A listener, those it let in, and the strangers in front of it."""

    def __init__(self, transport: UnixTransport | TcpTransport, poller: Poller):
        self.transport = transport
        self.poller = poller
        self.accepted: list[Connection] = []
        self.listener: StreamListener = transport.listen(LISTENER, poller, self.accepted.append)
        self.place = self.listener.address.place
        self._closing = contextlib.ExitStack()

    def stranger(self) -> socket.socket:
        if isinstance(self.transport, UnixTransport):
            sock = socket.socket(socket.AF_UNIX)
            where: object = "\0" + self.place
        else:
            sock = socket.socket()
            host, port = self.place.split("|")
            where = (host, int(port))
        self._closing.enter_context(sock)
        sock.settimeout(PATIENCE)
        sock.connect(where)
        return sock

    def connect(self, transport: UnixTransport | TcpTransport, them: Greeting) -> Connection:
        """Connect the ordinary way, with the listener driven meanwhile."""
        finished: list[Connection | Exception] = []

        def run() -> None:
            try:
                finished.append(transport.connect(self.place, CALLER, them, PATIENCE))
            except Exception as error:
                finished.append(error)
            self.poller.wake()

        with Background(run):
            drive(self.poller, lambda: finished, "the end of the handshake")
        if isinstance(finished[0], Exception):
            raise finished[0]
        self._closing.callback(finished[0].close)
        settle(self.poller)
        return finished[0]

    def refuses(self, stranger: socket.socket) -> bytes:
        """Drive the listener until it has sent the stranger away; what it said to it before."""
        said = b""

        def is_gone() -> bool:
            nonlocal said
            while select.select([stranger], [], [], 0)[0]:
                try:
                    piece = stranger.recv(4096)
                except ConnectionResetError:
                    return True
                said += piece
                if not piece:
                    return True
            return False

        drive(self.poller, is_gone, "the stranger's dismissal")
        assert not self.accepted
        return said

    def close(self) -> None:
        self._closing.close()
        self.listener.close()
        for connection in self.accepted:
            connection.close()


@pytest.fixture(params=[UnixTransport, TcpTransport])
def house(request: pytest.FixtureRequest) -> Iterator[House]:
    with contextlib.closing(EpollPoller()) as poller:
        house = House(request.param(TOKEN), poller)
        yield house
        house.close()


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n",
        os.urandom(4096),
        CLAIM * 4,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
        b"gradwirf" + bytes(NONCE),
    ],
    ids=["http", "random", "huge-frame", "tls", "almost"],
)
def test_a_stranger_that_speaks_something_else_is_told_nothing(house: House, words: bytes) -> None:
    stranger = house.stranger()
    stranger.sendall(words)
    assert house.refuses(stranger) == b""


def test_a_stranger_costs_no_memory_whatever_it_claims(house: House) -> None:
    handshake = ClientHandshake(b"a guess", CALLER, LISTENER.incarnation)
    stranger = house.stranger()
    settle(house.poller)
    tracemalloc.start()
    try:
        stranger.sendall(handshake.first() + CLAIM * 4000)
        house.refuses(stranger)
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("length", [0, MAX_GREETING + 1, 0xFFFF])
def test_a_greeting_of_impossible_length_is_not_awaited(house: House, length: int) -> None:
    stranger = house.stranger()
    stranger.sendall(MAGIC + bytes(NONCE) + bytes(PROOF) + struct.pack("<H", length))
    assert len(house.refuses(stranger)) == SECOND


def test_a_caller_without_the_token_is_refused_by_the_listener(house: House) -> None:
    """It does not check the listener's proof, as an honest client would."""
    stranger = house.stranger()
    greeting = b'[1, "caller", "caller-life"]'
    proof = bytes(PROOF) + struct.pack("<H", len(greeting)) + greeting
    stranger.sendall(MAGIC + bytes(NONCE) + proof)
    assert len(house.refuses(stranger)) == SECOND


def test_a_proof_is_good_for_one_connection_only(house: House) -> None:
    """Overheard and sent again."""
    overheard = ClientHandshake(TOKEN, CALLER, LISTENER.incarnation)
    server = ServerHandshake(TOKEN, LISTENER.incarnation)
    third = overheard.third(server.feed(overheard.first()))
    stranger = house.stranger()
    stranger.sendall(overheard.first() + third)
    assert len(house.refuses(stranger)) == SECOND


def test_a_caller_notices_that_the_listener_has_another_token(house: House) -> None:
    with pytest.raises(AuthenticationError, match="token"):
        house.connect(type(house.transport)(b"another secret"), LISTENER)
    assert not house.accepted


def test_a_caller_notices_that_it_reached_another_life_of_the_worker(house: House) -> None:
    with pytest.raises(AuthenticationError, match="another process"):
        house.connect(house.transport, LISTENER._replace(incarnation="an-earlier-life"))
    assert not house.accepted


def test_a_caller_that_is_hung_up_on_is_told_so(house: House) -> None:
    finished: list[None] = []

    def connect() -> None:
        with pytest.raises((AuthenticationError, ConnectionError)):
            house.transport.connect(house.place, CALLER, LISTENER, PATIENCE)
        finished.append(None)

    with Background(connect):
        drive(house.poller, lambda: house.listener._guests)
        house.listener.close()
    assert finished


def test_who_proves_itself_is_known_by_its_greeting(house: House) -> None:
    caller = house.connect(house.transport, LISTENER)
    assert caller.peer == LISTENER
    assert [connection.peer for connection in house.accepted] == [CALLER]


def test_a_greeting_that_does_not_fit_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ValueError, match="too long"):
        ClientHandshake(TOKEN, Greeting(1, "x" * MAX_GREETING, "life"), "them")


def test_a_member_that_claims_too_much_is_cut_off_without_any_memory(house: House) -> None:
    raw = house.connect(house.transport, LISTENER)
    raw.send(Frame(b"ok"))
    take(house.accepted[0], 1)
    raw._stream.send(CLAIM)  # type: ignore[attr-defined]
    tracemalloc.start()
    try:
        with pytest.raises(ConnectionClosed, match="claims"):
            take(house.accepted[0], 1)
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()


def test_silent_guests_are_sent_away_when_their_time_is_up(house: House) -> None:
    stranger = house.stranger()
    drive(house.poller, lambda: house.listener._guests)
    house.listener.trim()
    assert house.listener._guests  # not yet
    house.listener.trim(0.0)
    assert stranger.recv(1) == b""


@contextlib.contextmanager
def no_descriptor_free() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_strangers_give_way_when_there_are_no_descriptors(house: House) -> None:
    first = house.stranger()
    drive(house.poller, lambda: house.listener._guests)
    guests = set(house.listener._guests)
    house.stranger()
    with no_descriptor_free():
        drive(house.poller, lambda: set(house.listener._guests) - guests, "the second is let in")
    assert first.recv(1) == b""


def test_a_listener_without_descriptors_rests_until_it_is_told_to_try_again(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    house.stranger()
    with no_descriptor_free():
        drive(house.poller, lambda: caplog.messages, "the warning")
        house.poller.wake()
        assert house.poller.next() is None, "it looks again though nothing has changed"
        house.listener.trim()
        settle(house.poller)
        assert not house.listener._guests
    house.listener.trim()
    drive(house.poller, lambda: house.listener._guests, "the stranger is let in")
    (warning,) = caplog.messages
    assert "worker listener cannot accept connections" in warning
    house.connect(house.transport, LISTENER)


def test_a_crowd_of_strangers_does_not_keep_members_out(house: House) -> None:
    strangers = []
    descriptors = len(open_descriptors())
    for _ in range(MAX_GUESTS + 20):
        strangers.append(house.stranger())
        settle(house.poller)
    ours = len(open_descriptors()) - descriptors - len(strangers)
    assert ours <= MAX_GUESTS
    assert [stranger.recv(1) for stranger in strangers[:20]] == [b""] * 20
    house.connect(house.transport, LISTENER)
    assert len(house.accepted) == 1


def test_a_guest_that_leaves_is_forgotten(house: House) -> None:
    for words in (b"", MAGIC, MAGIC + bytes(NONCE), MAGIC + bytes(NONCE + PROOF)):
        with house.stranger() as stranger:
            stranger.send(words)
            drive(house.poller, lambda: house.listener._guests)
        drive(house.poller, lambda: not house.listener._guests)


def test_a_member_that_leaves_just_before_the_welcome_leaves_nothing(house: House) -> None:
    """Its socket is reset while the listener is about to answer."""
    client = ClientHandshake(TOKEN, CALLER, LISTENER.incarnation)
    before = len(open_descriptors())
    with house.stranger() as stranger:
        stranger.send(client.first())
        drive(house.poller, lambda: house.listener._guests)
        drive(house.poller, lambda: select.select([stranger], [], [], 0)[0])
        third = client.third(stranger.recv(SECOND, socket.MSG_WAITALL))
        if isinstance(house.transport, UnixTransport):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            probe = os.memfd_create("gradwire-probe")
            os.ftruncate(probe, 4096)
            socket.send_fds(stranger, [third], [theirs.fileno(), probe])
            for end in (ours, theirs):
                end.close()
            os.close(probe)
        else:
            stranger.send(third)
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    drive(house.poller, lambda: not house.listener._guests)
    for connection in house.accepted:  # where the system took the welcome nevertheless
        connection.close()
    assert len(open_descriptors()) == before


@pytest.fixture
def unix_house() -> Iterator[House]:
    with contextlib.closing(EpollPoller()) as poller:
        house = House(UnixTransport(TOKEN), poller)
        yield house
        house.close()


def test_a_stranger_cannot_fill_the_listener_with_descriptors(unix_house: House) -> None:
    stranger = unix_house.stranger()
    before = len(open_descriptors())
    most = 0
    try:
        for byte in MAGIC:
            socket.send_fds(stranger, [bytes([byte])], [stranger.fileno()] * 8)
            settle(unix_house.poller)
            most = max(most, len(open_descriptors()) - before)
    except BrokenPipeError:
        pass
    assert most <= 1 + MAX_DESCRIPTORS
    assert not unix_house.listener._guests


@pytest.mark.parametrize("count", [0, 1])
def test_a_member_that_offers_no_shared_memory_is_refused(unix_house: House, count: int) -> None:
    client = ClientHandshake(TOKEN, CALLER, LISTENER.incarnation)
    stranger = unix_house.stranger()
    stranger.send(client.first())
    drive(unix_house.poller, lambda: select.select([stranger], [], [], 0)[0])
    third = client.third(stranger.recv(SECOND))
    socket.send_fds(stranger, [third], [stranger.fileno()] * count)
    assert unix_house.refuses(stranger) == b""


@pytest.mark.parametrize("wrong", ["channel", "probe", "incoming", "outgoing", "blocking"])
def test_a_member_that_offers_something_else_is_refused(unix_house: House, wrong: str) -> None:
    client = ClientHandshake(TOKEN, CALLER, LISTENER.incarnation)
    stranger = unix_house.stranger()
    stranger.send(client.first())
    drive(unix_house.poller, lambda: select.select([stranger], [], [], 0)[0])
    third = client.third(stranger.recv(SECOND))
    (_, outgoing), (incoming, _) = pipes = make_pipes()
    ours, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    probe = os.memfd_create("probe")
    os.ftruncate(probe, 4096)
    with ours, channel, open(__file__) as file:
        offered = {
            "channel": channel.fileno(), "probe": probe, "incoming": incoming, "outgoing": outgoing,
        }  # fmt: skip
        others = {"channel": "incoming", "incoming": "outgoing", "outgoing": "incoming"}
        if wrong == "blocking":
            os.set_blocking(incoming, True)
        else:
            offered[wrong] = file.fileno() if wrong == "probe" else offered[others[wrong]]
        socket.send_fds(stranger, [third], list(offered.values()))
        assert unix_house.refuses(stranger) == b""
    for descriptor in (probe, *itertools.chain(*pipes)):
        os.close(descriptor)


@pytest.fixture
def tcp_house() -> Iterator[House]:
    with contextlib.closing(EpollPoller()) as poller:
        house = House(TcpTransport(TOKEN), poller)
        yield house
        house.close()


def test_a_handshake_may_come_byte_by_byte(tcp_house: House) -> None:
    client = ClientHandshake(TOKEN, CALLER, LISTENER.incarnation)
    stranger = tcp_house.stranger()
    stranger.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in client.first():
        stranger.send(bytes([byte]))
        settle(tcp_house.poller)
    for byte in client.third(stranger.recv(SECOND, socket.MSG_WAITALL)):
        stranger.send(bytes([byte]))
        settle(tcp_house.poller)
    drive(tcp_house.poller, lambda: tcp_house.accepted)
