"""At the end of a pass torch accumulates the leaves of a group, and `.grad` is put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from gradwire import Worker, autograd, rpc
from gradwire._core.autograd.leaf_accumulation import LeafGroup
from gradwire.errors import GradwireError
from gradwire.testing import runtime_of


class Halved(LeafGroup):
    """Halves the gradients of its leaves when torch accumulates them."""

    def __init__(self, *leaves: Tensor):
        self.leaves = leaves
        self.seen: list[Tensor] = []
        self.problem: Exception | None = None
        for leaf in leaves:
            leaf.register_post_accumulate_grad_hook(self._halve)

    def _halve(self, leaf: Tensor) -> None:
        assert leaf.grad is not None
        self.seen.append(leaf)
        leaf.grad /= 2

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        yield
        if self.problem is not None:
            raise self.problem

    def __str__(self) -> str:
        return "the halved leaves"


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, requires_grad=True)


def scaled(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight


def test_accumulate_hooks_change_the_gradient_and_grad_stays(trio: list[Worker]) -> None:
    x, weight, other = leaf(1.0, 2.0), leaf(3.0, 4.0), leaf(5.0, 6.0)
    group = Halved(x, weight)
    runtime_of(trio[0]).engine.register_leaf_groups(lambda: [group])
    kept = x.grad = torch.tensor([7.0, 7.0])
    with autograd.context() as context_id:
        # x is sent, weight is used in two regions, other is in no group.
        middle = rpc.rpc_sync("worker1", scaled, args=(x * weight, other))
        autograd.backward(context_id, [(middle * weight).sum()])
        gradients = autograd.get_gradients(context_id)
    assert gradients[x].tolist() == [9 * 5 / 2, 16 * 6 / 2]
    assert gradients[weight].tolist() == [2 * 3 * 5 / 2, 2 * 4 * 2 * 6 / 2]
    assert gradients[other].tolist() == [9.0, 32.0]
    assert len(group.seen) == 2
    assert x.grad is kept
    assert kept.tolist() == [7.0, 7.0]
    assert weight.grad is None
    assert other.grad is None


def test_later_passes_add_to_the_gradients_of_the_context(trio: list[Worker]) -> None:
    x = leaf(1.0)
    runtime_of(trio[0]).engine.register_leaf_groups(lambda: [group])
    group = Halved(x)
    with autograd.context() as context_id:
        for _ in range(2):
            autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.mul, args=(x, 8)).sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == [(8 / 2 + 8) / 2]


WEIGHT = leaf(3.0)


def times_weight(x: Tensor) -> Tensor:
    return x * WEIGHT


def gradient_of_weight(context_id: int) -> Tensor:
    return autograd.get_gradients(context_id)[WEIGHT]


def test_a_leaf_group_is_accumulated_on_its_own_worker(trio: list[Worker]) -> None:
    group = Halved(WEIGHT)
    runtime_of(trio[1]).engine.register_leaf_groups(lambda: [group])
    x = leaf(2.0)
    with autograd.context() as context_id:
        y = x
        for _ in range(2):
            y = rpc.rpc_sync("worker1", times_weight, args=(y,))
        loss = y.sum()
        autograd.backward(context_id, [loss], retain_graph=True)
        autograd.backward(context_id, [loss])  # worker1 asks for the outcome of the first pass
        assert autograd.get_gradients(context_id)[x].tolist() == [18.0]
        there = rpc.rpc_sync("worker1", gradient_of_weight, args=(context_id,))
    assert there.tolist() == [(12 / 2 + 12) / 2]
    assert WEIGHT.grad is None


def test_hooks_on_a_leaf_run_once(trio: list[Worker]) -> None:
    x = leaf(1.0)
    group = Halved(x)
    runtime_of(trio[0]).engine.register_leaf_groups(lambda: [group])
    handle = x.register_hook(lambda gradient: gradient * 3)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.mul, args=(x, 2)).sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == [2 * 3 / 2]
    assert list(x._backward_hooks or ()) == [handle.id]


def sparse_rows(weight: Tensor) -> Tensor:
    return torch.nn.functional.embedding(torch.tensor([1]), weight, sparse=True)


@pytest.mark.parametrize("function", [sparse_rows, torch.Tensor.relu])
def test_gradients_of_any_layout_are_accumulated(
    trio: list[Worker], function: Callable[[Tensor], Tensor]
) -> None:
    weight = torch.ones(3, 2, requires_grad=True)
    group = Halved(weight)
    runtime_of(trio[0]).engine.register_leaf_groups(lambda: [group])
    with autograd.context() as context_id:
        rows = rpc.rpc_sync("worker1", torch.mul, args=(function(weight), 4))
        autograd.backward(context_id, [rows.sum()])
        gradient = autograd.get_gradients(context_id)[weight]
    expected = torch.autograd.grad(function(weight).sum() * 2, [weight])[0]
    assert gradient.layout is expected.layout
    assert torch.equal(gradient.to_dense(), expected.to_dense())


def test_a_failure_leaves_grad_as_it_was(trio: list[Worker]) -> None:
    x = leaf(1.0)
    group = Halved(x)
    runtime_of(trio[0]).engine.register_leaf_groups(lambda: [group])
    kept = x.grad = torch.tensor([7.0])
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", torch.mul, args=(x, 2)).sum()
        group.problem = LookupError("not halved")
        with pytest.raises(LookupError, match="not halved"):
            autograd.backward(context_id, [loss], retain_graph=True)
        assert autograd.get_gradients(context_id) == {}
        assert x.grad is kept
        assert kept.tolist() == [7.0]
        group.problem = None
        autograd.backward(context_id, [loss])
        assert autograd.get_gradients(context_id)[x].tolist() == [1.0]


def test_gradients_of_leaf_groups_cannot_be_differentiated(trio: list[Worker]) -> None:
    x = leaf(1.0)
    group = Halved(x)
    runtime_of(trio[0]).engine.register_leaf_groups(lambda: [group])
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", torch.square, args=(x,)).sum()
        with pytest.raises(GradwireError, match="gradients of the halved leaves"):
            autograd.backward(context_id, [loss], create_graph=True)
        (slope,) = autograd.grad(context_id, [loss], [x], create_graph=True)
    assert slope.tolist() == [2.0]
    assert not group.seen
