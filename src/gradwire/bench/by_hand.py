"""Chained calls and their gradients, with only the work that no library can avoid.

Bytes go through a bare socket, tensors use those bytes as their storage, torch runs the functions,
and its autograd engine runs their backward passes. This code is useless as a library, because it
knows in advance which function is called, with which shapes, and in which order the gradients
arrive. Its time is the part of a step's time that no library can save.
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
#: How long to poll for a message before sleeping. Polling saves time, because waking up a sleeping
#: thread takes longer than all other work of a call.
_POLL_SECONDS = 0.001


@contextmanager
def connect(function: Callable[[Any, Any], Any], _rank: int) -> Iterator[socket.socket]:
    """Fork a process that computes `function`, and yield a socket to it. Call this before the
    present process differentiates anything: torch's autograd engine does not work in a process
    that is forked later."""
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


def serve(connection: socket.socket, function: Callable[[Any, Any], Any]) -> None:
    """Answer messages until the socket is closed. A message with two tensors holds the arguments of
    a call. A message with one tensor holds a gradient, for the result of the latest call whose
    result has no gradient yet."""
    import torch

    calls = []
    while tensors := receive(connection):
        if len(tensors) == 2:
            x, weight = (tensor.requires_grad_() for tensor in tensors)
            calls.append((function(x, weight), (x, weight)))
            send(connection, calls[-1][0])
        else:
            result, inputs = calls.pop()
            send(connection, *torch.autograd.grad(result, inputs, tensors))


def send(connection: socket.socket, *tensors: Any) -> None:
    message = bytearray(len(tensors) * _BYTES)
    for tensor, target in zip(tensors, tensors_over(message), strict=True):
        target.copy_(tensor.detach())
    connection.sendall(message)


def receive(connection: socket.socket) -> list[Any]:
    """Return the tensors of one message, or an empty list if the socket was closed."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    deadline = time.perf_counter() + _POLL_SECONDS
    while not poll.poll(0) and time.perf_counter() < deadline:
        pass
    return tensors_over(bytearray(connection.recv(2 * _BYTES)))


def tensors_over(message: bytearray) -> list[Any]:
    """Return tensors that have the bytes of the message as their storage."""
    import torch

    return [
        torch.frombuffer(message, dtype=torch.float32, count=_FLOATS, offset=start)
        for start in range(0, len(message), _BYTES)
    ]


def chained(length: int, connection: socket.socket, count: int) -> list[float]:
    """Return the seconds per step for the same chain of calls as in `autograd.chain`. A step is a
    forward pass and a backward pass."""
    import torch

    x, weight = (torch.ones(_FLOATS, requires_grad=True) for _ in range(2))

    def step() -> tuple[Any, Any]:
        h = x
        for _ in range(length):
            send(connection, h, weight)
            [h] = receive(connection)
        h.requires_grad_()
        [gradient] = torch.autograd.grad(h.sum(), [h])
        total = torch.zeros(_FLOATS)
        for _ in range(length):
            send(connection, gradient)
            gradient, part = receive(connection)
            total += part
        return gradient, total

    gradients = step()
    expected = torch.ones(_FLOATS), torch.full((_FLOATS,), float(length))
    if not all(map(torch.equal, gradients, expected)):
        raise AssertionError(f"wrong gradients: {gradients} instead of {expected}")
    return seconds_each(step, count, count // 5)
