"""The two ends of a differentiable message, as nodes of the local autograd graphs.

        worker A                                        worker B

    leaf ── op ── x ── end  · · · · message · · · ·  anchor ── x' ── op ── y
                        ^                               |
            gradients enter here                gradients leave here

An *end* hangs on a tensor that has left (a leaf is its own end): giving it a gradient is how
backward goes on from there. An *anchor* is the node that a tensor which arrived comes from: what
backward brings it is what has to be sent to the end.

Both are made by an operation of torch that gives a tensor the memory of another, like a view, but
without autograd taking it for one: what is done in place later, to either of them, is nothing to
the other's history.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

Gradients = Sequence["Tensor | None"]

_alias = torch.ops.aten._unsafe_view.default._op
#: Of larger tensors no memory is held on to.
_SMALL_BYTES = 4096


def _like(tensor: Tensor) -> Tensor:
    alias: Tensor
    if torch.is_grad_enabled() and tensor.layout is torch.strided:
        alias = _alias(tensor, tensor.shape)
        return alias
    # Whatever mode the calling code is in.
    with torch.inference_mode(False), torch.enable_grad():
        strided = tensor.layout is torch.strided
        alias = _alias(tensor, tensor.shape) if strided else tensor.clone()
    return alias


def _let_go_of_memory(tensor: Tensor) -> None:
    """Keep the place in the graph; the elements are not needed there."""
    if tensor.layout is torch.strided and tensor.nbytes > _SMALL_BYTES:
        tensor.data = tensor.data.new_empty(())


def edge_behind(node: Any) -> GradientEdge:
    """Where an alias leads to."""
    return GradientEdge(*node.next_functions[0])


def edge_of_leaf(leaf: Tensor) -> GradientEdge:
    """Where the gradient of a leaf goes. torch itself says so only of what it can make views of."""
    return edge_behind(_like(leaf).grad_fn)


class Send:
    """A differentiable message that has left."""

    __slots__ = ("about", "ends", "id", "to")

    def __init__(self, id: int, to: int, tensors: Sequence[Tensor], about: Any):
        self.id = id
        self.to = to
        #: What has answered, or in a tuple what was called; for errors.
        self.about = about
        self.ends = [tensor if tensor.grad_fn is None else _like(tensor) for tensor in tensors]
        for end in self.ends:
            if end.grad_fn is not None:
                _let_go_of_memory(end)

    def target(self, position: int) -> Tensor | GradientEdge:
        """What the gradient of one of the tensors goes into."""
        end = self.ends[position]
        return end if end.grad_fn is None else edge_behind(end.grad_fn)


class Recv:
    """A differentiable message that has arrived."""

    __slots__ = ("anchors", "id", "sender")

    def __init__(self, id: int, sender: int):
        self.id = id
        self.sender = sender
        self.anchors: list[Any] = []

    def take(self, tensor: Tensor) -> Tensor:
        """One of its tensors, a leaf; gives the one that user code gets to see."""
        tensor._backward_hooks = _LEAF_HOOKS
        arrived = _like(tensor)
        self.anchors.append(arrived.grad_fn)
        _let_go_of_memory(tensor)
        return arrived


def _refuse(_gradient: Tensor) -> None:
    """Backward has come to the leaf behind an anchor."""
    if running.gate is None:
        raise RuntimeError(
            "a plain backward() has reached a value that came from another worker. Call "
            "gradwire.autograd.backward(context_id, [loss]) inside the context the value was "
            "computed in"
        )


_LEAF_HOOKS: Any = {0: _refuse}


class Running(threading.local):
    """What a thread does when backward comes to a gate, and whether torch puts gradients into
    `.grad` meanwhile; set for every run of a region."""

    gate: Callable[[Send], Gradients] | None = None
    into_grad = False


running = Running()


def make_gate(send: Send) -> Tensor:
    """A token; backward from it waits for the gradients of what was sent."""
    with torch.enable_grad():
        token: Tensor = _Gate.apply(send, *send.ends)  # type: ignore[no-untyped-call]
    return token


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, send: Send, *_ends: Tensor) -> Tensor:
        ctx.send = send
        # A scalar on the CPU: the node then runs on the thread that runs the region.
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, _token: Tensor) -> Any:
        assert running.gate is not None
        return (None, *running.gate(ctx.send))
