"""Calls and references when messages are lost, late or duplicated, or connections are cut."""

from __future__ import annotations

import gc
import itertools
import threading
from typing import Any

import pytest
import torch

from gradwire import rpc
from gradwire._core.transport.in_process import InProcessTransport
from gradwire._core.wire.messages import Kind
from gradwire.errors import CallTimeout, EncodingError, WorkerLost
from gradwire.testing import Fault, FaultyTransport, cluster, runtime_of, transports_named
from gradwire.worker import Worker
from tests.processes import until

RUNS = itertools.count()


def count_run() -> int:
    return next(RUNS)


def faulty(*faults: Fault, seed: int = 0, inner: str = "in_process") -> list[FaultyTransport]:
    return [FaultyTransport(transports_named(inner)[0], faults, seed)]


def test_a_lost_call_ends_at_its_deadline() -> None:
    with cluster(2, transports=faulty(Fault("drop", kind=Kind.PYTHON_CALL, times=1))) as (a, _):
        with pytest.raises(CallTimeout):
            a.rpc_sync("worker1", count_run, timeout=0.1)
        before = next(RUNS)
        assert a.rpc_sync("worker1", count_run) == before + 1, "the lost call did not run"


def test_a_call_whose_answer_is_lost_is_not_run_again() -> None:
    with cluster(2, transports=faulty(Fault("drop", kind=Kind.PYTHON_RET, times=1))) as (a, _):
        before = next(RUNS)
        with pytest.raises(CallTimeout) as late:
            a.rpc_sync("worker1", count_run, timeout=0.1)
        assert late.value.may_have_run
        assert a.rpc_sync("worker1", count_run) == before + 2


def test_a_duplicated_call_runs_once() -> None:
    fault = Fault("duplicate", kind=Kind.PYTHON_CALL)
    with cluster(2, transports=faulty(fault)) as (a, _):
        first = next(RUNS)
        assert [a.rpc_sync("worker1", count_run) for _ in range(5)] == [
            first + n for n in range(1, 6)
        ]


def test_lost_heartbeats_end_the_connection() -> None:
    STARTED.clear()
    options = rpc.Options(heartbeat_interval=0.05, heartbeat_limit=0.2)
    fault = Fault("drop", kind=Kind.HEARTBEAT)
    with cluster(2, transports=faulty(fault), options=options) as (a, _):
        try:
            with pytest.raises(WorkerLost, match="no heartbeat"):
                a.rpc_sync("worker1", wait_for_start)
        finally:
            STARTED.set()


def make_reference() -> rpc.RRef[Any]:
    return rpc.RRef(Value())


def test_a_reference_in_a_late_answer_is_released() -> None:
    fault = Fault("delay", kind=Kind.PYTHON_RET, times=1, seconds=0.1)
    with cluster(2, transports=faulty(fault)) as workers:
        with pytest.raises(CallTimeout):
            workers[0].rpc_sync("worker1", make_reference, timeout=0.03)
        until(lambda: nothing_held(workers), "the value is gone")


def test_duplicate_and_late_answers_are_ignored() -> None:
    faults = (
        Fault("duplicate", kind=Kind.PYTHON_RET, times=3),
        Fault("delay", kind=Kind.PYTHON_RET, times=3, seconds=0.15),
    )
    with cluster(2, transports=faulty(*faults)) as (a, _):
        assert [a.rpc_sync("worker1", max, (n, 0)) for n in range(3)] == [0, 1, 2]
        for n in range(3):
            with pytest.raises(CallTimeout):
                a.rpc_sync("worker1", max, (n, 0), timeout=0.02)
        futures = [a.rpc_async("worker1", max, (n, 0)) for n in range(50)]
        assert [future.wait() for future in futures] == list(range(50))


@pytest.mark.parametrize("kind", [Kind.PYTHON_CALL, Kind.PYTHON_RET])
@pytest.mark.parametrize("inner", ["in_process", "unix", "tcp"])
def test_a_cut_connection_fails_its_calls_and_is_replaced(kind: Kind, inner: str) -> None:
    with cluster(2, transports=faulty(Fault("cut", kind=kind, times=1), inner=inner)) as (a, _):
        with pytest.raises(WorkerLost, match="'worker1'"):
            a.rpc_sync("worker1", count_run)
        assert a.rpc_sync("worker1", max, (1, 2)) == 2


def test_all_calls_of_a_cut_connection_fail_at_once() -> None:
    STARTED.clear()
    fault = Fault("cut", kind=Kind.RREF_USER_DELETE, times=1)
    with cluster(2, transports=faulty(fault)) as (a, _):
        rref = a.remote("worker1", max, (1, 2))
        rref.to_here()
        waiting = [a.rpc_async("worker1", wait_for_start) for _ in range(10)]
        del rref
        try:
            for future in waiting:
                with pytest.raises(WorkerLost, match="may have run"):
                    future.wait()
        finally:
            STARTED.set()


def test_a_call_after_a_failed_call_gets_a_new_connection(memory_pair: list[Worker]) -> None:
    """Also while another thread still closes the old connection."""
    a, _ = memory_pair
    assert a.rpc_sync("worker1", max, (1, 2)) == 2
    channel = runtime_of(a).agent.peers.find("worker1").channel
    assert channel is not None
    closing, close, go_on = threading.Event(), channel.connection.close, threading.Event()

    def close_late() -> None:
        closing.set()
        go_on.wait(30)
        close()

    channel.connection.close = close_late  # type: ignore[method-assign]
    ending = threading.Thread(target=channel.end, args=("the test ended it",))
    ending.start()
    try:
        assert closing.wait(30)
        assert a.rpc_sync("worker1", max, (3, 4)) == 4
    finally:
        go_on.set()
        ending.join()


STARTED = threading.Event()


def wait_for_start() -> bool:
    return STARTED.wait(30)


def test_a_fault_affects_only_the_chosen_direction() -> None:
    fault = Fault("drop", kind=Kind.PYTHON_CALL, sender="worker0", receiver="worker1")
    with cluster(3, transports=(transports := faulty(fault))) as (a, b, _):
        with pytest.raises(CallTimeout):
            a.rpc_sync("worker1", count_run, timeout=0.05)
        assert a.rpc_sync("worker2", max, (1, 2)) == 2
        assert b.rpc_sync("worker0", max, (1, 2)) == 2
    assert transports[0].done == [("drop", Kind.PYTHON_CALL, "worker0", "worker1")]


class Value:
    pass


def keep(rref: rpc.RRef[Any]) -> None:
    KEPT.append(rref)


KEPT: list[rpc.RRef[Any]] = []


def nothing_held(workers: list[Worker]) -> bool:
    gc.collect()
    return all(not any(runtime_of(worker).rrefs.debug_info().values()) for worker in workers)


CONTROL = [Kind.RREF_FORK_REQUEST, Kind.RREF_CHILD_ACCEPT, Kind.RREF_USER_DELETE]


@pytest.mark.parametrize("seed", range(3))
def test_references_survive_a_bad_network(seed: int) -> None:
    """Control messages are lost, late and duplicated. A value lives exactly as long as it is
    referenced."""
    faults = [
        Fault(action, kind=kind, chance=0.3, seconds=0.03, times=12)  # type: ignore[arg-type]
        for kind in CONTROL
        for action in ("drop", "delay", "duplicate")
    ]
    options = rpc.Options(heartbeat_interval=0.1, heartbeat_limit=0.25)
    with cluster(
        3, transports=[FaultyTransport(InProcessTransport(), faults, seed)], options=options
    ) as workers:
        for n in range(12):
            rref = workers[n % 3].remote((n + 1) % 3, torch.full, ((2,), float(n)))
            workers[n % 3].rpc_sync((n + 2) % 3, keep, (rref,))
        del rref
        assert sorted(rref.to_here()[0].item() for rref in KEPT) == [float(n) for n in range(12)]
        KEPT.clear()
        until(lambda: nothing_held(workers), "all values are gone")


def test_the_answer_to_a_call_confirms_its_references() -> None:
    """No separate message does."""
    with cluster(2, transports=faulty(Fault("drop", kind=Kind.RREF_CHILD_ACCEPT))) as (a, b):
        rref = a.remote("worker1", torch.ones, (2,))
        for call in (a.rpc_sync, lambda *args: a.rpc_async(*args).wait()):
            call("worker1", keep, (rref,))
            assert runtime_of(a).rrefs.debug_info()["num_pending_children"] == 0
        with pytest.raises(TypeError):
            a.rpc_sync(
                "worker1", keep, (rref, rref)
            )  # the callee decodes the references, then fails
        assert runtime_of(a).rrefs.debug_info()["num_pending_children"] == 0
        KEPT.clear()
        del rref
        until(lambda: nothing_held([a, b]), "the value is gone")


@pytest.mark.parametrize("lost", ["the call", "the answer"])
def test_a_reference_in_a_lost_call_is_released(lost: str) -> None:
    cut = Fault("cut", kind=Kind.PYTHON_CALL, answers=lost == "the answer", times=1)
    with cluster(2, transports=faulty(cut)) as (a, b):
        rref = a.remote("worker1", torch.ones, (2,))
        rref.to_here()
        with pytest.raises(WorkerLost):
            a.rpc_sync("worker1", keep, (rref,))
        assert rref.to_here().tolist() == [1.0, 1.0]  # there is a new connection
        KEPT.clear()
        del rref
        until(lambda: nothing_held([a, b]), "the value is gone")


def test_a_reference_whose_creation_failed_cannot_be_sent() -> None:
    refusal = Fault("refuse", kind=Kind.PYTHON_REMOTE_CALL)
    with cluster(3, transports=faulty(refusal)) as (a, _, _):
        for owner in ("worker0", "worker1"):
            rref = a.remote(owner, count_run)
            with pytest.raises(WorkerLost, match="RRef creation"):
                rref.to_here()
            with pytest.raises(EncodingError, match="RRef creation"):
                a.rpc_sync("worker2", repr, args=(rref,))


def test_a_control_message_that_cannot_be_sent_is_sent_again() -> None:
    refusal = Fault("refuse", kind=Kind.RREF_USER_DELETE, times=2)
    with cluster(2, transports=faulty(refusal)) as (a, b):
        rref = a.remote("worker1", count_run)
        rref.to_here()
        del rref
        until(
            lambda: runtime_of(b).rrefs.debug_info()["num_forks"] == 0, "the reference is dropped"
        )
        until(
            lambda: not any(runtime_of(a).rrefs.debug_info().values()),
            "all control messages are answered",
        )
