"""Checks that every transport must pass. They need no test framework.

    >>> from gradwire._core.transport.in_process import InProcessTransport
    >>> from gradwire._core.transport.poller import new_poller
    >>> from gradwire.testing.connection_pairs import open_pair
    >>> for check in CHECKS:                                # doctest: +SKIP
    ...     check(lambda: open_pair(InProcessTransport(), new_poller))

A check takes a function that opens a connection and returns its two ends. If the transport violates
the interface described in `gradwire._core.transport.base`, the check raises an AssertionError that
says how.
"""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from time import monotonic

import torch
from torch import Tensor

from gradwire._core.transport.base import Connection
from gradwire._core.wire.frames import Frame
from gradwire._core.wire.tensors import DTYPES
from gradwire.errors import ConnectionClosed, SendTimeout
from gradwire.testing.connection_pairs import (
    TIMEOUT,
    Background,
    Pair,
    drive,
    open_descriptors,
    run_due_callbacks,
    take,
)

OpenPair = Callable[[], AbstractContextManager[Pair]]
Check = Callable[[OpenPair], None]

#: The sizes in bytes to test. A transport sends small and large data in different ways. Some of
#: these sizes are at, just below or just above the limits between these ways.
SIZES = sorted(
    {0, 1, 2, 100, (1 << 20) + 1, 3_000_001}
    | {(1 << power) + near for power in (12, 15, 16, 17) for near in (-17, -16, -15, -1, 0, 1)}
)


def same_bytes(arrived: Tensor, sent: Tensor) -> bool:
    """Return whether a received buffer holds the elements of the tensor that was sent, in order.

    >>> same_bytes(torch.tensor([1, 0], dtype=torch.uint8), torch.tensor([1], dtype=torch.int16))
    True
    """
    expected = torch.empty(sent.numel() * sent.element_size(), dtype=torch.uint8)
    if len(expected):
        expected.view(sent.dtype).view(sent.shape).copy_(sent.detach())
    return arrived.dtype is torch.uint8 and arrived.dim() == 1 and torch.equal(arrived, expected)


def _assert_same(arrived: Sequence[Frame], sent: Sequence[Frame]) -> None:
    for index, (frame, original) in enumerate(zip(arrived, sent, strict=True)):
        where = f"frame {index} of {len(sent)}"
        assert bytes(frame.head) == original.whole_head(), (
            f"{where}: its head arrived changed or out of order"
        )
        assert len(frame.buffers) == len(original.buffers), (
            f"{where}: {len(frame.buffers)} of {len(original.buffers)} buffers arrived"
        )
        for number, (buffer, tensor) in enumerate(
            zip(frame.buffers, original.buffers, strict=True)
        ):
            assert same_bytes(buffer, tensor), (
                f"{where}: buffer {number} ({tensor.dtype}, shape {tuple(tensor.shape)}) "
                "arrived changed"
            )


def _send_all(connection: Connection, frames: Iterable[Frame]) -> None:
    for frame in frames:
        connection.send(frame)


def _assert_arrive(pair: Pair, frames: Sequence[Frame]) -> None:
    """Send the frames in both directions, and check that they arrive unchanged and in order."""
    for sender, receiver in ((pair.client, pair.listener), (pair.listener, pair.client)):
        with Background(partial(_send_all, sender, frames)):
            arrived = take(receiver, len(frames))
        _assert_same(arrived, frames)


def _assert_closed(act: Callable[[], object], what: str) -> None:
    try:
        act()
    except ConnectionClosed:
        return
    raise AssertionError(f"{what} did not raise ConnectionClosed")


def _receive_once(connection: Connection) -> list[Frame]:
    assert connection.begin_reading(), "another thread reads this connection"
    try:
        return connection.receive()
    finally:
        connection.end_reading()


def _wait_once(connection: Connection, timeout: float) -> bool:
    assert connection.begin_reading(), "another thread reads this connection"
    try:
        return connection.wait(timeout)
    finally:
        connection.end_reading()


# -- frames arrive unchanged


def check_frames_arrive_in_order(open_pair: OpenPair) -> None:
    with open_pair() as pair:
        _assert_arrive(pair, [Frame(str(number).encode()) for number in range(2000)])


def check_heads_of_every_size_arrive(open_pair: OpenPair) -> None:
    bits = random.Random(1)
    with open_pair() as pair:
        _assert_arrive(pair, [Frame(bits.randbytes(size)) for size in SIZES])


def check_heads_may_be_any_bytes(open_pair: OpenPair) -> None:
    data = bytes(range(256)) * 200
    with open_pair() as pair:
        kinds = (data, bytearray(data), memoryview(data), memoryview(data)[7:90])
        _assert_arrive(pair, [Frame(head) for head in kinds])


def check_heads_in_pieces_arrive_whole(open_pair: OpenPair) -> None:
    bits = random.Random(2)
    with open_pair() as pair:
        for size in SIZES:
            piece = bits.randbytes(size)
            rest = (bytearray(piece), memoryview(piece)[: size // 2], b"", piece)
            _assert_arrive(pair, [Frame(b"first", (), rest), Frame(b"", [torch.ones(3)], rest)])


def check_buffers_of_every_size_arrive(open_pair: OpenPair) -> None:
    frames = [Frame(b"head", [torch.randint(0, 256, (size,), dtype=torch.uint8)]) for size in SIZES]
    with open_pair() as pair:
        _assert_arrive(pair, frames)


def check_many_buffers_arrive(open_pair: OpenPair) -> None:
    """Send more buffers (tensors) in one message than one system call accepts. Then send a message
    with many large buffers. Each large buffer may need a segment of shared memory, and the file
    descriptor of the segment is sent through a socket. The message needs more descriptors than the
    socket can queue at once."""
    few = [torch.full((size,), size % 251, dtype=torch.uint8) for size in SIZES]
    small = [torch.tensor([number]) for number in range(3000)]
    large = [torch.full((40_000,), number % 251, dtype=torch.uint8) for number in range(700)]
    with open_pair() as pair:
        _assert_arrive(pair, [Frame(b"", few), Frame(b"small", small), Frame(b"large", large)])


def check_empty_buffers_arrive(open_pair: OpenPair) -> None:
    empty, full = torch.empty(0, 3), torch.arange(5)
    frames = [
        Frame(b"", [empty]),
        Frame(b"head", [empty, empty]),
        Frame(b"head", [empty, full, empty]),
        Frame(b""),
        Frame(b"", [full]),
    ]
    with open_pair() as pair:
        _assert_arrive(pair, frames)


def check_every_dtype_arrives(open_pair: OpenPair) -> None:
    tensors = [
        torch.arange(160 * scale).remainder(2).to(torch.uint8).view(dtype)
        for dtype in DTYPES
        for scale in (1, 1000)
    ]
    with open_pair() as pair:
        _assert_arrive(pair, [Frame(b"", [tensor]) for tensor in tensors])


def check_views_arrive_as_their_elements(open_pair: OpenPair) -> None:
    for size in (6, 300):
        base = torch.arange(size * size, dtype=torch.float64).view(size, size)
        views = [
            base.t(),
            base[1:-1, ::2],
            base[0, 0],
            base[:, :1].expand(size, size),
            base.as_strided((size, size), (1, 1)),
            base.unfold(0, 3, 1),
            torch.ones(size, size, requires_grad=True),
            torch.nn.Parameter(torch.ones(size, size)).t(),
        ]
        with open_pair() as pair:
            _assert_arrive(pair, [Frame(b"views", views)])


def check_try_send_keeps_the_order(open_pair: OpenPair) -> None:
    with open_pair() as pair:
        pair.client.send(Frame(b"before"))
        assert pair.client.try_send(Frame(b"tried")), "try_send failed though no thread was sending"
        pair.client.send(Frame(b"after"))
        heads = [bytes(frame.head) for frame in take(pair.listener, 3)]
        assert heads == [b"before", b"tried", b"after"], f"out of order: {heads}"


def check_frames_sent_before_a_close_arrive(open_pair: OpenPair) -> None:
    frames = [Frame(b"last words", [torch.arange(50_000)]), Frame(b"and more")]
    with open_pair() as pair:
        _send_all(pair.client, frames)
        pair.client.close()
        _assert_same(take(pair.listener, len(frames)), frames)
        _wait_once(pair.listener, TIMEOUT)
        _assert_closed(lambda: _receive_once(pair.listener), "receive after the peer's close")


# -- received memory is not shared with the sender, and is not reused while it is needed


def check_sender_may_change_its_tensors(open_pair: OpenPair) -> None:
    for size in (10, 10_000, 1_000_000):
        with open_pair() as pair:
            tensor = torch.zeros(size)
            with Background(partial(_send_numbers, pair.client, size)):
                arrived = take(pair.listener, 4)
            for number, frame in enumerate(arrived):
                assert same_bytes(frame.buffers[0], tensor.fill_(number)), (
                    f"a tensor of {size} floats changed when its sender wrote to it after send"
                )


def _send_numbers(connection: Connection, size: int) -> None:
    tensor = torch.empty(size)
    for number in range(4):
        connection.send(Frame(b"", [tensor.fill_(number)]))
    tensor.fill_(-1)


def check_receiver_may_change_its_tensors(open_pair: OpenPair) -> None:
    for size in (10, 10_000, 1_000_000):
        tensor = torch.ones(size)
        frames = [Frame(b"", [tensor]), Frame(b"", [tensor])]
        with open_pair() as pair:
            with Background(partial(_send_all, pair.client, frames)):
                first, second = take(pair.listener, 2)
            first.buffers[0].fill_(7)
            assert bool((tensor == 1).all()), "the receiver wrote to the sender's tensor"
            assert same_bytes(second.buffers[0], tensor), "two received tensors share memory"


def check_views_of_heads_outlive_their_frames(open_pair: OpenPair) -> None:
    heads = [bytes([number]) * 100_000 for number in range(4)]
    ends = []
    with open_pair() as pair:
        for head in heads:
            with Background(partial(pair.client.send, Frame(head))):
                ends.append(memoryview(take(pair.listener, 1)[0].head)[-50_000:])
        for end, head in zip(ends, heads, strict=True):
            assert end == head[-50_000:], "the memory of a head was used again"


def check_received_tensors_outlive_the_connection(open_pair: OpenPair) -> None:
    tensors = [torch.arange(size) for size in (10, 10_000, 100_000)]
    frame = Frame(b"", tensors)
    with open_pair() as pair:
        with Background(lambda: pair.client.send(frame)):
            arrived = take(pair.listener, 1)
    gc.collect()
    _assert_same(arrived, [frame])


def check_modes_of_the_reader_do_not_affect_tensors(open_pair: OpenPair) -> None:
    """A thread may read a message for another thread. So the `inference_mode` and the default
    device of the reading thread must not affect the received tensors."""
    frame = Frame(b"", [torch.arange(10), torch.arange(50_000)])
    with open_pair() as pair:
        with torch.inference_mode(), torch.device("meta"):
            pair.client.send(frame)
            arrived = take(pair.listener, 1)
        _assert_same(arrived, [frame])
        for buffer in arrived[0].buffers:
            assert not buffer.is_inference(), "inference_mode of the reader affected a tensor"


# -- threads


def check_many_threads_send_in_both_directions(open_pair: OpenPair) -> None:
    threads, per_thread = 3, 60

    def send(connection: Connection, name: int) -> None:
        bits = random.Random(name)
        for number in range(per_thread):
            size = bits.choice((1, 100, 5_000, 70_000))
            value = (name * per_thread + number) % 251
            buffers = [torch.full((size,), value, dtype=torch.uint8)] * (number % 3)
            connection.send(Frame(bytes([name]) * (1 + size // 2) + bytes([number]), buffers))

    def read(connection: Connection) -> None:
        upcoming = [0] * threads
        for frame in take(connection, threads * per_thread):
            name, number = frame.head[0], frame.head[-1]
            assert number == upcoming[name], f"thread {name}: frame {number} is out of order"
            assert bytes(frame.head) == bytes([name]) * (len(frame.head) - 1) + bytes([number]), (
                "frames of two threads are mixed up"
            )
            for buffer in frame.buffers:
                expected = (name * per_thread + number) % 251
                assert bool((buffer == expected).all()), "buffers of two threads are mixed up"
            upcoming[name] += 1

    with open_pair() as pair:
        work = [
            *(partial(read, end) for end in (pair.client, pair.listener)),
            *(
                partial(send, end, name)
                for end in (pair.client, pair.listener)
                for name in range(threads)
            ),
        ]
        _run_together(work)


def _run_together(work: Sequence[Callable[[], object]]) -> None:
    if work:
        with Background(work[0]):
            _run_together(work[1:])


def check_one_thread_reads_at_a_time(open_pair: OpenPair) -> None:
    with open_pair() as pair:
        end = pair.listener
        assert end.begin_reading()
        assert not end.begin_reading(), "two threads were allowed to read at once"
        end.end_reading()
        assert end.begin_reading(), "end_reading did not let others read"
        end.end_reading()


def check_blocked_is_called_at_most_once_for_a_frame(open_pair: OpenPair) -> None:
    calls: list[None] = []
    frame = Frame(bytes(64 << 20))
    with open_pair() as pair:
        with Background(lambda: pair.client.send(frame, lambda: calls.append(None))):
            arrived = take(pair.listener, 1)
        assert len(arrived[0].head) == len(frame.head)
        assert len(calls) <= 1, f"blocked was called {len(calls)} times for one frame"


# -- deadlines


#: The number of frames after which a check stops sending. This many frames of 30,000 bytes fill the
#: buffers of every connection. Only a transport that queues any number of frames accepts them all.
#: Such a transport passes the check.
_MANY = 2_000


def _send_until_withdrawn(connection: Connection, frame: Frame) -> int:
    """Send a frame again and again while no thread reads at the other end. Every send has a
    deadline. Stop when a frame is withdrawn at its deadline, or after `_MANY` frames. Return the
    number of frames that were not withdrawn: the other end must receive all of these."""
    for sent in range(_MANY):
        try:
            connection.send(frame, None, monotonic() + 0.05)
        except SendTimeout as timeout:
            if timeout.withdrawn:
                return sent
    return _MANY


def check_send_ends_at_its_deadline(open_pair: OpenPair) -> None:
    """A frame that has been sent in part must arrive whole, also if the sender changes its tensors
    afterwards. A frame of which no part was sent must not arrive."""
    small, large = torch.ones(1250), torch.ones(7_500)
    for frame in (Frame(bytes(30_000)), Frame(b"", [small] * 6), Frame(b"", [small, large])):
        with open_pair() as pair:
            expected = [Frame(frame.head, [b.clone() for b in frame.buffers])]
            expected *= _send_until_withdrawn(pair.client, frame)
            for buffer in frame.buffers:
                buffer.zero_()
            last = Frame(b"last")
            with Background(partial(_flush_and_send, pair.client, last)):
                _assert_same(take(pair.listener, len(expected) + 1), [*expected, last])
            for buffer in frame.buffers:
                buffer.fill_(1.0)


def _flush_and_send(connection: Connection, frame: Frame) -> None:
    connection.flush()
    connection.send(frame)


def check_waiting_for_a_turn_to_send_ends_at_the_deadline(open_pair: OpenPair) -> None:
    sent: list[Frame] = []
    is_blocked = threading.Event()

    def send() -> None:
        frame = Frame(bytes(30_000))
        while len(sent) < _MANY and not is_blocked.is_set():
            sent.append(frame)
            pair.client.send(frame, is_blocked.set)
        is_blocked.set()

    with open_pair() as pair:
        with Background(send):
            assert is_blocked.wait(TIMEOUT)
            late = Frame(b"late")
            sent += [late] * _send_until_withdrawn(pair.client, late)
            held = Frame(b"held")
            if pair.client.hold(held):
                try:
                    pair.client.flush(None, monotonic() + 0.05)
                    sent.append(held)
                except SendTimeout:
                    assert pair.client.withdraw(lambda frame: frame is held)
            arrived = take(pair.listener, len(sent))
        _assert_same(arrived, sent)


def check_frames_that_are_kept_back_can_be_withdrawn(open_pair: OpenPair) -> None:
    with open_pair() as pair:
        frames = [Frame(str(number).encode()) for number in range(4)]
        held = [frame for frame in frames if pair.client.hold(frame)]
        for frame in held[1:3]:
            assert pair.client.withdraw(lambda wanted, frame=frame: wanted is frame)  # type: ignore[misc]
            assert not pair.client.withdraw(lambda wanted, frame=frame: wanted is frame)  # type: ignore[misc]
        last = Frame(b"last")
        pair.client.send(last)
        expected = [*held[:1], *held[3:], last]
        _assert_same(take(pair.listener, len(expected)), expected)
        assert not pair.client.withdraw(lambda _: True), "a frame that was sent was withdrawn"


# -- reading


def check_receive_never_blocks(open_pair: OpenPair) -> None:
    with open_pair() as pair:
        for end in (pair.client, pair.listener):
            assert _receive_once(end) == [], "receive returned a frame that was not sent"


def check_wait_ends_at_its_timeout(open_pair: OpenPair) -> None:
    with open_pair() as pair:
        for timeout in (0, 0.001, -1):
            assert not _wait_once(pair.client, timeout), "wait reported data that was not sent"


def check_wait_wakes_on_data(open_pair: OpenPair) -> None:
    with open_pair() as pair:
        assert _wait_in_thread(pair.listener, lambda: pair.client.send(Frame(b"wake up")))


def check_wait_wakes_when_the_peer_closes(open_pair: OpenPair) -> None:
    with open_pair() as pair:
        assert _wait_in_thread(pair.listener, pair.client.close)
        _assert_closed(lambda: _receive_once(pair.listener), "receive after the peer's close")


def check_wait_wakes_when_its_own_end_closes(open_pair: OpenPair) -> None:
    with open_pair() as pair:
        assert _wait_in_thread(pair.listener, pair.listener.close)
        _assert_closed(lambda: _receive_once(pair.listener), "receive after close")


def _wait_in_thread(connection: Connection, act: Callable[[], object]) -> bool:
    """Return whether `act`, called by this thread, ends the wait of another thread."""
    results: list[bool] = []
    about_to_wait = threading.Event()

    def wait() -> None:
        assert connection.begin_reading()
        about_to_wait.set()
        results.append(connection.wait(TIMEOUT))
        connection.end_reading()

    with Background(wait):
        assert about_to_wait.wait(TIMEOUT)
        act()
    return results == [True]


# -- the poller


def check_armed_calls_back_once(open_pair: OpenPair) -> None:
    with open_pair() as pair:
        calls: list[None] = []
        pair.listener.attach(pair.poller, lambda: calls.append(None))
        pair.listener.arm()
        run_due_callbacks(pair.poller)
        assert not calls, "the callback was called before there was anything to receive"
        pair.client.send(Frame(b"one"))
        drive(pair.poller, lambda: calls, "the callback of an armed connection")
        pair.client.send(Frame(b"two"))
        assert _wait_once(pair.listener, TIMEOUT)
        run_due_callbacks(pair.poller)
        assert len(calls) == 1, f"armed once, called back {len(calls)} times"
        take(pair.listener, 2)


def check_arming_reports_data_that_arrived_before(open_pair: OpenPair) -> None:
    with open_pair() as pair:
        calls: list[None] = []
        pair.listener.attach(pair.poller, lambda: calls.append(None))
        pair.client.send(Frame(b"early"))
        assert _wait_once(pair.listener, TIMEOUT)
        run_due_callbacks(pair.poller)
        assert not calls, "a connection that was not armed called back when data came"
        pair.listener.arm()
        drive(pair.poller, lambda: calls, "the callback for data that arrived before arming")
        take(pair.listener, 1)


def check_disarmed_does_not_call_back(open_pair: OpenPair) -> None:
    with open_pair() as pair:
        calls: list[None] = []
        pair.listener.attach(pair.poller, lambda: calls.append(None))
        pair.listener.arm()
        pair.listener.disarm()
        pair.client.send(Frame(b"unnoticed"))
        assert _wait_once(pair.listener, TIMEOUT)
        run_due_callbacks(pair.poller)
        assert not calls, "a disarmed connection called back"
        pair.listener.arm()
        drive(pair.poller, lambda: calls, "the callback after arming again")
        take(pair.listener, 1)


def check_arming_wakes_a_poller_that_waits(open_pair: OpenPair) -> None:
    with open_pair() as pair:
        calls: list[None] = []
        pair.listener.attach(pair.poller, lambda: calls.append(None))
        pair.client.send(Frame(b"data"))
        with Background(lambda: drive(pair.poller, lambda: calls, "the callback")):
            pair.listener.arm()
        take(pair.listener, 1)


def check_an_armed_connection_reports_the_peers_close(open_pair: OpenPair) -> None:
    with open_pair() as pair:
        calls: list[None] = []
        pair.listener.attach(pair.poller, lambda: calls.append(None))
        pair.listener.arm()
        pair.client.close()
        drive(pair.poller, lambda: calls, "the report of the peer's close")
        _assert_closed(lambda: _receive_once(pair.listener), "receive after the peer's close")


def check_a_disarmed_connection_reports_the_peers_close(open_pair: OpenPair) -> None:
    """A poller reports arriving messages only after `arm` was called for the connection. But even
    without `arm`, it must report that the peer has closed the connection. Only some pollers can do
    this; see `CHECKS_WHILE_DISARMED`."""
    with open_pair() as pair:
        calls: list[None] = []
        pair.listener.attach(pair.poller, lambda: calls.append(None))
        pair.client.close()
        drive(pair.poller, lambda: calls, "the report of the peer's close")
        _assert_closed(lambda: _receive_once(pair.listener), "receive after the peer's close")


def check_a_close_is_reported_after_earlier_frames(open_pair: OpenPair) -> None:
    """The peer sends a frame (a message) and closes the connection. The poller reports the close,
    but the next `receive` may still return the frame. The reader then calls `disarm`, after which
    the poller reports no messages, only a close. The poller must report the close again, because
    the reader has not noticed it. Only some pollers can do this; see `CHECKS_WHILE_DISARMED`."""
    with open_pair() as pair:
        ended: list[str] = []

        def read() -> None:
            try:
                _receive_once(pair.listener)
            except ConnectionClosed as closed:
                ended.append(str(closed))
            else:
                pair.listener.disarm()

        pair.listener.attach(pair.poller, read)
        pair.client.send(Frame(b"the last frame"))
        pair.client.close()
        drive(pair.poller, lambda: ended, "the second report of the close")


def check_attaching_reports_an_earlier_close(open_pair: OpenPair) -> None:
    """The peer closes the connection before `attach` gives the connection to a poller. The poller
    must still report the close. It must do so even though `arm`, which makes it report arriving
    messages, was never called. Only some pollers can do this; see `CHECKS_WHILE_DISARMED`."""
    with open_pair() as pair:
        calls: list[None] = []
        pair.client.close()
        pair.listener.attach(pair.poller, lambda: calls.append(None))
        drive(pair.poller, lambda: calls, "the report of a close before attach")


# -- closing


def check_everything_fails_after_close(open_pair: OpenPair) -> None:
    with open_pair() as pair:
        pair.listener.send(Frame(b"never read"))
        assert _wait_once(pair.client, TIMEOUT)
        pair.client.close()
        for frame in (Frame(b"head"), Frame(b"", [torch.arange(50_000)])):
            _assert_closed(partial(pair.client.send, frame), "send after close")
        _assert_closed(lambda: _receive_once(pair.client), "receive after close")
        pair.client.arm()
        pair.client.disarm()
        pair.client.trim()


def check_sending_to_a_closed_end_fails(open_pair: OpenPair) -> None:
    """After the other end has closed, the second `send` must fail. The first may still succeed,
    because the system may report the close only to later sends."""
    with open_pair() as pair:
        pair.listener.close()
        assert _wait_once(pair.client, TIMEOUT)
        frame = Frame(b"to a closed end")
        try:
            pair.client.send(frame)
        except ConnectionClosed:
            pass
        _assert_closed(lambda: pair.client.send(frame), "send to an end that has closed")


def check_close_may_be_called_again_and_at_both_ends(open_pair: OpenPair) -> None:
    with open_pair() as pair:
        closes = [pair.client.close, pair.listener.close] * 4
        _run_together(closes)
        pair.client.close()


def check_close_ends_a_blocked_send(open_pair: OpenPair) -> None:
    """One end sends, but no thread reads at the other end, so `send` blocks. Then `close` must make
    the blocked `send` return or raise. If a transport queues any number of messages, `send` never
    blocks, and the check passes."""
    with open_pair() as pair:
        is_blocked = threading.Event()

        def send() -> None:
            try:
                for _ in range(2_000):
                    pair.client.send(Frame(bytes(30_000)), is_blocked.set)
            except ConnectionClosed:
                pass
            is_blocked.set()

        with Background(send):
            assert is_blocked.wait(TIMEOUT)
            pair.client.close()


def check_descriptors_are_closed(open_pair: OpenPair) -> None:
    gc.collect()
    before = open_descriptors()
    with open_pair() as pair:
        frame = Frame(b"", [torch.arange(100), torch.arange(50_000)])
        _assert_arrive(pair, [frame] * 3)
        # Close the connection while another thread reads it. In this case the reading thread must
        # close the file descriptors.
        assert _wait_in_thread(pair.listener, pair.listener.close)
    left = open_descriptors() - before
    assert not left, f"descriptors were not closed: {sorted(left)}"


#: The checks for every transport with every poller.
CHECKS: list[Check] = [
    check_frames_arrive_in_order,
    check_heads_of_every_size_arrive,
    check_heads_may_be_any_bytes,
    check_heads_in_pieces_arrive_whole,
    check_buffers_of_every_size_arrive,
    check_many_buffers_arrive,
    check_empty_buffers_arrive,
    check_every_dtype_arrives,
    check_views_arrive_as_their_elements,
    check_try_send_keeps_the_order,
    check_frames_sent_before_a_close_arrive,
    check_sender_may_change_its_tensors,
    check_receiver_may_change_its_tensors,
    check_views_of_heads_outlive_their_frames,
    check_received_tensors_outlive_the_connection,
    check_modes_of_the_reader_do_not_affect_tensors,
    check_many_threads_send_in_both_directions,
    check_one_thread_reads_at_a_time,
    check_blocked_is_called_at_most_once_for_a_frame,
    check_send_ends_at_its_deadline,
    check_waiting_for_a_turn_to_send_ends_at_the_deadline,
    check_frames_that_are_kept_back_can_be_withdrawn,
    check_receive_never_blocks,
    check_wait_ends_at_its_timeout,
    check_wait_wakes_on_data,
    check_wait_wakes_when_the_peer_closes,
    check_wait_wakes_when_its_own_end_closes,
    check_armed_calls_back_once,
    check_arming_reports_data_that_arrived_before,
    check_disarmed_does_not_call_back,
    check_arming_wakes_a_poller_that_waits,
    check_an_armed_connection_reports_the_peers_close,
    check_everything_fails_after_close,
    check_sending_to_a_closed_end_fails,
    check_close_may_be_called_again_and_at_both_ends,
    check_close_ends_a_blocked_send,
    check_descriptors_are_closed,
]

#: The checks for pollers that report that the peer has closed the connection, even while the
#: connection is disarmed (does not report that messages arrive).
CHECKS_WHILE_DISARMED: list[Check] = [
    check_a_disarmed_connection_reports_the_peers_close,
    check_a_close_is_reported_after_earlier_frames,
    check_attaching_reports_an_earlier_close,
]
