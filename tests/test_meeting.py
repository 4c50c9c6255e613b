"""Where the workers of a group meet: how they get there, and what they are told if they do not."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import Pipe
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.rendezvous import register_rendezvous_handler

import gradwire
from gradwire import rpc
from gradwire.agent import meeting
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
    looks, seen = Pipe(duplex=False)

    def come_early() -> str:
        may_be_up = meeting._may_be_up

        def look(host: str, port: int) -> bool:
            found = may_be_up(host, port)
            seen.send(found)
            return found

        meeting._may_be_up = look
        return body(1, port)()

    with looks, seen, free_port() as port, processes(come_early) as (early,):
        for _ in range(3):
            assert looks.poll(PATIENCE)
            assert not looks.recv()
        with processes(body(0, port)) as (host,):
            assert [early.result(), host.result()] == ["worker0", "worker1"]


def test_who_meets_nobody_is_told_where() -> None:
    with free_port() as port:
        place = f"tcp://127.0.0.1:{port}"
        options = rpc.Options(init_method=place, init_timeout=0.2)
        with pytest.raises(SetupError, match=rf"the group cannot meet at '{place}': "):
            gradwire.Worker("lonely", 1, 2, options)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_host_is_up_when_it_listens_and_may_be_where_nobody_can_tell(host: str) -> None:
    with socket.create_server((host, 0)) as holder:
        port = holder.getsockname()[1]
        assert meeting._may_be_up(host, port)
    assert not meeting._may_be_up(host, port)
    assert meeting._may_be_up("192.0.2.1", port)  # on another machine


def test_the_store_of_who_came_early_has_all_the_time_it_should_have() -> None:
    def come_early() -> float:
        store, _, _ = meeting.open_store(f"tcp://127.0.0.1:{port}", 1, 2, PATIENCE)
        store.set("here", "yes")
        return float(store.timeout.total_seconds())

    def be_host() -> None:
        store, _, _ = meeting.open_store(f"tcp://127.0.0.1:{port}", 0, 2, PATIENCE)
        store.wait(["here"])

    with free_port() as port, processes(come_early, be_host) as (early, host):
        assert early.result() == PATIENCE
        host.result()


def test_a_rendezvous_of_ones_own_is_told_the_size() -> None:
    urls = []

    def meet_here(url: str, **_how: Any) -> Iterator[tuple[HashStore, int, int]]:
        urls.append(url)
        yield HashStore(), 1, 4

    register_rendezvous_handler("gradwire-test", meet_here)
    meeting.open_store("gradwire-test://here", 1, 4, PATIENCE)
    assert urls == ["gradwire-test://here?rank=1&world_size=4"]


@pytest.mark.parametrize(("port", "complaint"), [("", "MASTER_PORT"), ("99999", "65535")])
def test_a_port_that_is_none_is_complained_of_at_once(
    monkeypatch: pytest.MonkeyPatch, port: str, complaint: str
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(SetupError, match=complaint):
        meeting.open_store("env://", 1, 2, PATIENCE)


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
