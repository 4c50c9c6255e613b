"""Calls: gradwire and torch's RPC, each with its defaults, between two processes on this machine.

The same code drives both; `rpc` below is `gradwire.rpc` for one and `torch.distributed.rpc` for the
other. What the machine itself needs for the like, a bare socket and a bare copy, is measured too.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from gradwire.bench.contest import Case, Contestant, Suite
from gradwire.bench.timing import microseconds, milliseconds, seconds_each

KB, MB = 1 << 10, 1 << 20
#: Calls under way at the same time in the pipelined case.
WINDOW = 2000


# -- what is called


def noop() -> None:
    pass


def add(x: Any, y: Any) -> Any:
    return x + y


def echo(x: Any) -> Any:
    return x


# -- what is measured


def noop_calls(rpc: Any, count: int) -> list[float]:
    return seconds_each(lambda: rpc.rpc_sync("worker1", noop), count, min(count, 100))


def small_tensor_calls(rpc: Any, count: int) -> list[float]:
    import torch

    args = (torch.ones(4), torch.ones(4))
    return seconds_each(lambda: rpc.rpc_sync("worker1", add, args=args), count, min(count, 100))


def pipelined_calls(rpc: Any, count: int) -> list[float]:
    """Seconds per call, with many under way."""
    import torch

    def window() -> None:
        torch.futures.wait_all([rpc.rpc_async("worker1", noop) for _ in range(WINDOW)])

    return [seconds / WINDOW for seconds in seconds_each(window, count, 1)]


def echoes(size: int, rpc: Any, count: int) -> list[float]:
    import torch

    tensor = torch.ones(size, dtype=torch.uint8)
    return seconds_each(lambda: rpc.rpc_sync("worker1", echo, args=(tensor,)), count, 2)


def ping_pongs(line: socket.socket, count: int) -> list[float]:
    def ping() -> None:
        line.sendall(b"ping")
        line.recv(4)

    return seconds_each(ping, count, min(count, 100))


def copies(size: int, _line: socket.socket, count: int) -> list[float]:
    import torch

    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    return seconds_each(lambda: target.copy_(source), count, 2)


# -- who takes part


@contextmanager
def worker(module: str, rank: int) -> Iterator[Any]:
    warnings.simplefilter("ignore")  # torch's RPC warns of its own ways at every shutdown
    rpc = import_module(module)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    yield rpc
    rpc.shutdown()


@contextmanager
def bare_socket(_rank: int) -> Iterator[socket.socket]:
    """A socket whose other end a second process answers."""
    here, there = socket.socketpair()
    if os.fork() == 0:
        here.close()
        while message := there.recv(4):
            there.sendall(message)
        os._exit(0)
    there.close()
    with here:
        yield here
    os.wait()


# -- in words


def calls_per_second(seconds: float) -> str:
    return f"{1 / seconds / 1e3:.1f} k/s"


def rate(size: int, seconds: float) -> str:
    return f"{size / seconds / 1e9:.2f} GB/s"


SUITE = Suite(
    "calls between two processes on this machine; echoes count the bytes of both ways",
    (
        Contestant("torch", partial(worker, "torch.distributed.rpc")),
        Contestant("gradwire", partial(worker, "gradwire.rpc")),
        Contestant("machine", bare_socket, processes=1),
    ),
    (
        Case("call of a function that does nothing", noop_calls, 1000, microseconds),
        Case("call with two tensors of 4 floats", small_tensor_calls, 1000, microseconds),
        Case(f"calls, {WINDOW} at a time", pipelined_calls, 3, calls_per_second, 1),
        Case("echo of 64 KB", partial(echoes, 64 * KB), 300, partial(rate, 2 * 64 * KB)),
        Case("echo of 1 MB", partial(echoes, MB), 100, partial(rate, 2 * MB)),
        Case("echo of 16 MB", partial(echoes, 16 * MB), 20, partial(rate, 2 * 16 * MB), 1),
        Case("echo of 64 MB", partial(echoes, 64 * MB), 8, partial(rate, 2 * 64 * MB), 1),
        Case("echo of 256 MB", partial(echoes, 256 * MB), 4, partial(rate, 2 * 256 * MB), 1),
        Case("bare unix socket, there and back", ping_pongs, 3000, microseconds, 10, ("machine",)),
        Case("copy of 64 MB, once", partial(copies, 64 * MB), 10, milliseconds, 1, ("machine",)),
    ),
)
