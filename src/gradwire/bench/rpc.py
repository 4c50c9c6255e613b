"""The suite ``rpc``: calls between two processes on this machine, with gradwire and with torch's
RPC. Both libraries use their default options; in some cases both use TCP, as between machines.

The same code measures both libraries: the variable `rpc` is either `gradwire.rpc` or
`torch.distributed.rpc`. A bare socket and a bare copy of memory show the lower bounds that the
machine sets.
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

from gradwire.bench.cases import Case, Contestant, Floor, Suite
from gradwire.bench.timing import microseconds, milliseconds, seconds_each

KB, MB = 1 << 10, 1 << 20
#: How many calls `pipelined_calls` has in flight at the same time.
WINDOW = 2000


# -- the functions that are called


def noop() -> None:
    pass


def add(x: Any, y: Any) -> Any:
    return x + y


def echo(x: Any) -> Any:
    return x


# -- measurements


@dataclass(frozen=True)
class Caller:
    """Calls functions in the other process. `call(function, args=())` returns the result,
    `start(function, args=())` returns a future, and `wait_all` waits for a list of futures."""

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
    """Return the seconds per call, with many calls in flight."""

    def window() -> None:
        caller.wait_all([caller.start(noop) for _ in range(WINDOW)])

    return [seconds / WINDOW for seconds in seconds_each(window, count, 1)]


def echoes(size: int, caller: Caller, count: int) -> list[float]:
    import torch

    tensor = torch.ones(size, dtype=torch.uint8)
    return seconds_each(lambda: caller.call(echo, args=(tensor,)), count, 2)


def echoes_of_bytes(size: int, caller: Caller, count: int) -> list[float]:
    """Return the seconds per call that sends a bytes object to the other process and back."""
    value = bytes(size)
    return seconds_each(lambda: caller.call(echo, args=(value,)), count, 2)


def bare_echoes(
    connect: Callable[[], tuple[socket.socket, socket.socket]], size: int, _tools: Any, count: int
) -> list[float]:
    """Return the seconds that `size` bytes take to another process and back, over a bare socket."""
    message, answer = bytes(size), bytearray(size)
    with echo_server(connect, size) as connection:

        def round_trip() -> None:
            connection.sendall(message)
            receive(connection, answer)

        return seconds_each(round_trip, count, min(count, 100))


def copies(size: int, _tools: Any, count: int) -> list[float]:
    import torch

    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    return seconds_each(lambda: target.copy_(source), count, 2)


# -- the bare machine


@contextmanager
def echo_server(
    connect: Callable[[], tuple[socket.socket, socket.socket]], size: int
) -> Iterator[socket.socket]:
    """Fork a process that sends every `size` bytes back, and yield a socket to it."""
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


def receive(connection: socket.socket, message: bytearray) -> bool:
    """Fill `message` with received bytes. Return False if the socket was closed."""
    rest = memoryview(message)
    while rest and (count := connection.recv_into(rest)):
        rest = rest[count:]
    return not rest


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        pair = socket.create_connection(server.getsockname()), server.accept()[0]
    for end in pair:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Choose the congestion control algorithm that gradwire's connections use, unless the system
        # does not have it. The algorithm sends without pauses between packets.
        with suppress(AttributeError, OSError):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    return pair


# -- contestants


@contextmanager
def worker(module: str, rank: int, **options: Any) -> Iterator[Any]:
    """Run this process as one of two workers, with these options and the RPC library `module`."""
    # Hide all warnings, because torch's RPC shows some at every shutdown.
    warnings.simplefilter("ignore")
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


# -- formatting


def calls_per_second(seconds: float) -> str:
    return f"{1 / seconds / 1e3:.1f} k/s"


def rate(size: int, seconds: float) -> str:
    return f"{size / seconds / 1e9:.2f} GB/s"


# -- the suite

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
#: For each size in megabytes, a case that copies a tensor of this size once.
COPIES = {
    size: Case(f"copy of {size} MB, once", partial(copies, size * MB), 10, milliseconds, 1, MACHINE)
    for size in (16, 64, 256)
}


def echo_case(size: int, count: int, aim: float, **options: Any) -> Case:
    name = f"echo of {size // MB} MB" if size >= MB else f"echo of {size // KB} KB"
    show, quick = partial(rate, 2 * size), 3 if size < 16 * MB else 1
    return Case(name, partial(echoes, size), count, show, quick, aim=aim, **options)


def over_copies(megabytes: int) -> Floor:
    """Return the lower bound for an echo of this size: the tensor is copied twice, once in each
    direction."""
    return Floor(COPIES[megabytes].name, 2)


# Each case is followed by the case that sets its lower bound. The load of the machine changes, so
# the two cases must be measured shortly after each other.
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
            open_to_competitors=True,
        ),
        Case(
            "call with two tensors of 4 floats",
            small_tensor_calls,
            1000,
            microseconds,
            aim=5,
            floor=Floor(UNIX_SOCKET.name),
            open_to_competitors=True,
        ),
        UNIX_SOCKET,
        Case(
            f"calls, {WINDOW} at a time",
            pipelined_calls,
            8,
            calls_per_second,
            1,
            aim=6,
            open_to_competitors=True,
        ),
        echo_case(64 * KB, 300, 4, open_to_competitors=True),
        echo_case(MB, 100, 3, open_to_competitors=True),
        echo_case(16 * MB, 20, 2, floor=over_copies(16), open_to_competitors=True),
        COPIES[16],
        echo_case(64 * MB, 8, 7, floor=over_copies(64), open_to_competitors=True),
        COPIES[64],
        echo_case(256 * MB, 4, 7, floor=over_copies(256), open_to_competitors=True),
        COPIES[256],
        Case(
            "echo of 1 MB, bytes that are no tensor",
            partial(echoes_of_bytes, MB),
            30,
            partial(rate, 2 * MB),
            open_to_competitors=True,
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
