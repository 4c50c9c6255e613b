"""The handshake: clients that do not complete it get nothing, and leave nothing behind."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import select
import socket
import struct
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from gradwire._core.transport import unix
from gradwire._core.transport.base import Connection, Greeting
from gradwire._core.transport.handshake import (
    CHALLENGE_SIZE,
    MAGIC,
    MAX_GREETING,
    NONCE_SIZE,
    PROOF_SIZE,
    READY,
    WELCOME,
    ClientHandshake,
    ServerHandshake,
)
from gradwire._core.transport.listener import MAX_PENDING, StreamListener
from gradwire._core.transport.pipes import make_pipes
from gradwire._core.transport.poller import EpollPoller, Poller
from gradwire._core.transport.tcp import TcpTransport
from gradwire._core.transport.unix import UnixTransport
from gradwire._core.wire.frames import Frame
from gradwire.errors import AuthenticationError, ConnectionClosed
from gradwire.testing.connection_pairs import (
    CLIENT,
    LISTENER,
    TIMEOUT,
    Background,
    drive,
    open_descriptors,
    run_due_callbacks,
    take,
)
from tests.processes import Process, processes, until

TOKEN = b"the group's secret"
HUGE_PREFIX = struct.pack("<QII", 1 << 62, 0, 0)


class ListeningServer:
    """A listener, the connections it has accepted, and clients that speak to it byte by byte."""

    def __init__(self, transport: UnixTransport | TcpTransport, poller: Poller):
        self.transport = transport
        self.poller = poller
        self.accepted: list[Connection] = []
        #: The callbacks that the listener wants to be called later.
        self.timers: list[Callable[[], None]] = []
        self.listener: StreamListener = transport.listen(
            LISTENER, poller, self.accepted.append, lambda _, callback: self.timers.append(callback)
        )
        self.place = self.listener.address.place
        self._closing = contextlib.ExitStack()

    def raw_client(self) -> socket.socket:
        if isinstance(self.transport, UnixTransport):
            sock = socket.socket(socket.AF_UNIX)
            address: object = "\0" + self.place
        else:
            sock = socket.socket()
            host, port = self.place.split("|")
            address = (host, int(port))
        self._closing.enter_context(sock)
        sock.settimeout(TIMEOUT)
        sock.connect(address)
        return sock

    def connect(self, transport: UnixTransport | TcpTransport, them: Greeting) -> Connection:
        """Open a connection with the transport, while this thread drives the listener."""
        finished: list[Connection | Exception] = []

        def run() -> None:
            try:
                finished.append(transport.connect(self.place, CLIENT, them, TIMEOUT))
            except Exception as error:
                finished.append(error)
            self.poller.wake()

        with Background(run):
            drive(self.poller, lambda: finished, "the end of the handshake")
        if isinstance(finished[0], Exception):
            raise finished[0]
        self._closing.callback(finished[0].close)
        run_due_callbacks(self.poller)
        return finished[0]

    def rejection(self, client: socket.socket) -> bytes:
        """Drive the listener until it has rejected a client. Return what it sent to the client."""
        received = b""

        def is_rejected() -> bool:
            nonlocal received
            while select.select([client], [], [], 0)[0]:
                try:
                    piece = client.recv(4096)
                except ConnectionResetError:
                    return True
                received += piece
                if not piece:
                    return True
            return False

        drive(self.poller, is_rejected, "the rejection of the client")
        assert not self.accepted
        return received

    def serve(self, process: Process) -> None:
        """Run the callbacks of the poller until a process has ended."""

        def has_ended() -> bool:
            run_due_callbacks(self.poller)
            return process.has_result()

        until(has_ended, "the process has ended")

    def run_timers(self) -> None:
        """Run the callbacks whose time has come, by the opinion of the test."""
        due, self.timers[:] = list(self.timers), []
        for callback in due:
            callback()

    def close(self) -> None:
        self._closing.close()
        self.listener.close()
        for connection in self.accepted:
            connection.close()


@pytest.fixture(params=[UnixTransport, TcpTransport])
def server(request: pytest.FixtureRequest) -> Iterator[ListeningServer]:
    with contextlib.closing(EpollPoller()) as poller:
        server = ListeningServer(request.param(TOKEN), poller)
        yield server
        server.close()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n",
        os.urandom(4096),
        HUGE_PREFIX * 4,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
        b"gradwirf" + bytes(NONCE_SIZE),
    ],
    ids=["http", "random", "huge-frame", "tls", "almost"],
)
def test_a_client_of_another_protocol_gets_no_answer(server: ListeningServer, data: bytes) -> None:
    client = server.raw_client()
    client.sendall(data)
    assert server.rejection(client) == b""


def test_a_client_without_the_token_cannot_allocate_memory(server: ListeningServer) -> None:
    handshake = ClientHandshake(b"a guess", CLIENT, LISTENER.incarnation)
    client = server.raw_client()
    run_due_callbacks(server.poller)
    tracemalloc.start()
    try:
        client.sendall(handshake.hello() + HUGE_PREFIX * 4000)
        server.rejection(client)
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("length", [0, MAX_GREETING + 1, 0xFFFF])
def test_a_greeting_that_is_too_long_is_rejected_unread(
    server: ListeningServer, length: int
) -> None:
    client = server.raw_client()
    client.sendall(MAGIC + bytes(NONCE_SIZE) + bytes(PROOF_SIZE) + struct.pack("<H", length))
    assert len(server.rejection(client)) == CHALLENGE_SIZE


def test_a_client_without_the_token_is_rejected(server: ListeningServer) -> None:
    """This client does not check the listener's proof, so it gets as far as its own proof."""
    client = server.raw_client()
    greeting = b'[1, "client", "client-incarnation"]'
    proof = bytes(PROOF_SIZE) + struct.pack("<H", len(greeting)) + greeting
    client.sendall(MAGIC + bytes(NONCE_SIZE) + proof)
    assert len(server.rejection(client)) == CHALLENGE_SIZE


def test_a_recorded_proof_is_rejected(server: ListeningServer) -> None:
    """An attacker has recorded the messages of a client and sends them again."""
    recorded = ClientHandshake(TOKEN, CLIENT, LISTENER.incarnation)
    other_server = ServerHandshake(TOKEN, LISTENER.incarnation)
    response = recorded.response(other_server.feed(recorded.hello()))
    client = server.raw_client()
    client.sendall(recorded.hello() + response)
    assert len(server.rejection(client)) == CHALLENGE_SIZE


def test_a_client_notices_that_the_listener_has_another_token(server: ListeningServer) -> None:
    with pytest.raises(AuthenticationError, match="token"):
        server.connect(type(server.transport)(b"another secret"), LISTENER)
    assert not server.accepted


def test_a_client_notices_another_incarnation_of_the_worker(server: ListeningServer) -> None:
    """The listener proves that it belongs to the group. So the worker has certainly ended."""
    with pytest.raises(ConnectionRefusedError, match="another worker of the group listens there"):
        server.connect(server.transport, LISTENER._replace(incarnation="an-earlier-incarnation"))
    assert not server.accepted


def test_only_a_member_can_prove_that_it_is_another_incarnation() -> None:
    client = ClientHandshake(TOKEN, CLIENT, LISTENER.incarnation)
    challenge = ServerHandshake(b"a guess", "another incarnation").feed(client.hello())
    replayed = ServerHandshake(TOKEN, "another incarnation").feed(
        ClientHandshake(TOKEN, CLIENT, LISTENER.incarnation).hello()
    )
    for answer in (challenge, replayed, bytes(CHALLENGE_SIZE), challenge[:-1] + b"\0"):
        with pytest.raises(AuthenticationError, match="not the worker to be called"):
            client.response(answer)


def test_a_unix_client_waits_for_room_in_the_backlog() -> None:
    place = f"gradwire-test-{os.getpid()}"
    errors: list[Exception] = []

    def connect() -> None:
        try:
            UnixTransport(TOKEN).connect(place, CLIENT, LISTENER, TIMEOUT)
        except Exception as error:
            errors.append(error)

    def waits() -> bool:
        frame = sys._current_frames().get(thread.ident or 0)
        while frame is not None and frame.f_code is not unix._wait_for_room.__code__:
            frame = frame.f_back
        return frame is not None

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + place)
        listener.listen(0)
        with contextlib.ExitStack() as crowd, pytest.raises(BlockingIOError):
            while True:
                client = crowd.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect("\0" + place)
        thread = threading.Thread(target=connect)
        thread.start()
        until(lambda: bool(errors) or waits(), "the client waits")
        assert not errors
        received = b""
        while not received:
            with listener.accept()[0] as accepted:
                received = accepted.recv(len(MAGIC))
    thread.join(TIMEOUT)
    assert received == MAGIC
    assert isinstance(errors[0], (AuthenticationError, ConnectionError))


def test_a_client_fails_when_the_listener_closes(server: ListeningServer) -> None:
    finished: list[None] = []

    def connect() -> None:
        with pytest.raises((AuthenticationError, ConnectionError)):
            server.transport.connect(server.place, CLIENT, LISTENER, TIMEOUT)
        finished.append(None)

    with Background(connect):
        drive(server.poller, lambda: server.listener._pending)
        server.listener.close()
    assert finished


def test_a_connection_has_the_greeting_of_its_peer(server: ListeningServer) -> None:
    client = server.connect(server.transport, LISTENER)
    assert client.peer == LISTENER
    assert [connection.peer for connection in server.accepted] == [CLIENT]


def test_a_client_does_not_send_a_greeting_that_is_too_long() -> None:
    with pytest.raises(ValueError, match="too long"):
        ClientHandshake(TOKEN, Greeting(1, "x" * MAX_GREETING, "incarnation"), "them")


def test_an_announced_frame_beyond_the_limit_allocates_nothing(server: ListeningServer) -> None:
    raw = server.connect(server.transport, LISTENER)
    raw.send(Frame(b"ok"))
    take(server.accepted[0], 1)
    raw._stream.send(HUGE_PREFIX)  # type: ignore[attr-defined]
    tracemalloc.start()
    try:
        with pytest.raises(ConnectionClosed, match="announced a frame"):
            take(server.accepted[0], 1)
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()


def test_silent_clients_are_rejected_after_a_while(
    server: ListeningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = server.raw_client()
    drive(server.poller, lambda: server.listener._pending)
    server.run_timers()
    assert server.listener._pending  # not yet late
    assert server.timers
    monkeypatch.setattr("gradwire._core.transport.listener.HANDSHAKE_SECONDS", 0.0)
    server.run_timers()
    assert client.recv(1) == b""
    assert not server.timers


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


def test_a_pending_handshake_is_rejected_when_descriptors_run_out(server: ListeningServer) -> None:
    first = server.raw_client()
    drive(server.poller, lambda: server.listener._pending)
    pending = set(server.listener._pending)
    server.raw_client()
    with no_descriptor_free():
        drive(
            server.poller, lambda: set(server.listener._pending) - pending, "the second handshake"
        )
    assert first.recv(1) == b""


def test_a_listener_without_descriptors_pauses_and_tries_again(
    server: ListeningServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.raw_client()
    with no_descriptor_free():
        drive(server.poller, lambda: caplog.messages, "the warning")
        server.poller.wake()
        assert server.poller.next() is None, "the listener is armed without free descriptors"
        server.run_timers()
        run_due_callbacks(server.poller)
        assert not server.listener._pending
    server.run_timers()
    drive(server.poller, lambda: server.listener._pending, "the new handshake")
    (warning,) = caplog.messages
    assert "worker listener cannot accept connections" in warning
    server.connect(server.transport, LISTENER)


def test_a_listener_that_pauses_again_and_again_warns_once(
    server: ListeningServer, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        with server.raw_client():
            with no_descriptor_free():
                drive(server.poller, lambda: server.timers, "the pause")
            server.run_timers()
            drive(server.poller, lambda: server.listener._pending, "the new handshake")
        drive(server.poller, lambda: not server.listener._pending, "the end of the handshake")
        server.run_timers()
    assert len(caplog.messages) == 1


def test_many_silent_clients_do_not_keep_members_out(server: ListeningServer) -> None:
    clients = []
    descriptors = len(open_descriptors())
    for _ in range(MAX_PENDING + 20):
        clients.append(server.raw_client())
        run_due_callbacks(server.poller)
    ours = len(open_descriptors()) - descriptors - len(clients)
    assert ours <= MAX_PENDING
    assert [client.recv(1) for client in clients[:20]] == [b""] * 20
    server.connect(server.transport, LISTENER)
    assert len(server.accepted) == 1


def test_a_client_that_disconnects_is_removed(server: ListeningServer) -> None:
    for data in (b"", MAGIC, MAGIC + bytes(NONCE_SIZE), MAGIC + bytes(NONCE_SIZE + PROOF_SIZE)):
        with server.raw_client() as client:
            client.send(data)
            drive(server.poller, lambda: server.listener._pending)
        drive(server.poller, lambda: not server.listener._pending)


def test_a_client_that_disconnects_before_the_welcome_leaves_nothing(
    server: ListeningServer,
) -> None:
    """The client resets its socket while the listener is about to answer."""
    handshake = ClientHandshake(TOKEN, CLIENT, LISTENER.incarnation)
    before = len(open_descriptors())
    with server.raw_client() as client:
        client.send(handshake.hello())
        drive(server.poller, lambda: server.listener._pending)
        drive(server.poller, lambda: select.select([client], [], [], 0)[0])
        response = handshake.response(client.recv(CHALLENGE_SIZE, socket.MSG_WAITALL))
        if isinstance(server.transport, UnixTransport):
            client.send(response)
            drive(server.poller, lambda: select.select([client], [], [], 0)[0], "the welcome")
            assert client.recv(1) == WELCOME
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            probe = os.memfd_create("gradwire-probe")
            os.ftruncate(probe, 4096)
            socket.send_fds(client, [READY], [theirs.fileno(), probe])
            for end in (ours, theirs):
                end.close()
            os.close(probe)
        else:
            client.send(response)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    drive(server.poller, lambda: not server.listener._pending)
    for connection in server.accepted:  # if the system accepted the welcome all the same
        connection.close()
    assert len(open_descriptors()) == before


@pytest.fixture
def unix_server() -> Iterator[ListeningServer]:
    with contextlib.closing(EpollPoller()) as poller:
        server = ListeningServer(UnixTransport(TOKEN), poller)
        yield server
        server.close()


@pytest.mark.usefixtures("older_kernel")
def test_a_client_that_sends_descriptors_before_its_proof_is_rejected(
    unix_server: ListeningServer,
) -> None:
    client = unix_server.raw_client()
    drive(unix_server.poller, lambda: unix_server.listener._pending)
    before = len(open_descriptors())
    socket.send_fds(client, [MAGIC], [client.fileno()] * 8)
    assert unix_server.rejection(client) == b""
    unix_server.transport.closer.finish()
    assert len(open_descriptors()) < before


def prove(server: ListeningServer) -> socket.socket:
    """Return a client that has proven that it belongs to the group."""
    handshake = ClientHandshake(TOKEN, CLIENT, LISTENER.incarnation)
    client = server.raw_client()
    client.send(handshake.hello())
    drive(server.poller, lambda: select.select([client], [], [], 0)[0], "the challenge")
    client.send(handshake.response(client.recv(CHALLENGE_SIZE)))
    drive(server.poller, lambda: select.select([client], [], [], 0)[0], "the welcome")
    assert client.recv(1) == WELCOME
    return client


@pytest.mark.parametrize("count", [0, 1])
def test_a_client_that_sends_too_few_descriptors_is_rejected(
    unix_server: ListeningServer, count: int
) -> None:
    client = prove(unix_server)
    socket.send_fds(client, [READY], [client.fileno()] * count)
    assert unix_server.rejection(client) == b""


@pytest.mark.parametrize("wrong", ["channel", "probe", "incoming", "outgoing", "blocking"])
def test_a_client_that_sends_wrong_descriptors_is_rejected(
    unix_server: ListeningServer, wrong: str
) -> None:
    client = prove(unix_server)
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
        socket.send_fds(client, [READY], list(offered.values()))
        assert unix_server.rejection(client) == b""
    for descriptor in (probe, *itertools.chain(*pipes)):
        os.close(descriptor)


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
NOBODY = 65534


@as_root
def test_a_process_of_another_user_is_refused_before_anything_is_read(
    unix_server: ListeningServer, caplog: pytest.LogCaptureFixture
) -> None:
    def connect() -> bytes:
        os.setuid(NOBODY)
        return unix_server.raw_client().recv(1)

    with processes(connect, connect) as clients:
        drive(unix_server.poller, lambda: caplog.messages, "the warning")
        for client in clients:
            unix_server.serve(client)
            assert client.result() == b""
    assert not unix_server.listener._pending
    (warning,) = caplog.messages
    assert f"refuses processes of user {NOBODY}" in warning
    assert "allow_other_users" in warning


@as_root
def test_a_client_refuses_a_listener_of_another_user(unix_server: ListeningServer) -> None:
    def connect() -> str:
        os.setuid(NOBODY)
        with pytest.raises(AuthenticationError) as refused:
            UnixTransport(TOKEN).connect(unix_server.place, CLIENT, LISTENER, TIMEOUT)
        return str(refused.value)

    with processes(connect) as (client,):
        unix_server.serve(client)
        assert "belongs to user 0" in client.result()


@as_root
def test_an_option_allows_other_users() -> None:
    with contextlib.closing(EpollPoller()) as poller:
        transport = UnixTransport(TOKEN, allow_other_users=True)
        server = ListeningServer(transport, poller)

        def connect() -> bytes:
            os.setuid(NOBODY)
            connection = transport.connect(server.place, CLIENT, LISTENER, TIMEOUT)
            return take(connection, 1)[0].head

        with processes(connect) as (client,):
            drive(poller, lambda: server.accepted, "the connection")
            server.accepted[0].send(Frame(b"hello"))
            assert client.result() == b"hello"
        server.close()


@pytest.fixture
def tcp_server() -> Iterator[ListeningServer]:
    with contextlib.closing(EpollPoller()) as poller:
        server = ListeningServer(TcpTransport(TOKEN), poller)
        yield server
        server.close()


def test_a_handshake_may_arrive_byte_by_byte(tcp_server: ListeningServer) -> None:
    handshake = ClientHandshake(TOKEN, CLIENT, LISTENER.incarnation)
    client = tcp_server.raw_client()
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in handshake.hello():
        client.send(bytes([byte]))
        run_due_callbacks(tcp_server.poller)
    for byte in handshake.response(client.recv(CHALLENGE_SIZE, socket.MSG_WAITALL)):
        client.send(bytes([byte]))
        run_due_callbacks(tcp_server.poller)
    drive(tcp_server.poller, lambda: tcp_server.accepted)


@pytest.mark.parametrize("transport", [UnixTransport, TcpTransport])
def test_a_listener_that_dribbles_cannot_delay_a_client_beyond_its_timeout(
    transport: type[UnixTransport | TcpTransport],
) -> None:
    name = "gradwire-test-" + os.urandom(8).hex()
    is_unix = transport is UnixTransport
    sent: list[bytes] = []
    with contextlib.closing(socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET)) as sock:
        sock.bind("\0" + name if is_unix else ("127.0.0.1", 0))
        sock.listen()
        place = name if is_unix else "{}|{}".format(*sock.getsockname())

        def dribble() -> None:
            client, _ = sock.accept()
            with client:
                # Each byte comes well before the timeout of the client.
                while not select.select([], [], [], 0.05)[0] and len(sent) < CHALLENGE_SIZE - 1:
                    try:
                        client.send(b"g")
                    except OSError:
                        return
                    sent.append(b"g")

        with Background(dribble), pytest.raises(TimeoutError):
            transport(TOKEN).connect(place, CLIENT, LISTENER, 0.3)
    assert 0 < len(sent) < CHALLENGE_SIZE - 1
