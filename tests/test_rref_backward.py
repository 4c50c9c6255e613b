"""`RRef.backward`: any worker that has an RRef can start a backward pass from its value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire import autograd, rpc
from gradwire.errors import GradwireError
from gradwire.worker import Worker


def total(x: Tensor) -> Tensor:
    return x.sum()


def same(x: Any) -> Any:
    return x


def run_backward(loss: rpc.RRef[Tensor], context_id: int) -> None:
    loss.backward(context_id)


def test_the_owner_without_a_context_runs_an_ordinary_pass(trio: list[Worker]) -> None:
    x = torch.ones(3, requires_grad=True)
    loss = rpc.RRef(x.sum())
    loss.backward(retain_graph=True)
    loss.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 3


@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_a_pass_begins_where_the_value_is(trio: list[Worker], to: str) -> None:
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.remote(to, total, (x * 2,))
        loss.backward(context_id, retain_graph=True)
        assert autograd.get_gradients(context_id)[x].tolist() == [2.0] * 3
        loss.backward(context_id)
        assert autograd.get_gradients(context_id)[x].tolist() == [4.0] * 3
    assert x.grad is None


def test_any_worker_with_a_reference_can_start_a_pass(trio: list[Worker]) -> None:
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.remote("worker1", total, (x,))
        rpc.rpc_sync("worker2", run_backward, (loss, context_id))
        assert autograd.get_gradients(context_id)[x].tolist() == [1.0] * 3


def test_values_that_cannot_be_differentiated_are_refused(trio: list[Worker]) -> None:
    with autograd.context() as context_id:
        for text in (rpc.RRef("text"), rpc.remote("worker1", same, ("text",))):
            with pytest.raises(GradwireError, match=r"contain a tensor for .backward\(\)"):
                text.backward(context_id)
        with pytest.raises(GradwireError, match="require 'dist_autograd_ctx_id' to be specified"):
            rpc.remote("worker1", total, (torch.ones(2),)).backward()
        with pytest.raises(ValueError, match="does not have a valid gradient function"):
            rpc.RRef(torch.ones((), requires_grad=True)).backward(context_id)
        with pytest.raises(ValueError, match="scalar"):
            rpc.RRef(torch.ones(2, requires_grad=True) * 2).backward(context_id)
    with pytest.raises(GradwireError, match="Could not find autograd context with id: 100"):
        rpc.RRef(torch.ones(2, requires_grad=True).sum()).backward(100)
