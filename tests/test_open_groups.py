"""Open groups: workers join and leave at any time, and a name is free once its worker is gone."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

import gradwire
from gradwire import autograd, rpc
from gradwire._core.group import membership
from gradwire._core.group.membership import LocalMembership, Member, is_gone
from gradwire._core.ids import WorkerInfo
from gradwire._core.transport.base import Address
from gradwire.errors import CallTimeout, SetupError, UnknownWorkerError, WorkerLost
from gradwire.launch import free_port
from gradwire.testing import acting_as, runtime_of, transports_named
from gradwire.worker import Worker
from tests.processes import Process, freeze, processes, rendezvous_file, until

TIMEOUT = 30.0


def pid() -> int:
    return os.getpid()


def echo(value: Any) -> Any:
    return value


def whoami() -> str:
    return rpc.get_worker_info().name


def server(options: rpc.Options, rank: int = -1) -> Callable[[], None]:
    """Return the body of a process whose worker only serves calls."""

    def serve() -> None:
        gradwire.Worker("server", rank, options=options)
        threading.Event().wait(TIMEOUT)

    return serve


def test_workers_join_and_leave_an_open_group() -> None:
    with rendezvous_file() as place:
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


def test_open_and_fixed_groups_do_not_mix_and_names_are_unique() -> None:
    with rendezvous_file() as place:
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


def test_a_refused_worker_does_not_affect_the_group() -> None:
    with rendezvous_file() as place:
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


@pytest.mark.parametrize(("name", "worker_id"), [("one", 2), ("three", 0)])
def test_a_refused_worker_does_not_affect_a_local_group(name: str, worker_id: int) -> None:
    common: Any = {"membership": LocalMembership(), "transports": transports_named("in_process")}
    with gradwire.Worker("one", 0, **common), gradwire.Worker("two", 1, **common) as two:
        with pytest.raises(SetupError, match="not unique"):
            gradwire.Worker(name, worker_id, **common)
        assert two.rpc_sync("one", whoami) == "one"
        assert names(two) == ["one", "two"]


def test_a_killed_worker_can_rejoin() -> None:
    with rendezvous_file() as place:
        options = rpc.Options(init_method=place)
        with gradwire.Worker("client", options=options) as client:
            gone = threading.Event()
            runtime_of(client).agent.on_gone.append(lambda _info: gone.set())
            with processes(server(options)) as (first,):
                until(lambda: names(client) == ["client", "server"], "the server has joined")
                assert client.rpc_sync("server", pid) == first.pid
                first.kill()
                assert gone.wait(TIMEOUT)
            with processes(server(options)) as (second,):
                until(lambda: client.worker_infos()[-1].id == 2, "the second server has joined")
                assert client.rpc_sync("server", pid) == second.pid
                assert names(client) == ["client", "server"], "the first server is removed"


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def fetch(rref: Any) -> Any:
    return rref.to_here()


def check_connection(me: Worker, to: str) -> None:
    """Check calls, gradients and references from one worker to another."""

    with acting_as(me):
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            y = me.rpc_sync(to, double, args=(x,))
            autograd.backward(context_id, [y.sum()])
            assert autograd.get_gradients(context_id)[x].tolist() == [2.0, 2.0, 2.0]
        assert me.remote(to, double, args=(torch.ones(2),)).to_here().tolist() == [2.0, 2.0]
        assert me.rpc_sync(to, fetch, args=(me.rref([1, 2]),)) == [1, 2]


@pytest.mark.parametrize("where", ["store", "process"])
def test_a_worker_can_rejoin_under_its_rank(where: str) -> None:
    """It gets another id, because references of the first worker with that rank may still exist."""
    with rendezvous_file() as place:
        common: Any = {"options": rpc.Options(init_method=place)}
        if where == "process":
            common = {"membership": LocalMembership(), "transports": transports_named("in_process")}
        with gradwire.Worker("client", 0, **common) as client:
            seen = []
            for _ in range(3):
                with gradwire.Worker("server", 7, **common) as server:
                    until(
                        lambda here=server.info: client.worker_info("server") == here,  # type: ignore[misc]
                        "the goodbye of the earlier server has arrived",
                    )
                    seen.append(server.id)
                    check_connection(client, "server")
                    check_connection(server, "client")
            assert seen[0] == 7
            assert len(set(seen)) == 3


def test_an_assigned_id_is_not_the_rank_of_another_worker() -> None:
    with rendezvous_file() as place:
        options = rpc.Options(init_method=place)
        with (
            gradwire.Worker("one", 0, options=options),
            gradwire.Worker("two", options=options) as two,
        ):
            assert two.id == 1


def test_a_killed_worker_can_rejoin_under_its_rank() -> None:
    with rendezvous_file() as place:
        options = rpc.Options(init_method=place)
        with gradwire.Worker("client", 0, options=options) as client:
            gone = threading.Event()
            runtime_of(client).agent.on_gone.append(lambda _info: gone.set())
            with processes(server(options, 7)) as (first,):
                until(lambda: names(client) == ["client", "server"], "the server has joined")
                check_connection(client, "server")
                held = client.remote("server", echo, args=(5,))
                assert held.to_here() == 5
                first.kill()
                assert gone.wait(TIMEOUT)
            with processes(server(options, 7)) as (second,):
                until(lambda: client.worker_infos()[-1].id > 7, "the second server has joined")
                assert client.rpc_sync("server", pid) == second.pid
                check_connection(client, "server")
                with pytest.raises(UnknownWorkerError, match=r"worker 7: .*server \(id 32767\)"):
                    held.to_here()
            with gradwire.Worker("successor", 7, options=options):
                check_connection(client, "successor")


def test_only_a_member_on_this_machine_can_be_known_to_be_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = "{}|{}".format(*server.getsockname())
    info, addresses = WorkerInfo("server", 7), (Address("tcp", place), Address("unix", "nobody"))
    transports = transports_named("tcp") + transports_named("unix")
    assert is_gone(Member(info, "a life", addresses), transports)
    assert not is_gone(Member(info, "a life", addresses, machine="another"), transports)


def test_only_a_refusal_or_another_member_at_the_address_proves_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "_PROBE_SECONDS", 0.2)
    ours, theirs = (transports_named("tcp", token) for token in (b"our token", b"another token"))
    local = LocalMembership()
    with gradwire.Worker("a", 0, membership=local, transports=ours) as worker:
        member = runtime_of(worker).agent.member
        assert member is not None
        assert not is_gone(member, ours), "it runs"
        earlier = replace(member, incarnation="an earlier one")
        assert is_gone(earlier, ours), "a worker of the group has its address"
        assert not is_gone(earlier, theirs), "a stranger has its address"
    assert is_gone(member, ours), "nobody listens at its address"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address("tcp", "{}|{}".format(*silent.getsockname()))
        assert not is_gone(replace(member, addresses=(address,)), ours), "it may be frozen"
        refusing = (*member.addresses, address)
        assert not is_gone(replace(member, addresses=refusing), ours), "one address may work"


@contextmanager
def rendezvous_host(**more: Any) -> Iterator[tuple[Process, rpc.Options]]:
    with free_port() as port:
        options = rpc.Options(init_method=f"tcp://127.0.0.1:{port}", **more)

        def serve() -> None:
            gradwire.Worker("host", 0, options=options)
            threading.Event().wait(TIMEOUT)

        with processes(serve) as (host,):
            yield host, options


def test_nothing_waits_for_a_frozen_rendezvous_host(monkeypatch: pytest.MonkeyPatch) -> None:
    beat = {"heartbeat_interval": 0.2, "heartbeat_limit": 0.6}
    with (
        rendezvous_host(**beat) as (host, options),
        gradwire.Worker("client", 1, options=options) as client,
    ):
        until(lambda: "host" in names(client), "the host has joined")  # after it made the store
        assert client.rpc_sync("host", pid) == host.pid
        gone = threading.Event()
        runtime_of(client).agent.on_gone.append(lambda _info: gone.set())
        freeze(host.pid)
        with pytest.raises(WorkerLost, match="no heartbeat"):
            client.rpc_sync("host", pid)
        assert gone.wait(TIMEOUT)
        with pytest.raises(CallTimeout):
            client.rpc_sync("host", pid, timeout=0.1)
        monkeypatch.setattr(membership, "_STORE_SECONDS", 0.1)
        with pytest.raises(UnknownWorkerError, match="rendezvous store does not answer"):
            client.rpc_sync("another", pid)
        client.shutdown()  # does not wait for the host either
        assert "gradwire-store" in thread_names()
        host.kill()
        until(lambda: "gradwire-store" not in thread_names(), "the request to the store has ended")


def test_connected_workers_continue_without_the_rendezvous_host() -> None:
    with (
        rendezvous_host() as (host, options),
        gradwire.Worker("one", 1, options=options) as one,
        gradwire.Worker("two", 2, options=options),
    ):
        one.rpc_sync("two", pid)
        host.kill()
        assert one.rpc_sync("two", echo, args=(5,)) == 5
        for ask in (one.worker_infos, lambda: one.rpc_sync("three", pid)):
            with pytest.raises(UnknownWorkerError, match="rendezvous store does not answer"):
                ask()


def test_a_refused_worker_is_not_reported_as_lost() -> None:
    with rendezvous_file() as place:
        options = rpc.Options(init_method=place)
        with gradwire.Worker("one", 0, options=options) as one:
            lost: list[int] = []
            suspected = threading.Event()
            runtime_of(one).agent.on_gone.append(
                lambda info: (lost.append(info.id), suspected.set())
            )
            with pytest.raises(SetupError, match="'one' is not unique"):
                gradwire.Worker("one", 5, options=options)
            assert suspected.wait(TIMEOUT)  # the refused worker connected and is gone
            assert 5 not in lost


def test_a_frozen_worker_keeps_its_name() -> None:
    with rendezvous_file() as place:
        options = rpc.Options(init_method=place)
        with (
            gradwire.Worker("client", options=options) as client,
            processes(server(options)) as (frozen,),
        ):
            until(lambda: names(client) == ["client", "server"], "the server has joined")
            freeze(frozen.pid)
            with pytest.raises(SetupError, match=r"not unique.*frozen.*give this one another"):
                gradwire.Worker("server", options=options)
            frozen.signal(signal.SIGCONT)
            assert client.rpc_sync("server", pid) == frozen.pid
