"""Workers that were given up and come back, and what counts as the death of a worker."""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import pytest
import torch

from gradwire import autograd, rpc
from gradwire._core import current
from gradwire._core.transport import listener
from gradwire._core.wire.messages import Kind
from gradwire.errors import ContextReleased, GradwireError, WorkerLost
from gradwire.testing import (
    Fault,
    FaultyTransport,
    acting_as,
    cluster,
    open_contexts,
    runtime_of,
    transports_named,
)
from gradwire.worker import Worker
from tests.processes import freeze, group, processes, until

TIMEOUT = 30.0
#: With these options a silent worker is given up soon.
IMPATIENT = {"heartbeat_interval": 0.1, "heartbeat_limit": 0.4}
#: References that a worker keeps between two calls.
KEPT: dict[str, Any] = {}
DONE = threading.Event()


class Counter:
    def __init__(self, value: int):
        self.value = value

    def add(self, number: int) -> int:
        self.value += number
        return self.value


def pid() -> int:
    return os.getpid()


def end() -> None:
    DONE.set()


def keep(name: str, rref: Any) -> None:
    KEPT[name] = rref


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def use(rref: Any) -> tuple[int, int]:
    """Use a reference in both ways. Return the results."""
    return rref.rpc_sync(timeout=TIMEOUT).add(1), rref.to_here(timeout=TIMEOUT).value


def use_kept(name: str) -> list[str]:
    """Use a reference that this worker has kept. Return the error of each way to use it."""
    errors = []
    rref = KEPT[name]
    for way in (
        lambda: rref.to_here(timeout=TIMEOUT),
        lambda: rref.rpc_sync(timeout=TIMEOUT).add(1),
        lambda: rref.rpc_async(timeout=TIMEOUT).add(1).wait(),
        lambda: rref.remote(timeout=TIMEOUT).add(1).to_here(timeout=TIMEOUT),
        lambda: rpc.rpc_sync("worker0", use, args=(rref,), timeout=TIMEOUT),
        lambda: rpc.rpc_sync("worker2", use, args=(rref,), timeout=TIMEOUT),
    ):
        try:
            way()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
        else:
            errors.append("no error")
    return errors


def check_membership(other: str, me: str) -> None:
    """Check new calls, references and gradients between two workers, in both directions."""
    made = rpc.remote(other, Counter, args=(1,))
    assert use(made) == (2, 2)
    assert rpc.rpc_sync(other, use, args=(rpc.RRef(Counter(5)),)) == (6, 6)
    assert rpc.rpc_sync(other, make_and_use, args=(me,)) == (8, 8)
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync(other, double, args=(x,)).sum()
        autograd.backward(context_id, [loss])
        assert autograd.get_gradients(context_id)[x].tolist() == [2.0, 2.0]


def make_and_use(owner: str) -> tuple[int, int]:
    return use(rpc.remote(owner, Counter, args=(7,)))


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_frozen_worker_that_runs_again_is_a_full_member(transport: str) -> None:
    """The worker was given up while it was frozen. New calls and references work, in both
    directions. The references that it held to values of the other worker are void."""

    def body(rank: int) -> list[str]:
        if rank:
            DONE.wait(TIMEOUT)
            rpc.shutdown(timeout=TIMEOUT)
            return []
        gone = threading.Event()
        current.runtime().agent.on_gone.append(lambda _info: gone.set())
        victim = rpc.rpc_sync("worker1", pid)
        rpc.rpc_sync("worker1", keep, args=("old", rpc.RRef(Counter(0))))
        mine = rpc.remote("worker1", Counter, args=(1,))
        check_membership("worker1", "worker0")
        freeze(victim)
        with pytest.raises(WorkerLost, match="no heartbeat"):
            rpc.rpc_sync("worker1", pid, timeout=TIMEOUT)
        assert gone.wait(TIMEOUT)
        os.kill(victim, signal.SIGCONT)
        check_membership("worker1", "worker0")
        assert use(mine) == (2, 2), "the worker that came back has dropped nothing"
        errors: list[str] = rpc.rpc_sync("worker1", use_kept, args=("old",))
        for other in ("worker1", "worker2"):
            rpc.rpc_sync(other, end)
        rpc.shutdown(timeout=TIMEOUT)
        return errors

    with group(3, body, shut_down=False, transports=[transport], **IMPATIENT) as started:
        errors = started[0].result()
        started[1].result()
        started[2].result()
    assert len(errors) == 6
    for error in errors:
        assert error.startswith(f"{GradwireError.__name__}: "), error
        assert "worker 'worker0' has dropped the value of this RRef" in error


def wait_for_end_of(worker: Worker, other: Worker) -> None:
    """Make one worker call another one until it knows that the other one is gone."""
    with pytest.raises(WorkerLost):
        worker.rpc_sync(other.name, pid)
    until(lambda: runtime_of(worker).agent.liveness.is_gone(other.id), "it counts as lost")


def test_workers_that_a_cut_network_separated_are_full_members_again() -> None:
    network = FaultyTransport(transports_named("in_process")[0], [])
    with cluster(2, transports=[network], options=rpc.Options(**IMPATIENT)) as (a, b):
        for worker, other in ((a, b), (b, a)):
            with acting_as(worker):
                check_membership(other.name, worker.name)
        of_a, of_b = b.remote("worker0", Counter, (1,)), a.remote("worker1", Counter, (1,))
        assert (of_a.to_here().value, of_b.to_here().value) == (1, 1)
        with network.unreachable("worker1"):
            wait_for_end_of(a, b)
            wait_for_end_of(b, a)
        for worker, other in ((a, b), (b, a)):
            with acting_as(worker):
                check_membership(other.name, worker.name)
        for rref, owner in ((of_a, "worker0"), (of_b, "worker1")):
            for way in (rref.to_here, lambda rref=rref: rref.rpc_sync().add(1)):
                with pytest.raises(GradwireError, match=f"'{owner}' has dropped the value"):
                    way()


def test_contexts_of_before_fail_at_once_and_end() -> None:
    network = FaultyTransport(transports_named("in_process")[0], [])
    with cluster(2, transports=[network], options=rpc.Options(**IMPATIENT)) as workers:
        a, b = workers
        with ExitStack() as blocks:
            passes = []
            for worker, other in ((a, b), (b, a)):
                with acting_as(worker):
                    context_id = blocks.enter_context(autograd.context())
                    x = torch.ones(2, requires_grad=True)
                    loss = worker.rpc_sync(other.name, double, (x,)).sum()
                    passes.append((worker, context_id, loss))
            with network.unreachable("worker1"):
                wait_for_end_of(a, b)
            for (worker, context_id, loss), error in zip(
                passes, (WorkerLost, ContextReleased), strict=True
            ):
                with acting_as(worker), pytest.raises(error):
                    autograd.backward(context_id, [loss])
        until(lambda: not open_contexts(workers), "all contexts are released")


def test_a_void_reference_cannot_be_sent_on(trio: list[Worker]) -> None:
    a, b, _ = trio
    rref = b.remote("worker0", Counter, (1,))
    assert rref.to_here().value == 1
    runtime_of(a).agent.liveness.declare_gone(b.info)
    for receiver in ("worker0", "worker2"):
        with pytest.raises(GradwireError, match="'worker0' has dropped the value of this RRef"):
            b.rpc_sync(receiver, use, (rref,))
    assert runtime_of(a).rrefs.debug_info()["num_forks"] == 0


def test_a_void_reference_that_was_never_confirmed_fails_at_once() -> None:
    """The worker was given up before it had read the answer to the call that made the value."""
    answer = Fault("drop", kind=Kind.PYTHON_REMOTE_CALL, sender="worker0", answers=True, times=1)
    network = FaultyTransport(transports_named("in_process")[0], [answer])
    with cluster(3, transports=[network]) as (a, b, _):
        KEPT["unconfirmed"] = rref = b.remote("worker0", Counter, (1,))
        until(lambda: bool(network.done), "the owner has made the value, and the answer is lost")
        runtime_of(a).agent.liveness.declare_gone(b.info)
        assert not rref.confirmed_by_owner()
        with acting_as(b):
            errors = use_kept("unconfirmed")
        del KEPT["unconfirmed"]
        assert len(errors) == 6
        for error in errors:
            assert "worker 'worker0' has dropped the value of this RRef" in error
        assert runtime_of(a).rrefs.debug_info()["num_forks"] == 0
        end_connection(b, a)  # The lost answer would keep the group from shutting down.


@pytest.mark.parametrize("use_it", [lambda rref: rref.to_here().value, lambda rref: use(rref)[0]])
def test_a_use_that_arrives_before_the_value_is_made_waits_for_it(use_it: Any) -> None:
    """This holds for a worker that came back, too."""
    late = Fault("delay", kind=Kind.PYTHON_REMOTE_CALL, sender="worker1", times=1, seconds=0.3)
    network = FaultyTransport(transports_named("in_process")[0], [late])
    with cluster(2, transports=[network]) as (a, b):
        runtime_of(a).agent.liveness.declare_gone(b.info)
        rref = b.remote("worker0", Counter, (1,))
        assert use_it(rref) in (1, 2)


def test_cleaning_up_late_spares_what_belongs_to_the_return(trio: list[Worker]) -> None:
    """The worker comes back while the others still clean up after it."""
    a, b, c = trio
    old = b.remote("worker0", Counter, (1,))
    old.to_here()
    made: list[Any] = []

    def come_back(info: Any) -> None:
        runtime_of(a).agent.on_gone.remove(come_back)
        runtime_of(a).agent.heard_from(info)
        made.append(b.remote("worker0", Counter, (2,)))
        made[0].to_here()
        theirs = a.remote("worker2", Counter, (3,))
        a.rpc_sync("worker1", keep, ("mine", theirs))

    runtime_of(a).agent.on_gone.insert(0, come_back)
    runtime_of(a).agent.liveness.declare_gone(b.info)
    assert use(made[0]) == (3, 3)
    assert not runtime_of(a).agent.liveness.is_gone(b.id)
    with pytest.raises(GradwireError, match="has dropped the value"):
        old.to_here()
    with acting_as(b):
        assert use(KEPT.pop("mine")) == (4, 4)
    until(lambda: runtime_of(c).rrefs.debug_info()["num_forks"] == 0, "nothing is kept for it")


def test_a_call_over_an_open_connection_shows_that_the_caller_is_back() -> None:
    """The network let the calls of one direction through, but no new connection."""
    network = FaultyTransport(transports_named("in_process")[0], [])
    with cluster(2, transports=[network], options=rpc.Options(**IMPATIENT)) as (a, b):
        b.rpc_sync("worker0", pid)
        a.rpc_sync("worker1", pid)
        with network.unreachable("worker0"):
            wait_for_end_of(a, b)
        made = b.remote("worker0", Counter, (1,))
        assert use(made) == (2, 2)
        assert not runtime_of(a).agent.liveness.is_gone(b.id)


# -- what counts as death


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_killed_worker_is_lost_at_once(transport: str) -> None:
    """Long before the limit that applies to a worker that may still run."""

    def body(rank: int) -> None:
        if rank:
            DONE.wait(TIMEOUT)
            return
        gone = threading.Event()
        current.runtime().agent.on_gone.append(lambda _info: gone.set())
        os.kill(rpc.rpc_sync("worker1", pid), signal.SIGKILL)
        assert gone.wait(TIMEOUT)
        with pytest.raises(WorkerLost, match="'worker1' cannot be reached"):
            rpc.rpc_sync("worker1", pid)
        rpc.shutdown(timeout=TIMEOUT)

    patient: dict[str, Any] = {"heartbeat_interval": 3600.0, "heartbeat_limit": 3600.0}
    with group(2, body, shut_down=False, transports=[transport], **patient) as started:
        started[0].result()


def end_connection(caller: Worker, callee: Worker) -> None:
    channel = runtime_of(caller).agent.peers.find(callee.id).channel
    assert channel is not None
    channel.end("a test has cut it")


def check_suspicion(a: Worker, b: Worker, hinder: AbstractContextManager[None]) -> None:
    """Cut the connection of `b` to `a` while `hinder` keeps `a` from connecting to `b`. Check that
    `a` goes on trying, and that it drops nothing that it keeps for `b`."""
    gone: list[Any] = []
    runtime_of(a).agent.on_gone.append(gone.append)
    suspected = runtime_of(a).agent.liveness.suspected
    held = b.remote(a.name, Counter, (1,))
    assert held.to_here().value == 1
    with hinder:
        end_connection(b, a)
        until(lambda: b.id in suspected and suspected[b.id].attempts > 2, "it has tried again")
        assert not gone
    until(lambda: not suspected, "it has found that the other one runs")
    assert use(held) == (2, 2)
    assert not gone


@contextmanager
def no_descriptors(limit: int) -> Iterator[None]:
    """Let this process open no descriptor until the end of the block. The descriptors below the
    limit are in use."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.open(os.devnull, os.O_RDONLY)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_worker_without_descriptors_takes_nobody_for_dead(transport: str) -> None:
    def body() -> None:
        limit = 32
        while os.open(os.devnull, os.O_RDONLY) < limit:
            pass  # The descriptors of the workers come after these.
        with cluster(2, transports=transports_named(transport)) as (a, b):
            check_suspicion(a, b, no_descriptors(limit))

    with processes(body) as (child,):
        child.result()


@contextmanager
def flood(worker: Worker) -> Iterator[None]:
    """Let strangers connect to a worker all the time, until the end of the block."""
    member = runtime_of(worker).agent.member
    assert member is not None
    address = member.addresses[0]
    stop = threading.Event()

    def connect() -> socket.socket:
        if address.transport == "unix":
            stranger = socket.socket(socket.AF_UNIX)
            stranger.settimeout(TIMEOUT)
            with suppress(OSError):
                stranger.connect("\0" + address.place)
            return stranger
        host, port = address.place.split("|")
        return socket.create_connection((host, int(port)), TIMEOUT)

    def run() -> None:
        crowd: deque[socket.socket] = deque()
        while not stop.is_set():
            crowd.append(connect())
            if len(crowd) > 8:
                crowd.popleft().close()
        for stranger in crowd:
            stranger.close()

    with processes(run) as (strangers,):
        try:
            yield
        finally:
            strangers.kill()


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_flood_of_strangers_kills_nobody(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "MAX_PENDING", 1)  # so that a few strangers are a flood
    with cluster(2, transports=transports_named(transport)) as (a, b):
        gone: list[Any] = []
        runtime_of(a).agent.on_gone.append(gone.append)
        held = b.remote("worker0", Counter, (1,))
        assert held.to_here().value == 1
        with flood(b):
            for _ in range(12):
                b.rpc_sync("worker0", pid)
                end_connection(b, a)
                with suppress(WorkerLost):
                    a.rpc_sync("worker1", pid)
                    end_connection(a, b)
                until(lambda: not runtime_of(a).agent.liveness.suspected, "it was found to run")
        assert use(held) == (2, 2)
        assert not gone


def test_a_short_cut_of_the_network_kills_nobody() -> None:
    network = FaultyTransport(transports_named("in_process")[0], [])
    with cluster(2, transports=[network]) as (a, b):
        check_suspicion(a, b, network.unreachable("worker1"))


def test_the_use_of_a_slower_transport_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    transports = transports_named("unix") + transports_named("tcp")
    with cluster(2, transports=transports) as (a, b):
        listener = runtime_of(b).agent._listeners[0]
        listener.close()
        with caplog.at_level("WARNING", "gradwire"):
            assert a.rpc_sync("worker1", pid) == os.getpid()
    assert "worker0 is connected to worker worker1 over tcp, because unix failed" in caplog.text


def test_a_shutdown_that_lost_its_connection_goes_on_waiting() -> None:
    cut = Fault("cut", kind=Kind.BARRIER, sender="worker1", times=1)
    network = FaultyTransport(transports_named("in_process")[0], [cut])
    with cluster(2, transports=[network]) as (a, b):
        shutdown = threading.Thread(target=b.shutdown)
        shutdown.start()
        until(lambda: bool(network.done), "the connection is cut")
        for _ in range(200):
            assert a.rpc_sync("worker1", pid) == os.getpid()
        a.shutdown()
        shutdown.join(TIMEOUT)
        assert not shutdown.is_alive()
