"""Running a region through torch's own engine.

Gradients enter at the sources that are answered; at those that are not, the run waits (`gate`).
They leave at leaves, and at anchors: at the end of the run; or, if it has to wait or torch puts
gradients into `.grad`, as soon as they get there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.autograd.variable import Variable

from gradwire.gradients.functions import Gradients, Send, edge_behind, make_gate, running
from gradwire.gradients.graph import Anchor, Region, Root, is_loose, lift_nodes
from gradwire.gradients.ledger import OPEN, How, Ledger

# Below `torch.autograd.grad`, whose checks cost as much as a small region.
run_backward = Variable._execution_engine.run_backward

#: Told which tensor of which message has got which gradient.
Deliver = Callable[[int, int, "Tensor | None"], None]


class Run:
    """One run of a region. Made with the lock of the pass held, run without."""

    __slots__ = ("_gates", "_how", "_outputs", "_region", "_seeds", "anchors", "leaves")

    def __init__(self, region: Region, ledger: Ledger, how: How):
        self._region = region
        self._how = how
        self._outputs: list[Tensor | GradientEdge] = []
        self._seeds: list[Tensor] = []
        self._gates: list[Send] = []
        for source in region.sources:
            if type(source) is Root:
                self._outputs.append(source.tensor)
                self._seeds.append(source.gradient)
                continue
            assert type(source) is Send
            answer = ledger.answers.get(source.id, OPEN)
            if answer is OPEN:
                self._gates.append(source)
                continue
            for position, gradient in enumerate(answer or ()):
                if gradient is not None and not (ledger.loose and is_loose(source.ends[position])):
                    self._outputs.append(source.target(position))
                    self._seeds.append(gradient)
        self.anchors = ledger.open_anchors(region)
        #: Where the pass was not started, tensors that it is for are not asked for.
        self.leaves = [] if how.for_inputs and ledger.parent is not None else region.leaves

    def run(
        self, gate: Callable[[Send], Gradients], deliver: Deliver, *, into_grad: bool
    ) -> Gradients:
        """Returns the gradients of the leaves and then those of the anchors, as far as they were
        not delivered, or put into `.grad`, on the way."""
        if not (self._outputs or self._gates) or not (self.leaves or self.anchors):
            return ()
        if self._gates:
            tokens = _make_gates(self._gates, self._region)
            self._outputs += tokens
            self._seeds += [torch.ones_like(token) for token in tokens]
        handles: list[Any] = []
        if self._gates or into_grad:
            handles = [_watch(anchor, deliver) for anchor in self.anchors]
        behind = self._gates and not into_grad
        edges = [
            edge_behind(recv.anchors[position])
            if behind
            else GradientEdge(recv.anchors[position], 0)
            for recv, position in self.anchors
        ]
        outer = running.gate, running.into_grad
        running.gate, running.into_grad = gate, into_grad
        try:
            found: Gradients = run_backward(
                tuple(self._outputs),
                tuple(self._seeds),
                self._how.retain_graph,
                self._how.create_graph,
                (*self.leaves, *edges),
                allow_unreachable=True,
                accumulate_grad=into_grad,
            )
        finally:
            running.gate, running.into_grad = outer
            for handle in handles:
                handle.remove()
        if into_grad:
            return ()
        return found[: len(self.leaves)] if self._gates else found


def _watch(anchor: Anchor, deliver: Deliver) -> Any:
    """Have a gradient delivered in the middle of a run."""
    recv, position = anchor
    return recv.anchors[position].register_prehook(partial(_reached, deliver, recv.id, position))


def _reached(
    deliver: Deliver, message: int, position: int, gradients: tuple[Tensor | None]
) -> tuple[None] | None:
    (gradient,) = gradients
    deliver(message, position, gradient)
    # It has been taken; what is behind the anchor cannot handle a sparse one.
    return None if gradient is None or gradient.layout is torch.strided else (None,)


def _make_gates(gates: list[Send], region: Region) -> list[Tensor]:
    """Let torch run the gates after everything else, the newest first. Ordinary nodes count from 0
    too, so those that would come after a gate are lifted."""
    lift_nodes(region, len(gates))
    tokens = [make_gate(send) for send in sorted(gates, key=lambda send: send.id)]
    for number, token in enumerate(tokens):
        token.grad_fn._set_sequence_nr(number)  # type: ignore[union-attr]
    return tokens


def through_gate(send: Send, gradients: Gradients | None, *, loose: bool) -> Gradients:
    """The answer to a send, as a gate has to give it to torch."""
    answer: list[Tensor | None] = [None] * len(send.ends)
    for position, gradient in enumerate(gradients or ()):
        end = send.ends[position]
        if gradient is not None and not (loose and is_loose(end)):
            # Torch has no sparse gradients of an alias, which is what the gate leads to.
            through_alias = end.layout is torch.strided and end.grad_fn is not None
            dense = through_alias and gradient.layout is not torch.strided
            answer[position] = gradient.to_dense() if dense else gradient
    return answer


class GradBackup:
    """What `.grad` was before runs that put gradients there."""

    def __init__(self) -> None:
        self._before: list[tuple[Tensor, Tensor | None, Tensor | None]] = []

    def remember(self, leaves: Sequence[Tensor]) -> None:
        for leaf in leaves:
            before = leaf.grad
            self._before.append((leaf, before, None if before is None else before.clone()))

    def restore(self) -> None:
        """Put back the very tensors, with their values."""
        before, self._before = self._before, []
        for leaf, gradient, values in reversed(before):
            if gradient is not None and values is not None:
                gradient.detach().copy_(values)
            leaf.grad = gradient
