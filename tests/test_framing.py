"""Frames come out of a `FrameReader` as they went in, however the bytes are cut."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.errors import ConnectionClosed
from gradwire.testing.transports import same_bytes
from gradwire.transport.framing import (
    FORGET,
    HEAD_BESIDE,
    MAX_ENTRIES,
    PREFIX,
    FrameReader,
    pack_prefix,
)
from gradwire.wire.frames import Frame
from gradwire.wire.tensors import memory_of

LIMIT = 1 << 24


def pack(frame: Frame) -> bytes:
    entries = [(len(buffer), 0) for buffer in frame.buffers]
    buffers = [*map(memory_of, frame.buffers)]
    if not frame.rest:
        return b"".join((pack_prefix(len(frame.head), entries), frame.head, *buffers))
    head = frame.whole_head()
    return b"".join((pack_prefix(0, [*entries, (len(head), 0)], HEAD_BESIDE), *buffers, head))


def feed(reader: FrameReader, data: bytes, sizes: Iterator[int]) -> list[Frame]:
    """Give the reader its bytes in pieces of the sizes given, or smaller when it wants fewer."""
    frames, position = [], 0
    while position < len(data):
        target = reader.target
        assert len(target), "the reader has no room: a socket would look closed"
        count = min(next(sizes), len(target), len(data) - position)
        target[:count] = data[position : position + count]
        position += count
        frames += reader.advance(count)
    return frames


def assert_same(arrived: Sequence[Frame], sent: Sequence[Frame]) -> None:
    assert [bytes(frame.head) for frame in arrived] == [frame.whole_head() for frame in sent]
    for frame, original in zip(arrived, sent, strict=True):
        assert len(frame.buffers) == len(original.buffers)
        assert all(map(same_bytes, frame.buffers, original.buffers))


def sizes_from(bits: random.Random, largest: int) -> Iterator[int]:
    while True:
        yield bits.randint(1, largest)


sizes = st.one_of(st.integers(0, 40), st.integers(65_500, 65_600), st.integers(0, 200_000))


@settings(max_examples=150, deadline=None)
@given(
    shapes=st.lists(st.tuples(sizes, st.lists(sizes, max_size=4), st.booleans()), max_size=6),
    largest=st.sampled_from([7, 100, 5_000, 65_536, 1 << 20]),
    seed=st.integers(0, 1 << 32),
)
def test_frames_survive_any_cut(
    shapes: list[tuple[int, list[int], bool]], largest: int, seed: int
) -> None:
    bits = random.Random(seed)
    frames = [
        Frame(
            bits.randbytes(head),
            [
                torch.frombuffer(bytearray(bits.randbytes(n) + b"."), dtype=torch.uint8)[:n]
                for n in buffers
            ],
            [b"the rest"] if in_pieces else (),
        )
        for head, buffers, in_pieces in shapes
    ]
    data = b"".join(map(pack, frames))
    if largest == 7 and len(data) > 100_000:
        largest = 700
    assert_same(feed(FrameReader(LIMIT), data, sizes_from(bits, largest)), frames)


SOME = [
    Frame(b""),
    Frame(b"head"),
    Frame(b"", [torch.arange(10, dtype=torch.uint8)]),
    Frame(b"head", [torch.empty(0, dtype=torch.uint8), torch.ones(300, dtype=torch.uint8)]),
    Frame(bytes(1000)),
    Frame(b"in ", [torch.ones(7, dtype=torch.uint8)], [b"three", b" pieces"]),
    Frame(b"last", [torch.empty(0, dtype=torch.uint8)]),
]


def test_frames_come_out_of_single_bytes() -> None:
    data = b"".join(map(pack, SOME))
    assert_same(feed(FrameReader(LIMIT), data, sizes_from(random.Random(), 1)), SOME)


@pytest.mark.parametrize("frame", SOME)
def test_trailing_bytes_wait_for_the_rest_of_their_frame(frame: Frame) -> None:
    data = pack(SOME[1]) + pack(frame)
    for cut in range(len(pack(SOME[1])), len(data)):
        reader = FrameReader(LIMIT)
        whole = sizes_from(random.Random(0), 1 << 20)
        assert_same(feed(reader, data[:cut], whole), [SOME[1]])
        assert_same(feed(reader, data[cut:], whole), [frame])


def test_a_table_larger_than_the_chunk_is_read() -> None:
    frame = Frame(
        b"head", [torch.full((1,), number % 251, dtype=torch.uint8) for number in range(9000)]
    )
    bits = random.Random(3)
    assert_same(feed(FrameReader(LIMIT), pack(frame) * 2, sizes_from(bits, 50_000)), [frame, frame])


def test_received_memory_is_not_shared_with_the_reader() -> None:
    reader = FrameReader(LIMIT)
    whole = sizes_from(random.Random(0), 1 << 20)
    (first,) = feed(reader, pack(Frame(b"first", SOME[2].buffers)), whole)
    feed(reader, pack(Frame(b"other", [torch.zeros(10, dtype=torch.uint8)])), whole)
    assert_same([first], [Frame(b"first", SOME[2].buffers)])


def test_forgotten_segments_are_reported_and_make_no_frame() -> None:
    forgotten: list[int] = []
    reader = FrameReader(LIMIT, lambda number, length: torch.empty(0), forgotten.append)
    data = pack_prefix(0, [(FORGET, 5), (FORGET, 6)]) + pack(SOME[1])
    assert_same(feed(reader, data, sizes_from(random.Random(0), 9)), [SOME[1]])
    assert forgotten == [5, 6]


@pytest.mark.parametrize(
    "data",
    [
        PREFIX.pack(LIMIT + 1, 0, 0),
        PREFIX.pack(1 << 62, 0, 0),
        PREFIX.pack(0, MAX_ENTRIES + 1, 0),
        PREFIX.pack(0, 0, 2),
        PREFIX.pack(0, 0, HEAD_BESIDE),
        pack_prefix(1, [(1, 0)], HEAD_BESIDE),
        pack_prefix(0, [(FORGET, 1)], HEAD_BESIDE),
        pack_prefix(0, [(LIMIT + 1, 0)]),
        pack_prefix(0, [(LIMIT // 2, 0), (LIMIT // 2 + 1, 0)]),
        pack_prefix(0, [(FORGET - 1, 0)]),
        pack_prefix(0, [(10, 1)]),
    ],
    ids=[
        "head",
        "huge",
        "entries",
        "where",
        "no head",
        "two",
        "gone",
        "buffer",
        "sum",
        "length",
        "segment",
    ],
)
def test_what_is_beyond_the_limits_ends_the_connection(data: bytes) -> None:
    with pytest.raises(ConnectionClosed):
        feed(FrameReader(LIMIT), data, sizes_from(random.Random(0), 100))


def test_what_does_not_fit_into_memory_ends_the_connection() -> None:
    for data in (PREFIX.pack(1 << 62, 0, 0) + b".", pack_prefix(0, [(1 << 62, 0)])):
        with pytest.raises(ConnectionClosed, match="no memory"):
            feed(FrameReader(1 << 63), data, sizes_from(random.Random(0), 100))
