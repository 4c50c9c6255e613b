"""Gradients across workers equal those of one process, and a pass always ends."""

from __future__ import annotations

import copy
import gc
import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

from gradwire import autograd, rpc
from gradwire._core import current
from gradwire._core.wire.messages import Kind
from gradwire.errors import CallError, ContextReleased, GradwireError
from gradwire.testing import (
    Fault,
    FaultyTransport,
    acting_as,
    cluster,
    open_contexts,
    transports_named,
)
from gradwire.worker import Worker
from tests.processes import group, run_group, until

# -- the interface


def square(x: Tensor) -> Tensor:
    SEEN.append(1)
    return x * x


SEEN: list[int] = []


def scale(x: Tensor, factor: Tensor) -> Tensor:
    return x * factor


def test_gradients_are_collected_in_the_context_and_add_up(trio: list[Worker]) -> None:
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", square, args=(x,))
        loss = y.sum()
        autograd.backward(context_id, [loss], retain_graph=True)
        assert torch.equal(autograd.get_gradients(context_id)[x], 2 * x)
        autograd.backward(context_id, [loss])
        assert torch.equal(autograd.get_gradients(context_id)[x], 4 * x)
    assert x.grad is None
    with pytest.raises(
        GradwireError, match=f"Could not find autograd context with id: {context_id}"
    ):
        autograd.get_gradients(context_id)


def test_roots_may_come_with_gradients(trio: list[Worker]) -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", square, args=(x,))
        autograd.backward(context_id, [y, y.sum()], grad_tensors=[torch.tensor([1.0, 10.0]), None])
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.tensor([4.0, 44.0]))


def test_unusable_roots_are_refused(trio: list[Worker]) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        for roots, complaint in (
            ([], "No tensors provided"),
            ([torch.ones(1)], "requires_grad not set on"),
            ([x * 2], "is not a scalar, all roots need to be scalar"),
            ([torch.ones(1, requires_grad=True)], "does not have a valid gradient function"),
        ):
            with pytest.raises(ValueError, match=complaint):
                autograd.backward(context_id, roots)
        for root in ((x * 0).sum(), x.sum(), (x * 2)[:1]):
            with pytest.raises(TypeError, match=r"are given as a list.* write \[loss\]"):
                autograd.backward(context_id, root)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="so are gradients for them"):
            autograd.backward(context_id, [x * 2], grad_tensors=torch.ones(1, 2))  # type: ignore[arg-type]
        assert autograd.get_gradients(context_id) == {}


def test_a_plain_backward_names_the_function_to_call(trio: list[Worker]) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context():
        y = rpc.rpc_sync("worker1", square, args=(x,))
        with pytest.raises(RuntimeError, match=r"gradwire\.autograd\.backward\(context_id"):
            y.sum().backward()


# -- calls outside of any context


def ways_to_call(x: Tensor) -> dict[str, Tensor]:
    """Return results of calls that require gradients, by the name that errors give the call."""
    rref = rpc.remote("worker1", square, args=(x,))
    return {
        "square": rpc.rpc_sync("worker1", square, args=(x,)),
        "scale": rpc.rpc_async("worker1", scale, args=(x, torch.tensor(2.0))).wait(),
        "in_a_container": rpc.rpc_sync("worker1", in_a_container, args=(x,))["results"][1],
        "weigh": rpc.rpc_sync("worker1", weigh, args=(torch.ones(2),)),
        "RRef.to_here()": rref.to_here(),
        "Linear.forward": rpc.remote("worker1", torch.nn.Linear, (2, 2)).rpc_sync().forward(x),
        "grown": rpc.rpc_sync("worker1", grown, args=(x,)),
    }


def in_a_container(x: Tensor) -> dict[str, Any]:
    return {"name": {1, 2}, "results": [x.detach(), x * 2]}


def grown(x: Tensor) -> Tensor:
    """Return a tensor that does not travel inside the message."""
    return x.repeat(10_000)


def test_a_result_from_outside_a_context_says_so_in_every_backward(trio: list[Worker]) -> None:
    x = torch.ones(2, requires_grad=True)
    for name, y in ways_to_call(x).items():
        assert y.requires_grad
        complaint = rf"the result of {re.escape(name)} on worker 'worker1', called outside of auto"
        with pytest.raises(RuntimeError, match=complaint):
            y.sum().backward()
        with autograd.context() as context_id:
            z = rpc.rpc_sync("worker2", square, args=(y,))
            for loss in (y.sum(), z.sum() + x.sum()):
                with pytest.raises(RuntimeError, match=complaint):
                    autograd.backward(context_id, [loss], retain_graph=True)
            assert autograd.get_gradients(context_id) == {}
    assert x.grad is None
    until(lambda: not open_contexts(trio), "all contexts are released")


def test_a_result_from_outside_a_context_is_an_ordinary_value(trio: list[Worker]) -> None:
    x = torch.ones(2, requires_grad=True)
    for y in ways_to_call(x).values():
        values = y.detach().clone()
        own = y.detach().requires_grad_()
        (own * 3).sum().backward()
        assert own.grad is not None
        assert torch.equal(own.grad, torch.full_like(own, 3.0))
        y.mul_(2)
        assert torch.equal(y, 2 * values)
        with pytest.raises(RuntimeError, match="called outside of autograd"):
            y.sum().backward()


def test_a_result_got_without_gradients_enabled_says_so_too(trio: list[Worker]) -> None:
    x = torch.ones(2, requires_grad=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = rpc.rpc_sync("worker1", square, args=(x,))
        with autograd.context() as context_id:
            with pytest.raises(RuntimeError, match="called outside of autograd"):
                autograd.backward(context_id, [y.sum()])


def test_what_needs_no_gradient_is_left_alone_outside_a_context(trio: list[Worker]) -> None:
    """A result that requires no gradient, and a copy of a module, which may be trained here."""
    assert rpc.rpc_sync("worker1", square, args=(torch.ones(2),)).grad_fn is None
    for copied in (
        rpc.rpc_sync("worker1", copy.deepcopy, args=(torch.nn.Linear(2, 1),)),
        rpc.remote("worker1", torch.nn.Linear, args=(2, 1)).to_here(),
    ):
        copied(torch.ones(2)).sum().backward()
        assert copied.weight.grad.tolist() == [[1.0, 1.0]]
    assert not open_contexts(trio)


def slope_of_copy(x: Tensor) -> tuple[bool, Tensor]:
    """Differentiate with respect to an argument, on the worker that got it."""
    (x * x).sum().backward()
    assert x.grad is not None
    return x.is_leaf, x.grad


def test_an_argument_from_outside_a_context_is_a_leaf_of_its_own(trio: list[Worker]) -> None:
    x = torch.ones(2, requires_grad=True)
    is_leaf, slope = rpc.rpc_sync("worker1", slope_of_copy, args=(x,))
    assert is_leaf
    assert slope.tolist() == [2.0, 2.0]
    assert x.grad is None


def test_hooks_run_once_on_the_full_gradient(trio: list[Worker]) -> None:
    seen: list[Tensor] = []
    x = torch.ones(2, requires_grad=True)
    middle = x * 2
    middle.register_hook(seen.append)
    with autograd.context() as context_id:
        a = rpc.rpc_sync("worker1", square, args=(middle,))
        b = rpc.rpc_sync("worker2", scale, args=(middle, torch.tensor(3.0)))
        autograd.backward(context_id, [(a + b + middle).sum()])
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((2,), 16.0))
    assert [hook.tolist() for hook in seen] == [[8.0, 8.0]]


@pytest.mark.parametrize("together", [False, True])
def test_a_hook_on_several_tensors_runs_for_each_part_of_the_graph(
    trio: list[Worker], together: bool
) -> None:
    seen: list[list[bool]] = []
    leaves = [torch.ones(2, requires_grad=True) for _ in range(2)]
    with autograd.context(into_grad=True) as context_id:
        a, b = (leaf * 2 for leaf in leaves)
        register_multi_grad_hook([a, b], lambda got: seen.append([g is not None for g in got]))
        if together:
            loss = rpc.rpc_sync("worker1", scale, args=(a, b)).sum()
        else:
            loss = sum(rpc.rpc_sync("worker1", square, args=(part,)).sum() for part in (a, b))
        autograd.backward(context_id, [loss])
    assert sorted(seen) == ([[True, True]] if together else [[False, True], [True, False]])


@pytest.mark.parametrize("into_grad", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_a_hook_applies_to_the_passes_after_its_registration(
    trio: list[Worker], into_grad: bool, gated: bool
) -> None:
    """Also on a received tensor, and after a pass that has run its node."""
    x = torch.ones(2, requires_grad=True)
    with autograd.context(into_grad) as context_id:
        arrived = rpc.rpc_sync("worker1", square, args=(x,))
        loss = rpc.rpc_sync("worker2", square, args=(arrived,)).sum()
        if gated:
            loss = loss + arrived.sum()
        autograd.backward(context_id, [loss], retain_graph=True)
        arrived.register_hook(lambda gradient: gradient * 100)
        autograd.backward(context_id, [loss])
        gradient = x.grad if into_grad else autograd.get_gradients(context_id)[x]
    once = 6.0 if gated else 4.0
    assert gradient is not None
    assert gradient.tolist() == [101 * once] * 2


def multiply_gradient_elsewhere(x: Tensor) -> Tensor:
    """Register a hook that makes a call in the middle of a pass."""
    y = x * 1
    y.register_hook(lambda gradient: rpc.rpc_sync("worker2", torch.mul, args=(gradient, 10)))
    return y * 2


def test_hooks_may_make_calls(trio: list[Worker]) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", multiply_gradient_elsewhere, args=(x,)).sum()
        autograd.backward(context_id, [loss])
        assert autograd.get_gradients(context_id)[x].tolist() == [20.0, 20.0]


def checkpointed(x: Tensor, use_reentrant: bool) -> Tensor:
    y: Tensor = checkpoint(square, x, use_reentrant=use_reentrant)
    return y


def square_there(x: Tensor) -> Tensor:
    return rpc.rpc_sync("worker1", square, args=(x,)) * x


def test_checkpoints_work_in_callees_and_around_calls(trio: list[Worker]) -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", checkpointed, args=(x, False))
        z = checkpoint(square_there, x, use_reentrant=False)
        autograd.backward(context_id, [(y + z).sum()])
        assert torch.equal(autograd.get_gradients(context_id)[x], 2 * x + 3 * x * x)


def test_reentrant_checkpoints_are_refused_by_torch(trio: list[Worker]) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", checkpointed, args=(x, True)).sum()
        with pytest.raises(RuntimeError, match="use_reentrant=True"):
            autograd.backward(context_id, [loss])


def test_post_accumulate_hooks_run_when_gradients_go_into_grad(trio: list[Worker]) -> None:
    x = torch.ones(2, requires_grad=True)
    seen: list[Any] = []
    x.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.tolist()))
    with autograd.context(into_grad=True) as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", square, args=(x,)).sum()])
        assert autograd.get_gradients(context_id) == {}
    assert seen == [[2.0, 2.0]]


def test_ddp_averages_gradients_that_come_through_calls(tmp_path: Path) -> None:
    """Two trainers have a replica each. The layers before and behind it are on another worker."""

    def body(rank: int) -> list[float] | None:
        if rank == 2:
            return None
        store = torch.distributed.FileStore(str(tmp_path / "store"), 2)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
        model = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.ones_(model.weight)
        replica = torch.nn.parallel.DistributedDataParallel(model)
        with autograd.context(into_grad=True) as context_id:
            features = rpc.rpc_sync("worker2", square, args=(torch.full((1, 2), 1.0 + rank),))
            loss = rpc.rpc_sync("worker2", square, args=(replica(features),)).sum()
            autograd.backward(context_id, [loss])
        gradient = model.weight.grad
        assert gradient is not None
        torch.distributed.destroy_process_group()
        return gradient[0].tolist()

    # 2 * (w x) * x for x = 1 and x = 4, averaged
    assert run_group(3, body)[:2] == [[34.0, 34.0]] * 2


def test_contexts_nest_and_follow_callbacks(trio: list[Worker]) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as outer:
        a = rpc.rpc_sync("worker1", square, args=(x,))
        with autograd.context() as inner:
            b = rpc.rpc_async("worker2", square, args=(x,)).then(
                lambda f: rpc.rpc_sync("worker1", square, args=(f.wait(),))
            )
            autograd.backward(inner, [b.wait().sum()])
            assert torch.equal(autograd.get_gradients(inner)[x], torch.full((2,), 4.0))
        autograd.backward(outer, [a.sum()])
        assert torch.equal(autograd.get_gradients(outer)[x], torch.full((2,), 2.0))


def residual(x: Tensor, weight: Tensor) -> Tensor:
    return (x * weight).relu()


@pytest.mark.parametrize("into_grad", [False, True])
def test_concurrent_passes_of_one_context_do_not_mix(trio: list[Worker], into_grad: bool) -> None:
    """Torch allows this in one process too."""
    for _ in range(10):
        x = torch.ones(4, dtype=torch.float64, requires_grad=True)
        weight = torch.full((4,), 0.5, dtype=torch.float64)
        with autograd.context(into_grad) as context_id:
            h = x * 1
            for _ in range(8):
                h = h + rpc.rpc_sync("worker1", residual, args=(h, weight))
            loss = h.sum()
            with ThreadPoolExecutor() as threads:
                passes = [
                    threads.submit(
                        copy_context().run,
                        partial(autograd.backward, context_id, [loss], True, grad_tensors=[scale]),
                    )
                    for scale in torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)
                ]
                for running in passes:
                    running.result()
            gradient = x.grad if into_grad else autograd.get_gradients(context_id)[x]
        assert gradient is not None
        assert torch.allclose(gradient, torch.full_like(x, 111 * 1.5**8))


def test_concurrent_contexts_do_not_mix(trio: list[Worker]) -> None:
    weight = torch.ones(2, requires_grad=True)
    results: dict[int, list[float]] = {}

    def trainer(number: int) -> None:
        with acting_as(trio[0]):
            with autograd.context() as context_id:
                factor = torch.tensor(float(number))
                y = rpc.rpc_sync("worker1", scale, args=(weight, factor))
                autograd.backward(context_id, [y.sum()])
                results[number] = autograd.get_gradients(context_id)[weight].tolist()

    threads = [threading.Thread(target=trainer, args=(number,)) for number in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {number: [float(number)] * 2 for number in range(60)}


# -- failures


class Refuses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if REFUSE[0]:
            raise ZeroDivisionError("no gradient today")
        return gradient


REFUSE = [True]


def refuse(x: Tensor) -> Tensor:
    return Refuses.apply(x * 2)


def test_a_failed_pass_leaves_no_gradients_and_can_be_repeated(trio: list[Worker]) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        a = rpc.rpc_sync("worker1", square, args=(x,))
        b = rpc.rpc_sync("worker2", refuse, args=(a,))
        loss = (a + b).sum()
        REFUSE[0] = True
        with pytest.raises(ZeroDivisionError, match="no gradient today") as caught:
            autograd.backward(context_id, [loss], retain_graph=True)
        assert 'on worker "worker2"' in str(caught.value.__cause__)
        assert autograd.get_gradients(context_id) == {}
        REFUSE[0] = False
        autograd.backward(context_id, [loss])
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((2,), 6.0))


@pytest.mark.parametrize("into_grad", [False, True])
def test_a_pass_that_reaches_another_context_raises(trio: list[Worker], into_grad: bool) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context(into_grad):
        y = rpc.rpc_sync("worker1", square, args=(x,))
        with autograd.context(into_grad) as inner:
            z = rpc.rpc_sync("worker1", square, args=(y * 2,))
            with pytest.raises(RuntimeError, match="a pass of another context, has reached"):
                autograd.backward(inner, [z.sum()])


WEIGHT = torch.ones(2, requires_grad=True)


def weigh(x: Tensor) -> Tensor:
    return x * WEIGHT


def count_gradients(context_id: int) -> int:
    return len(autograd.get_gradients(context_id))


def test_a_hook_may_read_gradients_of_other_workers_during_a_pass(trio: list[Worker]) -> None:
    x = torch.ones(2, requires_grad=True)
    counts = []
    with autograd.context() as context_id:
        h = x * 2
        h.register_hook(
            lambda _gradient: counts.append(
                rpc.rpc_sync("worker1", count_gradients, args=(context_id,))
            )
        )
        autograd.backward(context_id, [rpc.rpc_sync("worker1", weigh, args=(h,)).sum()])
        assert counts == [0]  # a running pass has stored no gradient yet
        assert rpc.rpc_sync("worker1", count_gradients, args=(context_id,)) == 1


@pytest.mark.parametrize("action", ["drop", "cut"])
@pytest.mark.parametrize("kind", [Kind.BACKWARD_AUTOGRAD_REQ, Kind.PYTHON_RET])
def test_lost_messages_end_the_pass(action: Any, kind: Kind) -> None:
    x = torch.ones(2, requires_grad=True)
    transport = FaultyTransport(transports_named("in_process")[0], [])
    with cluster(2, transports=[transport]) as workers:
        with acting_as(workers[0]):
            with autograd.context() as context_id:
                loss = rpc.rpc_sync("worker1", square, args=(x,)).sum()
                transport.add(Fault(action, kind=kind, times=1))
                with pytest.raises(CallError):
                    autograd.backward(context_id, [loss], retain_graph=True, timeout=0.3)
                assert autograd.get_gradients(context_id) == {}
                autograd.backward(context_id, [loss])
                assert torch.equal(autograd.get_gradients(context_id)[x], 2 * x)


def test_a_worker_killed_during_the_pass_ends_it() -> None:
    def body(rank: int) -> str | None:
        if rank == 1:
            threading.Event().wait(30)
            return None
        x = torch.ones(2, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", die_in_backward, args=(x,)).sum()
            try:
                autograd.backward(context_id, [loss])
            except CallError as error:
                return str(error)
            finally:
                rpc.shutdown(graceful=False)
        return "it lived"

    with group(2, body, shut_down=False) as started:
        assert "worker 'worker1' was lost" in started[0].result()


class Dies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return gradient


def die_in_backward(x: Tensor) -> Tensor:
    return Dies.apply(x)


def test_contexts_of_a_lost_creator_are_released() -> None:
    def body(rank: int) -> int | None:
        if rank == 1:
            context = autograd.context()
            context.__enter__()
            rpc.rpc_sync("worker0", square, args=(torch.ones(2, requires_grad=True),))
            os.kill(os.getpid(), signal.SIGKILL)
        contexts = current.runtime().contexts
        until(lambda: bool(SEEN), "the other worker has called")
        until(lambda: not len(contexts), "the context is released")
        rpc.shutdown(graceful=False)
        return len(contexts)

    with group(2, body, shut_down=False) as started:
        assert started[0].result() == 0


def test_a_released_context_keeps_no_tensor(trio: list[Worker]) -> None:
    x = torch.ones(1000, requires_grad=True)
    for number in range(50):
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", refuse, args=(x,)).sum()
            REFUSE[0] = number % 5 == 0
            try:
                autograd.backward(context_id, [loss])
            except ZeroDivisionError:
                assert number % 5 == 0
        del loss
    until(
        lambda: not open_contexts(trio),
        "all contexts are released",
    )
    gc.collect()
    alive = [o for o in gc.get_objects() if type(o) is Tensor and o.shape == (1000,)]
    assert len(alive) == 1, "only the leaf is left"


def test_gradients_across_processes_equal_those_of_one_process() -> None:
    def body(rank: int) -> list[float] | None:
        if rank:
            return None
        x = torch.arange(4.0, requires_grad=True)
        with autograd.context() as context_id:
            y = rpc.rpc_sync("worker1", square, args=(x * 2,))
            z = rpc.rpc_sync("worker2", scale, args=(y, x))
            autograd.backward(context_id, [z.sum()])
            return autograd.get_gradients(context_id)[x].tolist()

    x = torch.arange(4.0, requires_grad=True)
    (square(x * 2) * x).sum().backward()
    assert x.grad is not None
    assert run_group(3, body)[0] == x.grad.tolist()


# -- gradients as values


class Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, gradient


def test_gradients_can_be_changed_in_place_without_changing_others(trio: list[Worker]) -> None:
    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        autograd.backward(context_id, [Fork.apply(x, y).sum()])
        gradients = autograd.get_gradients(context_id)
        gradients[x].mul_(5)
        assert gradients[y].tolist() == [1, 1, 1]


def test_a_sparse_leaf_that_was_sent_gets_its_gradient(trio: list[Worker]) -> None:
    x = torch.eye(2).to_sparse().requires_grad_()
    with autograd.context() as context_id:
        there = rpc.rpc_sync("worker1", torch.mul, args=(x, 3.0))
        autograd.backward(context_id, [torch.sparse.sum(there)])
        assert autograd.get_gradients(context_id)[x].to_dense().diagonal().tolist() == [3, 3]


def test_an_ended_context_says_that_its_block_has_ended(memory_pair: list[Worker]) -> None:
    with acting_as(memory_pair[0]):
        with autograd.context() as context_id:
            pass
        with pytest.raises(ContextReleased, match=f"with id: {context_id}.*block ended"):
            autograd.get_gradients(context_id)
        with pytest.raises(ContextReleased, match="use it inside the block"):
            autograd.backward(context_id, [torch.ones((), requires_grad=True) * 2])


def test_a_context_that_was_not_entered_is_refused(memory_pair: list[Worker]) -> None:
    with acting_as(memory_pair[0]):
        context: Any = autograd.context()
        with pytest.raises(TypeError, match=r"Write `with autograd.context\(\) as context_id:`"):
            autograd.get_gradients(context)
