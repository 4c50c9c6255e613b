"""The two ends of a differentiable message, as nodes of the local autograd graphs.

        worker A                                     worker B

    leaf ── op ── x ── [ send ] · · · message · · · [ recv ] ── x' ── op ── y
                          |                            |
                        token                        anchor

`send` consumes the tensors that leave and gives a token; running backward from the token asks for
the gradients of those tensors. `recv` is where tensors that arrived come from; running backward
into it hands over their gradients. Its anchor is a leaf of its own, so that backward can be asked
to reach it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Gradients = Sequence["Tensor | None"]


def recording(action: Callable[..., Any], *args: Any) -> Any:
    """Do something with autograd on, whatever mode the calling code is in."""
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        return action(*args)
    with torch.inference_mode(False), torch.enable_grad():
        return action(*args)


class Send:
    """A differentiable message that has left."""

    __slots__ = ("count", "id", "to", "token")

    def __init__(self, id: int, to: int, tensors: Sequence[Tensor]):
        self.id = id
        self.to = to
        self.count = len(tensors)
        self.token: Tensor = recording(_SendBackward.apply, self, *tensors)

    @property
    def node(self) -> Any:
        return self.token.grad_fn


class Recv:
    """A differentiable message that has arrived."""

    __slots__ = ("__weakref__", "anchor", "count", "id", "node", "sender")

    def __init__(self, id: int, sender: int, tensors: Sequence[Tensor]):
        self.id = id
        self.sender = sender
        self.count = len(tensors)
        self.node: Any = recording(self._attach, tensors)

    def _attach(self, tensors: Sequence[Tensor]) -> Any:
        self.anchor = torch.empty(0, requires_grad=True, device="cpu")
        for tensor in tensors:
            tensor.requires_grad_(False)
        outputs = _RecvBackward.apply(self, self.anchor, *tensors)  # type: ignore[no-untyped-call]
        return outputs[0].grad_fn


class Running(threading.local):
    """What a thread does when backward reaches one of the two nodes; set by the engine."""

    gate: Callable[[Send], Gradients] | None = None
    deliver: Callable[[Recv, Gradients], None] | None = None


running = Running()

_ADVICE = (
    "a plain backward() has reached a value that came from another worker. Call "
    "gradwire.autograd.backward(context_id, [loss]) inside the context the value was computed in"
)


class _SendBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, send: Send, *_tensors: Tensor) -> Tensor:
        ctx.send = send
        # A scalar on the CPU: the node then runs on the thread that runs the region.
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, _token: Tensor) -> Any:
        if running.gate is None:
            raise RuntimeError(_ADVICE)
        return (None, *running.gate(ctx.send))


class _RecvBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recv: Recv, _anchor: Tensor, *tensors: Tensor) -> Any:
        ctx.recv = recv
        ctx.set_materialize_grads(False)
        # The tensors themselves become the outputs: they are already part of the arguments.
        ctx.mark_dirty(*tensors)
        return tensors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if running.deliver is None:
            raise RuntimeError(_ADVICE)
        running.deliver(ctx.recv, gradients)
        return (None, None, *(None for _ in gradients))
