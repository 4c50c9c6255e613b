"""Calls: gradwire and torch's RPC, each with its defaults, between two processes on this machine;
and both over TCP, as between machines.

The same code drives both; `rpc` below is `gradwire.rpc` for one and `torch.distributed.rpc` for the
other. What the machine itself needs for the like, a bare socket and a bare copy, is measured too.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from gradwire.bench.contest import Case, Contestant, Floor, Suite
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


@dataclass(frozen=True)
class Caller:
    """How functions are called in the other process: `call(function, args=())` gives the result,
    `start(function, args=())` what `wait_all` waits for, of many at once."""

    call: Callable[..., Any]
    start: Callable[..., Any]
    wait_all: Callable[[list[Any]], Any]


def noop_calls(caller: Caller, count: int) -> list[float]:
    return seconds_each(lambda: caller.call(noop), count, min(count, 100))


def small_tensor_calls(caller: Caller, count: int) -> list[float]:
    import torch

    args = (torch.ones(4), torch.ones(4))
    return seconds_each(lambda: caller.call(add, args=args), count, min(count, 100))


def pipelined_calls(caller: Caller, count: int) -> list[float]:
    """Seconds per call, with many under way."""

    def window() -> None:
        caller.wait_all([caller.start(noop) for _ in range(WINDOW)])

    return [seconds / WINDOW for seconds in seconds_each(window, count, 1)]


def echoes(size: int, caller: Caller, count: int) -> list[float]:
    import torch

    tensor = torch.ones(size, dtype=torch.uint8)
    return seconds_each(lambda: caller.call(echo, args=(tensor,)), count, 2)


def echoes_of_bytes(size: int, caller: Caller, count: int) -> list[float]:
    """Of something that is no tensor."""
    value = bytes(size)
    return seconds_each(lambda: caller.call(echo, args=(value,)), count, 2)


def bare_echoes(
    connect: Callable[[], tuple[socket.socket, socket.socket]], size: int, _tools: Any, count: int
) -> list[float]:
    """Bytes through a socket and back, with nothing around it."""
    message, answer = bytes(size), bytearray(size)
    with answered(connect, size) as line:

        def there_and_back() -> None:
            line.sendall(message)
            receive(line, answer)

        return seconds_each(there_and_back, count, min(count, 100))


def copies(size: int, _tools: Any, count: int) -> list[float]:
    import torch

    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    return seconds_each(lambda: target.copy_(source), count, 2)


# -- the machine


@contextmanager
def answered(
    connect: Callable[[], tuple[socket.socket, socket.socket]], size: int
) -> Iterator[socket.socket]:
    """A socket at whose other end a second process sends every `size` bytes back."""
    here, there = connect()
    if os.fork() == 0:
        here.close()
        message = bytearray(size)
        while receive(there, message):
            there.sendall(message)
        os._exit(0)
    there.close()
    with here:
        yield here
    os.wait()


def receive(line: socket.socket, message: bytearray) -> bool:
    """Fill `message`; says whether there was one."""
    rest = memoryview(message)
    while rest and (count := line.recv_into(rest)):
        rest = rest[count:]
    return not rest


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        pair = socket.create_connection(server.getsockname()), server.accept()[0]
    for end in pair:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(AttributeError, OSError):  # the fastest that the machine offers
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    return pair


# -- who takes part


@contextmanager
def worker(module: str, rank: int, **options: Any) -> Iterator[Any]:
    """One of two workers; the options are those of the module."""
    warnings.simplefilter("ignore")  # torch's RPC warns of its own ways at every shutdown
    rpc = import_module(module)
    chosen = rpc.TensorPipeRpcBackendOptions(**options) if options else None
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=chosen)
    yield rpc
    rpc.shutdown()


@contextmanager
def caller(module: str, rank: int, **options: Any) -> Iterator[Caller]:
    with worker(module, rank, **options) as rpc:
        import torch

        yield Caller(
            partial(rpc.rpc_sync, "worker1"),
            partial(rpc.rpc_async, "worker1"),
            torch.futures.wait_all,
        )


# -- in words


def calls_per_second(seconds: float) -> str:
    return f"{1 / seconds / 1e3:.1f} k/s"


def rate(size: int, seconds: float) -> str:
    return f"{size / seconds / 1e9:.2f} GB/s"


# -- all of it

MACHINE, TCP = ("machine",), ("torch over TCP", "gradwire over TCP")

UNIX_SOCKET = Case(
    "bare unix socket, there and back",
    partial(bare_echoes, socket.socketpair, 4),
    3000,
    microseconds,
    10,
    MACHINE,
)
TCP_SOCKET = Case(
    "bare TCP socket, there and back",
    partial(bare_echoes, tcp_pair, 4),
    3000,
    microseconds,
    10,
    MACHINE,
)
LARGE_TCP_SOCKET = Case(
    "bare TCP socket, 16 MB there and back",
    partial(bare_echoes, tcp_pair, 16 * MB),
    10,
    partial(rate, 2 * 16 * MB),
    1,
    MACHINE,
)
#: Of megabytes, once.
COPIES = {
    size: Case(f"copy of {size} MB, once", partial(copies, size * MB), 10, milliseconds, 1, MACHINE)
    for size in (16, 64, 256)
}


def echo_case(size: int, count: int, aim: float, **how: Any) -> Case:
    name = f"echo of {size // MB} MB" if size >= MB else f"echo of {size // KB} KB"
    show, quick = partial(rate, 2 * size), 3 if size < 16 * MB else 1
    return Case(name, partial(echoes, size), count, show, quick, aim=aim, **how)


def over_copies(megabytes: int) -> Floor:
    """There and back, a tensor is copied twice."""
    return Floor(COPIES[megabytes].name, 2)


# The machine has its turn next to those whose floor it is: what else goes on changes in between.
SUITE = Suite(
    "calls between two processes on this machine; echoes count the bytes of both ways",
    (
        Contestant("torch", partial(caller, "torch.distributed.rpc")),
        Contestant("gradwire", partial(caller, "gradwire.rpc")),
        Contestant(
            TCP[0],
            partial(caller, "torch.distributed.rpc", _transports=["uv"], _channels=["basic"]),
        ),
        Contestant(TCP[1], partial(caller, "gradwire.rpc", transports=["tcp"])),
        Contestant(*MACHINE, nullcontext, processes=1),
    ),
    (
        Case(
            "call of a function that does nothing",
            noop_calls,
            1000,
            microseconds,
            aim=5,
            floor=Floor(UNIX_SOCKET.name),
            peers=True,
        ),
        Case(
            "call with two tensors of 4 floats",
            small_tensor_calls,
            1000,
            microseconds,
            aim=5,
            floor=Floor(UNIX_SOCKET.name),
            peers=True,
        ),
        UNIX_SOCKET,
        Case(
            f"calls, {WINDOW} at a time",
            pipelined_calls,
            8,
            calls_per_second,
            1,
            aim=6,
            peers=True,
        ),
        echo_case(64 * KB, 300, 4, peers=True),
        echo_case(MB, 100, 3, peers=True),
        echo_case(16 * MB, 20, 2, floor=over_copies(16), peers=True),
        COPIES[16],
        echo_case(64 * MB, 8, 7, floor=over_copies(64), peers=True),
        COPIES[64],
        echo_case(256 * MB, 4, 7, floor=over_copies(256), peers=True),
        COPIES[256],
        Case(
            "echo of 1 MB, bytes that are no tensor",
            partial(echoes_of_bytes, MB),
            30,
            partial(rate, 2 * MB),
            peers=True,
        ),
        Case(
            "call of a function that does nothing, TCP",
            noop_calls,
            1000,
            microseconds,
            contestants=TCP,
            aim=3,
            floor=Floor(TCP_SOCKET.name),
        ),
        TCP_SOCKET,
        Case(
            "echo of 16 MB, TCP",
            partial(echoes, 16 * MB),
            30,
            partial(rate, 2 * 16 * MB),
            1,
            contestants=TCP,
            aim=1.5,
            floor=Floor(LARGE_TCP_SOCKET.name),
        ),
        LARGE_TCP_SOCKET,
    ),
)
