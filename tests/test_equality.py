"""Corners of local autograd that random programs do not come by: the same on workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire import autograd, rpc
from gradwire.errors import EncodingError
from gradwire.worker import Worker


def square(x: Tensor) -> Tensor:
    return x * x


def gradient_of(leaf: Tensor, context_id: int, into_grad: bool) -> Tensor | None:
    return leaf.grad if into_grad else autograd.get_gradients(context_id).get(leaf)


# -- backward inside of backward


@pytest.mark.parametrize("into_grad", [False, True])
def test_a_hook_may_differentiate_something_else(trio: list[Worker], into_grad: bool) -> None:
    """Though it comes by the same received tensor, in the middle of a pass that waits for it."""
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    aside: list[Tensor] = []
    with autograd.context(into_grad) as context_id:
        y = rpc.rpc_sync("worker1", square, args=(x,))
        side = (y * 7).sum()
        z = rpc.rpc_sync("worker2", square, args=(y,))
        z.register_hook(lambda _: aside.extend(torch.autograd.grad(side, y, retain_graph=True)))
        autograd.backward(context_id, [(z + y).sum()])
        found = gradient_of(x, context_id, into_grad)
    assert found is not None
    assert torch.equal(found, (4 * x**3 + 2 * x).detach())
    assert [gradient.tolist() for gradient in aside] == [[7, 7, 7]]


@pytest.mark.parametrize("into_grad", [False, True])
def test_a_plain_backward_in_a_hook_says_what_to_call(trio: list[Worker], into_grad: bool) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context(into_grad) as context_id:
        y = rpc.rpc_sync("worker1", square, args=(x,))
        side = (y * 7).sum()
        z = y * 1
        z.register_hook(lambda _: side.backward())
        with pytest.raises(RuntimeError, match=r"gradwire\.autograd\.backward"):
            autograd.backward(context_id, [z.sum()])


# -- what is not recorded


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_grad_holds_for_what_is_called(trio: list[Worker], mode: Any) -> None:
    weight = torch.ones(2, requires_grad=True)
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        with mode():
            target = rpc.rpc_sync("worker1", relay, args=(weight,))
        assert not target.requires_grad
        autograd.backward(context_id, [(x * target).sum()])
        assert autograd.get_gradients(context_id).keys() == {x}


def relay(x: Tensor) -> Tensor:
    assert not torch.is_grad_enabled()
    return rpc.rpc_sync("worker2", square, args=(x * x,))


def test_what_is_recorded_all_the_same_under_no_grad_counts(trio: list[Worker]) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        with torch.no_grad():
            y = rpc.rpc_sync("worker1", square_with_grad, args=(x,))
        autograd.backward(context_id, [y.sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == [2, 2]


def square_with_grad(x: Tensor) -> Tensor:
    with torch.enable_grad():
        return x * x


@pytest.mark.parametrize("into_grad", [False, True])
def test_a_view_made_under_no_grad_leads_nowhere(trio: list[Worker], into_grad: bool) -> None:
    """Though torch says that it requires gradients."""
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        view = x.view(2)
    assert view.requires_grad
    with autograd.context(into_grad) as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", square, args=(view,)).sum()])
        assert autograd.get_gradients(context_id) == {}
    assert x.grad is None


@pytest.mark.parametrize("into_grad", [False, True])
@pytest.mark.parametrize("far", [False, True])
def test_hooks_are_called_where_a_graph_leads_nowhere(
    trio: list[Worker], into_grad: bool, far: bool
) -> None:
    x = torch.ones(2, requires_grad=True)
    seen: list[Tensor] = []
    with torch.no_grad():
        view = x.view(2)
    with autograd.context(into_grad) as context_id:
        y = view * 1  # behind it there is nothing
        y.register_hook(seen.append)
        z = rpc.rpc_sync("worker1", torch.mul, args=(y, 3)) if far else y * 3
        autograd.backward(context_id, [z.sum()])
    assert [gradient.tolist() for gradient in seen] == [[3, 3]]
    assert x.grad is None


WEIGHT = torch.ones(2, requires_grad=True)


def weigh(x: Tensor) -> Tensor:
    return x * WEIGHT


@pytest.mark.parametrize("into_grad", [False, True])
@pytest.mark.parametrize("way", ["used there", "sent", "used here"])
def test_a_leaf_that_was_frozen_gets_nothing(trio: list[Worker], way: str, into_grad: bool) -> None:
    x = torch.ones(2, requires_grad=True)
    try:
        with autograd.context(into_grad) as context_id:
            if way == "used there":
                y = rpc.rpc_sync("worker1", weigh, args=(x,))
            elif way == "sent":
                y = rpc.rpc_sync("worker1", torch.mul, args=(x, WEIGHT))
            else:
                y = rpc.rpc_sync("worker1", square, args=(x,)) * WEIGHT
            WEIGHT.requires_grad_(False)
            autograd.backward(context_id, [y.sum()])
            assert gradient_of(x, context_id, into_grad) is not None
            assert gradient_of(WEIGHT, context_id, into_grad) is None
    finally:
        WEIGHT.requires_grad_()


# -- what is sent


class Special(Tensor):
    """Not a plain tensor."""


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2).as_subclass(Special).requires_grad_(),
        lambda: torch.nn.Parameter(torch.eye(2).to_sparse()),
    ],
)
def test_gradients_are_not_lost_without_a_word(
    trio: list[Worker], make: Callable[[], Tensor]
) -> None:
    rpc.rpc_sync("worker1", square, args=(make(),))
    with autograd.context():
        with pytest.raises(EncodingError, match=r"argument 0 .* send a plain tensor"):
            rpc.rpc_sync("worker1", square, args=(make(),))
        rpc.rpc_sync("worker1", square, args=(make().detach(),))
        with pytest.raises(EncodingError, match="send a plain tensor"):
            rpc.rpc_sync("worker1", special_square, args=(torch.ones(2, requires_grad=True),))


def special_square(x: Tensor) -> Tensor:
    return (x * x).as_subclass(Special)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_compressed_sparse_leaf_gets_its_gradient(trio: list[Worker]) -> None:
    x = torch.eye(2).to_sparse_csr().requires_grad_()
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", dense, args=(x,)).sum()])
        assert autograd.get_gradients(context_id)[x].to_dense().tolist() == [[1, 0], [0, 1]]


def dense(x: Tensor) -> Tensor:
    return x.to_dense()


# -- what others hold


def test_gradients_may_be_changed_in_place_whoever_else_has_seen_them(trio: list[Worker]) -> None:
    x = torch.ones(2, requires_grad=True)
    seed = torch.ones(2)
    seen: list[Tensor] = []
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", square, args=(x.detach(),)) + x
        autograd.backward(context_id, [y], retain_graph=True, grad_tensors=[seed])
        autograd.get_gradients(context_id)[x].mul_(0.1)
        assert seed.tolist() == [1, 1]
    with autograd.context() as context_id:
        x.register_hook(seen.append)
        y = rpc.rpc_sync("worker1", square, args=(x,))
        autograd.backward(context_id, [y.sum()])
        autograd.get_gradients(context_id)[x].mul_(0.1)
        assert [gradient.tolist() for gradient in seen] == [[2, 2]]


def test_a_complex_root_needs_a_gradient(trio: list[Worker]) -> None:
    x = torch.ones((), dtype=torch.complex64, requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", square, args=(x,))
        with pytest.raises(ValueError, match="a root is complex"):
            autograd.backward(context_id, [y])


def test_the_base_of_a_view_from_under_no_grad_may_change_after_the_view_was_sent(
    trio: list[Worker],
) -> None:
    """Torch refuses to look at such a view again; but it has no gradient anyway."""
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        base = 2 * x
        with torch.no_grad():
            view = base[:1]
        seen = rpc.rpc_sync("worker1", torch.mul, args=(view, 3))
        base.mul_(5)
        autograd.backward(context_id, [(base * seen).sum()])
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((2,), 60.0))
