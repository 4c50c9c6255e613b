"""Every transport passes the checks; the unix transport and the pollers have tests of their own."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import select
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gradwire._core.transport import registry
from gradwire._core.transport.base import Connection
from gradwire._core.transport.in_process import InProcessTransport
from gradwire._core.transport.poller import EpollPoller, Poller, SelectorPoller
from gradwire._core.transport.shared_memory import SEGMENT_BYTES, SegmentReceiver, SegmentSender
from gradwire._core.transport.stream import StreamConnection
from gradwire._core.transport.tcp import TcpTransport
from gradwire._core.transport.unix import UnixConnection, UnixTransport
from gradwire._core.wire.frames import Frame
from gradwire.errors import ConnectionClosed, SendTimeout, SetupError
from gradwire.options import DEFAULT_TRANSPORTS, Options
from gradwire.testing import transport_checks, transports_named
from gradwire.testing.connection_pairs import (
    CLIENT,
    LISTENER,
    TIMEOUT,
    Background,
    Pair,
    drive,
    never,
    open_descriptors,
    open_pair,
    shared_memory,
    take,
)
from gradwire.testing.transport_checks import (
    CHECKS,
    CHECKS_WHILE_DISARMED,
    Check,
    OpenPair,
    same_bytes,
)
from gradwire.worker import Worker
from tests.processes import rendezvous_file

TOKEN = b"the group's secret"


@contextlib.contextmanager
def open_narrow_pair(segment_bytes: int = SEGMENT_BYTES) -> Iterator[Pair]:
    """Open a pair with small pipes, such as Linux makes for users that have many pipes."""
    with open_pair(UnixTransport(TOKEN, segment_bytes=segment_bytes), EpollPoller) as pair:
        for end in (pair.client, pair.listener):
            assert isinstance(end, UnixConnection)
            fcntl.fcntl(end._pipes.outgoing, fcntl.F_SETPIPE_SZ, 8192)
        yield pair


PAIRS: dict[str, OpenPair] = {
    "in_process": lambda: open_pair(InProcessTransport(), EpollPoller),
    "unix": lambda: open_pair(UnixTransport(TOKEN), EpollPoller),
    "unix-narrow": open_narrow_pair,
    "tcp": lambda: open_pair(TcpTransport(TOKEN), EpollPoller),
    "tcp-selector": lambda: open_pair(TcpTransport(TOKEN), SelectorPoller),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_transport_passes(check: Check, name: str) -> None:
    check(PAIRS[name])


@pytest.mark.parametrize(
    "check",
    [
        transport_checks.check_heads_of_every_size_arrive,
        transport_checks.check_heads_in_pieces_arrive_whole,
        transport_checks.check_views_of_heads_outlive_their_frames,
        transport_checks.check_buffers_of_every_size_arrive,
        transport_checks.check_many_threads_send_in_both_directions,
        transport_checks.check_blocked_is_called_at_most_once_for_a_frame,
        transport_checks.check_send_ends_at_its_deadline,
    ],
    ids=lambda check: check.__name__,
)
def test_without_segments_everything_goes_through_the_pipes(check: Check) -> None:
    check(lambda: open_narrow_pair(segment_bytes=1 << 40))


@pytest.mark.parametrize("name", ["in_process", "unix", "tcp"])
@pytest.mark.parametrize("check", CHECKS_WHILE_DISARMED, ids=lambda check: check.__name__)
def test_every_transport_passes_while_disarmed(check: Check, name: str) -> None:
    check(PAIRS[name])


def test_a_thread_that_releases_a_connection_may_use_it() -> None:
    """During the release the garbage collector may run a destructor that makes a call."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    connection = StreamConnection(ours, LISTENER, 1 << 20, 5.0)
    with theirs:
        assert connection.begin_reading()
        with connection._release_lock:
            connection.close()
            with pytest.raises(ConnectionClosed):
                connection.send(Frame(b"late"))
        connection.end_reading()
    assert ours.fileno() < 0


# -- the registry


def test_an_unknown_transport_is_an_error_that_lists_the_known_ones() -> None:
    options = Options(transports=["tcp", "pigeon"], init_method="file:///does-not-exist")
    with pytest.raises(SetupError, match=r"no transport called 'pigeon'.*are unix, tcp$"):
        Worker("worker", 0, 1, options)
    with pytest.raises(SetupError, match=r"are unix, tcp, in_process$"):
        transports_named("pigeon")


def test_options_cannot_name_a_transport_that_workers_must_share() -> None:
    options = Options(transports=["in_process"], init_method="file:///does-not-exist")
    with pytest.raises(SetupError, match=r"cannot name 'in_process'.*transports=\[...\]"):
        Worker("worker", 0, 1, options)


@pytest.mark.parametrize("transports", [(), "tcp"])
def test_transports_in_options_are_a_list_of_names(transports: Any) -> None:
    with pytest.raises(SetupError, match="list of names"):
        Options(transports=transports)


def test_a_system_without_a_transport_uses_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    factory = registry._FACTORIES["unix"]._replace(is_available=False)
    monkeypatch.setitem(registry._FACTORIES, "unix", factory)
    settings = registry.TransportSettings(TOKEN)
    made = registry.make_transports(DEFAULT_TRANSPORTS, settings)
    assert [transport.name for transport in made] == ["tcp"]
    with pytest.raises(SetupError, match="none of the transports unix is available"):
        registry.make_transports(["unix"], settings)


def test_a_registered_transport_can_be_named_in_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))
    made: list[registry.TransportSettings] = []

    def make(settings: registry.TransportSettings) -> TcpTransport:
        made.append(settings)
        return TcpTransport(settings.token, settings.host, name="own")

    registry.register("own", registry.TransportFactory(make))
    with pytest.raises(SetupError, match="already a transport"):
        registry.register("tcp", registry.TransportFactory(make))
    with rendezvous_file() as place:
        options = Options(
            transports=["own"], init_method=place, token="the group's secret", heartbeat_limit=40
        )
        with Worker("a", options=options) as a, Worker("b", options=options):
            assert a.rpc_sync("b", max, (1, 2)) == 2
    settings = registry.TransportSettings(
        b"the group's secret", max_bytes=options.max_message_bytes, stall_limit=40
    )
    assert made == [settings] * 2


# -- pollers


@pytest.fixture(params=[EpollPoller, SelectorPoller])
def poller(request: pytest.FixtureRequest) -> Iterator[Poller]:
    poller = request.param()
    yield poller
    poller.close()


def test_a_posted_callback_wakes_the_leader(poller: Poller) -> None:
    calls: list[int] = []
    with Background(lambda: drive(poller, lambda: len(calls) == 100)):
        for number in range(100):
            poller.post(lambda number=number: calls.append(number))  # type: ignore[misc]
    assert calls == list(range(100))


def test_a_reused_descriptor_number_is_registered_afresh(poller: Poller) -> None:
    """Between two polls a connection ends, and a new connection gets its descriptor number."""
    calls: list[str] = []
    for name in ("first", "second"):
        reader, writer = socket.socketpair()
        with reader, writer:
            if name == "first":
                number = reader.fileno()
            assert reader.fileno() == number
            poller.add(number, lambda name=name: calls.append(name))  # type: ignore[misc]
            poller.arm(number)
            poller.wake()
            assert poller.next() is None  # this has registered the number
            if name == "second":
                writer.send(b"data")
                drive(poller, lambda: calls, "the event of a descriptor with a reused number")
            poller.remove(number)
    assert calls == ["second"]


def test_a_descriptor_closed_while_armed_does_not_break_the_poller(poller: Poller) -> None:
    reader, writer = socket.socketpair()
    poller.add(reader.fileno(), lambda: None)
    poller.arm(reader.fileno())
    number = reader.fileno()
    reader.close()
    writer.close()
    poller.wake()
    assert poller.next() is None
    poller.remove(number)


# -- in_process


def test_in_process_ends_a_connection_if_the_listener_closes_before_accepting() -> None:
    network, poller, accepted = InProcessTransport(), EpollPoller(), []
    with contextlib.closing(poller):
        listener = network.listen(LISTENER, poller, accepted.append, never)
        client = network.connect(listener.address.place, CLIENT, LISTENER, TIMEOUT)
        listener.close()
        callback = poller.next()
        assert callback is not None
        callback()
        assert accepted == []
        with pytest.raises(ConnectionClosed):
            client.receive()


# -- tcp


def test_tcp_explains_a_host_it_cannot_listen_on() -> None:
    with (
        contextlib.closing(EpollPoller()) as poller,
        pytest.raises(SetupError, match="GRADWIRE_HOST"),
    ):
        TcpTransport(TOKEN, host="192.0.2.1").listen(LISTENER, poller, lambda _: None, never)


def test_tcp_within_the_machine_is_not_paced() -> None:
    try:
        with socket.socket() as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    except (AttributeError, OSError):
        pytest.skip("this system does not let programs choose the congestion control")
    with PAIRS["tcp"]() as pair:
        for end in (pair.client, pair.listener):
            assert isinstance(end, StreamConnection)
            assert isinstance(end._stream, socket.socket)
            control = end._stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            assert control.rstrip(b"\0") == b"reno"


# -- unix: shared memory


def _mapped_at(address: int) -> str:
    """Return the name of the mapping at an address, as the system shows it."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.split()
            start, end = (int(edge, 16) for edge in fields[0].split("-"))
            if start <= address < end:
                return " ".join(fields[5:])
    return ""


@pytest.fixture
def unix() -> Iterator[Pair]:
    with PAIRS["unix"]() as pair:
        yield pair


def _send(pair: Pair, tensor: torch.Tensor) -> torch.Tensor:
    with Background(lambda: pair.client.send(Frame(b"", [tensor]))):
        return take(pair.listener, 1)[0].buffers[0]


def test_unix_maps_a_large_tensor_and_copies_a_small_one(unix: Pair) -> None:
    large, small = _send(unix, torch.arange(10_000)), _send(unix, torch.arange(10))
    assert "memfd:gradwire" in _mapped_at(large.data_ptr())
    assert "memfd:gradwire" not in _mapped_at(small.data_ptr())


def test_unix_recycles_a_segment_when_the_receivers_tensor_dies(unix: Pair) -> None:
    first = _send(unix, torch.full((10_000,), 1))
    view = first[8:].view(torch.int64)  # a view keeps the memory as well
    used = first.data_ptr()
    del first
    second = _send(unix, torch.full((10_000,), 2))
    assert second.data_ptr() != used
    assert bool((view == 1).all())
    del view
    third = _send(unix, torch.full((10_000,), 3))
    assert third.data_ptr() == used
    assert len(shared_memory()) == 2


def test_unix_copies_large_tensors_in_pieces(unix: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire._core.transport.memcopy._TWO_THREADS_BYTES", 1 << 16)
    monkeypatch.setattr("gradwire._core.transport.memcopy._PIECE_BYTES", 1 << 12)
    sent = torch.randint(256, (1_000_003,), dtype=torch.uint8)
    unix.client.send(Frame(b"", [sent]))
    assert same_bytes(take(unix.listener, 1)[0].buffers[0], sent)


def test_unix_frees_retired_segments_on_both_sides(unix: Pair) -> None:
    kept, gone = _send(unix, torch.arange(10_000)), _send(unix, torch.arange(10_000))
    del gone
    unix.client.trim()  # marks the free segment as idle
    assert len(shared_memory()) == 2
    unix.client.trim()
    unix.client.send(Frame(b"after"))
    assert [bytes(frame.head) for frame in take(unix.listener, 1)] == [b"after"]
    assert len(shared_memory()) == 1
    assert same_bytes(kept, torch.arange(10_000))


def test_unix_reports_retired_segments_with_the_next_buffers(unix: Pair) -> None:
    """If the pipe is full, reporting them at once would block."""
    first = _send(unix, torch.arange(100_000))
    del first

    def send() -> None:
        for _ in range(20):
            unix.client.send(Frame(bytes(30_000)))

    with Background(send):
        poll = select.poll()
        poll.register(unix.client._fd, select.POLLOUT)  # type: ignore[attr-defined]
        while poll.poll(0):
            pass
        unix.client.trim()
        unix.client.trim()
        take(unix.listener, 20)
    kept = _send(unix, torch.arange(10_000))
    assert len(shared_memory()) == 1
    assert same_bytes(kept, torch.arange(10_000))


def test_unix_sends_through_the_pipe_when_there_are_too_many_segments(
    unix: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradwire._core.transport.shared_memory.MAX_SEGMENTS", 3)
    tensors = [torch.full((10_000,), number) for number in range(5)]
    arrived = [_send(unix, tensor) for tensor in tensors]
    assert len(shared_memory()) == 3
    assert all(map(same_bytes, arrived, tensors))


def test_unix_keeps_nothing_of_a_peer_that_was_killed() -> None:
    before, poller, accepted = open_descriptors(), EpollPoller(), list[Connection]()
    listener = UnixTransport(TOKEN).listen(LISTENER, poller, accepted.append, never)
    child = os.fork()
    if not child:
        _hold_a_tensor_until_killed(listener.address.place)
    try:
        drive(poller, lambda: accepted, "the child's connection")
        sender = accepted[0]
        sender.send(Frame(b"", [torch.arange(100_000)]))
        assert take(sender, 1)[0].head == b"I hold it"
        assert shared_memory()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    calls: list[None] = []
    sender.attach(poller, lambda: calls.append(None))
    drive(poller, lambda: calls, "the report of the child's death")
    with pytest.raises(ConnectionClosed):
        sender.receive()
    sender.close()
    listener.close()
    poller.close()
    assert open_descriptors() == before
    assert not shared_memory()


def _hold_a_tensor_until_killed(place: str) -> None:
    try:
        connection = UnixTransport(TOKEN).connect(place, CLIENT, LISTENER, TIMEOUT)
        held = take(connection, 1)
        connection.send(Frame(b"I hold it"))
        signal.pause()
        del held
    finally:
        os._exit(1)


def test_frames_that_are_withdrawn_use_up_no_shared_memory() -> None:
    large = Frame(b"", [torch.zeros(100_000)])
    with open_narrow_pair() as pair:
        before = shared_memory()
        with pytest.raises(SendTimeout):
            for _ in range(1000):
                pair.client.send(Frame(b"x"), None, 0.0)
        for _ in range(50):
            with pytest.raises(SendTimeout) as late:
                pair.client.send(large, None, 0.0)
            assert late.value.withdrawn
        assert len(shared_memory() - before) == 1
        assert isinstance(pair.client, UnixConnection)
        pair.client.trim()
        pair.client.trim()
        assert pair.client._sender.has_retired
        with pytest.raises(SendTimeout):
            pair.client.send(Frame(b"", [torch.zeros(1)]), None, 0.0)
        assert pair.client._sender.has_retired, "a later frame must tell the peer"


@contextlib.contextmanager
def forked_child() -> Iterator[None]:
    """Run a child that keeps copies of all descriptors open until the block ends."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    os.close(read_end)
    try:
        yield
    finally:
        os.close(write_end)
        os.waitpid(child, 0)


@pytest.mark.parametrize("name", ["unix", "tcp"])
@pytest.mark.parametrize("listen", [Connection.arm, Connection.disarm])
def test_a_forked_child_does_not_keep_a_connection_open(
    name: str, listen: Callable[[Connection], None]
) -> None:
    with PAIRS[name]() as pair, forked_child():
        calls: list[None] = []
        pair.listener.attach(pair.poller, lambda: calls.append(None))
        pair.client.send(Frame(b"the last one"))
        pair.client.close()
        drive(pair.poller, lambda: calls, "the report that the peer has closed")
        assert take(pair.listener, 1)[0].head == b"the last one"
        calls.clear()
        getattr(pair.listener, listen.__name__)()
        drive(pair.poller, lambda: calls, "the report that nothing more will come")
        with pytest.raises(ConnectionClosed):
            take(pair.listener, 1)
        with pytest.raises(ConnectionClosed):
            for _ in range(400):
                pair.listener.send(Frame(bytes(30_000)))


def test_sending_fails_when_only_a_forked_child_keeps_the_pipe_open() -> None:
    def send_until_closed() -> None:
        with pytest.raises(ConnectionClosed):
            while True:
                pair.listener.send(Frame(bytes(1000)))

    with PAIRS["unix"]() as pair, forked_child(), Background(send_until_closed):
        pair.client.close()


def test_a_frame_sent_right_before_the_close_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the pipe was empty at the previous read."""

    class LateFile(io.FileIO):
        def readinto(self, buffer: Any) -> Any:
            count = super().readinto(buffer)
            if count is None:
                pair.client.send(Frame(b"the last one"))
                pair.client.close()
            return count

    with PAIRS["unix"]() as pair, forked_child():
        assert isinstance(pair.listener, UnixConnection)
        pipes = pair.listener._pipes
        late = LateFile(pipes.incoming.fileno(), "rb", closefd=False)
        monkeypatch.setattr(pipes, "incoming", late)
        assert take(pair.listener, 1)[0].head == b"the last one"
        monkeypatch.undo()


def test_started_programs_inherit_no_descriptor() -> None:
    with PAIRS["unix"]() as pair:
        for end in (pair.client, pair.listener):
            assert isinstance(end, UnixConnection)
            pipes = end._pipes
            for opened in (pipes.incoming, pipes.outgoing, pipes.sock, end._channel):
                assert not os.get_inheritable(opened.fileno())


def test_a_connection_may_be_closed_while_it_is_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    with PAIRS["unix"]() as pair:
        add = pair.poller.add

        def add_and_end(descriptor: int, callback: Callable[[], None]) -> None:
            add(descriptor, callback)
            pair.listener.close()

        monkeypatch.setattr(pair.poller, "add", add_and_end)
        pair.listener.attach(pair.poller, lambda: None)


_SEALED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@pytest.mark.parametrize(
    ("seals", "size", "length", "message"),
    [
        (0, 1 << 16, 100, "not sealed"),
        (fcntl.F_SEAL_GROW, 1 << 16, 100, "not sealed"),
        (_SEALED, 1 << 15, 100, "another size"),
        (_SEALED, 1 << 17, 100, "another size"),
        (_SEALED, 1 << 16, (1 << 16) - 63, "in a segment of"),
        (_SEALED, 1 << 16, 0, "in a segment of"),
    ],
)
def test_segments_that_could_crash_the_receiver_are_rejected(
    seals: int, size: int, length: int, message: str
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    descriptor = os.memfd_create("gradwire-evil", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with ours, theirs:
        os.ftruncate(descriptor, size)
        if seals:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        socket.send_fds(theirs, [struct.pack("<QQ", 1, 1 << 16)], [descriptor])
        os.close(descriptor)
        with pytest.raises(ConnectionClosed, match=message):
            SegmentReceiver(ours).get(1, length)


@pytest.mark.parametrize("announcement", [b"", b"short", struct.pack("<QQ", 1, 1 << 16)])
def test_announcements_without_a_segment_are_rejected(announcement: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        if announcement:
            theirs.send(announcement)
        else:
            theirs.close()
        with pytest.raises(ConnectionClosed):
            SegmentReceiver(ours).get(1, 100)


def test_a_descriptor_that_is_no_shared_memory_is_rejected() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        socket.send_fds(theirs, [struct.pack("<QQ", 1, 1 << 16)], [theirs.fileno()])
        with pytest.raises(ConnectionClosed):
            SegmentReceiver(ours).get(1, 100)


def test_a_sender_with_a_closed_channel_has_no_segment() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        theirs.close()
        assert SegmentSender(ours).put(torch.arange(10_000)) == 0
