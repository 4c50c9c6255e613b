"""Open groups: workers join and leave when they like, and names belong to those who live."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import gradwire
from gradwire import autograd, rpc
from gradwire.agent import roster
from gradwire.agent.roster import LocalRoster, Member, is_gone
from gradwire.errors import CallTimeout, SetupError, UnknownWorkerError, WorkerLost
from gradwire.ids import WorkerInfo
from gradwire.launch import free_port
from gradwire.testing import transports_named
from gradwire.transport.base import Address
from gradwire.worker import Worker
from tests.processes import Process, freeze, meeting_place, processes, until

TIMEOUT = 30.0


def pid() -> int:
    return os.getpid()


def echo(value: Any) -> Any:
    return value


def whoami() -> str:
    return rpc.get_worker_info().name


def server(options: rpc.Options, rank: int = -1) -> Callable[[], None]:
    """What a process does that only serves."""

    def serve() -> None:
        gradwire.Worker("server", rank, options=options)
        threading.Event().wait(TIMEOUT)

    return serve


def test_workers_join_and_leave_an_open_group() -> None:
    with meeting_place() as place:
        options = rpc.Options(init_method=place)

        def visitor() -> list[str]:
            with gradwire.Worker("visitor", options=options) as me:
                greeting = me.rpc_sync("host", whoami)
                return [greeting, *(info.name for info in me.worker_infos())]

        with gradwire.Worker("host", options=options) as host:
            with pytest.raises(UnknownWorkerError, match="'visitor'"):
                host.rpc_sync("visitor", whoami)
            for _ in range(2):
                with processes(visitor) as (guest,):
                    assert guest.result() == ["host", "host", "visitor"]
            with pytest.raises((UnknownWorkerError, WorkerLost), match="'visitor'"):
                host.rpc_sync("visitor", whoami)
            with pytest.raises(UnknownWorkerError):
                host.rpc_sync("visitor", whoami)
            assert [info.name for info in host.worker_infos()] == ["host"]


def test_a_group_is_of_one_kind_and_names_are_unique() -> None:
    with meeting_place() as place:
        options = rpc.Options(init_method=place)
        with gradwire.Worker("one", options=options):
            with pytest.raises(SetupError, match="not unique"):
                gradwire.Worker("one", options=options)
            with pytest.raises(SetupError, match="mixes statically and dynamically"):
                gradwire.Worker("two", 1, 2, options)


def thread_names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def names(worker: Worker) -> list[str]:
    return [info.name for info in worker.worker_infos()]


def test_a_worker_that_is_refused_takes_nothing_along() -> None:
    with meeting_place() as place:
        options = rpc.Options(init_method=place)
        with gradwire.Worker("one", options=options) as one:
            for _ in range(2):
                with pytest.raises(SetupError, match="name 'one' is not unique"):
                    gradwire.Worker("one", options=options)
            with pytest.raises(SetupError, match=f"id {one.id} is not unique"):
                gradwire.Worker("two", one.id, options=options)
            with gradwire.Worker("two", options=options) as two:
                assert two.rpc_sync("one", whoami) == "one"
                assert names(two) == ["one", "two"]


@pytest.mark.parametrize(("name", "id"), [("one", 2), ("three", 0)])
def test_a_worker_that_is_refused_in_its_process_takes_nothing_along(name: str, id: int) -> None:
    common: Any = {"roster": LocalRoster(), "transports": transports_named("memory")}
    with gradwire.Worker("one", 0, **common), gradwire.Worker("two", 1, **common) as two:
        with pytest.raises(SetupError, match="not unique"):
            gradwire.Worker(name, id, **common)
        assert two.rpc_sync("one", whoami) == "one"
        assert names(two) == ["one", "two"]


def test_a_killed_worker_comes_back_to_an_open_group() -> None:
    with meeting_place() as place:
        options = rpc.Options(init_method=place)
        with gradwire.Worker("client", options=options) as client:
            gone = threading.Event()
            client.agent.on_gone.append(lambda _info: gone.set())
            with processes(server(options)) as (first,):
                until(lambda: names(client) == ["client", "server"], "the server is there")
                assert client.rpc_sync("server", pid) == first.pid
                first.kill()
                assert gone.wait(TIMEOUT)
            with processes(server(options)) as (second,):
                until(lambda: client.worker_infos()[-1].id == 2, "the server is there again")
                assert client.rpc_sync("server", pid) == second.pid
                assert names(client) == ["client", "server"], "and the first one is not any more"


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def fetch(rref: Any) -> Any:
    return rref.to_here()


def check_all_works(me: Worker, to: str) -> None:
    """Calls, gradients and references between two workers."""

    def check() -> None:
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as id:
            y = me.rpc_sync(to, double, args=(x,))
            autograd.backward(id, [y.sum()])
            assert autograd.get_gradients(id)[x].tolist() == [2.0, 2.0, 2.0]
        assert me.remote(to, double, args=(torch.ones(2),)).to_here().tolist() == [2.0, 2.0]
        assert me.rpc_sync(to, fetch, args=(me.rref([1, 2]),)) == [1, 2]

    me.agent.run_in_context(check)


@pytest.mark.parametrize("where", ["store", "process"])
def test_a_worker_comes_back_under_its_rank(where: str) -> None:
    """With another id: what its first life has made may still be around."""
    with meeting_place() as place:
        common: Any = {"options": rpc.Options(init_method=place)}
        if where == "process":
            common = {"roster": LocalRoster(), "transports": transports_named("memory")}
        with gradwire.Worker("client", 0, **common) as client:
            seen = []
            for _ in range(3):
                with gradwire.Worker("server", 7, **common) as server:
                    assert client.worker_info("server") == server.info
                    seen.append(server.id)
                    check_all_works(client, "server")
                    check_all_works(server, "client")
            assert seen[0] == 7
            assert len(set(seen)) == 3


def test_ids_are_given_that_nobody_has_as_a_rank() -> None:
    with meeting_place() as place:
        options = rpc.Options(init_method=place)
        with (
            gradwire.Worker("one", 0, options=options),
            gradwire.Worker("two", options=options) as two,
        ):
            assert two.id == 1


def test_a_killed_worker_comes_back_under_its_rank() -> None:
    with meeting_place() as place:
        options = rpc.Options(init_method=place)
        with gradwire.Worker("client", 0, options=options) as client:
            gone = threading.Event()
            client.agent.on_gone.append(lambda _info: gone.set())
            with processes(server(options, 7)) as (first,):
                until(lambda: names(client) == ["client", "server"], "the server is there")
                check_all_works(client, "server")
                held = client.remote("server", echo, args=(5,))
                assert held.to_here() == 5
                first.kill()
                assert gone.wait(TIMEOUT)
            with processes(server(options, 7)) as (second,):
                until(lambda: client.worker_infos()[-1].id > 7, "the server is there again")
                assert client.rpc_sync("server", pid) == second.pid
                check_all_works(client, "server")
                with pytest.raises(UnknownWorkerError, match=r"worker 7: .*server \(id 32767\)"):
                    held.to_here()
            with gradwire.Worker("successor", 7, options=options):
                check_all_works(client, "successor")


def test_only_who_could_be_reached_from_here_is_known_to_be_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = "{}|{}".format(*server.getsockname())
    info, addresses = WorkerInfo("server", 7), (Address("tcp", place), Address("unix", "nobody"))
    ways = transports_named("tcp") + transports_named("unix")
    assert is_gone(Member(info, "a life", addresses), ways)
    assert not is_gone(Member(info, "a life", addresses, machine="another"), ways)


@contextmanager
def host_of_meeting_place(**more: Any) -> Iterator[tuple[Process, rpc.Options]]:
    with free_port() as port:
        options = rpc.Options(init_method=f"tcp://127.0.0.1:{port}", **more)

        def serve() -> None:
            gradwire.Worker("host", 0, options=options)
            threading.Event().wait(TIMEOUT)

        with processes(serve) as (host,):
            yield host, options


def test_nothing_waits_for_a_frozen_meeting_place(monkeypatch: pytest.MonkeyPatch) -> None:
    beat = {"heartbeat_interval": 0.2, "heartbeat_limit": 0.6}
    with (
        host_of_meeting_place(**beat) as (host, options),
        gradwire.Worker("client", 1, options=options) as client,
    ):
        assert client.rpc_sync("host", pid) == host.pid
        gone = threading.Event()
        client.agent.on_gone.append(lambda _info: gone.set())
        freeze(host.pid)
        with pytest.raises(WorkerLost, match="no sign of life"):
            client.rpc_sync("host", pid)
        assert gone.wait(TIMEOUT)
        with pytest.raises(CallTimeout):
            client.rpc_sync("host", pid, timeout=0.1)
        monkeypatch.setattr(roster, "_STORE_SECONDS", 0.1)
        with pytest.raises(UnknownWorkerError, match="meeting place cannot be asked"):
            client.rpc_sync("another", pid)
        client.shutdown()  # which does not wait either
        host.kill()
        until(lambda: "gradwire-store" not in thread_names(), "who has asked knows that")


def test_without_a_meeting_place_workers_that_know_each_other_go_on() -> None:
    with (
        host_of_meeting_place() as (host, options),
        gradwire.Worker("one", 1, options=options) as one,
        gradwire.Worker("two", 2, options=options),
    ):
        one.rpc_sync("two", pid)
        host.kill()
        assert one.rpc_sync("two", echo, args=(5,)) == 5
        for ask in (one.worker_infos, lambda: one.rpc_sync("three", pid)):
            with pytest.raises(UnknownWorkerError, match="meeting place cannot be asked"):
                ask()


def test_who_was_refused_is_not_taken_for_lost() -> None:
    with meeting_place() as place:
        options = rpc.Options(init_method=place)
        with gradwire.Worker("one", 0, options=options) as one:
            lost: list[int] = []
            suspected = threading.Event()
            one.agent.on_gone.append(lambda info: (lost.append(info.id), suspected.set()))
            with pytest.raises(SetupError, match="'one' is not unique"):
                gradwire.Worker("one", 5, options=options)
            assert suspected.wait(TIMEOUT)  # whoever has knocked is not there any more
            assert 5 not in lost


def test_a_frozen_worker_keeps_its_name() -> None:
    with meeting_place() as place:
        options = rpc.Options(init_method=place)
        with (
            gradwire.Worker("client", options=options) as client,
            processes(server(options)) as (frozen,),
        ):
            until(lambda: names(client) == ["client", "server"], "the server is there")
            freeze(frozen.pid)
            with pytest.raises(SetupError, match=r"not unique.*frozen.*give this one another"):
                gradwire.Worker("server", options=options)
            frozen.signal(signal.SIGCONT)
            assert client.rpc_sync("server", pid) == frozen.pid
