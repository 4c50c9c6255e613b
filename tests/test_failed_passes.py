"""A pass that fails ends on all workers, with the root cause, and leaves no gradients behind."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire import autograd, rpc
from gradwire._core import current
from gradwire._core.autograd.pass_messages import (
    PassMessage,
    PassOptions,
    pack_request,
)
from gradwire._core.autograd.plan import make_roots
from gradwire._core.autograd.termination import NOT_A_CHILD
from gradwire._core.ids import WorkerInfo
from gradwire._core.rpc.exceptions import add_note, decode_exception, encode_exception
from gradwire._core.wire.codec import Codec
from gradwire._core.wire.messages import Kind
from gradwire.errors import CallError, CallTimeout, GradwireError, WorkerLost
from gradwire.testing import (
    Fault,
    FaultyTransport,
    acting_as,
    cluster,
    open_contexts,
    runtime_of,
    transports_named,
    waiting_at_gates,
)
from gradwire.worker import Worker
from tests.processes import group, until


@pytest.fixture
def trio(trio: list[Worker]) -> Iterator[list[Worker]]:
    yield trio
    BLOCK.set()
    until(lambda: not waiting_at_gates(trio), "no thread waits at a gate")


class Unwilling(Exception):
    """Its constructor has other parameters than its attribute `args`."""

    def __init__(self, *, day: str):
        super().__init__(f"no gradient {day}")
        self.day = day


def act(gradient: Tensor) -> None:
    """Run the actions that the test has set. Called in the backward of the functions below."""
    for action in list(ACTIONS):
        action()


ACTIONS: list[Callable[[], None]] = []
BLOCK = threading.Event()
REACHED = threading.Event()


@pytest.fixture(autouse=True)
def _behave() -> Iterator[None]:
    ACTIONS.clear()
    BLOCK.clear()
    REACHED.clear()
    yield
    ACTIONS.clear()


def refuse() -> None:
    raise Unwilling(day="today")


def block() -> None:
    REACHED.set()
    assert BLOCK.wait(30)


class Acts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        act(gradient)
        return gradient


def with_function(x: Tensor) -> Tensor:
    return Acts.apply(x * WEIGHTS["there"])


def with_hook(x: Tensor) -> Tensor:
    y = x * WEIGHTS["there"]
    y.register_hook(act)
    return y * 1


def relay(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Have a region with a gate: the result of a call is added to the tensor that was sent."""
    middle = x * WEIGHTS["between"]
    return rpc.rpc_sync("worker2", function, args=(middle,)) + middle


WEIGHTS = {name: torch.ones(2, requires_grad=True) for name in ("here", "between", "there")}


@pytest.fixture(autouse=True)
def _weights() -> None:
    for weight in WEIGHTS.values():
        weight.grad = None


def forward(function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a loss that depends on all three workers."""
    y = rpc.rpc_sync("worker1", relay, args=(WEIGHTS["here"] * 2, function))
    return y.sum()


def gradients_of(context_id: int) -> dict[int, Tensor]:
    """Return the gradients of the current worker, by the id of the leaf."""
    return {id(leaf): gradient for leaf, gradient in autograd.get_gradients(context_id).items()}


def everywhere(workers: list[Worker], context_id: int) -> dict[str, list[float]]:
    by_leaf: dict[int, Tensor] = {}
    for worker in workers:
        by_leaf |= rpc.rpc_sync(worker.name, gradients_of, args=(context_id,))
    names = {id(weight): name for name, weight in WEIGHTS.items()}
    return {names[key]: gradient.tolist() for key, gradient in sorted(by_leaf.items())}


RIGHT = {"here": [4.0, 4.0], "between": [4.0, 4.0], "there": [2.0, 2.0]}


# -- the exception of the caller


@pytest.mark.parametrize("function", [with_function, with_hook])
def test_the_root_cause_comes_through_a_chain_of_workers(
    trio: list[Worker], function: Callable[[Tensor], Tensor]
) -> None:
    with autograd.context() as context_id:
        loss = forward(function)
        ACTIONS.append(refuse)
        with pytest.raises(Unwilling) as caught:
            autograd.backward(context_id, [loss], retain_graph=True)
        assert caught.value.day == "today"
        assert 'on worker "worker2"' in str(caught.value.__cause__)
        line = function.__code__.co_firstlineno
        place = f"on worker 'worker2', of {function.__name__} ({__file__}:{line})"
        assert caught.value.__notes__ == [f"in the backward pass {place}"]
        printed = "".join(traceback.format_exception(caught.value))
        # Once in the remote traceback, and once as a note, if Python prints notes. (Python 3.10
        # does so only if a library such as `exceptiongroup` has patched it.)
        prints_notes = hasattr(traceback.TracebackException(Unwilling, None, None), "__notes__")
        assert printed.count(place) == (2 if prints_notes else 1)
        assert "in refuse" in printed
        assert everywhere(trio, context_id) == {}
        ACTIONS.clear()
        autograd.backward(context_id, [loss])
        assert everywhere(trio, context_id) == RIGHT


def between_calls(x: Tensor) -> Tensor:
    return rpc.rpc_sync("worker2", torch.neg, args=(Acts.apply(x),))


def test_an_error_between_two_calls_names_the_next_call(trio: list[Worker]) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", between_calls, args=(x,)).sum()
        ACTIONS.append(refuse)
        with pytest.raises(Unwilling) as caught:
            autograd.backward(context_id, [loss])
    (note,) = caught.value.__notes__
    assert "on worker 'worker1', of what was sent to" in note
    assert "neg" in note


def test_a_note_survives_when_attributes_cannot_be_sent() -> None:
    """The exception is encoded again without the attributes that cannot be sent."""
    error = ZeroDivisionError("nothing")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    add_note(error, "somewhere")
    codec = Codec()
    encoded = encode_exception(codec, error, "a function", WorkerInfo("there", 1))
    decoded = decode_exception(codec, encoded.whole_payload(), encoded.buffers, "there")
    assert type(decoded) is ZeroDivisionError
    assert decoded.__notes__ == ["somewhere"]
    assert "somewhere" in str(decoded.__cause__)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_of_the_caller_ends_the_pass_on_all_workers(
    trio: list[Worker], kind: type[BaseException]
) -> None:
    x = torch.ones(2, requires_grad=True)

    def interrupt(gradient: Tensor) -> None:
        raise kind

    with autograd.context() as context_id:
        middle = x * 2
        loss = (rpc.rpc_sync("worker1", relay, args=(middle, with_function)) + middle).sum()
        hook = middle.register_hook(interrupt)
        with pytest.raises(kind):
            autograd.backward(context_id, [loss], retain_graph=True)
        until(lambda: not any(passes_of(trio)), "the pass has ended on all workers")
        assert everywhere(trio, context_id) == {}
        hook.remove()
        autograd.backward(context_id, [loss])


def passes_of(workers: list[Worker]) -> list[int]:
    return [
        len(context.passes) for worker in workers for context in runtime_of(worker).contexts.all()
    ]


def test_a_late_message_of_a_failed_pass_is_answered_with_the_root_cause(
    trio: list[Worker],
) -> None:
    """An answer that only says that the pass is over could reach the caller before the cause."""
    with autograd.context() as context_id:
        loss = forward(with_function)
        ACTIONS.append(refuse)
        with pytest.raises(Unwilling):
            autograd.backward(context_id, [loss])
        (failed,) = runtime_of(trio[2]).contexts.get(context_id).failures()
        message = PassMessage([], [], [], NOT_A_CHILD, [], [])
        late = pack_request(context_id, failed, PassOptions(), (), None, message)
        asked = runtime_of(trio[1]).agent.sender.request(
            "worker2", Kind.BACKWARD_AUTOGRAD_REQ, late
        )
        with pytest.raises(Unwilling, match="no gradient today"):
            asked.wait()


# -- reasons to end


def test_a_thread_that_waits_at_a_gate_is_counted(trio: list[Worker]) -> None:
    """The other tests rely on the count being 0 when no thread waits."""
    with autograd.context() as context_id:
        loss = forward(with_function)
        assert waiting_at_gates(trio) == 0
        ACTIONS.append(block)
        backward = in_context_of(trio[0], lambda: autograd.backward(context_id, [loss]))
        assert REACHED.wait(30)
        until(lambda: waiting_at_gates(trio) == 1, "worker1 waits for worker2")
        assert [waiting_at_gates([worker]) for worker in trio] == [0, 1, 0]
        assert passes_of(trio) == [1, 1, 1]
        BLOCK.set()
        backward.join(30)
        assert waiting_at_gates(trio) == 0
        assert everywhere(trio, context_id) == RIGHT


def test_the_release_of_the_context_ends_the_pass(trio: list[Worker]) -> None:
    def release() -> None:
        assert REACHED.wait(30)
        until(lambda: waiting_at_gates(trio) == 1, "worker1 waits at its gate")
        runtime_of(trio[0]).releases.release(context_id)
        until(lambda: waiting_at_gates(trio) == 0, "no thread waits, although the hook still runs")
        BLOCK.set()

    with autograd.context() as context_id:
        loss = forward(with_function)
        ACTIONS.append(block)
        thread = threading.Thread(target=release)
        thread.start()
        with pytest.raises(GradwireError, match="was released"):
            autograd.backward(context_id, [loss])
        thread.join()
    until(lambda: not open_contexts(trio), "the context is released")


def test_a_released_context_cannot_begin_a_pass(trio: list[Worker]) -> None:
    with autograd.context() as context_id:
        loss = forward(with_function)
        context = runtime_of(trio[0]).contexts.get(context_id)
    with pytest.raises(GradwireError, match="was released"):
        runtime_of(trio[0]).engine.run(context, make_roots([loss]), PassOptions())


def test_a_deadline_ends_the_pass_and_names_a_late_worker(trio: list[Worker]) -> None:
    with autograd.context() as context_id:
        loss = forward(with_function)
        ACTIONS.append(block)
        started = time.monotonic()
        with pytest.raises(CallTimeout, match=r"worker1|worker2"):
            autograd.backward(context_id, [loss], retain_graph=True, timeout=0.2)
        assert time.monotonic() - started < 10
        until(
            lambda: waiting_at_gates(trio) == 0, "no thread waits, although the function still runs"
        )
        ACTIONS.clear()
        BLOCK.set()
        autograd.backward(context_id, [loss])
        assert everywhere(trio, context_id) == RIGHT


# -- into .grad


@pytest.mark.parametrize("existed", [True, False])
def test_grad_is_restored_to_the_last_bit(trio: list[Worker], existed: bool) -> None:
    before: dict[str, Tensor | None] = dict.fromkeys(WEIGHTS)
    if existed:
        before = {name: torch.tensor([0.1, -0.0]) for name in WEIGHTS}
    for name, weight in WEIGHTS.items():
        weight.grad = before[name]
    values = {name: None if g is None else g.clone() for name, g in before.items()}
    with autograd.context(into_grad=True) as context_id:
        loss = forward(with_function) + (WEIGHTS["there"] * 3).sum()
        ACTIONS.append(refuse)
        with pytest.raises(Unwilling):
            autograd.backward(context_id, [loss], retain_graph=True)
        until(lambda: not any(passes_of(trio)), "the pass has ended on all workers")
        for name, weight in WEIGHTS.items():
            assert weight.grad is before[name]
            if weight.grad is not None:
                assert same_bits(weight.grad, values[name])
        ACTIONS.clear()
        autograd.backward(context_id, [loss])
        assert WEIGHTS["here"].grad is not None
        start = values["here"] if existed else torch.zeros(2)
        assert torch.equal(WEIGHTS["here"].grad, start + torch.full((2,), 4.0))


def same_bits(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_a_run_that_outlives_its_pass_leaves_nothing_in_grad(trio: list[Worker]) -> None:
    """worker1 is in a backward function when the pass fails. It goes on and accumulates, and the
    next pass waits until that is undone."""
    WEIGHTS["there"].grad = torch.tensor([7.0, 7.0])
    x = torch.ones(2, requires_grad=True)
    with autograd.context(into_grad=True) as context_id:
        loss = rpc.rpc_sync("worker1", with_function, args=(x,)).sum()
        ACTIONS.append(block)
        with pytest.raises(CallTimeout):
            autograd.backward(context_id, [loss], retain_graph=True, timeout=0.1)
        assert REACHED.is_set()
        ACTIONS.clear()
        again = in_context_of(trio[0], lambda: autograd.backward(context_id, [loss]))
        until(
            lambda: len(runtime_of(trio[1]).contexts.get(context_id).writers) == 2,
            "the second pass has reached worker1",
        )
        BLOCK.set()
        again.join(30)
        assert WEIGHTS["there"].grad.tolist() == [8.0, 8.0]
        assert x.grad is not None
        assert x.grad.tolist() == [1.0, 1.0]


def test_a_failed_pass_is_undone_although_the_outcome_message_was_lost() -> None:
    """The first message of the next pass reports the failure."""
    lost = Fault("drop", kind=Kind.BACKWARD_AUTOGRAD_OUTCOME)
    transport = FaultyTransport(transports_named("in_process")[0], [lost])
    with cluster(2, transports=[transport], graceful=False) as workers:
        with acting_as(workers[0]):
            x = torch.ones(2, requires_grad=True)
            with autograd.context(into_grad=True) as context_id:
                loss = rpc.rpc_sync("worker1", with_function, args=(x,)).sum()
                transport.add(Fault("drop", kind=Kind.BACKWARD_AUTOGRAD_REQ, answers=True, times=1))
                with pytest.raises(CallTimeout):
                    autograd.backward(context_id, [loss], retain_graph=True, timeout=0.1)
                autograd.backward(context_id, [loss])
                assert WEIGHTS["there"].grad is not None
                assert WEIGHTS["there"].grad.tolist() == [1.0, 1.0]
                assert x.grad is not None
                assert x.grad.tolist() == [1.0, 1.0]


def in_context_of(worker: Worker, action: Callable[[], None]) -> threading.Thread:
    def run() -> None:
        with acting_as(worker):
            action()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


# -- lost workers


def body_that_signals(rank: int, gated: bool, size: int, number: int) -> list[Any] | None:
    """The last worker kills or stops itself in backward. The pass ends on the others."""
    if rank:
        FINISHED.wait(30)
        rpc.shutdown(graceful=False)
        return None
    x = torch.ones(2, requires_grad=True)
    last = f"worker{size - 1}"
    with autograd.context() as context_id:
        if size == 3:
            loss = rpc.rpc_sync("worker1", pass_on, args=(x, number, gated)).sum()
        else:
            loss = rpc.rpc_sync(last, signal_in_backward, args=(x, number, gated)).sum()
        started = time.monotonic()
        try:
            autograd.backward(context_id, [loss])
        except CallError as error:
            report = [str(error), type(error).__name__, time.monotonic() - started]
        assert autograd.get_gradients(context_id) == {}
        report.append(waiting_here())
        if size == 3:
            until(
                lambda: rpc.rpc_sync("worker1", state_here) == (0, 0),
                "the pass has ended on worker1 too",
            )
            with contextlib.suppress(WorkerLost):  # worker1 may shut down before it answers
                rpc.rpc_sync("worker1", finish)
    rpc.shutdown(graceful=False)
    return report


FINISHED = threading.Event()


def finish() -> None:
    FINISHED.set()


def waiting_here() -> int:
    """Return how many threads of the current worker wait at gates."""
    return len(current.runtime().engine.gate_waits)


def state_here() -> tuple[int, int]:
    contexts = current.runtime().contexts.all()
    return waiting_here(), sum(len(context.passes) for context in contexts)


class Signals(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int) -> Tensor:
        ctx.number = number
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        os.kill(os.getpid(), ctx.number)
        threading.Event().wait(30)  # other threads may be stopped before this one
        return gradient, None


def signal_in_backward(x: Tensor, number: int, gated: bool) -> Tensor:
    y = Signals.apply(x, number)
    # The message that began a region with a gate is answered before the region ends. So the pass
    # fails although no open call does.
    return y + rpc.rpc_sync("worker0", torch.mul, args=(x * 2, 3)) if gated else y


def pass_on(x: Tensor, number: int, gated: bool) -> Tensor:
    return x + rpc.rpc_sync("worker2", signal_in_backward, args=(x * 2, number, gated))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("gated", [False, True], ids=["ungated", "gated"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_lost_worker_ends_the_pass_everywhere(size: int, gated: bool, number: int) -> None:
    with group(
        size,
        lambda rank: body_that_signals(rank, gated, size, number),
        shut_down=False,
        heartbeat_interval=0.1,
        heartbeat_limit=0.4,
    ) as started:
        text, kind, seconds, gates = started[0].result()
        if size == 3:
            started[1].result()
    assert kind == "WorkerLost", text
    assert f"worker 'worker{size - 1}'" in text
    assert seconds < 20, "long before the deadline"
    assert gates == 0


def test_losing_a_worker_after_its_part_has_ended_is_harmless(trio: list[Worker]) -> None:
    """The worker that began the pass has already reported its success."""
    with autograd.context() as context_id:
        autograd.backward(context_id, [forward(with_function)])
        runtime_of(trio[2]).releases.clear_up_after(trio[1].info)
        assert everywhere([trio[0], trio[2]], context_id)["there"] == RIGHT["there"]


def test_a_pass_in_a_context_that_lost_a_worker_raises(trio: list[Worker]) -> None:
    """Another worker of that name would not have its graph, and the gradients would be wrong."""
    with autograd.context() as context_id:
        loss = forward(with_function)
        runtime_of(trio[0]).releases.clear_up_after(trio[1].info)
        with pytest.raises(WorkerLost, match="'worker1' took part in autograd context"):
            autograd.backward(context_id, [loss])


def test_a_pass_that_reaches_a_released_context_raises() -> None:
    """Without an error the gradients would be silently missing."""
    with cluster(2) as workers:
        with acting_as(workers[0]):
            with autograd.context() as context_id:
                x = torch.ones(2, requires_grad=True)
                loss = rpc.rpc_sync("worker1", torch.mul, args=(x, x)).sum()
                runtime_of(workers[1]).contexts.release(context_id)
                with pytest.raises(GradwireError, match="was released"):
                    autograd.backward(context_id, [loss])


def test_a_pass_can_be_repeated_after_a_lost_connection() -> None:
    transport = FaultyTransport(transports_named("in_process")[0], [])
    with cluster(3, transports=[transport]) as workers:
        with acting_as(workers[0]):
            with autograd.context() as context_id:
                loss = forward(with_function)
                transport.add(
                    Fault("cut", kind=Kind.BACKWARD_AUTOGRAD_REQ, receiver="worker2", times=1)
                )
                with pytest.raises(WorkerLost, match="'worker2'"):
                    autograd.backward(context_id, [loss], retain_graph=True)
                assert everywhere(workers, context_id) == {}
                autograd.backward(context_id, [loss])
                assert everywhere(workers, context_id) == RIGHT
