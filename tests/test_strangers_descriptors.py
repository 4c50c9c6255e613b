"""Processes without the token can attach descriptors to what they send. Closing such a descriptor
may block, so a worker never does that on a thread that serves calls."""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from gradwire._core.transport import listener, strangers
from gradwire._core.transport.handshake import CHALLENGE_SIZE, HELLO_SIZE, MAGIC, NONCE_SIZE
from gradwire._core.transport.poller import EpollPoller
from gradwire._core.transport.unix import UnixTransport
from gradwire.errors import AuthenticationError
from gradwire.testing import cluster, runtime_of, transports_named
from gradwire.testing.connection_pairs import CLIENT, LISTENER, Background
from gradwire.worker import Worker
from tests.processes import processes, until
from tests.test_handshake import ListeningServer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the transport unix")

#: Far longer than any step of these tests takes, and shorter than a test may hang.
TIMEOUT = 30.0
LINGER_SECONDS = 600
#: More guests than a worker has threads.
GUESTS = 20
#: More connections than may wait to be closed.
FLOOD = strangers.MAX_WAITING + 72
#: The user nobody.
ANOTHER_USER = 65534


def kernel_refuses_descriptors() -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.setsockopt(socket.SOL_SOCKET, strangers.PASSRIGHTS, 0)
        except OSError:
            return False
        return True


@contextlib.contextmanager
def a_pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


needs_passrights = pytest.mark.skipif(
    sys.platform != "linux" or not kernel_refuses_descriptors(),
    reason="kernels before Linux 6.16 cannot refuse descriptors",
)


class BlockingDescriptors:
    """Passes descriptors whose last close blocks until the end of the block `with`: sockets with
    bytes that nobody reads, and with SO_LINGER, which makes `close` wait until somebody has."""

    def __enter__(self) -> BlockingDescriptors:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._receivers: list[socket.socket] = []
        self._closing: list[threading.Thread] = []
        return self

    def __exit__(self, *_: object) -> None:
        for sock in (*self._receivers, self._server):
            sock.close()
        for thread in self._closing:
            thread.join(TIMEOUT)

    def _make(self) -> int:
        sender = socket.create_connection(self._server.getsockname())
        self._receivers.append(self._server.accept()[0])
        sender.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                sender.send(bytes(1 << 16))
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_SECONDS))
        return sender.detach()

    def send_one(self, client: socket.socket, data: bytes, flags: int = 0) -> None:
        """Send a descriptor with some bytes and close it here, so that the copy on its way becomes
        the last one. If the other side has closed that copy already, the close here blocks."""
        descriptor = self._make()
        attached = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
        client.sendmsg([data], [attached], flags)
        closing = threading.Thread(target=os.close, args=(descriptor,))
        self._closing.append(closing)
        closing.start()
        closing.join(0.02)


def guest_of(worker: Worker) -> socket.socket:
    """Return a socket that is connected to a worker, and has sent nothing yet."""
    assert runtime_of(worker).agent.member is not None
    guest = socket.socket(socket.AF_UNIX)
    guest.settimeout(TIMEOUT)
    guest.connect("\0" + runtime_of(worker).agent.member.addresses[0].place)
    return guest


def wait_until_dismissed(guest: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError):
        while guest.recv(1 << 10):
            pass


def send_rest(client: socket.socket, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):  # the worker may have hung up already
        client.sendall(data)


def with_noise(client: socket.socket, descriptors: BlockingDescriptors) -> None:
    descriptors.send_one(client, b"noise")
    send_rest(client, bytes(200))


def with_the_first_message(client: socket.socket, descriptors: BlockingDescriptors) -> None:
    descriptors.send_one(client, MAGIC)
    send_rest(client, bytes(NONCE_SIZE))
    client.shutdown(socket.SHUT_WR)


def with_the_proof(client: socket.socket, descriptors: BlockingDescriptors) -> None:
    client.sendall(MAGIC + bytes(NONCE_SIZE))
    assert client.recv(CHALLENGE_SIZE)
    descriptors.send_one(client, b"proof")
    send_rest(client, bytes(28) + b"\1" + bytes(256))


def out_of_band(client: socket.socket, descriptors: BlockingDescriptors) -> None:
    """A plain read discards an urgent byte, with its descriptor, and returns the bytes behind."""
    descriptors.send_one(client, b"!", socket.MSG_OOB)
    send_rest(client, bytes(200))


def and_hang_up(client: socket.socket, descriptors: BlockingDescriptors) -> None:
    descriptors.send_one(client, MAGIC)
    client.shutdown(socket.SHUT_WR)


@pytest.mark.usefixtures("older_kernel")
@pytest.mark.parametrize(
    "attack", [with_noise, with_the_first_message, with_the_proof, out_of_band, and_hang_up]
)
def test_descriptors_of_strangers_do_not_hold_up_calls(
    attack: Callable[[socket.socket, BlockingDescriptors], None],
) -> None:
    with cluster(3, transports=transports_named("unix")) as (caller, callee, newcomer):
        assert caller.rpc_sync("worker1", max, (1, 2)) == 2
        with BlockingDescriptors() as descriptors, contextlib.ExitStack() as guests:
            for _ in range(GUESTS):
                guest = guests.enter_context(guest_of(callee))
                attack(guest, descriptors)
                wait_until_dismissed(guest)
            for number in range(50):
                assert caller.rpc_sync("worker1", max, (number, 0), timeout=TIMEOUT) == number
            assert newcomer.rpc_sync("worker1", max, (3, 4), timeout=TIMEOUT) == 4


@pytest.mark.usefixtures("older_kernel")
def test_descriptors_of_strangers_do_not_hold_up_a_shutdown() -> None:
    """The strangers are not dismissed when the worker shuts down. Those who connect while its
    leader is busy are not even accepted."""
    transport = UnixTransport(b"the token of this test")
    with BlockingDescriptors() as descriptors, contextlib.ExitStack() as guests:
        with cluster(1, transports=[transport]) as (worker,):
            closed = threading.Event()
            runtime_of(worker).agent.poller.post(lambda: closed.wait(TIMEOUT))
            for _ in range(10):
                descriptors.send_one(guests.enter_context(guest_of(worker)), MAGIC)

            def shut_down() -> None:
                worker.shutdown(graceful=False)

            with Background(shut_down):
                until(lambda: runtime_of(worker).agent.executor.stopped, "the worker has closed")
                closed.set()
    transport.closer.finish()


@pytest.mark.parametrize("data", [b"!", b"!" + bytes(200)], ids=["alone", "with-bytes-behind"])
def test_an_urgent_byte_with_a_descriptor_is_not_read(data: bytes) -> None:
    closer = strangers.SocketCloser()
    ours, theirs = socket.socketpair()
    with BlockingDescriptors() as descriptors, theirs:
        strangers.prepare(ours)
        descriptors.send_one(theirs, data[:1], socket.MSG_OOB)
        theirs.sendall(data[1:])

        def read_and_close() -> None:
            with pytest.raises(AuthenticationError, match="descriptors"):
                strangers.receive(ours, 100)
            closer.close(ours)

        with Background(read_and_close):
            pass
    closer.finish()


@pytest.mark.usefixtures("older_kernel")
def test_a_client_is_not_held_up_by_descriptors_of_a_listener() -> None:
    """Another process listens at the address of a worker that has died."""
    transport = UnixTransport(b"the token of this test")
    with BlockingDescriptors() as descriptors, socket.socket(socket.AF_UNIX) as impostor:
        impostor.bind("")
        impostor.listen()
        name = impostor.getsockname()[1:].decode()

        def connect() -> None:
            with pytest.raises(AuthenticationError, match="descriptors"):
                transport.connect(name, CLIENT, LISTENER, TIMEOUT)

        with Background(connect):
            client, _ = impostor.accept()
            with client:
                assert client.recv(HELLO_SIZE, socket.MSG_WAITALL)
                descriptors.send_one(client, bytes(CHALLENGE_SIZE))
    transport.closer.finish()


@pytest.mark.usefixtures("older_kernel")
def test_a_listener_takes_a_break_while_many_strangers_wait_to_be_dismissed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(strangers, "MAX_WAITING", 2)
    monkeypatch.setattr(listener, "RETRY_SECONDS", 0.01)
    with cluster(3, transports=transports_named("unix")) as (caller, callee, newcomer):
        assert caller.rpc_sync("worker1", max, (1, 2)) == 2
        with BlockingDescriptors() as descriptors, contextlib.ExitStack() as guests:
            for _ in range(10):
                descriptors.send_one(guests.enter_context(guest_of(callee)), bytes(200))
            until(lambda: "cannot accept connections" in caplog.text, "the listener has a break")
            assert caller.rpc_sync("worker1", max, (3, 4), timeout=TIMEOUT) == 4
        assert newcomer.rpc_sync("worker1", max, (5, 6), timeout=TIMEOUT) == 6


@needs_passrights
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_flood_of_descriptors_of_another_user_does_not_keep_members_out() -> None:
    with contextlib.ExitStack() as stack:
        poller = stack.enter_context(contextlib.closing(EpollPoller()))
        server = ListeningServer(UnixTransport(b"the token of this test"), poller)
        stack.callback(server.close)
        flooded, theirs = stack.enter_context(a_pipe())

        def flood() -> None:
            """Connect often, with a descriptor. Then wait to be killed."""
            os.setgroups([])
            os.setgid(ANOTHER_USER)
            os.setuid(ANOTHER_USER)
            guests = [socket.socket(socket.AF_UNIX) for _ in range(FLOOD)]
            with BlockingDescriptors() as descriptors:
                for guest in guests:
                    guest.connect("\0" + server.place)
                # A single descriptor that blocks holds up all sockets behind it.
                with contextlib.suppress(PermissionError):
                    descriptors.send_one(guests[0], b"!")
                for guest in guests:
                    guest.send(b"!")
                os.write(theirs, b"!")
                threading.Event().wait()

        # The listener runs only in `connect`, so it meets all guests before it meets the member.
        # Its timers do not run there: if it pauses, it never accepts the member.
        (stranger,) = stack.enter_context(processes(flood))
        until(lambda: select.select([flooded], [], [], 0)[0] or stranger.has_result(), "the flood")
        assert not stranger.has_result(), stranger.result()
        server.connect(server.transport, LISTENER)


@needs_passrights
def test_a_stranger_cannot_send_descriptors_to_a_listener() -> None:
    with cluster(1, transports=transports_named("unix")) as (worker,), guest_of(worker) as guest:
        for flags in (0, socket.MSG_OOB):
            with pytest.raises(PermissionError):
                socket.send_fds(guest, [MAGIC], [guest.fileno()], flags)


@needs_passrights
def test_a_stranger_cannot_send_descriptors_to_a_client() -> None:
    transport = UnixTransport(b"the token of this test")
    with socket.socket(socket.AF_UNIX) as impostor:
        impostor.bind("")
        impostor.listen()
        name = impostor.getsockname()[1:].decode()

        def connect() -> None:
            with pytest.raises(AuthenticationError):
                transport.connect(name, CLIENT, LISTENER, TIMEOUT)

        with Background(connect):
            client, _ = impostor.accept()
            with client:
                assert client.recv(HELLO_SIZE, socket.MSG_WAITALL)
                with pytest.raises(PermissionError):
                    socket.send_fds(client, [bytes(CHALLENGE_SIZE)], [client.fileno()])
