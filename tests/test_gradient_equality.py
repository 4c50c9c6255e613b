"""Gradients equal those of one process in special cases that random programs do not contain."""

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


# -- backward inside a hook


@pytest.mark.parametrize("into_grad", [False, True])
def test_a_hook_may_differentiate_something_else(trio: list[Worker], into_grad: bool) -> None:
    """Even through the same received tensor, while a backward pass waits for its gradient."""
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    side_gradients: list[Tensor] = []
    with autograd.context(into_grad) as context_id:
        y = rpc.rpc_sync("worker1", square, args=(x,))
        side = (y * 7).sum()
        z = rpc.rpc_sync("worker2", square, args=(y,))
        z.register_hook(
            lambda _: side_gradients.extend(torch.autograd.grad(side, y, retain_graph=True))
        )
        autograd.backward(context_id, [(z + y).sum()])
        gradient = gradient_of(x, context_id, into_grad)
    assert gradient is not None
    assert torch.equal(gradient, (4 * x**3 + 2 * x).detach())
    assert [gradient.tolist() for gradient in side_gradients] == [[7, 7, 7]]


@pytest.mark.parametrize("into_grad", [False, True])
def test_a_plain_backward_in_a_hook_names_the_function_to_call(
    trio: list[Worker], into_grad: bool
) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context(into_grad) as context_id:
        y = rpc.rpc_sync("worker1", square, args=(x,))
        side = (y * 7).sum()
        z = y * 1
        z.register_hook(lambda _: side.backward())
        with pytest.raises(RuntimeError, match=r"gradwire\.autograd\.backward"):
            autograd.backward(context_id, [z.sum()])


# -- under no_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_grad_applies_to_the_called_function(trio: list[Worker], mode: Any) -> None:
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


def test_a_callee_may_enable_gradients_under_no_grad(trio: list[Worker]) -> None:
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
def test_a_view_made_under_no_grad_has_no_gradient_path(
    trio: list[Worker], into_grad: bool
) -> None:
    """Although torch says that the view requires gradients."""
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        view = x.view(2)
    assert view.requires_grad
    with autograd.context(into_grad) as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", square, args=(view,)).sum()])
        assert autograd.get_gradients(context_id) == {}
    assert x.grad is None


@pytest.mark.parametrize("into_grad", [False, True])
@pytest.mark.parametrize("remote", [False, True])
def test_hooks_are_called_in_a_graph_without_leaves(
    trio: list[Worker], into_grad: bool, remote: bool
) -> None:
    x = torch.ones(2, requires_grad=True)
    seen: list[Tensor] = []
    with torch.no_grad():
        view = x.view(2)
    with autograd.context(into_grad) as context_id:
        y = view * 1  # the graph ends here
        y.register_hook(seen.append)
        z = rpc.rpc_sync("worker1", torch.mul, args=(y, 3)) if remote else y * 3
        autograd.backward(context_id, [z.sum()])
    assert [gradient.tolist() for gradient in seen] == [[3, 3]]
    assert x.grad is None


WEIGHT = torch.ones(2, requires_grad=True)


def weigh(x: Tensor) -> Tensor:
    return x * WEIGHT


@pytest.mark.parametrize("into_grad", [False, True])
@pytest.mark.parametrize("use", ["on the callee", "sent", "on the caller"])
def test_a_frozen_leaf_gets_no_gradient(trio: list[Worker], use: str, into_grad: bool) -> None:
    x = torch.ones(2, requires_grad=True)
    try:
        with autograd.context(into_grad) as context_id:
            if use == "on the callee":
                y = rpc.rpc_sync("worker1", weigh, args=(x,))
            elif use == "sent":
                y = rpc.rpc_sync("worker1", torch.mul, args=(x, WEIGHT))
            else:
                y = rpc.rpc_sync("worker1", square, args=(x,)) * WEIGHT
            WEIGHT.requires_grad_(False)
            autograd.backward(context_id, [y.sum()])
            assert gradient_of(x, context_id, into_grad) is not None
            assert gradient_of(WEIGHT, context_id, into_grad) is None
    finally:
        WEIGHT.requires_grad_()


# -- tensors that cannot be differentiated when sent


class Special(Tensor):
    """A subclass of Tensor."""


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2).as_subclass(Special).requires_grad_(),
        lambda: torch.nn.Parameter(torch.eye(2).to_sparse()),
    ],
)
def test_losing_gradients_is_an_error(trio: list[Worker], make: Callable[[], Tensor]) -> None:
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


# -- storage shared with gradients


def test_gradients_can_be_changed_in_place_without_effect_on_seeds_and_hooks(
    trio: list[Worker],
) -> None:
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
    """Torch raises an error for such a view when it is used again, but it has no gradient."""
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        base = 2 * x
        with torch.no_grad():
            view = base[:1]
        seen = rpc.rpc_sync("worker1", torch.mul, args=(view, 3))
        base.mul_(5)
        autograd.backward(context_id, [(base * seen).sum()])
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((2,), 60.0))
