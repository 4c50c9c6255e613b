"""The two ends of a differentiable message, as nodes of the local autograd graphs.

        worker A                                        worker B

    leaf ── op ── x ── end  · · · · message · · · ·  anchor ── x' ── op ── y
                        ^                               |
            gradients enter here                gradients leave here

An *end* hangs on a tensor that has left (a leaf is its own end): giving it a gradient is how
backward goes on from there.
An *anchor* is a leaf of its own from which a tensor that arrived is made: what backward brings it
is what has to be sent to the end. Both are kept without the memory of the tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

Gradients = Sequence["Tensor | None"]

# Gives a tensor that shares memory with another, like a view, but is none to autograd: what the
# user does in place later, to either of them, is nothing to the other's history.
_alias = torch.ops.aten._unsafe_view.default._op
_empty: dict[torch.dtype, Tensor] = {}


def _like(tensor: Tensor) -> Tensor:
    alias: Tensor
    alias = _alias(tensor, tensor.shape) if tensor.layout is torch.strided else tensor.clone()
    return alias


def _without_memory(tensor: Tensor) -> Tensor:
    """The same place in the graph; the elements are not needed there."""
    if tensor.layout is torch.strided and tensor.is_cpu:
        empty = _empty.get(tensor.dtype)
        if empty is None:
            empty = _empty[tensor.dtype] = torch.empty(0, dtype=tensor.dtype, device="cpu")
        tensor.data = empty
    return tensor


class Send:
    """A differentiable message that has left."""

    __slots__ = ("about", "ends", "id", "to")

    def __init__(self, id: int, to: int, tensors: Sequence[Tensor], about: Any):
        self.id = id
        self.to = to
        #: What has answered, or in a tuple what was called; for errors.
        self.about = about
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            self.ends = self._make_ends(tensors)
        else:
            # Whatever mode the calling code is in.
            with torch.inference_mode(False), torch.enable_grad():
                self.ends = self._make_ends(tensors)

    def target(self, position: int) -> Tensor | GradientEdge:
        """What the gradient of one of the tensors goes into."""
        end = self.ends[position]
        return end if end.grad_fn is None else GradientEdge(*end.grad_fn.next_functions[0])

    @staticmethod
    def _make_ends(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [
            tensor if tensor.grad_fn is None else _without_memory(_like(tensor))
            for tensor in tensors
        ]


class Recv:
    """A differentiable message that has arrived."""

    __slots__ = ("_shapes", "anchors", "id", "sender")

    def __init__(self, id: int, sender: int):
        self.id = id
        self.sender = sender
        self.anchors: list[Tensor] = []
        self._shapes: list[torch.Size] = []

    def take(self, tensor: Tensor) -> Tensor:
        """One of its tensors, a leaf still; gives the one that user code gets to see."""
        if torch.is_grad_enabled():
            arrived = _like(tensor)
        else:
            with torch.enable_grad():
                arrived = _like(tensor)
        # By number: a hook that knew its message would keep it, and itself, alive.
        arrived.grad_fn.register_prehook(partial(_reached, self.id, len(self.anchors)))  # type: ignore[union-attr]
        self._shapes.append(tensor.shape)
        self.anchors.append(_without_memory(tensor))
        return arrived

    def let_accumulate(self, position: int) -> Tensor:
        """An anchor that torch can give a `.grad` to: that needs the shape, but no memory still."""
        anchor = self.anchors[position]
        if anchor.shape != self._shapes[position]:
            anchor.data = anchor.data.new_empty(()).expand(self._shapes[position])
        return anchor


class Running(threading.local):
    """What a thread does when backward reaches one of the two; set for every run."""

    gate: Callable[[Send], Gradients] | None = None
    deliver: Callable[[int, int, Tensor | None], None] | None = None


running = Running()

_ADVICE = (
    "a plain backward() has reached a value that came from another worker. Call "
    "gradwire.autograd.backward(context_id, [loss]) inside the context the value was computed in"
)


def _reached(message: int, position: int, gradients: tuple[Tensor | None]) -> tuple[None] | None:
    deliver = running.deliver
    if deliver is None:
        raise RuntimeError(_ADVICE)
    (gradient,) = gradients
    deliver(message, position, gradient)
    # It has been taken; what is behind the alias cannot handle a sparse one.
    return None if gradient is None or gradient.layout is torch.strided else (None,)


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
