"""Passes and contexts, when something else happens in the worst moment.

Each test has the other thread act exactly there: in the middle of a method, by a patch.
"""

from __future__ import annotations

import contextvars
import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from gradwire import autograd, rpc
from gradwire.errors import ContextReleased
from gradwire.gradients.passes import Pass
from gradwire.gradients.versions import Versions
from gradwire.optim import DistributedOptimizer
from gradwire.testing import cluster
from gradwire.wire.messages import Kind
from gradwire.worker import Worker
from tests.processes import until

WEIGHT = torch.ones(2, requires_grad=True)
BROKEN: list[None] = []


@pytest.fixture(autouse=True)
def _fresh_weight() -> Iterator[None]:
    WEIGHT.grad = None
    yield
    WEIGHT.grad = None
    BROKEN.clear()


class Fragile(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if BROKEN:
            raise ZeroDivisionError
        return gradient


def use_weight(x: Tensor) -> Tensor:
    return x * WEIGHT


def break_easily(x: Tensor) -> Tensor:
    return Fragile.apply(2 * x)  # type: ignore[no-any-return, no-untyped-call]


def assert_grad_is_one(leaf: Tensor) -> None:
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.ones(2))


def test_backward_raises_when_all_have_been_told(
    trio: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what comes next meets what the failed pass has left, and is undone with it."""
    engine, reply_to = trio[0].engine, Pass.reply_to
    fail, told = engine.fail, threading.Event()
    about_to_tell = threading.Event()

    def tell_late(failed: Pass, error: BaseException) -> None:
        if threading.current_thread() is not threading.main_thread():
            about_to_tell.set()
            assert not told.wait(0.1)  # the system lets others run for a while
        fail(failed, error)

    def reply_late(self: Pass, request: Any) -> None:
        if self._engine is trio[2].engine:
            self._run_ready(gated=False)
            assert about_to_tell.wait(30)
        reply_to(self, request)

    x = torch.ones(2, requires_grad=True)
    BROKEN.append(None)
    with autograd.context(into_grad=True) as context_id:
        parts = [rpc.rpc_sync("worker1", use_weight, (x,))]
        parts.append(rpc.rpc_sync("worker2", break_easily, (x,)))
        loss = torch.stack(parts).sum()
        with monkeypatch.context() as patch:
            patch.setattr(engine, "fail", tell_late)
            patch.setattr(Pass, "reply_to", reply_late)
            with pytest.raises(ZeroDivisionError):
                autograd.backward(context_id, [loss], retain_graph=True)
            assert trio[0].contexts.get(context_id).failures()
        BROKEN.clear()
        autograd.backward(context_id, [loss])
    assert_grad_is_one(WEIGHT)


def test_what_comes_after_the_end_does_not_undo_a_success(
    trio: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads of a worker say that it is done; one of them is late."""
    reply_to, released, answered = Pass.reply_to, threading.Event(), threading.Event()
    handler, runs_user_code = trio[0].agent._handlers[Kind.BACKWARD_AUTOGRAD_REQ]
    asked = threading.Event()

    def drive_and_reply(self: Pass, request: Any) -> None:
        if self._engine is trio[1].engine:
            self._run_ready(gated=False)
            drive = threading.Thread(target=trio[1].agent.run_in_context, args=(self.drive,))
            drive.start()
            assert asked.wait(30)
        reply_to(self, request)

    def serve_late(request: Any) -> None:
        asked.set()
        assert released.wait(30)
        try:
            handler(request)
        finally:
            answered.set()

    monkeypatch.setattr(Pass, "reply_to", drive_and_reply)
    trio[0].agent._handlers[Kind.BACKWARD_AUTOGRAD_REQ] = (serve_late, runs_user_code)
    with autograd.context(into_grad=True) as context_id:
        y = rpc.rpc_sync("worker1", use_weight, (torch.ones(2),))
        autograd.backward(context_id, [y.sum()])
    released.set()
    assert answered.wait(30)
    rpc.rpc_sync("worker1", abs, (-1,))  # whatever was under way to it is there
    assert_grad_is_one(WEIGHT)


def test_a_pass_that_is_done_everywhere_succeeds_though_the_context_is_released(
    trio: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = trio[0].engine
    succeed = engine.succeed
    x = torch.ones(2, requires_grad=True)
    with autograd.context(into_grad=True) as context_id:
        y = rpc.rpc_sync("worker1", use_weight, (x,))

        def release_and_succeed(done: Pass) -> Any:
            engine.release(context_id)
            return succeed(done)

        monkeypatch.setattr(engine, "succeed", release_and_succeed)
        autograd.backward(context_id, [y.sum()])
    assert_grad_is_one(x)
    assert_grad_is_one(WEIGHT)


def test_a_call_that_meets_the_release_leaves_no_context_behind(
    trio: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = trio[0].engine
    tag = engine.tag

    def release_and_tag(tags: Any, context: Any, *args: Any) -> None:
        engine.release(context.id)
        tag(tags, context, *args)

    with autograd.context():
        with monkeypatch.context() as patch:
            patch.setattr(engine, "tag", release_and_tag)
            with pytest.raises(ContextReleased):
                rpc.rpc_sync("worker1", abs, (-1,))
    rpc.rpc_sync("worker1", abs, (-1,))
    until(lambda: not any(len(worker.contexts) for worker in trio), "all contexts are gone")


def test_who_joins_a_context_that_is_just_released_hears_of_it(
    trio: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts, engine = trio[0].contexts, trio[0].engine
    find = contexts.find

    def find_and_release(id: int) -> Any:
        found = find(id)
        engine.release(id)
        return found

    with autograd.context() as context_id:
        monkeypatch.setattr(contexts, "find", find_and_release)
        joined = trio[1].agent.request(0, Kind.JOIN_AUTOGRAD_CONTEXT_REQ, context_id)
        assert joined.wait() is False


def test_a_context_ends_with_a_generator_that_is_never_finished(trio: list[Worker]) -> None:
    """In another context of context variables than the one it began in."""

    def steps() -> Iterator[None]:
        with autograd.context():
            rpc.rpc_sync("worker1", torch.mul, (torch.ones(2, requires_grad=True), 2))
            yield

    suspended = [steps()]
    contextvars.copy_context().run(next, suspended[0])
    assert len(trio[0].contexts) == 1

    def drop() -> None:
        suspended.clear()
        gc.collect()

    thread = threading.Thread(target=drop)
    thread.start()
    thread.join()
    assert len(trio[0].contexts) == 0


def test_the_garbage_collector_may_release_contexts_anywhere() -> None:
    with cluster(1) as (worker,):
        first = worker.contexts.new()
        with worker.contexts._lock, worker.engine._lock:
            worker.engine.release(first.id)
        assert len(worker.contexts) == 0


def test_a_parameter_stays_protected_when_one_in_the_same_memory_dies() -> None:
    versions, memory = Versions(), torch.ones(4)
    first, second = nn.Parameter(memory[:2]), nn.Parameter(memory[2:])
    versions.track([first, second])
    del first
    gc.collect()
    x = torch.ones(2, requires_grad=True)
    recording = versions.recording()
    assert recording is not None
    with recording:
        y = (x * second).sum()
    with versions.changing([second]), torch.no_grad():
        second.mul_(10)
    y.backward()  # type: ignore[no-untyped-call]
    assert_grad_is_one(x)


def test_a_parameter_that_was_looked_at_for_a_moment_can_move_later() -> None:
    versions, weight = Versions(), nn.Parameter(torch.ones(2))
    passing = weight.detach()
    versions.track([weight])
    del passing
    place = weight.data_ptr()

    def change() -> None:
        with versions.changing([weight]), torch.no_grad():
            weight.add_(1)

    change()
    assert weight.data_ptr() == place, "nobody needs the value before"
    recording = versions.recording()
    assert recording is not None
    with recording:
        y = torch.ones(2, requires_grad=True) * weight
    change()
    assert weight.data_ptr() != place, "a backward may be reading there"
    del y


def test_an_optimizer_that_is_made_does_not_keep_parameters_in_place() -> None:
    """Others that begin to look after a parameter take whoever is in its memory for a reason."""
    seen: list[bool] = []

    class Watched(nn.Parameter):
        def detach(self) -> Tensor:
            with ThreadPoolExecutor(1) as other:
                seen.append(other.submit(is_free, worker.versions.lock).result())
            return super().detach()

    def is_free(lock: Any) -> bool:
        free: bool = lock.acquire(blocking=False)
        if free:
            lock.release()
        return free

    with cluster(1) as (worker,):
        mine = worker.rref(Watched(torch.ones(2)))
        worker.agent.run_in_context(lambda: DistributedOptimizer(SGD, [mine], lr=0.1))
    assert seen == [False]


_THREADS_USE_A_LEAF = """
import faulthandler, sys, threading, torch
from gradwire.gradients.functions import Send

faulthandler.dump_traceback_later(30, exit=True)
sys.setswitchinterval(1e-5)
leaf = torch.ones(64, requires_grad=True)
leaf.register_hook(lambda gradient: None)
edge = Send(1, 1, [leaf], None).edge(0)  # as a pass holds it

def use(operation):
    for _ in range(20_000):
        operation(leaf)

operations = (torch.clone, torch.clone, lambda leaf: leaf[:2])
threads = [threading.Thread(target=use, args=(operation,)) for operation in operations]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_can_use_a_leaf_that_a_pass_knows() -> None:
    """Torch locks itself up if Python alone holds the node of a leaf."""
    subprocess.run([sys.executable, "-c", _THREADS_USE_A_LEAF], check=True, timeout=60)
