"""Plans that are made before the pass: changes between planning and the pass take effect."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire import autograd, rpc
from gradwire._core.autograd.boundary import Recv, Send
from gradwire._core.autograd.context import Context
from gradwire._core.autograd.plan import Plan, make_roots
from gradwire._core.autograd.recorder import Recorder
from gradwire._core.ids import IdSource
from gradwire.errors import GradwireError
from gradwire.testing import runtime_of
from gradwire.worker import Worker

WEIGHT = torch.tensor([2.0, 3.0])
SEEN: list[list[float]] = []


def use_weight(x: Tensor) -> Tensor:
    return x * WEIGHT


def freeze_weight(frozen: bool) -> None:
    WEIGHT.requires_grad_(not frozen)


def weight_gradient(context_id: int) -> list[float] | None:
    gradient = autograd.get_gradients(context_id).get(WEIGHT)
    return None if gradient is None else gradient.tolist()


def plan_of(context: Context) -> Plan:
    context.plan_ahead()
    plan = context._plan
    assert plan is not None
    return plan


@pytest.fixture
def context() -> Context:
    return Context(1, IdSource(0))


def test_both_workers_of_a_call_plan_ahead(trio: list[Worker]) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        rpc.rpc_sync("worker1", use_weight, args=(x,))
        for worker in trio[:2]:
            [context] = [c for c in runtime_of(worker).contexts.all() if c.id == context_id]
            plan = context._plan
            assert plan is not None
            assert len(plan.sends) == 1


@pytest.mark.parametrize("frozen", [True, False])
def test_a_leaf_may_be_frozen_or_unfrozen_before_the_pass(trio: list[Worker], frozen: bool) -> None:
    x = torch.ones(2, requires_grad=True)
    freeze_weight(False)
    y = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        z = rpc.rpc_sync("worker1", use_weight, args=(x,)) + rpc.rpc_sync(
            "worker1", torch.mul, args=(y, 2)
        )
        rpc.rpc_sync("worker1", freeze_weight, args=(frozen,))
        y.requires_grad_(not frozen)
        autograd.backward(context_id, [z.sum()])
        expected = None if frozen else [1.0, 1.0]
        assert rpc.rpc_sync("worker1", weight_gradient, args=(context_id,)) == expected
        gradients = autograd.get_gradients(context_id)
        assert gradients[x].tolist() == [2, 3]
        assert (y in gradients) is not frozen
    freeze_weight(False)


def test_a_hook_registered_after_the_call_sees_the_whole_gradient(trio: list[Worker]) -> None:
    x = torch.ones(2, requires_grad=True)
    SEEN.clear()
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", use_weight, args=(x,))
        z = rpc.rpc_sync("worker2", use_weight, args=(x,))
        x.register_hook(lambda gradient: SEEN.append(gradient.tolist()))
        autograd.backward(context_id, [(y + z).sum()])
    assert SEEN == [[4, 6]]


@pytest.mark.parametrize("into_grad", [False, True])
def test_a_leaf_whose_data_was_replaced_gets_its_gradient(
    trio: list[Worker], into_grad: bool
) -> None:
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _gradient: None)
    with autograd.context(into_grad) as context_id:
        y = rpc.rpc_sync("worker1", torch.mul, args=(x, 2))
        x.data = x.data.double()
        autograd.backward(context_id, [y.sum()])
        gradient = x.grad if into_grad else autograd.get_gradients(context_id)[x]
    assert gradient is not None
    assert gradient.tolist() == [2, 2]


def test_an_interrupt_while_planning_leaves_no_call_open(
    trio: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(2, requires_grad=True)
    unanswered = rpc.rpc_async("worker1", wait_for_end)
    assert runtime_of(trio[0]).agent.metrics.open_calls() == 1
    MAY_END.set()
    unanswered.wait()
    with autograd.context():
        monkeypatch.setattr(Recorder, "waiting", interrupted_on(trio[0]))
        with pytest.raises(KeyboardInterrupt):
            rpc.rpc_sync("worker1", use_weight, args=(x,))
    assert runtime_of(trio[0]).agent.metrics.open_calls() == 0


MAY_END = threading.Event()


def wait_for_end() -> None:
    assert MAY_END.wait(30)


def interrupted_on(worker: Worker) -> Callable[..., None]:
    def waiting(recorder: Recorder, _tags: Any) -> None:
        if recorder._contexts is runtime_of(worker).contexts:
            raise KeyboardInterrupt

    return waiting


def test_an_error_at_the_begin_of_a_pass_reaches_the_caller(
    trio: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> Any:
        raise GradwireError("this is why")

    runtime_of(trio[1]).engine.register_leaf_groups(refuse)
    for _ in range(10):
        x = torch.ones(2, requires_grad=True)
        with autograd.context() as context_id:
            y = rpc.rpc_sync("worker1", torch.mul, args=(x, 2))
            with pytest.raises(GradwireError, match="this is why"):
                autograd.backward(context_id, [y.sum()])


def _freeze(leaf: Tensor) -> None:
    leaf.requires_grad_(False)


def _watch(leaf: Tensor) -> None:
    leaf.register_hook(lambda _gradient: None)


@pytest.mark.parametrize("change", [_freeze, _watch])
@pytest.mark.parametrize("is_sent", [True, False])
def test_a_plan_knows_whether_it_still_holds(
    context: Context, change: Callable[[Tensor], Any], is_sent: bool
) -> None:
    leaf = torch.ones(2, requires_grad=True)
    context.sends[1] = Send(1, 1, [leaf if is_sent else leaf * 2], None)
    plan = plan_of(context)
    assert plan.still_holds()
    change(leaf)
    assert plan.still_holds() is (change is _watch and not is_sent)
    assert context.take_plan() is not plan or plan.still_holds()


def test_a_plan_does_not_hold_once_a_frozen_leaf_requires_gradients(context: Context) -> None:
    leaf = torch.ones(2, requires_grad=True)
    context.sends[1] = Send(1, 1, [leaf, leaf * 2], None)
    leaf.requires_grad_(False)
    plan = plan_of(context)
    assert plan.still_holds()
    leaf.requires_grad_(True)
    assert not plan.still_holds()


def test_a_plan_does_not_hold_once_another_tensor_of_a_message_arrives(context: Context) -> None:
    recv = context.recvs[1] = Recv(1, 1)
    recv.take(torch.ones(2, requires_grad=True))
    plan = plan_of(context)
    assert plan.still_holds()
    recv.take(torch.ones(2, requires_grad=True))
    assert not plan.still_holds()


def test_a_plan_is_used_once_and_can_be_extended(context: Context) -> None:
    leaf = torch.ones(2, requires_grad=True)
    context.sends[1] = Send(1, 1, [leaf * 2], None)
    plan = plan_of(context)
    context.sends[2] = Send(2, 1, [leaf * 3], None)
    taken = context.take_plan()
    assert taken is plan
    taken.add(context.sends, {})
    taken.finish(make_roots([leaf.sum()]))
    [region] = taken.regions  # the leaf joins the three graphs
    assert len(region.sources) == 3
    assert [taken.region_of(send) for send in (1, 2, 3)] == [region, region, None]
    assert context.take_plan() is not plan


def test_a_graph_that_cannot_be_planned_ahead_is_left_to_the_pass(context: Context) -> None:
    class Broken(Send):
        def edge(self, _position: int) -> Any:
            raise GradwireError("broken")

    context.sends[1] = Broken(1, 1, [torch.ones(2, requires_grad=True) * 2], None)
    context.plan_ahead()
    assert context._plan is None


@pytest.mark.parametrize("more", [1, 2, 9])
def test_large_graphs_are_planned_in_pieces(
    context: Context, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    monkeypatch.setattr("gradwire._core.autograd.context._NODES_AHEAD", 10)
    leaf, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    x, y = leaf * 1, other * 1
    for _ in range(25):
        x, y = x + 1, y + 1
    context.sends[1] = Send(1, 1, [x], None)
    context.sends[2] = Send(2, 1, [y], None)
    plan = plan_of(context)
    assert len(plan._region_of_node) == 2 + 10
    for _ in range(more):
        context.plan_ahead()
    assert len(plan._region_of_node) <= 2 + 10 + 10 * more
    assert (len(plan._region_of_node) == 54) == (more == 9), (
        "the whole graph after nine more pieces"
    )
    context.sends[3] = Send(3, 1, [x * y], None)
    taken = context.take_plan()
    assert taken is plan
    taken.add(context.sends, {})
    taken.finish([])
    (region,) = taken.regions
    assert {id(planned_leaf) for planned_leaf in region.leaves} == {id(leaf), id(other)}
    assert len(region.sources) == 3


def test_a_plan_that_was_made_ahead_may_be_extended_without_limit(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradwire._core.autograd.context._NODES_AHEAD", 10)
    x = torch.ones(2, requires_grad=True) * 1
    context.sends[1] = Send(1, 1, [x], None)
    plan = plan_of(context)
    for _ in range(20):
        x = x + 1
    taken = context.take_plan()
    assert taken is plan
    taken.finish(make_roots([x.sum()]))
    assert len(taken.regions) == 1


def test_a_leaf_may_be_frozen_before_a_plan_reaches_it() -> None:
    leaf = torch.ones(2, requires_grad=True)
    plan = Plan(direct_leaves=False)
    plan.add({1: Send(1, 1, [leaf], None)}, {}, limit=0)
    assert plan.still_holds()
    leaf.requires_grad_(False)
    assert not plan.still_holds()


def test_a_released_context_plans_nothing(context: Context) -> None:
    context.release()
    context.plan_ahead()
    assert context._plan is None


def test_the_pass_completes_a_plan_of_many_messages(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradwire._core.autograd.context._MESSAGES_AHEAD", 2)
    leaf = torch.ones(2, requires_grad=True)
    for send_id in range(1, 5):
        context.sends[send_id] = Send(send_id, 1, [leaf * 2], None)
        context.plan_ahead()
    plan = context.take_plan()
    assert len(plan.sends) == 2
    plan.add(context.sends, {})
    plan.finish([])
    assert len(plan.regions[0].sources) == 4


# -- the gradients of roots, and the resulting gradients


def test_the_gradients_of_two_roots_share_no_storage(trio: list[Worker]) -> None:
    kept: list[Tensor] = []
    for _ in range(2):
        x = torch.ones(2, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", use_weight, args=(x,)).sum()
            loss.register_hook(lambda gradient: kept.append(gradient.detach()))
            autograd.backward(context_id, [loss])
    first, second = kept
    first.zero_()
    assert second.item() == 1


def test_changing_the_gradient_of_a_root_affects_no_other_pass(trio: list[Worker]) -> None:
    for factor in (2, 1):
        x = torch.ones(2, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", torch.mul, args=(x, 1)).sum()
            if factor != 1:
                loss.register_hook(lambda gradient: gradient.data.mul_(2) and None)
            autograd.backward(context_id, [loss])
            assert autograd.get_gradients(context_id)[x].tolist() == [factor, factor]


@pytest.mark.parametrize("size", [10, 1000, 100_000])
def test_expanded_gradients_can_be_changed_in_place(trio: list[Worker], size: int) -> None:
    x = torch.ones(size, requires_grad=True)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.sum, args=(x,))])
        gradient = autograd.get_gradients(context_id)[x]
    gradient[0].mul_(2)
    assert gradient.sum().item() == size + 1


def test_roots_are_checked_in_the_order_of_torch() -> None:
    """A leaf that is not a scalar is refused because it is not a scalar."""
    with pytest.raises(ValueError, match="requires_grad not set on root"):
        make_roots([torch.ones(2)])
    with pytest.raises(ValueError, match="all roots need to be scalar"):
        make_roots([torch.ones(2, requires_grad=True)])
    with pytest.raises(ValueError, match="valid gradient function"):
        make_roots([torch.ones((), requires_grad=True)])
