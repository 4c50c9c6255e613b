"""The rendezvous of a group, and the errors of workers that cannot reach it."""

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
from gradwire._core.group import rendezvous
from gradwire.errors import SetupError
from gradwire.launch import free_port
from tests.processes import PATIENCE, processes, rendezvous_file


def whoami() -> str:
    return rpc.get_worker_info().name


def greet(me: int, **given: Any) -> str:
    """Join a group of two workers. Return the name that the other worker answers."""
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
def test_a_rendezvous_works_over_tcp_and_through_the_environment(
    body: Callable[[int, int], Callable[[], str]],
) -> None:
    with free_port() as port, processes(body(0, port), body(1, port)) as started:
        assert [p.result() for p in started] == ["worker1", "worker0"]


@pytest.mark.parametrize("body", [over_tcp, by_environment])
def test_a_worker_that_starts_before_the_host_polls_it(
    body: Callable[[int, int], Callable[[], str]],
) -> None:
    """Torch would sleep for half a second or more between two attempts."""
    looks, seen = Pipe(duplex=False)

    def come_early() -> str:
        may_be_up = rendezvous._may_be_up

        def look(host: str, port: int) -> bool:
            is_up = may_be_up(host, port)
            seen.send(is_up)
            return is_up

        rendezvous._may_be_up = look
        return body(1, port)()

    with looks, seen, free_port() as port, processes(come_early) as (early,):
        for _ in range(3):
            assert looks.poll(PATIENCE)
            assert not looks.recv()
        with processes(body(0, port)) as (host,):
            assert [early.result(), host.result()] == ["worker0", "worker1"]


def test_a_rendezvous_without_a_host_names_its_address() -> None:
    with free_port() as port:
        place = f"tcp://127.0.0.1:{port}"
        options = rpc.Options(init_method=place, init_timeout=0.2)
        with pytest.raises(SetupError, match=rf"the rendezvous at '{place}' failed: "):
            gradwire.Worker("lonely", 1, 2, options)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_host_is_up_when_it_listens_or_is_on_another_machine(host: str) -> None:
    with socket.create_server((host, 0)) as holder:
        port = holder.getsockname()[1]
        assert rendezvous._may_be_up(host, port)
    assert not rendezvous._may_be_up(host, port)
    assert rendezvous._may_be_up("192.0.2.1", port)  # on another machine


def test_the_store_of_an_early_worker_has_the_full_timeout() -> None:
    def come_early() -> float:
        store, _, _ = rendezvous.open_store(f"tcp://127.0.0.1:{port}", 1, 2, PATIENCE)
        store.set("here", "yes")
        return float(store.timeout.total_seconds())

    def be_host() -> None:
        store, _, _ = rendezvous.open_store(f"tcp://127.0.0.1:{port}", 0, 2, PATIENCE)
        store.wait(["here"])

    with free_port() as port, processes(come_early, be_host) as (early, host):
        assert early.result() == PATIENCE
        host.result()


def test_a_custom_rendezvous_gets_the_rank_and_the_size() -> None:
    urls = []

    def meet_here(url: str, **_how: Any) -> Iterator[tuple[HashStore, int, int]]:
        urls.append(url)
        yield HashStore(), 1, 4

    register_rendezvous_handler("gradwire-test", meet_here)
    rendezvous.open_store("gradwire-test://here", 1, 4, PATIENCE)
    assert urls == ["gradwire-test://here?rank=1&world_size=4"]


@pytest.mark.parametrize(("port", "complaint"), [("", "MASTER_PORT"), ("99999", "65535")])
def test_an_invalid_port_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, port: str, complaint: str
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(SetupError, match=complaint):
        rendezvous.open_store("env://", 1, 2, PATIENCE)


@pytest.mark.parametrize("over", ["file", "tcp"])
def test_a_missing_worker_is_named_at_the_deadline(over: str) -> None:
    def wait_in_vain(place: str) -> None:
        options = rpc.Options(init_method=place, init_timeout=0.3)
        with pytest.raises(
            SetupError, match=r"worker of rank 1 has not joined the group within 0.3 s"
        ):
            gradwire.Worker("lonely", 0, 2, options)

    with rendezvous_file() as file, free_port() as port:
        place = file if over == "file" else f"tcp://127.0.0.1:{port}"
        with processes(partial(wait_in_vain, place)) as (lonely,):
            lonely.result()


def test_ranks_are_checked() -> None:
    with pytest.raises(SetupError, match="rank parameter missing"):
        gradwire.Worker("w", world_size=2, options=rpc.Options(init_method="file:///nowhere"))
    with pytest.raises(SetupError, match="rank 2 is not below"):
        gradwire.Worker("w", 2, 2, options=rpc.Options(init_method="file:///nowhere"))
