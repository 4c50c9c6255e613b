"""Contexts go everywhere the code goes, end everywhere when they end, and never come back."""

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

from gradwire import autograd, current, rpc
from gradwire.agent.link import Link
from gradwire.agent.service import Request
from gradwire.errors import ContextReleased, GradwireError, WorkerLost
from gradwire.gradients.engine import TAG
from gradwire.gradients.family import NO_CHILD
from gradwire.gradients.ledger import How, Ledger
from gradwire.testing import soak
from gradwire.wire.messages import Kind
from gradwire.worker import Worker
from tests.processes import group, until


def square(x: Tensor) -> Tensor:
    return x * x


def contexts_here() -> int:
    return len(current.worker().contexts)


# -- where they go


def test_asyncio_tasks_have_contexts_of_their_own(trio: list[Worker]) -> None:
    """They take turns in one thread, and each goes on in its own."""
    turns: list[str] = []

    async def train(name: str, factor: float) -> Tensor:
        x = torch.full((2,), factor, requires_grad=True)
        with autograd.context() as context_id:
            y = x
            for _ in range(3):
                y = await rpc.rpc_async("worker1", torch.mul, args=(y, factor))
                turns.append(name)
                await asyncio.sleep(0)  # the other one's turn
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
    """Its result is set by a thread that knows of no context."""
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
    """A context inside of a served function, with a pass of its own."""
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
        current.enter(trio[0])
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


# -- how they end


def test_a_thread_does_not_keep_the_pass_that_failed_there(trio: list[Worker]) -> None:
    """Torch would keep what the run had still to come to, and the gate there knows its pass."""
    x = torch.ones(2, requires_grad=True)
    with contextlib.suppress(soak.Refused), autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", soak.relay, args=(x, True))
        there = weakref.ref(trio[1].contexts.get(context_id))
        autograd.backward(context_id, [y.sum()])
    until(lambda: not trio[1].contexts.all(), "it is released there too")
    until(lambda: not gc.collect() and there() is None, "nobody holds it any more")


@pytest.mark.parametrize("transport", ["memory", "unix"])
def test_nothing_is_left_of_many_contexts(transport: str) -> None:
    assert soak.soak(200, transport, lambda line: None) == []


def test_graphs_die_with_their_context(trio: list[Worker]) -> None:
    """On every worker, as soon as it has heard of the end."""
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
    until(lambda: not any(len(worker.contexts) for worker in trio), "all contexts are released")
    for worker in trio[1:]:
        rpc.rpc_sync(worker.name, contexts_here)  # its thread forgets what it did last
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


def test_a_late_message_does_not_bring_a_context_back(trio: list[Worker]) -> None:
    with autograd.context() as context_id:
        rpc.rpc_sync("worker1", square, args=(torch.ones(2, requires_grad=True),))
    until(lambda: not any(len(worker.contexts) for worker in trio), "all contexts are released")
    agent = trio[0].agent
    peer = agent.peers.find("worker1")

    call = agent.codec.encode_call(square, (torch.ones(2, requires_grad=True),), {})
    tags = {TAG: (context_id, 77, True, (5,), [])}
    with pytest.raises(GradwireError, match="was released already"):
        agent.call_async(peer, Kind.PYTHON_CALL, square, call, 5.0, tags).wait()
    said = ([78], [], NO_CHILD, [], [])
    message = ((context_id, 7, tuple(How()), said, (), None), ())
    with pytest.raises(GradwireError, match="was released already"):
        agent.request("worker1", Kind.BACKWARD_AUTOGRAD_REQ, message).wait()
    with pytest.raises(GradwireError, match="was released"):
        agent.request("worker1", Kind.AUTOGRAD_CHART_REQ, context_id).wait()
    assert (
        agent.request("worker1", Kind.BACKWARD_AUTOGRAD_OUTCOME, (context_id, 7, None)).wait()
        is False
    )
    agent.request("worker1", Kind.CLEANUP_AUTOGRAD_CONTEXT_REQ, [context_id]).wait()
    with pytest.raises(GradwireError, match="was released already"):
        agent.request("worker1", Kind.JOIN_AUTOGRAD_CONTEXT_REQ, context_id).wait()
    assert not any(len(worker.contexts) for worker in trio)


def test_a_context_that_nothing_was_heard_of_is_not_made_by_its_end(trio: list[Worker]) -> None:
    """The cleanup overtakes the call."""
    with autograd.context() as context_id:
        pass
    agent = trio[0].agent
    agent.request("worker1", Kind.CLEANUP_AUTOGRAD_CONTEXT_REQ, [context_id]).wait()
    call = agent.codec.encode_call(square, (torch.ones(2, requires_grad=True),), {})
    tags = {TAG: (context_id, 77, True, (), [])}
    with pytest.raises(GradwireError, match="was released already"):
        agent.call_async(
            agent.peers.find("worker1"), Kind.PYTHON_CALL, square, call, 5.0, tags
        ).wait()
    assert not any(len(worker.contexts) for worker in trio)


def test_a_context_ends_where_it_came_through_a_worker_that_died() -> None:
    """The creator has never talked to the last worker, which would not be told."""

    def body(rank: int) -> int | None:
        if rank:
            FINISHED.wait(30)
            rpc.shutdown(graceful=False)
            return None
        x = torch.ones(2, requires_grad=True)
        with autograd.context() as context_id:
            _, pid = rpc.rpc_sync("worker1", pass_on, args=(x,))
            os.kill(pid, signal.SIGKILL)
            known = current.worker().contexts.get(context_id).known
            until(lambda: 2 in known, "the last worker asks to be told")
        until(lambda: rpc.rpc_sync("worker2", contexts_here) == 0, "it is told")
        with contextlib.suppress(WorkerLost):  # it may be gone before it can answer
            rpc.rpc_sync("worker2", finish)
        rpc.shutdown(graceful=False)
        return 0

    with group(3, body, shut_down=False) as started:
        assert started[0].result() == 0


def test_a_context_ends_that_is_heard_of_after_its_creator_was_lost(
    trio: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a call that had to wait, or through a worker that has not noticed."""
    monkeypatch.setattr("gradwire.agent.insisting._RETRY_SECONDS", 0.005)

    def square_in(context_id: int, caller: Worker) -> None:
        agent = caller.agent
        call = agent.codec.encode_call(square, (torch.ones(2, requires_grad=True),), {})
        tags = {TAG: (context_id, 77, True, (), [])}
        peer = agent.peers.find("worker2")
        agent.call_async(peer, Kind.PYTHON_CALL, square, call, 5.0, tags).wait()

    first, second = trio[1].contexts.new(), trio[1].contexts.new()
    square_in(first.id, trio[1])
    assert len(trio[2].contexts) == 1
    trio[1].shutdown(graceful=False)
    until(lambda: not len(trio[2].contexts), "the context it had is released")
    with contextlib.suppress(ContextReleased):  # it may be before the answer is sent
        square_in(second.id, trio[0])
    until(lambda: not len(trio[2].contexts), "so is the one it hears of now")


FINISHED = threading.Event()


def finish() -> None:
    FINISHED.set()


def pass_on(x: Tensor) -> tuple[Tensor, int]:
    return rpc.rpc_sync("worker2", square, args=(x,)), os.getpid()


def test_the_command_says_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--contexts", "20", "--transport", "tcp"]) == 0
    assert "20 contexts in" in capsys.readouterr().out


def test_the_command_would_notice_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Tensor] = []

    def keep(x: Tensor, context_id: int, network: Any) -> None:
        kept.append(x * 2)

    monkeypatch.setattr(soak, "_GOOD", [keep])
    assert any("tensors more" in line for line in soak.soak(100, "memory", lambda line: None))


def test_a_call_that_comes_too_late_does_not_keep_what_it_refers_to(trio: list[Worker]) -> None:
    with autograd.context() as context_id:
        pass
    trio[1].contexts.release(context_id)
    agent = trio[0].agent
    rref = rpc.RRef(torch.ones(2))
    call = agent.codec.encode_call(rpc.RRef.to_here, (rref,), {})
    tags = {TAG: (context_id, 0, True, (), [])}
    peer = agent.peers.find("worker1")
    with pytest.raises(GradwireError, match="was released already"):
        agent.call_async(peer, Kind.PYTHON_CALL, "to_here", call, 5.0, tags).wait()
    del rref, call
    until(lambda: nothing_held(trio), "the value is gone")


def nothing_held(workers: list[Worker]) -> bool:
    gc.collect()
    return not any(any(worker.refs.debug_info().values()) for worker in workers)


def refer_when_it_is_too_late(context_id: int) -> Any:
    current.worker().contexts.release(context_id)
    return rpc.RRef(torch.ones(2))


def test_an_answer_that_comes_too_late_does_not_keep_what_it_refers_to(trio: list[Worker]) -> None:
    with autograd.context() as context_id, pytest.raises(ContextReleased):
        rpc.rpc_sync("worker1", refer_when_it_is_too_late, args=(context_id,))
    until(lambda: nothing_held(trio), "the value is gone")


MADE = threading.Event()


def make_when_it_is_time() -> Tensor:
    assert MADE.wait(30)
    return torch.ones(2)


def test_a_value_that_is_made_after_its_context_ended_is_not_waited_for(trio: list[Worker]) -> None:
    MADE.clear()
    rref = rpc.remote("worker1", make_when_it_is_time)
    with autograd.context() as context_id:
        value = threading.Thread(target=contextvars.copy_context().run, args=(fetch, rref))
        value.start()
        until(lambda: trio[1].agent.served_calls() > 1, "the value was asked for")
    until(lambda: trio[1].contexts.is_released(context_id), "the context has ended there too")
    MADE.set()
    value.join()
    assert [ContextReleased] == FETCHED
    assert trio[1].agent.served_calls() == 0


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
def test_what_was_sent_may_be_changed_the_moment_it_has_left(
    trio: list[Worker], monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """By whoever got it: with a call of a function that has the same tensor."""
    kind, name = (Request, "answer_encoded") if answers else (Link, "send")
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


def _ledgers() -> int:
    return sum(type(found) is Ledger for found in gc.get_objects())


def constant(x: Tensor) -> Tensor:
    return x.detach() * 2


def test_what_passes_knew_is_gone_without_the_garbage_collector(trio: list[Worker]) -> None:
    """Also of those that ran at gates, had to look ahead for that, and made gates in vain."""
    gc.collect()
    gc.disable()
    try:
        before = _ledgers()
        for _ in range(3):
            x = torch.ones(2, requires_grad=True)
            with autograd.context() as context_id:
                h = x * 1
                for worker in ("worker1", "worker2", "worker1"):
                    h = h + rpc.rpc_sync(worker, square, args=(h,))
                    h = h + rpc.rpc_sync(worker, constant, args=(h,))
                autograd.backward(context_id, [h.sum()], retain_graph=True)
            del h
        until(lambda: all(not worker.contexts.all() for worker in trio), "the contexts go")
        until(lambda: _ledgers() <= before, "the ledgers go")
    finally:
        gc.enable()
