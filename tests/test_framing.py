"""A `FrameReader` returns the frames that were sent, however the bytes are split."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire._core.transport.framing import (
    HEAD_AS_BUFFER,
    MAX_ENTRIES,
    PREFIX,
    RETIRED,
    FrameReader,
    pack_prefix,
)
from gradwire._core.wire.frames import Frame
from gradwire._core.wire.tensors import memory_of
from gradwire.errors import ConnectionClosed
from gradwire.testing.transport_checks import same_bytes

LIMIT = 1 << 24


def pack(frame: Frame) -> bytes:
    entries = [(len(buffer), 0) for buffer in frame.buffers]
    buffers = [*map(memory_of, frame.buffers)]
    if not frame.rest:
        return b"".join((pack_prefix(len(frame.head), entries), frame.head, *buffers))
    head = frame.whole_head()
    return b"".join((pack_prefix(0, [*entries, (len(head), 0)], HEAD_AS_BUFFER), *buffers, head))


def feed(reader: FrameReader, data: bytes, sizes: Iterator[int]) -> list[Frame]:
    """Pass the bytes to the reader in pieces of the given sizes, or smaller if it takes fewer."""
    frames, position = [], 0
    while position < len(data):
        target = reader.target
        assert len(target), "recv_into would return 0, as if the peer had closed"
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
def test_frames_survive_any_split(
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


FRAMES = [
    Frame(b""),
    Frame(b"head"),
    Frame(b"", [torch.arange(10, dtype=torch.uint8)]),
    Frame(b"head", [torch.empty(0, dtype=torch.uint8), torch.ones(300, dtype=torch.uint8)]),
    Frame(bytes(1000)),
    Frame(b"in ", [torch.ones(7, dtype=torch.uint8)], [b"three", b" pieces"]),
    Frame(b"last", [torch.empty(0, dtype=torch.uint8)]),
]


def test_frames_are_read_from_single_bytes() -> None:
    data = b"".join(map(pack, FRAMES))
    assert_same(feed(FrameReader(LIMIT), data, sizes_from(random.Random(), 1)), FRAMES)


@pytest.mark.parametrize("frame", FRAMES)
def test_a_frame_is_returned_once_its_last_byte_has_come(frame: Frame) -> None:
    data = pack(FRAMES[1]) + pack(frame)
    for split in range(len(pack(FRAMES[1])), len(data)):
        reader = FrameReader(LIMIT)
        whole = sizes_from(random.Random(0), 1 << 20)
        assert_same(feed(reader, data[:split], whole), [FRAMES[1]])
        assert_same(feed(reader, data[split:], whole), [frame])


def test_a_table_larger_than_the_chunk_is_read() -> None:
    frame = Frame(
        b"head", [torch.full((1,), number % 251, dtype=torch.uint8) for number in range(9000)]
    )
    bits = random.Random(3)
    assert_same(feed(FrameReader(LIMIT), pack(frame) * 2, sizes_from(bits, 50_000)), [frame, frame])


def test_received_memory_is_not_shared_with_the_reader() -> None:
    reader = FrameReader(LIMIT)
    whole = sizes_from(random.Random(0), 1 << 20)
    (first,) = feed(reader, pack(Frame(b"first", FRAMES[2].buffers)), whole)
    feed(reader, pack(Frame(b"other", [torch.zeros(10, dtype=torch.uint8)])), whole)
    assert_same([first], [Frame(b"first", FRAMES[2].buffers)])


def test_retired_segments_are_reported_and_make_no_frame() -> None:
    retired: list[int] = []
    reader = FrameReader(LIMIT, lambda number, length: torch.empty(0), retired.append)
    data = pack_prefix(0, [(RETIRED, 5), (RETIRED, 6)]) + pack(FRAMES[1])
    assert_same(feed(reader, data, sizes_from(random.Random(0), 9)), [FRAMES[1]])
    assert retired == [5, 6]


@pytest.mark.parametrize(
    "data",
    [
        PREFIX.pack(LIMIT + 1, 0, 0),
        PREFIX.pack(1 << 62, 0, 0),
        PREFIX.pack(0, MAX_ENTRIES + 1, 0),
        PREFIX.pack(0, 0, 2),
        PREFIX.pack(0, 0, HEAD_AS_BUFFER),
        pack_prefix(1, [(1, 0)], HEAD_AS_BUFFER),
        pack_prefix(0, [(RETIRED, 1)], HEAD_AS_BUFFER),
        pack_prefix(0, [(LIMIT + 1, 0)]),
        pack_prefix(0, [(LIMIT // 2, 0), (LIMIT // 2 + 1, 0)]),
        pack_prefix(0, [(RETIRED - 1, 0)]),
        pack_prefix(0, [(10, 1)]),
    ],
    ids=[
        "head",
        "huge",
        "entries",
        "head place",
        "no head",
        "two heads",
        "only a retired segment",
        "buffer",
        "sum",
        "length",
        "segment",
    ],
)
def test_a_frame_beyond_the_limits_ends_the_connection(data: bytes) -> None:
    with pytest.raises(ConnectionClosed):
        feed(FrameReader(LIMIT), data, sizes_from(random.Random(0), 100))


def test_a_frame_that_memory_cannot_hold_ends_the_connection() -> None:
    for data in (PREFIX.pack(1 << 62, 0, 0) + b".", pack_prefix(0, [(1 << 62, 0)])):
        with pytest.raises(ConnectionClosed, match="no memory"):
            feed(FrameReader(1 << 63), data, sizes_from(random.Random(0), 100))
