"""If a message is lost, late or duplicated, or its connection is cut, the gradients are right or an
error is raised soon. Afterwards all workers work as before."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_args

import pytest

from gradwire import rpc
from gradwire._core.transport.in_process import InProcessTransport
from gradwire._core.wire.messages import Kind
from gradwire.errors import CallTimeout, WorkerLost
from gradwire.testing import (
    Fault,
    FaultyTransport,
    acting_as,
    cluster,
    fuzz,
    open_contexts,
    runtime_of,
    waiting_at_gates,
)
from gradwire.testing.faults import Action
from gradwire.testing.fuzz.comparing import differences
from gradwire.testing.fuzz.distributed import run_on_workers
from gradwire.testing.fuzz.local import run_locally
from gradwire.worker import Worker
from tests.processes import until

OPTIONS = rpc.Options(rpc_timeout=0.25, heartbeat_interval=0.1, heartbeat_limit=0.3)
#: For one program. Several calls and passes may reach their deadlines one after the other.
SOON = 20.0

KINDS = [
    Kind.BACKWARD_AUTOGRAD_REQ,
    Kind.BACKWARD_AUTOGRAD_OUTCOME,
    Kind.AUTOGRAD_PATHS_REQ,
    Kind.CLEANUP_AUTOGRAD_CONTEXT_REQ,
    Kind.PYTHON_CALL,
    Kind.PYTHON_REMOTE_CALL,
    Kind.PYTHON_RREF_FETCH_CALL,
    Kind.RREF_USER_DELETE,
    Kind.RREF_FORK_REQUEST,
    Kind.RREF_CHILD_ACCEPT,
]


@contextmanager
def faulty_trio() -> Iterator[tuple[list[Worker], FaultyTransport]]:
    transport = FaultyTransport(InProcessTransport(), [])
    with cluster(3, transports=[transport], options=OPTIONS, graceful=False) as workers:
        with acting_as(workers[0]):
            yield workers, transport


def try_program(seed: int) -> str:
    """Run a program. Return "right", or the error. Wrong gradients fail the test."""
    program = fuzz.make_program(seed, 3)
    try:
        expected = run_locally(program)
    except RuntimeError:
        return "no meaning"
    started = time.monotonic()
    try:
        outcome = run_on_workers(program)
    except Exception as error:
        return repr(error)
    finally:
        assert time.monotonic() - started < SOON
    complaint = next(differences(program, expected, outcome), "")
    assert not complaint, f"seed {seed}: {complaint}\n{program}"
    return "right"


SEEDS = itertools.cycle(range(5000, 5400))


@pytest.mark.parametrize("answers", [False, True], ids=["messages", "answers"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_fault_gives_right_gradients_or_an_error(kind: Kind, answers: bool) -> None:
    with faulty_trio() as (workers, transport):
        tried = 0

        def hit() -> list[Kind]:
            return [hit_kind for _, hit_kind, _, _ in transport.done]

        for action, skip in itertools.product(get_args(Action), (0, 2)):
            transport.done.clear()
            transport.add(
                Fault(action, kind=kind, answers=answers, skip=skip, times=1, seconds=0.02)
            )
            if kind == Kind.BACKWARD_AUTOGRAD_OUTCOME:  # this message reports failures only
                transport.add(Fault("cut", kind=Kind.BACKWARD_AUTOGRAD_REQ, times=3))
            for seed in itertools.islice(SEEDS, 100):
                try_program(seed)
                if any(
                    hit_kind != Kind.BACKWARD_AUTOGRAD_REQ or hit_kind == kind for hit_kind in hit()
                ):
                    tried += 1
                    break
            transport.clear()
        verdicts = {try_program(seed) for seed in range(5400, 5404)}
        assert verdicts <= {"right", "no meaning"}, verdicts
        assert tried >= 4, "few programs had such a message"
        until(
            lambda: not open_contexts(workers),
            "all contexts are released",
        )
        until(lambda: not waiting_at_gates(workers), "no thread waits at a gate")


def test_a_bad_network_gives_right_gradients_or_errors() -> None:
    """All kinds of messages and all faults at once."""
    with faulty_trio() as (workers, transport):
        for kind, action in itertools.product(KINDS, get_args(Action)):
            transport.add(Fault(action, kind=kind, chance=0.01, times=3, seconds=0.02))
            transport.add(
                Fault(action, kind=kind, answers=True, chance=0.01, times=3, seconds=0.02)
            )
        verdicts = [try_program(seed) for seed in range(6000, 6030)]
        assert "right" in verdicts
        assert set(verdicts) - {"right", "no meaning"}
        transport.clear()
        again = {try_program(seed) for seed in range(6000, 6010)}
        assert again <= {"right", "no meaning"}, again
        until(
            lambda: not open_contexts(workers),
            "all contexts are released",
        )


def test_a_cut_connection_causes_no_more_work() -> None:
    """Although an answer was still expected on it when it was cut."""
    transport = FaultyTransport(InProcessTransport(), [])
    with cluster(3, transports=[transport], graceful=False) as (a, b, c):
        transport.add(Fault("drop", kind=Kind.PYTHON_CALL, times=1))
        with pytest.raises(CallTimeout):
            a.rpc_sync("worker1", max, (1, 2), timeout=0.01)
        transport.add(Fault("cut", kind=Kind.PYTHON_CALL, times=1))
        with pytest.raises(WorkerLost):
            a.rpc_sync("worker1", max, (1, 2))
        assert a.rpc_sync("worker1", max, (1, 2)) == 2
        before = executor_steps(a, b)
        for _ in range(100):
            c.rpc_sync("worker2", max, (1, 2))
        assert executor_steps(a, b) - before < 50, "these workers were idle"
        for _ in range(100):
            a.rpc_sync("worker1", max, (1, 2))
        assert executor_steps(a, b) - before > 50, "steps are counted"


def executor_steps(*workers: Worker) -> int:
    return sum(runtime_of(worker).agent.executor._step for worker in workers)


# -- the faulty transport


def test_a_fault_affects_only_the_chosen_message() -> None:
    transport = FaultyTransport(InProcessTransport(), [])
    with cluster(2, transports=[transport]) as (a, _):
        transport.add(Fault("delay", kind=Kind.PYTHON_CALL, answers=True, skip=2, times=1))
        for _ in range(4):
            assert a.rpc_sync("worker1", max, (1, 2)) == 2
    assert transport.done == [("delay", Kind.PYTHON_RET, "worker1", "worker0")]
