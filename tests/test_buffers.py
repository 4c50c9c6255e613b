"""Memory for large buffers is used again, but never under a tensor that lives."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from gradwire.errors import ConnectionClosed
from gradwire.testing.pairs import Background, open_pair, take
from gradwire.transport.buffers import LARGE_BYTES, Buffers
from gradwire.transport.poller import new_poller
from gradwire.transport.tcp import TcpTransport
from gradwire.wire.frames import Frame


def test_memory_is_used_again_when_the_tensor_is_gone() -> None:
    buffers = Buffers()
    first = buffers.get(LARGE_BYTES + 5)
    address = first.data_ptr()
    del first
    assert buffers.get(LARGE_BYTES + 7).data_ptr() == address


def test_memory_is_left_alone_while_anything_is_in_it() -> None:
    buffers = Buffers()
    whole = buffers.get(2 * LARGE_BYTES).fill_(1)
    part = whole.view(torch.float32)[3:9].detach()
    before = part.clone()
    address = whole.data_ptr()
    del whole
    buffers.get(2 * LARGE_BYTES).fill_(2)
    assert torch.equal(part, before)
    del part
    assert address in [buffers.get(2 * LARGE_BYTES).data_ptr() for _ in range(2)]


def test_tensors_outlive_the_buffers_they_came_from() -> None:
    buffers = Buffers()
    tensor = buffers.get(LARGE_BYTES).fill_(7)
    buffers.trim()
    del buffers
    assert tensor.eq(7).all()


def test_memory_that_nobody_asks_for_is_given_back() -> None:
    buffers = Buffers()
    address = buffers.get(1 << 22).data_ptr()
    buffers.trim()  # it was needed since the last time
    assert buffers.get(1 << 22).data_ptr() == address
    buffers.trim()
    buffers.trim()
    assert mappings_at(address) == 0


def test_other_sizes_do_not_keep_what_is_not_needed() -> None:
    buffers = Buffers()
    address = buffers.get(1 << 22).data_ptr()
    for _ in range(3):
        buffers.get(LARGE_BYTES)
        buffers.trim()
    assert mappings_at(address) == 0


def test_as_much_is_kept_as_was_needed_at_once() -> None:
    buffers = Buffers()
    addresses = sorted(tensor.data_ptr() for tensor in [buffers.get(1 << 22) for _ in range(3)])
    buffers.trim()
    two = [buffers.get(1 << 22) for _ in range(2)]
    del two
    buffers.trim()
    assert sum(map(mappings_at, addresses)) == 2


def mappings_at(address: int) -> int:
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps]
    return sum(int(start, 16) <= address < int(end, 16) for start, end in ranges)


def test_too_much_is_an_error_of_the_connection() -> None:
    with pytest.raises(ConnectionClosed, match="no memory"):
        Buffers().get(1 << 60)


def test_a_connection_fills_the_same_memory_again() -> None:
    addresses = set()
    with open_pair(TcpTransport(b"secret"), new_poller) as pair:
        for value in range(4):
            tensor = torch.full((1 << 20,), value, dtype=torch.uint8)
            with Background(partial(pair.caller.send, Frame(b"x", [tensor]))):
                [arrived] = take(pair.listener, 1)
            assert arrived.buffers[0].eq(value).all()
            addresses.add(arrived.buffers[0].data_ptr())
            del arrived
    assert len(addresses) == 1
