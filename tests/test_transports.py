"""Every transport keeps the promises of `transport.base`; the unix one keeps some more."""

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

from gradwire.errors import ConnectionClosed, SetupError
from gradwire.testing import transports
from gradwire.testing.pairs import (
    CALLER,
    LISTENER,
    PATIENCE,
    Background,
    Pair,
    drive,
    open_descriptors,
    open_pair,
    shared_memory,
    take,
)
from gradwire.testing.transports import CHECKS, CHECKS_AT_REST, Check, Open, same_bytes
from gradwire.transport.base import Connection
from gradwire.transport.memory import MemoryNetwork
from gradwire.transport.poller import EpollPoller, Poller, SelectorPoller
from gradwire.transport.segments import SEGMENT_BYTES, SegmentReceiver, SegmentSender
from gradwire.transport.stream import StreamConnection
from gradwire.transport.tcp import TcpTransport
from gradwire.transport.unix import UnixConnection, UnixTransport
from gradwire.wire.frames import Frame

TOKEN = b"the group's secret"


@contextlib.contextmanager
def open_narrow_pair(segment_bytes: int = SEGMENT_BYTES) -> Iterator[Pair]:
    """With pipes as small as Linux makes them for users who have too many."""
    with open_pair(UnixTransport(TOKEN, segment_bytes=segment_bytes), EpollPoller) as pair:
        for end in (pair.caller, pair.listener):
            assert isinstance(end, UnixConnection)
            fcntl.fcntl(end._pipes.outgoing, fcntl.F_SETPIPE_SZ, 8192)
        yield pair


WAYS: dict[str, Open] = {
    "memory": lambda: open_pair(MemoryNetwork(), EpollPoller),
    "unix": lambda: open_pair(UnixTransport(TOKEN), EpollPoller),
    "unix-narrow": open_narrow_pair,
    "tcp": lambda: open_pair(TcpTransport(TOKEN), EpollPoller),
    "tcp-selector": lambda: open_pair(TcpTransport(TOKEN), SelectorPoller),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_transport_passes(check: Check, way: str) -> None:
    check(WAYS[way])


@pytest.mark.parametrize(
    "check",
    [
        transports.check_heads_of_every_size_arrive,
        transports.check_heads_in_pieces_arrive_whole,
        transports.check_parts_of_heads_outlive_their_frames,
        transports.check_buffers_of_every_size_arrive,
        transports.check_both_directions_and_many_threads_at_once,
        transports.check_blocked_is_called_at_most_once_for_a_frame,
    ],
    ids=lambda check: check.__name__,
)
def test_all_goes_through_the_pipes_where_no_segments_are_to_be_had(check: Check) -> None:
    check(lambda: open_narrow_pair(segment_bytes=1 << 40))


@pytest.mark.parametrize("way", ["memory", "unix", "tcp"])
@pytest.mark.parametrize("check", CHECKS_AT_REST, ids=lambda check: check.__name__)
def test_every_transport_passes_at_rest(check: Check, way: str) -> None:
    check(WAYS[way])


def test_a_thread_that_gives_a_connection_back_may_use_it_meanwhile() -> None:
    """In the middle of that the garbage collector may run a destructor that makes a call."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    connection = StreamConnection(ours, LISTENER, 1 << 20, 5.0)
    with theirs:
        assert connection.begin_reading()
        with connection._disposing:
            connection.close()
            with pytest.raises(ConnectionClosed):
                connection.send(Frame(b"late"))
        connection.end_reading()
    assert ours.fileno() < 0


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


def test_a_reused_descriptor_is_a_new_one(poller: Poller) -> None:
    """Between two looks of the leader a connection ends, and the next gets its number."""
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
            assert poller.next() is None  # the leader has looked, so the number is registered
            if name == "second":
                writer.send(b"data")
                drive(poller, lambda: calls, "the event of a descriptor with a used number")
            poller.remove(number)
    assert calls == ["second"]


def test_a_descriptor_closed_while_armed_does_not_hurt_the_leader(poller: Poller) -> None:
    reader, writer = socket.socketpair()
    poller.add(reader.fileno(), lambda: None)
    poller.arm(reader.fileno())
    number = reader.fileno()
    reader.close()
    writer.close()
    poller.wake()
    assert poller.next() is None
    poller.remove(number)


# -- memory


def test_memory_ends_a_connection_to_a_listener_that_closes_before_it_accepts() -> None:
    network, poller, accepted = MemoryNetwork(), EpollPoller(), []
    with contextlib.closing(poller):
        listener = network.listen(LISTENER, poller, accepted.append)
        caller = network.connect(listener.address.place, CALLER, LISTENER, PATIENCE)
        listener.close()
        callback = poller.next()
        assert callback is not None
        callback()
        assert accepted == []
        with pytest.raises(ConnectionClosed):
            caller.receive()


# -- tcp


def test_tcp_says_what_to_do_when_it_cannot_listen_there() -> None:
    with (
        contextlib.closing(EpollPoller()) as poller,
        pytest.raises(SetupError, match="GRADWIRE_HOST"),
    ):
        TcpTransport(TOKEN, host="192.0.2.1").listen(LISTENER, poller, lambda _: None)


def test_what_stays_in_the_machine_is_not_paced() -> None:
    try:
        with socket.socket() as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    except (AttributeError, OSError):
        pytest.skip("the system cannot be told")
    with WAYS["tcp"]() as pair:
        for end in (pair.caller, pair.listener):
            assert isinstance(end, StreamConnection)
            assert isinstance(end._stream, socket.socket)
            control = end._stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            assert control.rstrip(b"\0") == b"reno"


# -- unix: shared memory


def _mapped_at(address: int) -> str:
    """What the memory at an address is a mapping of."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.split()
            start, end = (int(edge, 16) for edge in fields[0].split("-"))
            if start <= address < end:
                return " ".join(fields[5:])
    return ""


@pytest.fixture
def unix() -> Iterator[Pair]:
    with WAYS["unix"]() as pair:
        yield pair


def _pass(pair: Pair, tensor: torch.Tensor) -> torch.Tensor:
    with Background(lambda: pair.caller.send(Frame(b"", [tensor]))):
        return take(pair.listener, 1)[0].buffers[0]


def test_unix_maps_a_large_tensor_and_copies_a_small_one(unix: Pair) -> None:
    large, small = _pass(unix, torch.arange(10_000)), _pass(unix, torch.arange(10))
    assert "memfd:gradwire" in _mapped_at(large.data_ptr())
    assert "memfd:gradwire" not in _mapped_at(small.data_ptr())


def test_unix_recycles_a_segment_when_the_receivers_tensor_dies(unix: Pair) -> None:
    first = _pass(unix, torch.full((10_000,), 1))
    view = first[8:].view(torch.int64)  # a view keeps the memory as well
    used = first.data_ptr()
    del first
    second = _pass(unix, torch.full((10_000,), 2))
    assert second.data_ptr() != used
    assert bool((view == 1).all())
    del view
    third = _pass(unix, torch.full((10_000,), 3))
    assert third.data_ptr() == used
    assert len(shared_memory()) == 2


def test_unix_copies_much_in_pieces(unix: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.transport.segments._MUCH", 1 << 16)
    monkeypatch.setattr("gradwire.transport.segments._PIECE", 1 << 12)
    sent = torch.randint(256, (1_000_003,), dtype=torch.uint8)
    unix.caller.send(Frame(b"", [sent]))
    assert same_bytes(take(unix.listener, 1)[0].buffers[0], sent)


def test_unix_forgets_trimmed_segments_on_both_sides(unix: Pair) -> None:
    kept, gone = _pass(unix, torch.arange(10_000)), _pass(unix, torch.arange(10_000))
    del gone
    unix.caller.trim()  # notes that one is free
    assert len(shared_memory()) == 2
    unix.caller.trim()
    unix.caller.send(Frame(b"after"))
    assert [bytes(frame.head) for frame in take(unix.listener, 1)] == [b"after"]
    assert len(shared_memory()) == 1
    assert same_bytes(kept, torch.arange(10_000))


def test_unix_tells_of_trimmed_segments_with_the_next_buffers(unix: Pair) -> None:
    """Where telling at once would block, because the pipe is full."""
    del_me = _pass(unix, torch.arange(100_000))
    del del_me

    def send() -> None:
        for _ in range(20):
            unix.caller.send(Frame(bytes(30_000)))

    with Background(send):
        poll = select.poll()
        poll.register(unix.caller._fd, select.POLLOUT)  # type: ignore[attr-defined]
        while poll.poll(0):
            pass
        unix.caller.trim()
        unix.caller.trim()
        take(unix.listener, 20)
    kept = _pass(unix, torch.arange(10_000))
    assert len(shared_memory()) == 1
    assert same_bytes(kept, torch.arange(10_000))


def test_unix_sends_through_the_socket_when_there_are_too_many_segments(
    unix: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradwire.transport.segments.MAX_SEGMENTS", 3)
    tensors = [torch.full((10_000,), number) for number in range(5)]
    arrived = [_pass(unix, tensor) for tensor in tensors]
    assert len(shared_memory()) == 3
    assert all(map(same_bytes, arrived, tensors))


def test_unix_sender_keeps_nothing_of_a_receiver_that_was_killed() -> None:
    before, poller, accepted = open_descriptors(), EpollPoller(), list[Connection]()
    listener = UnixTransport(TOKEN).listen(LISTENER, poller, accepted.append)
    child = os.fork()
    if not child:
        _hold_a_tensor_until_killed(listener.address.place)
    try:
        drive(poller, lambda: accepted, "the child's connection")
        sender = accepted[0]
        sender.send(Frame(b"", [torch.arange(100_000)]))
        assert take(sender, 1)[0].head == b"I hold it"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    calls: list[None] = []
    sender.attach(poller, lambda: calls.append(None))
    drive(poller, lambda: calls, "the notice of the child's death")
    with pytest.raises(ConnectionClosed):
        sender.receive()
    sender.close()
    listener.close()
    poller.close()
    assert open_descriptors() == before
    assert not shared_memory()


def _hold_a_tensor_until_killed(place: str) -> None:
    try:
        connection = UnixTransport(TOKEN).connect(place, CALLER, LISTENER, PATIENCE)
        held = take(connection, 1)
        connection.send(Frame(b"I hold it"))
        signal.pause()
        del held
    finally:
        os._exit(1)


@contextlib.contextmanager
def forked_child() -> Iterator[None]:
    """A child that has all that is open here, and closes nothing."""
    until_the_end, end = os.pipe()
    child = os.fork()
    if not child:
        os.close(end)
        os.read(until_the_end, 1)
        os._exit(0)
    os.close(until_the_end)
    try:
        yield
    finally:
        os.close(end)
        os.waitpid(child, 0)


@pytest.mark.parametrize("way", ["unix", "tcp"])
@pytest.mark.parametrize("listen", [Connection.arm, Connection.disarm])
def test_a_forked_child_keeps_no_connection_open(
    way: str, listen: Callable[[Connection], None]
) -> None:
    with WAYS[way]() as pair, forked_child():
        calls: list[None] = []
        pair.listener.attach(pair.poller, lambda: calls.append(None))
        pair.caller.send(Frame(b"the last one"))
        pair.caller.close()
        drive(pair.poller, lambda: calls, "the notice that the other end is closed")
        assert take(pair.listener, 1)[0].head == b"the last one"
        calls.clear()
        getattr(pair.listener, listen.__name__)()
        drive(pair.poller, lambda: calls, "the notice that nothing more will come")
        with pytest.raises(ConnectionClosed):
            take(pair.listener, 1)
        with pytest.raises(ConnectionClosed):
            for _ in range(400):
                pair.listener.send(Frame(bytes(30_000)))


def test_who_sends_to_a_forked_child_alone_is_told() -> None:
    def send_for_ever() -> None:
        with pytest.raises(ConnectionClosed):
            while True:
                pair.listener.send(Frame(bytes(1000)))

    with WAYS["unix"]() as pair, forked_child(), Background(send_for_ever):
        pair.caller.close()


def test_what_is_sent_right_before_the_end_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if there was nothing to read a moment ago."""

    class Late(io.FileIO):
        def readinto(self, buffer: Any) -> Any:
            count = super().readinto(buffer)
            if count is None:
                pair.caller.send(Frame(b"the last one"))
                pair.caller.close()
            return count

    with WAYS["unix"]() as pair, forked_child():
        assert isinstance(pair.listener, UnixConnection)
        pipes = pair.listener._pipes
        late = Late(pipes.incoming.fileno(), "rb", closefd=False)
        monkeypatch.setattr(pipes, "incoming", late)
        assert take(pair.listener, 1)[0].head == b"the last one"
        monkeypatch.undo()


def test_no_program_that_is_started_gets_a_connection() -> None:
    with WAYS["unix"]() as pair:
        for end in (pair.caller, pair.listener):
            assert isinstance(end, UnixConnection)
            pipes = end._pipes
            for opened in (pipes.incoming, pipes.outgoing, pipes.sock, end._channel):
                assert not os.get_inheritable(opened.fileno())


def test_a_connection_may_end_while_it_gets_its_poller(monkeypatch: pytest.MonkeyPatch) -> None:
    with WAYS["unix"]() as pair:
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
        (0, 1 << 16, 100, "take away"),
        (fcntl.F_SEAL_GROW, 1 << 16, 100, "take away"),
        (_SEALED, 1 << 15, 100, "another size"),
        (_SEALED, 1 << 17, 100, "another size"),
        (_SEALED, 1 << 16, (1 << 16) - 63, "smaller segment"),
        (_SEALED, 1 << 16, 0, "smaller segment"),
    ],
)
def test_segments_that_could_crash_the_receiver_are_refused(
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
def test_announcements_without_a_segment_are_refused(announcement: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        if announcement:
            theirs.send(announcement)
        else:
            theirs.close()
        with pytest.raises(ConnectionClosed):
            SegmentReceiver(ours).get(1, 100)


def test_what_is_no_shared_memory_is_refused() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        socket.send_fds(theirs, [struct.pack("<QQ", 1, 1 << 16)], [theirs.fileno()])
        with pytest.raises(ConnectionClosed):
            SegmentReceiver(ours).get(1, 100)


def test_a_sender_whose_channel_is_gone_says_that_it_has_no_segment() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        theirs.close()
        assert SegmentSender(ours).put(torch.arange(10_000)) == 0
