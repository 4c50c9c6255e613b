"""Chained calls and their gradients, with all that no library can leave out, and nothing else.

Bytes go through a bare socket, tensors lie over them, torch runs the functions and its engine their
backward. Nobody could use it: it knows what is called, with which shapes, and in which order
gradients come. It says how much of a step's time is not the library's.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gradwire.bench.timing import seconds_each

_FLOATS = 4
_BYTES = 4 * _FLOATS
#: How long something is looked for before going to sleep: to be woken takes longer than all else.
_LOOK_SECONDS = 0.001


@contextmanager
def line(function: Callable[[Any, Any], Any], _rank: int) -> Iterator[socket.socket]:
    """A socket at whose other end a second process computes `function`. (It is there from the
    beginning: torch does not differentiate in a process whose parent has done so.)"""
    here, there = socket.socketpair()
    if os.fork() == 0:
        here.close()
        try:
            serve(there, function)
        finally:
            os._exit(0)
    there.close()
    with here:
        yield here
    os.wait()


def serve(line: socket.socket, function: Callable[[Any, Any], Any]) -> None:
    """Two tensors are a call; one is the gradient of the last call that has none yet."""
    import torch

    calls = []
    while arrived := receive(line):
        if len(arrived) == 2:
            x, weight = (tensor.requires_grad_() for tensor in arrived)
            calls.append((function(x, weight), (x, weight)))
            send(line, calls[-1][0])
        else:
            result, inputs = calls.pop()
            send(line, *torch.autograd.grad(result, inputs, arrived))


def send(line: socket.socket, *tensors: Any) -> None:
    elements = bytearray(len(tensors) * _BYTES)
    for tensor, over in zip(tensors, tensors_over(elements), strict=True):
        over.copy_(tensor.detach())
    line.sendall(elements)


def receive(line: socket.socket) -> list[Any]:
    """As many tensors as were sent at once; none at the end."""
    poll = select.poll()
    poll.register(line, select.POLLIN)
    patience = time.perf_counter() + _LOOK_SECONDS
    while not poll.poll(0) and time.perf_counter() < patience:
        pass
    return tensors_over(bytearray(line.recv(2 * _BYTES)))


def tensors_over(elements: bytearray) -> list[Any]:
    import torch

    return [
        torch.frombuffer(elements, dtype=torch.float32, count=_FLOATS, offset=start)
        for start in range(0, len(elements), _BYTES)
    ]


def chained(length: int, line: socket.socket, count: int) -> list[float]:
    """`autograd.chain`, forward and backward."""
    import torch

    x, weight = (torch.ones(_FLOATS, requires_grad=True) for _ in range(2))

    def step() -> tuple[Any, Any]:
        h = x
        for _ in range(length):
            send(line, h, weight)
            [h] = receive(line)
        h.requires_grad_()
        [gradient] = torch.autograd.grad(h.sum(), [h])
        total = torch.zeros(_FLOATS)
        for _ in range(length):
            send(line, gradient)
            gradient, part = receive(line)
            total += part
        return gradient, total

    gradients = step()
    expected = torch.ones(_FLOATS), torch.full((_FLOATS,), float(length))
    if not all(map(torch.equal, gradients, expected)):
        raise AssertionError(f"{gradients}, not {expected}")
    return seconds_each(step, count, count // 5)
