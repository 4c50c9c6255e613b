"""Memory for large buffers is reused, but never while a tensor uses it."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from gradwire._core.transport.poller import new_poller
from gradwire._core.transport.receive_buffers import LARGE_BYTES, ReceiveBuffers
from gradwire._core.transport.tcp import TcpTransport
from gradwire._core.wire.frames import Frame
from gradwire.errors import ConnectionClosed
from gradwire.testing.connection_pairs import Background, open_pair, take


def test_memory_is_reused_when_its_tensor_was_freed() -> None:
    buffers = ReceiveBuffers()
    first = buffers.get(LARGE_BYTES + 5)
    address = first.data_ptr()
    del first
    assert buffers.get(LARGE_BYTES + 7).data_ptr() == address


def test_memory_is_not_reused_while_a_view_exists() -> None:
    buffers = ReceiveBuffers()
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
    buffers = ReceiveBuffers()
    tensor = buffers.get(LARGE_BYTES).fill_(7)
    buffers.trim()
    del buffers
    assert tensor.eq(7).all()


def test_unused_memory_is_freed() -> None:
    buffers = ReceiveBuffers()
    address = buffers.get(1 << 22).data_ptr()
    buffers.trim()  # keeps it, because it was used since the last trim
    assert buffers.get(1 << 22).data_ptr() == address
    buffers.trim()
    buffers.trim()
    assert mappings_at(address) == 0


def test_using_one_size_does_not_keep_memory_of_another() -> None:
    buffers = ReceiveBuffers()
    address = buffers.get(1 << 22).data_ptr()
    for _ in range(3):
        buffers.get(LARGE_BYTES)
        buffers.trim()
    assert mappings_at(address) == 0


def test_trim_keeps_as_much_as_was_in_use_at_once() -> None:
    buffers = ReceiveBuffers()
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


def test_a_lack_of_memory_ends_the_connection() -> None:
    with pytest.raises(ConnectionClosed, match="no memory"):
        ReceiveBuffers().get(1 << 60)


def test_a_connection_reuses_its_receive_memory() -> None:
    addresses = set()
    with open_pair(TcpTransport(b"secret"), new_poller) as pair:
        for value in range(4):
            tensor = torch.full((1 << 20,), value, dtype=torch.uint8)
            with Background(partial(pair.client.send, Frame(b"x", [tensor]))):
                [arrived] = take(pair.listener, 1)
            assert arrived.buffers[0].eq(value).all()
            addresses.add(arrived.buffers[0].data_ptr())
            del arrived
    assert len(addresses) == 1
