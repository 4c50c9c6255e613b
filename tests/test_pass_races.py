"""Races in passes and contexts.

Each test patches a method so that another thread acts in the middle of it.
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
from gradwire._core.autograd.backward_pass import BackwardPass
from gradwire._core.autograd.copy_on_write import ParameterVersions
from gradwire._core.wire.messages import Kind
from gradwire.errors import ContextReleased
from gradwire.optim import DistributedOptimizer
from gradwire.testing import acting_as, cluster, open_contexts, runtime_of
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


def test_backward_raises_after_all_workers_were_told(
    trio: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next pass could begin before the failed one is undone, and be undone too."""
    engine, reply_to = runtime_of(trio[0]).engine, BackwardPass.reply_to
    encode_failure, never = engine.encode_failure, threading.Event()
    about_to_tell = threading.Event()

    def tell_late(error: BaseException) -> Any:
        if threading.current_thread() is not threading.main_thread():
            about_to_tell.set()
            assert not never.wait(0.1)  # gives the other threads time to run
        return encode_failure(error)

    def reply_late(self: BackwardPass, request: Any) -> None:
        if self._port is runtime_of(trio[2]).engine:
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
            patch.setattr(engine, "encode_failure", tell_late)
            patch.setattr(BackwardPass, "reply_to", reply_late)
            with pytest.raises(ZeroDivisionError):
                autograd.backward(context_id, [loss], retain_graph=True)
            assert runtime_of(trio[0]).contexts.get(context_id).failures()
        BROKEN.clear()
        autograd.backward(context_id, [loss])
    assert_grad_is_one(WEIGHT)


def test_a_late_report_does_not_undo_a_success(
    trio: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads of a worker report that it is done, and one report arrives late."""
    reply_to, released, answered = BackwardPass.reply_to, threading.Event(), threading.Event()
    handler, runs_user_code = runtime_of(trio[0]).agent.dispatcher.handlers[
        Kind.BACKWARD_AUTOGRAD_REQ
    ]
    asked = threading.Event()

    def drive_and_reply(self: BackwardPass, request: Any) -> None:
        if self._port is runtime_of(trio[1]).engine:
            self._run_ready(gated=False)
            drive = threading.Thread(
                target=runtime_of(trio[1]).agent.run_in_context, args=(self.drive,)
            )
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

    monkeypatch.setattr(BackwardPass, "reply_to", drive_and_reply)
    runtime_of(trio[0]).agent.dispatcher.handlers[Kind.BACKWARD_AUTOGRAD_REQ] = (
        serve_late,
        runs_user_code,
    )
    with autograd.context(into_grad=True) as context_id:
        y = rpc.rpc_sync("worker1", use_weight, (torch.ones(2),))
        autograd.backward(context_id, [y.sum()])
    released.set()
    assert answered.wait(30)
    rpc.rpc_sync("worker1", abs, (-1,))  # earlier messages arrive before this call
    assert_grad_is_one(WEIGHT)


def test_a_finished_pass_succeeds_although_its_context_is_released(
    trio: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    succeed, releases = BackwardPass.succeed, runtime_of(trio[0]).releases
    x = torch.ones(2, requires_grad=True)
    with autograd.context(into_grad=True) as context_id:
        y = rpc.rpc_sync("worker1", use_weight, (x,))

        def release_and_succeed(done: BackwardPass) -> Any:
            if done.started_here:
                releases.release(context_id)
            return succeed(done)

        monkeypatch.setattr(BackwardPass, "succeed", release_and_succeed)
        autograd.backward(context_id, [y.sum()])
    assert_grad_is_one(x)
    assert_grad_is_one(WEIGHT)


def test_a_call_during_the_release_leaves_no_context_behind(
    trio: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, releases = runtime_of(trio[0]).engine, runtime_of(trio[0]).releases
    record_send = engine.record_send

    def release_and_record(tags: Any, context: Any, *args: Any) -> None:
        releases.release(context.id)
        record_send(tags, context, *args)

    with autograd.context():
        with monkeypatch.context() as patch:
            patch.setattr(engine, "record_send", release_and_record)
            with pytest.raises(ContextReleased):
                rpc.rpc_sync("worker1", abs, (-1,))
    rpc.rpc_sync("worker1", abs, (-1,))
    until(
        lambda: not open_contexts(trio),
        "all contexts are released",
    )


def test_joining_a_context_during_its_release_is_refused(
    trio: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts, releases = runtime_of(trio[0]).contexts, runtime_of(trio[0]).releases
    find = contexts.find

    def find_and_release(context_id: int) -> Any:
        context = find(context_id)
        releases.release(context_id)
        return context

    with autograd.context() as context_id:
        monkeypatch.setattr(contexts, "find", find_and_release)
        joined = runtime_of(trio[1]).agent.sender.request(
            0, Kind.JOIN_AUTOGRAD_CONTEXT_REQ, context_id
        )
        assert joined.wait() is False


def test_a_context_ends_with_its_unfinished_generator(trio: list[Worker]) -> None:
    """The generator is freed in a thread with other context variables than it began with."""

    def steps() -> Iterator[None]:
        with autograd.context():
            rpc.rpc_sync("worker1", torch.mul, (torch.ones(2, requires_grad=True), 2))
            yield

    suspended = [steps()]
    contextvars.copy_context().run(next, suspended[0])
    assert open_contexts([trio[0]]) == 1

    def drop() -> None:
        suspended.clear()
        gc.collect()

    thread = threading.Thread(target=drop)
    thread.start()
    thread.join()
    assert open_contexts([trio[0]]) == 0


def test_the_garbage_collector_may_release_contexts_anywhere() -> None:
    with cluster(1) as (worker,):
        first = runtime_of(worker).contexts.new()
        assert open_contexts([worker]) == 1
        with runtime_of(worker).contexts._lock, runtime_of(worker).releases._lock:
            runtime_of(worker).releases.release(first.id)
        assert open_contexts([worker]) == 0


def test_a_parameter_stays_protected_when_one_in_the_same_storage_is_freed() -> None:
    versions, storage = ParameterVersions(), torch.ones(4)
    first, second = nn.Parameter(storage[:2]), nn.Parameter(storage[2:])
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


def test_a_parameter_that_had_a_temporary_alias_can_move_later() -> None:
    versions, weight = ParameterVersions(), nn.Parameter(torch.ones(2))
    alias = weight.detach()
    versions.track([weight])
    del alias
    place = weight.data_ptr()

    def change() -> None:
        with versions.changing([weight]), torch.no_grad():
            weight.add_(1)

    change()
    assert weight.data_ptr() == place, "no graph needs the old value"
    recording = versions.recording()
    assert recording is not None
    with recording:
        y = torch.ones(2, requires_grad=True) * weight
    change()
    assert weight.data_ptr() != place, "a backward may be reading the old storage"
    del y


def test_an_optimizer_detaches_its_parameters_under_the_lock() -> None:
    """Without the lock another thread that begins to track the parameter would see an alias of it
    and never move it."""
    seen: list[bool] = []

    class Watched(nn.Parameter):
        def detach(self) -> Tensor:
            with ThreadPoolExecutor(1) as other:
                seen.append(other.submit(is_free, runtime_of(worker).versions.lock).result())
            return super().detach()

    def is_free(lock: Any) -> bool:
        free: bool = lock.acquire(blocking=False)
        if free:
            lock.release()
        return free

    with cluster(1) as (worker,):
        mine = worker.rref(Watched(torch.ones(2)))
        with acting_as(worker):
            DistributedOptimizer(SGD, [mine], lr=0.1)
    assert seen == [False]


_THREADS_USE_A_LEAF = """
import faulthandler, sys, threading, torch
from gradwire._core.autograd.boundary import Send

faulthandler.dump_traceback_later(30, exit=True)
sys.setswitchinterval(1e-5)
leaf = torch.ones(64, requires_grad=True)
leaf.register_hook(lambda gradient: None)
edge = Send(1, 1, [leaf], None).edge(0)  # a pass holds this edge

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


def test_threads_can_use_a_leaf_during_a_pass() -> None:
    """Torch deadlocks if only Python holds the node of a leaf."""
    subprocess.run([sys.executable, "-c", _THREADS_USE_A_LEAF], check=True, timeout=60)
