"""Where the workers of a group meet: how they get there, and what they are told if they do not."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from functools import partial
from multiprocessing import Pipe
from typing import Any

import pytest

import gradwire
from gradwire import rpc
from gradwire.errors import SetupError
from gradwire.launch import free_port
from tests.processes import PATIENCE, meeting_place, processes


def whoami() -> str:
    return rpc.get_worker_info().name


def greet(me: int, **given: Any) -> str:
    """What each of two workers does in these tests."""
    rpc.init_rpc(f"worker{me}", **given)
    answer: str = rpc.rpc_sync(f"worker{1 - me}", whoami)
    rpc.shutdown()
    return answer


def over_tcp(rank: int, port: int) -> Callable[[], str]:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    return lambda: greet(rank, rank=rank, world_size=2, rpc_backend_options=options)


def by_environment(rank: int, port: int) -> Callable[[], str]:
    def run() -> str:
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "WORLD_SIZE": "2",
        }
        return greet(rank)

    return run


@pytest.mark.parametrize("body", [over_tcp, by_environment])
def test_groups_meet_over_tcp_and_through_the_environment(
    body: Callable[[int, int], Callable[[], str]],
) -> None:
    with free_port() as port, processes(body(0, port), body(1, port)) as started:
        assert [p.result() for p in started] == ["worker1", "worker0"]


@pytest.mark.parametrize("body", [over_tcp, by_environment])
def test_who_comes_before_the_host_looks_again_and_again(
    body: Callable[[int, int], Callable[[], str]],
) -> None:
    """torch would sleep for half a second or more in between."""
    looks, refused = Pipe(duplex=False)

    def come_early() -> str:
        connect = socket.create_connection

        def look(*place: Any) -> socket.socket:
            try:
                return connect(*place)
            except ConnectionRefusedError:
                refused.send("nobody there")
                raise

        socket.create_connection = look  # type: ignore[assignment]
        return body(1, port)()

    with looks, refused, free_port() as port, processes(come_early) as (early,):
        for _ in range(3):
            assert looks.poll(PATIENCE)
            looks.recv()
        with processes(body(0, port)) as (host,):
            assert [early.result(), host.result()] == ["worker0", "worker1"]


def test_who_meets_nobody_is_told_where() -> None:
    with free_port() as port:
        place = f"tcp://127.0.0.1:{port}"
        options = rpc.Options(init_method=place, init_timeout=0.1)
        with pytest.raises(SetupError, match=rf"'{place}': nobody listened at 127.0.0.1:{port}"):
            gradwire.Worker("lonely", 1, 2, options)


@pytest.mark.parametrize("over", ["file", "tcp"])
def test_a_missing_worker_is_named_at_the_deadline(over: str) -> None:
    def wait_in_vain(place: str) -> None:
        options = rpc.Options(init_method=place, init_timeout=0.3)
        with pytest.raises(SetupError, match=r"0.3 s in vain for the worker of rank 1"):
            gradwire.Worker("lonely", 0, 2, options)

    with meeting_place() as file, free_port() as port:
        place = file if over == "file" else f"tcp://127.0.0.1:{port}"
        with processes(partial(wait_in_vain, place)) as (lonely,):
            lonely.result()


def test_ranks_are_checked() -> None:
    with pytest.raises(SetupError, match="rank parameter missing"):
        gradwire.Worker("w", world_size=2, options=rpc.Options(init_method="file:///nowhere"))
    with pytest.raises(SetupError, match="rank 2 is not below"):
        gradwire.Worker("w", 2, 2, options=rpc.Options(init_method="file:///nowhere"))
