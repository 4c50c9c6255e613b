"""What every transport must do, as checks that need no test framework.

    for check in CHECKS:
        check(lambda: open_pair(TcpTransport(token), new_poller))

A check takes a function that opens a fresh pair of connected ends, and raises an AssertionError
that says which promise of `gradwire.transport.base` was broken.
"""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from gradwire.errors import ConnectionClosed
from gradwire.testing.pairs import (
    PATIENCE,
    Background,
    Pair,
    drive,
    open_descriptors,
    settle,
    take,
)
from gradwire.transport.base import Connection
from gradwire.wire.frames import Frame
from gradwire.wire.tensors import DTYPES

Open = Callable[[], AbstractContextManager[Pair]]
Check = Callable[[Open], None]

#: Around the sizes at which transports change their ways.
SIZES = sorted(
    {0, 1, 2, 100, (1 << 20) + 1, 3_000_001}
    | {(1 << power) + near for power in (12, 15, 16, 17) for near in (-17, -16, -15, -1, 0, 1)}
)


def same_bytes(arrived: Tensor, sent: Tensor) -> bool:
    """Whether a received buffer holds the elements of the one that was sent, in order."""
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
    """In both directions, one after the other."""
    for sender, receiver in ((pair.caller, pair.listener), (pair.listener, pair.caller)):
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
    assert connection.begin_reading(), "somebody else reads this connection"
    try:
        return connection.receive()
    finally:
        connection.end_reading()


def _wait_once(connection: Connection, timeout: float) -> bool:
    assert connection.begin_reading(), "somebody else reads this connection"
    try:
        return connection.wait(timeout)
    finally:
        connection.end_reading()


# -- what arrives


def check_frames_arrive_in_order(open_pair: Open) -> None:
    with open_pair() as pair:
        _assert_arrive(pair, [Frame(str(number).encode()) for number in range(2000)])


def check_heads_of_every_size_arrive(open_pair: Open) -> None:
    bits = random.Random(1)
    with open_pair() as pair:
        _assert_arrive(pair, [Frame(bits.randbytes(size)) for size in SIZES])


def check_heads_may_be_any_bytes(open_pair: Open) -> None:
    data = bytes(range(256)) * 200
    with open_pair() as pair:
        kinds = (data, bytearray(data), memoryview(data), memoryview(data)[7:90])
        _assert_arrive(pair, [Frame(head) for head in kinds])


def check_heads_in_pieces_arrive_whole(open_pair: Open) -> None:
    bits = random.Random(2)
    with open_pair() as pair:
        for size in SIZES:
            piece = bits.randbytes(size)
            rest = (bytearray(piece), memoryview(piece)[: size // 2], b"", piece)
            _assert_arrive(pair, [Frame(b"first", (), rest), Frame(b"", [torch.ones(3)], rest)])


def check_buffers_of_every_size_arrive(open_pair: Open) -> None:
    frames = [Frame(b"head", [torch.randint(0, 256, (size,), dtype=torch.uint8)]) for size in SIZES]
    with open_pair() as pair:
        _assert_arrive(pair, frames)


def check_many_buffers_arrive(open_pair: Open) -> None:
    """More of them than one system call, or one queue of the system, takes."""
    few = [torch.full((size,), size % 251, dtype=torch.uint8) for size in SIZES]
    small = [torch.tensor([number]) for number in range(3000)]
    large = [torch.full((40_000,), number % 251, dtype=torch.uint8) for number in range(700)]
    with open_pair() as pair:
        _assert_arrive(pair, [Frame(b"", few), Frame(b"small", small), Frame(b"large", large)])


def check_empty_buffers_arrive(open_pair: Open) -> None:
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


def check_every_dtype_arrives(open_pair: Open) -> None:
    tensors = [
        torch.arange(160 * scale).remainder(2).to(torch.uint8).view(dtype)
        for dtype in DTYPES
        for scale in (1, 1000)
    ]
    with open_pair() as pair:
        _assert_arrive(pair, [Frame(b"", [tensor]) for tensor in tensors])


def check_views_arrive_as_their_elements(open_pair: Open) -> None:
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


def check_a_nudge_arrives_in_its_place(open_pair: Open) -> None:
    with open_pair() as pair:
        pair.caller.send(Frame(b"before"))
        assert pair.caller.nudge(Frame(b"nudge")), "nobody else was sending"
        pair.caller.send(Frame(b"after"))
        heads = [bytes(frame.head) for frame in take(pair.listener, 3)]
        assert heads == [b"before", b"nudge", b"after"], f"out of order: {heads}"


def check_frames_sent_before_a_close_arrive(open_pair: Open) -> None:
    frames = [Frame(b"last words", [torch.arange(50_000)]), Frame(b"and more")]
    with open_pair() as pair:
        _send_all(pair.caller, frames)
        pair.caller.close()
        _assert_same(take(pair.listener, len(frames)), frames)
        _wait_once(pair.listener, PATIENCE)
        _assert_closed(lambda: _receive_once(pair.listener), "receive after the peer's close")


# -- whose memory it is


def check_sender_may_change_its_tensors(open_pair: Open) -> None:
    for size in (10, 10_000, 1_000_000):
        with open_pair() as pair:
            tensor = torch.zeros(size)
            with Background(partial(_send_numbers, pair.caller, size)):
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


def check_receiver_may_change_its_tensors(open_pair: Open) -> None:
    for size in (10, 10_000, 1_000_000):
        tensor = torch.ones(size)
        frames = [Frame(b"", [tensor]), Frame(b"", [tensor])]
        with open_pair() as pair:
            with Background(partial(_send_all, pair.caller, frames)):
                first, second = take(pair.listener, 2)
            first.buffers[0].fill_(7)
            assert bool((tensor == 1).all()), "the receiver wrote to the sender's tensor"
            assert same_bytes(second.buffers[0], tensor), "two received tensors share memory"


def check_parts_of_heads_outlive_their_frames(open_pair: Open) -> None:
    heads = [bytes([number]) * 100_000 for number in range(4)]
    ends = []
    with open_pair() as pair:
        for head in heads:
            with Background(partial(pair.caller.send, Frame(head))):
                ends.append(memoryview(take(pair.listener, 1)[0].head)[-50_000:])
        for end, head in zip(ends, heads, strict=True):
            assert end == head[-50_000:], "the memory of a head was used again"


def check_received_tensors_outlive_the_connection(open_pair: Open) -> None:
    tensors = [torch.arange(size) for size in (10, 10_000, 100_000)]
    frame = Frame(b"", tensors)
    with open_pair() as pair:
        with Background(lambda: pair.caller.send(frame)):
            arrived = take(pair.listener, 1)
    gc.collect()
    _assert_same(arrived, [frame])


def check_tensors_are_ordinary_whatever_mode_the_threads_are_in(open_pair: Open) -> None:
    """A thread may read frames meant for others while it is inside somebody's `with` block."""
    frame = Frame(b"", [torch.arange(10), torch.arange(50_000)])
    with open_pair() as pair:
        with torch.inference_mode(), torch.device("meta"):
            pair.caller.send(frame)
            arrived = take(pair.listener, 1)
        _assert_same(arrived, [frame])
        for buffer in arrived[0].buffers:
            assert not buffer.is_inference(), "a tensor of inference_mode leaked to its receiver"


# -- threads


def check_both_directions_and_many_threads_at_once(open_pair: Open) -> None:
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
            *(partial(read, end) for end in (pair.caller, pair.listener)),
            *(
                partial(send, end, name)
                for end in (pair.caller, pair.listener)
                for name in range(threads)
            ),
        ]
        _run_together(work)


def _run_together(work: Sequence[Callable[[], object]]) -> None:
    if work:
        with Background(work[0]):
            _run_together(work[1:])


def check_one_thread_reads_at_a_time(open_pair: Open) -> None:
    with open_pair() as pair:
        end = pair.listener
        assert end.begin_reading()
        assert not end.begin_reading(), "two threads were allowed to read at once"
        end.end_reading()
        assert end.begin_reading(), "end_reading did not let others read"
        end.end_reading()


def check_blocked_is_called_at_most_once_for_a_frame(open_pair: Open) -> None:
    calls: list[None] = []
    frame = Frame(bytes(64 << 20))
    with open_pair() as pair:
        with Background(lambda: pair.caller.send(frame, lambda: calls.append(None))):
            arrived = take(pair.listener, 1)
        assert len(arrived[0].head) == len(frame.head)
        assert len(calls) <= 1, f"blocked was called {len(calls)} times for one frame"


# -- reading


def check_receive_never_blocks(open_pair: Open) -> None:
    with open_pair() as pair:
        for end in (pair.caller, pair.listener):
            assert _receive_once(end) == [], "something arrived that nobody sent"


def check_wait_ends_at_its_timeout(open_pair: Open) -> None:
    with open_pair() as pair:
        for timeout in (0, 0.001, -1):
            assert not _wait_once(pair.caller, timeout), "wait reported what nobody sent"


def check_wait_wakes_on_data(open_pair: Open) -> None:
    with open_pair() as pair:
        assert _wait_in_thread(pair.listener, lambda: pair.caller.send(Frame(b"wake up")))


def check_wait_wakes_when_the_other_end_closes(open_pair: Open) -> None:
    with open_pair() as pair:
        assert _wait_in_thread(pair.listener, pair.caller.close)
        _assert_closed(lambda: _receive_once(pair.listener), "receive after the peer's close")


def check_wait_wakes_when_its_own_end_closes(open_pair: Open) -> None:
    with open_pair() as pair:
        assert _wait_in_thread(pair.listener, pair.listener.close)
        _assert_closed(lambda: _receive_once(pair.listener), "receive after close")


def _wait_in_thread(connection: Connection, act: Callable[[], object]) -> bool:
    """Whether a thread that waits wakes when `act` is done by this one."""
    results: list[bool] = []
    about_to_wait = threading.Event()

    def wait() -> None:
        assert connection.begin_reading()
        about_to_wait.set()
        results.append(connection.wait(PATIENCE))
        connection.end_reading()

    with Background(wait):
        assert about_to_wait.wait(PATIENCE)
        act()
    return results == [True]


# -- the poller


def check_armed_calls_back_once(open_pair: Open) -> None:
    with open_pair() as pair:
        calls: list[None] = []
        pair.listener.attach(pair.poller, lambda: calls.append(None))
        pair.listener.arm()
        settle(pair.poller)
        assert not calls, "the callback came before there was something to receive"
        pair.caller.send(Frame(b"one"))
        drive(pair.poller, lambda: calls, "the callback of an armed connection")
        pair.caller.send(Frame(b"two"))
        assert _wait_once(pair.listener, PATIENCE)
        settle(pair.poller)
        assert len(calls) == 1, f"armed once, called back {len(calls)} times"
        take(pair.listener, 2)


def check_arming_notices_what_is_there_already(open_pair: Open) -> None:
    with open_pair() as pair:
        calls: list[None] = []
        pair.listener.attach(pair.poller, lambda: calls.append(None))
        pair.caller.send(Frame(b"early"))
        assert _wait_once(pair.listener, PATIENCE)
        settle(pair.poller)
        assert not calls, "a connection at rest called back because data came"
        pair.listener.arm()
        drive(pair.poller, lambda: calls, "the callback for data that came before arming")
        take(pair.listener, 1)


def check_disarmed_does_not_call_back(open_pair: Open) -> None:
    with open_pair() as pair:
        calls: list[None] = []
        pair.listener.attach(pair.poller, lambda: calls.append(None))
        pair.listener.arm()
        pair.listener.disarm()
        pair.caller.send(Frame(b"unnoticed"))
        assert _wait_once(pair.listener, PATIENCE)
        settle(pair.poller)
        assert not calls, "a disarmed connection called back"
        pair.listener.arm()
        drive(pair.poller, lambda: calls, "the callback after arming again")
        take(pair.listener, 1)


def check_arming_wakes_a_poller_that_waits(open_pair: Open) -> None:
    with open_pair() as pair:
        calls: list[None] = []
        pair.listener.attach(pair.poller, lambda: calls.append(None))
        pair.caller.send(Frame(b"data"))
        with Background(lambda: drive(pair.poller, lambda: calls, "the callback")):
            pair.listener.arm()
        take(pair.listener, 1)


def check_an_armed_connection_notices_the_other_ends_close(open_pair: Open) -> None:
    with open_pair() as pair:
        calls: list[None] = []
        pair.listener.attach(pair.poller, lambda: calls.append(None))
        pair.listener.arm()
        pair.caller.close()
        drive(pair.poller, lambda: calls, "the notice of the other end's close")
        _assert_closed(lambda: _receive_once(pair.listener), "receive after the peer's close")


def check_a_resting_connection_notices_the_other_ends_close(open_pair: Open) -> None:
    """Not for pollers that only know readability: see `CHECKS_AT_REST`."""
    with open_pair() as pair:
        calls: list[None] = []
        pair.listener.attach(pair.poller, lambda: calls.append(None))
        pair.caller.close()
        drive(pair.poller, lambda: calls, "the notice of the other end's close")
        _assert_closed(lambda: _receive_once(pair.listener), "receive after the peer's close")


def check_a_close_is_noticed_after_what_came_before_it(open_pair: Open) -> None:
    """At rest the close alone is noticed, and whoever is called back then finds a frame. Not for
    pollers that only know readability: see `CHECKS_AT_REST`."""
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
        pair.caller.send(Frame(b"farewell"))
        pair.caller.close()
        drive(pair.poller, lambda: ended, "the notice of the close")


def check_attaching_notices_that_the_other_end_has_closed(open_pair: Open) -> None:
    """Not for pollers that only know readability: see `CHECKS_AT_REST`."""
    with open_pair() as pair:
        calls: list[None] = []
        pair.caller.close()
        pair.listener.attach(pair.poller, lambda: calls.append(None))
        drive(pair.poller, lambda: calls, "the notice of a close before attach")


# -- the end


def check_everything_fails_after_close(open_pair: Open) -> None:
    with open_pair() as pair:
        pair.listener.send(Frame(b"never read"))
        assert _wait_once(pair.caller, PATIENCE)
        pair.caller.close()
        for frame in (Frame(b"head"), Frame(b"", [torch.arange(50_000)])):
            _assert_closed(partial(pair.caller.send, frame), "send after close")
        _assert_closed(lambda: _receive_once(pair.caller), "receive after close")
        pair.caller.arm()
        pair.caller.disarm()
        pair.caller.trim()


def check_sending_to_a_closed_end_fails(open_pair: Open) -> None:
    """At the latest when the other end's close has been noticed and the system has had one try."""
    with open_pair() as pair:
        pair.listener.close()
        assert _wait_once(pair.caller, PATIENCE)
        frame = Frame(b"into the void")
        try:
            pair.caller.send(frame)
        except ConnectionClosed:
            pass
        _assert_closed(lambda: pair.caller.send(frame), "send to an end that has closed")


def check_close_may_be_called_again_and_by_all(open_pair: Open) -> None:
    with open_pair() as pair:
        closes = [pair.caller.close, pair.listener.close] * 4
        _run_together(closes)
        pair.caller.close()


def check_close_ends_a_send_that_is_stuck(open_pair: Open) -> None:
    """Nobody reads: the sender is stuck for good, unless the transport queues without limit."""
    with open_pair() as pair:
        stuck = threading.Event()

        def send() -> None:
            try:
                for _ in range(2_000):
                    pair.caller.send(Frame(bytes(30_000)), stuck.set)
            except ConnectionClosed:
                pass
            stuck.set()

        with Background(send):
            assert stuck.wait(PATIENCE)
            pair.caller.close()


def check_descriptors_are_given_back(open_pair: Open) -> None:
    gc.collect()
    before = open_descriptors()
    with open_pair() as pair:
        frame = Frame(b"", [torch.arange(100), torch.arange(50_000)])
        _assert_arrive(pair, [frame] * 3)
        # Closed by one thread while another reads: the reader gives them back.
        assert _wait_in_thread(pair.listener, pair.listener.close)
    left = open_descriptors() - before
    assert not left, f"descriptors were not given back: {sorted(left)}"


#: For every transport with every poller.
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
    check_a_nudge_arrives_in_its_place,
    check_frames_sent_before_a_close_arrive,
    check_sender_may_change_its_tensors,
    check_receiver_may_change_its_tensors,
    check_parts_of_heads_outlive_their_frames,
    check_received_tensors_outlive_the_connection,
    check_tensors_are_ordinary_whatever_mode_the_threads_are_in,
    check_both_directions_and_many_threads_at_once,
    check_one_thread_reads_at_a_time,
    check_blocked_is_called_at_most_once_for_a_frame,
    check_receive_never_blocks,
    check_wait_ends_at_its_timeout,
    check_wait_wakes_on_data,
    check_wait_wakes_when_the_other_end_closes,
    check_wait_wakes_when_its_own_end_closes,
    check_armed_calls_back_once,
    check_arming_notices_what_is_there_already,
    check_disarmed_does_not_call_back,
    check_arming_wakes_a_poller_that_waits,
    check_an_armed_connection_notices_the_other_ends_close,
    check_everything_fails_after_close,
    check_sending_to_a_closed_end_fails,
    check_close_may_be_called_again_and_by_all,
    check_close_ends_a_send_that_is_stuck,
    check_descriptors_are_given_back,
]

#: For pollers that report the end of a connection that is not armed.
CHECKS_AT_REST: list[Check] = [
    check_a_resting_connection_notices_the_other_ends_close,
    check_a_close_is_noticed_after_what_came_before_it,
    check_attaching_notices_that_the_other_end_has_closed,
]
