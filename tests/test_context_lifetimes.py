"""A context follows the code to all workers, is released on all of them, and never returns."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import os
import signal
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire import autograd, rpc
from gradwire._core import current
from gradwire._core.autograd.pass_messages import (
    TAG,
    PassMessage,
    PassOptions,
    pack_metadata,
    pack_request,
)
from gradwire._core.autograd.pass_state import PassState
from gradwire._core.autograd.termination import NOT_A_CHILD
from gradwire._core.rpc.client import ClientChannel
from gradwire._core.rpc.server import Request
from gradwire._core.wire.messages import Kind, Tags
from gradwire.errors import ContextReleased, GradwireError, WorkerLost
from gradwire.testing import acting_as, open_contexts, runtime_of, soak
from gradwire.worker import Worker
from tests.processes import group, until


def square(x: Tensor) -> Tensor:
    return x * x


def tags_of(context_id: int, message_id: int, successes: tuple[int, ...] = ()) -> Tags:
    """Return the tags of a call made in a context."""
    return {TAG: pack_metadata(context_id, message_id, True, successes, ())}


def contexts_here() -> int:
    return len(current.runtime().contexts)


# -- propagation


def test_asyncio_tasks_have_contexts_of_their_own(trio: list[Worker]) -> None:
    """Two tasks take turns in one thread, and each keeps its own context."""
    turns: list[str] = []

    async def train(name: str, factor: float) -> Tensor:
        x = torch.full((2,), factor, requires_grad=True)
        with autograd.context() as context_id:
            y = x
            for _ in range(3):
                y = await rpc.rpc_async("worker1", torch.mul, args=(y, factor))
                turns.append(name)
                await asyncio.sleep(0)  # lets the other task run
            autograd.backward(context_id, [y.sum()])
            return autograd.get_gradients(context_id)[x]

    async def both() -> list[Tensor]:
        return await asyncio.gather(train("one", 2.0), train("other", 3.0))

    one, other = asyncio.run(both())
    assert one.tolist() == [8.0, 8.0]
    assert other.tolist() == [27.0, 27.0]
    assert turns != sorted(turns)
    assert turns != sorted(turns, reverse=True)


def square_in_a_thread(x: Tensor) -> Tensor:
    results: list[Tensor] = []

    def run() -> None:
        results.append(rpc.rpc_sync("worker2", square, args=(x,)))

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,))
    thread.start()
    thread.join()
    return results[0]


@rpc.functions.async_execution
def square_later(x: Tensor) -> Any:
    future = rpc.rpc_async("worker2", square, args=(x,))
    return future.then(lambda done: rpc.rpc_sync("worker0", square, args=(done.wait(),)))


@rpc.functions.async_execution
def square_from_a_bare_thread(x: Tensor) -> Any:
    """Return a future whose result is set by a thread without a context."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    thread = threading.Thread(target=lambda: future.set_result(x * x))
    thread.start()
    thread.join()
    return future


@pytest.mark.parametrize(
    ("function", "power"),
    [(square_in_a_thread, 2), (square_later, 4), (square_from_a_bare_thread, 2)],
)
def test_contexts_follow_served_functions(trio: list[Worker], function: Any, power: int) -> None:
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", function, args=(x,))
        autograd.backward(context_id, [y.sum()])
        expected = power * x.detach() ** (power - 1)
        assert torch.equal(autograd.get_gradients(context_id)[x], expected)


def differentiate_inside(x: Tensor) -> Tensor:
    """Run a backward pass in a context of its own, inside a served function."""
    inner = x.detach().requires_grad_()
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker2", square, args=(inner,)).sum()])
        slope = autograd.get_gradients(context_id)[inner]
    return rpc.rpc_sync("worker2", square, args=(x,)) * slope


def test_a_served_function_may_open_a_context(trio: list[Worker]) -> None:
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", differentiate_inside, args=(x,))
        autograd.backward(context_id, [y.sum()])
        slope = 2 * x.detach()
        assert torch.equal(autograd.get_gradients(context_id)[x], slope * slope)


def test_sixty_trainers_share_a_worker_and_some_fail(trio: list[Worker]) -> None:
    weight = torch.ones(2, requires_grad=True)
    right: list[int] = []

    def train(number: int) -> None:
        with acting_as(trio[0]):
            function = soak.refuse if number % 5 == 0 else torch.mul
            args = (weight,) if number % 5 == 0 else (weight, float(number))
            try:
                with autograd.context() as context_id:
                    y = rpc.rpc_sync("worker1", function, args=args)
                    autograd.backward(context_id, [y.sum()])
                    if autograd.get_gradients(context_id)[weight].tolist() == [float(number)] * 2:
                        right.append(number)
            except soak.Refused:
                pass

    threads = [threading.Thread(target=train, args=(number,)) for number in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(right) == [number for number in range(60) if number % 5]


# -- release


def test_a_thread_does_not_keep_a_failed_pass_alive(trio: list[Worker]) -> None:
    """Torch would keep the nodes that had not run yet, and a gate among them refers to its pass."""
    x = torch.ones(2, requires_grad=True)
    with contextlib.suppress(soak.Refused), autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", soak.relay, args=(x, True))
        context = weakref.ref(runtime_of(trio[1]).contexts.get(context_id))
        autograd.backward(context_id, [y.sum()])
    until(lambda: not open_contexts([trio[1]]), "worker1 releases the context too")
    until(lambda: not gc.collect() and context() is None, "the context is freed")


@pytest.mark.parametrize("transport", ["in_process", "unix"])
def test_many_contexts_leave_nothing_behind(transport: str) -> None:
    assert soak.soak(200, transport, lambda line: None) == []


def test_graphs_die_with_their_context(trio: list[Worker]) -> None:
    """On every worker, as soon as the release has reached it."""
    GRAPHS.clear()
    x = torch.ones(2, requires_grad=True)
    for fails in (False, True):
        with autograd.context() as context_id:
            y = rpc.rpc_sync("worker1", remember, args=(x * 1, fails))
            try:
                autograd.backward(context_id, [y.sum()])
            except soak.Refused:
                assert fails
        del y
    until(
        lambda: not open_contexts(trio),
        "all contexts are released",
    )
    for worker in trio[1:]:
        rpc.rpc_sync(worker.name, contexts_here)  # the thread drops the objects of its last call
    gc.collect()
    assert [graph() for graph in GRAPHS] == [None] * 6


class Remembered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        GRAPHS.append(weakref.ref(ctx))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.fails:
            raise soak.Refused
        return gradient, None


GRAPHS: list[Any] = []


def remember(x: Tensor, fails: bool) -> Tensor:
    y = Remembered.apply(x, False)
    if rpc.get_worker_info().id == 1:
        return rpc.rpc_sync("worker2", remember, args=(y, fails)) + y
    return Remembered.apply(x, fails)


def test_a_late_message_does_not_recreate_a_context(trio: list[Worker]) -> None:
    with autograd.context() as context_id:
        rpc.rpc_sync("worker1", square, args=(torch.ones(2, requires_grad=True),))
    until(
        lambda: not open_contexts(trio),
        "all contexts are released",
    )
    agent = runtime_of(trio[0]).agent
    peer = agent.peers.find("worker1")

    call = agent.codec.encode_call(square, (torch.ones(2, requires_grad=True),), {})
    tags = tags_of(context_id, 77, (5,))
    with pytest.raises(GradwireError, match="was released already"):
        agent.sender.call_async(peer, Kind.PYTHON_CALL, square, call, 5.0, tags).wait()
    message = PassMessage([78], [], [], NOT_A_CHILD, [], [])
    late = pack_request(context_id, 7, PassOptions(), (), None, message)
    with pytest.raises(GradwireError, match="was released already"):
        agent.sender.request("worker1", Kind.BACKWARD_AUTOGRAD_REQ, late).wait()
    with pytest.raises(GradwireError, match="was released"):
        agent.sender.request("worker1", Kind.AUTOGRAD_PATHS_REQ, context_id).wait()
    assert (
        agent.sender.request(
            "worker1", Kind.BACKWARD_AUTOGRAD_OUTCOME, (context_id, 7, None)
        ).wait()
        is False
    )
    agent.sender.request("worker1", Kind.CLEANUP_AUTOGRAD_CONTEXT_REQ, [context_id]).wait()
    with pytest.raises(GradwireError, match="was released already"):
        agent.sender.request("worker1", Kind.JOIN_AUTOGRAD_CONTEXT_REQ, context_id).wait()
    assert not open_contexts(trio)


def test_a_cleanup_before_the_first_call_creates_no_context(trio: list[Worker]) -> None:
    """The cleanup message overtakes the call."""
    with autograd.context() as context_id:
        pass
    agent = runtime_of(trio[0]).agent
    agent.sender.request("worker1", Kind.CLEANUP_AUTOGRAD_CONTEXT_REQ, [context_id]).wait()
    call = agent.codec.encode_call(square, (torch.ones(2, requires_grad=True),), {})
    tags = tags_of(context_id, 77)
    with pytest.raises(GradwireError, match="was released already"):
        agent.sender.call_async(
            agent.peers.find("worker1"), Kind.PYTHON_CALL, square, call, 5.0, tags
        ).wait()
    assert not open_contexts(trio)


def test_a_context_that_arrived_through_a_killed_worker_is_released() -> None:
    """The creator has no connection to the last worker, and would not notify it by itself."""

    def body(rank: int) -> int | None:
        if rank:
            FINISHED.wait(30)
            rpc.shutdown(graceful=False)
            return None
        x = torch.ones(2, requires_grad=True)
        with autograd.context() as context_id:
            _, pid = rpc.rpc_sync("worker1", pass_on, args=(x,))
            os.kill(pid, signal.SIGKILL)
            known = current.runtime().contexts.get(context_id).known
            until(lambda: 2 in known, "the last worker has joined the context")
        until(
            lambda: rpc.rpc_sync("worker2", contexts_here) == 0,
            "the last worker releases the context",
        )
        with contextlib.suppress(WorkerLost):  # worker2 may shut down before it answers
            rpc.rpc_sync("worker2", finish)
        rpc.shutdown(graceful=False)
        return 0

    with group(3, body, shut_down=False) as started:
        assert started[0].result() == 0


def test_a_context_that_arrives_after_its_creator_was_lost_is_released(
    trio: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a delayed call, or through a worker that has not detected the loss yet."""
    monkeypatch.setattr("gradwire._core.rpc.retry._RETRY_SECONDS", 0.005)

    def square_in(context_id: int, caller: Worker) -> None:
        agent = runtime_of(caller).agent
        call = agent.codec.encode_call(square, (torch.ones(2, requires_grad=True),), {})
        tags = tags_of(context_id, 77)
        peer = agent.peers.find("worker2")
        agent.sender.call_async(peer, Kind.PYTHON_CALL, square, call, 5.0, tags).wait()

    first, second = runtime_of(trio[1]).contexts.new(), runtime_of(trio[1]).contexts.new()
    square_in(first.id, trio[1])
    assert open_contexts([trio[2]]) == 1
    trio[1].shutdown(graceful=False)
    until(lambda: not open_contexts([trio[2]]), "worker2 releases the first context")
    with contextlib.suppress(ContextReleased):  # the release may precede the answer
        square_in(second.id, trio[0])
    until(lambda: not open_contexts([trio[2]]), "worker2 releases the second context")


FINISHED = threading.Event()


def finish() -> None:
    FINISHED.set()


def pass_on(x: Tensor) -> tuple[Tensor, int]:
    return rpc.rpc_sync("worker2", square, args=(x,)), os.getpid()


def test_the_soak_command_reports_the_contexts(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--contexts", "20", "--transport", "tcp"]) == 0
    assert "20 contexts in" in capsys.readouterr().out


def test_the_soak_test_detects_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Tensor] = []

    def keep(x: Tensor, context_id: int, network: Any) -> None:
        kept.append(x * 2)

    monkeypatch.setattr(soak, "_SUCCEEDING", [keep])
    assert any("more tensors" in line for line in soak.soak(100, "in_process", lambda line: None))


def test_a_call_into_a_released_context_releases_its_references(trio: list[Worker]) -> None:
    with autograd.context() as context_id:
        pass
    runtime_of(trio[1]).contexts.release(context_id)
    agent = runtime_of(trio[0]).agent
    rref = rpc.RRef(torch.ones(2))
    call = agent.codec.encode_call(rpc.RRef.to_here, (rref,), {})
    tags = tags_of(context_id, 0)
    peer = agent.peers.find("worker1")
    with pytest.raises(GradwireError, match="was released already"):
        agent.sender.call_async(peer, Kind.PYTHON_CALL, "to_here", call, 5.0, tags).wait()
    del rref, call
    until(lambda: nothing_held(trio), "the value is gone")


def nothing_held(workers: list[Worker]) -> bool:
    gc.collect()
    return not any(any(runtime_of(worker).rrefs.debug_info().values()) for worker in workers)


def refer_when_it_is_too_late(context_id: int) -> Any:
    current.runtime().contexts.release(context_id)
    return rpc.RRef(torch.ones(2))


def test_an_answer_from_a_released_context_releases_its_references(trio: list[Worker]) -> None:
    with autograd.context() as context_id, pytest.raises(ContextReleased):
        rpc.rpc_sync("worker1", refer_when_it_is_too_late, args=(context_id,))
    until(lambda: nothing_held(trio), "the value is gone")


MADE = threading.Event()


def make_when_it_is_time() -> Tensor:
    assert MADE.wait(30)
    return torch.ones(2)


def test_fetching_a_value_raises_when_the_context_has_ended(trio: list[Worker]) -> None:
    MADE.clear()
    rref = rpc.remote("worker1", make_when_it_is_time)
    with autograd.context() as context_id:
        value = threading.Thread(target=contextvars.copy_context().run, args=(fetch, rref))
        value.start()
        until(
            lambda: runtime_of(trio[1]).agent.metrics.served_calls() > 1,
            "worker1 has received the request for the value",
        )
    until(
        lambda: runtime_of(trio[1]).contexts.is_released(context_id),
        "worker1 has released the context",
    )
    MADE.set()
    value.join()
    assert [ContextReleased] == FETCHED
    assert runtime_of(trio[1]).agent.metrics.served_calls() == 0


FETCHED: list[Any] = []


def fetch(rref: rpc.RRef[Tensor]) -> None:
    FETCHED.clear()
    try:
        FETCHED.append(rref.to_here())
    except GradwireError as error:
        FETCHED.append(type(error))


SENT: list[Tensor] = []


def double_and_keep(x: Tensor) -> Tensor:
    SENT.append(2 * x)
    return SENT[-1]


@pytest.mark.parametrize("answers", [False, True])
def test_a_tensor_may_be_changed_right_after_it_was_sent(
    trio: list[Worker], monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """The receiver may call a function that changes the same tensor."""
    kind, name = (Request, "answer_encoded") if answers else (ClientChannel, "send")
    send = getattr(kind, name)

    def send_and_change(*args: Any) -> None:
        send(*args)
        while SENT:
            SENT.pop().mul_(3)

    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, send_and_change)
            if answers:
                y = rpc.rpc_sync("worker1", double_and_keep, args=(x,))
            else:
                y = rpc.rpc_sync("worker1", torch.clone, args=(double_and_keep(x),))
        assert torch.equal(y, torch.full((2,), 2.0))
        autograd.backward(context_id, [y.sum()])
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((2,), 2.0))


def _pass_states() -> int:
    return sum(type(candidate) is PassState for candidate in gc.get_objects())


def constant(x: Tensor) -> Tensor:
    return x.detach() * 2


def test_pass_states_are_freed_without_the_garbage_collector(trio: list[Worker]) -> None:
    """Also those of passes with gates, with forecasts, and with gates that were not needed."""
    gc.collect()
    gc.disable()
    try:
        before = _pass_states()
        during: list[int] = []
        for _ in range(3):
            x = torch.ones(2, requires_grad=True)
            with autograd.context() as context_id:
                h = x * 1
                for worker in ("worker1", "worker2", "worker1"):
                    h = h + rpc.rpc_sync(worker, square, args=(h,))
                    h = h + rpc.rpc_sync(worker, constant, args=(h,))
                loss = h.sum()
                loss.register_hook(lambda _gradient: during.append(_pass_states()))
                autograd.backward(context_id, [loss], retain_graph=True)
            del h, loss
        until(lambda: not open_contexts(trio), "all contexts are released")
        until(lambda: _pass_states() <= before, "the states of the passes are freed")
    finally:
        gc.enable()
    assert min(during) > before, "the states of a running pass are counted"
