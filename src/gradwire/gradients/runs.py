"""Running a region through torch's own engine.

Gradients enter at the sources that are answered; at those that are not, the run waits (`gate`).
They leave at leaves, and at anchors: at the end of the run; or, if it has to wait or torch puts
gradients into `.grad`, as soon as they get there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.autograd.variable import Variable

from gradwire.gradients.functions import (
    NOTHING,
    OPEN,
    Deliver,
    Gradient,
    Send,
    Task,
    Wait,
    edge_at,
    edge_behind,
    make_gate,
    running,
)
from gradwire.gradients.graph import Region, Root
from gradwire.gradients.ledger import How, Ledger

# Below `torch.autograd.grad`, whose checks cost as much as a small region.
run_backward = Variable._execution_engine.run_backward

#: What a run gives.
Found = Sequence["Tensor | None"]


class Run:
    """One run of a region. Made with the lock of the pass held, run without."""

    __slots__ = ("_how", "_outputs", "_prepared", "_region", "_seeds", "anchors", "gates")

    def __init__(self, region: Region, ledger: Ledger, how: How):
        self._region = region
        self._how = how
        self._prepared = ledger.plan.gates
        self._outputs: list[GradientEdge] = []
        self._seeds: list[Tensor] = []
        #: Where the run will wait.
        self.gates: list[tuple[Send, int]] = []
        for source, position, edge in region.starts:
            if type(source) is Root:
                gradient: Gradient = source.gradient
            else:
                assert type(source) is Send
                answer = ledger.answers.get(source.id, OPEN)
                if answer is OPEN:
                    known = ledger.prospects.known.get(source.id)
                    is_gate = known is None or position in known
                    gradient = NOTHING if is_gate else None
                else:
                    gradient = answer[position] if answer and position < len(answer) else None
            if gradient is NOTHING:  # yet, or at all: torch begins nowhere with nothing
                assert type(source) is Send
                self.gates.append((source, position))
            elif gradient is not None:
                self._outputs.append(edge)
                self._seeds.append(gradient)
        self.anchors = ledger.open_anchors(region)

    def run(self, wait: Wait, deliver: Deliver, into_grad: bool) -> Found:
        """Returns the gradients of the leaves and then those of the anchors, as far as they were
        not delivered, or put into `.grad`, on the way."""
        how, gates, outputs = self._how, self.gates, self._outputs
        if not outputs and not gates:
            return ()
        leaves = self._region.leaves
        dead_ends = self._region.dead_ends if not how.for_inputs else ()
        if not (self.anchors or leaves or dead_ends):
            return ()
        task: Task | None = None
        sinks: list[Tensor | GradientEdge] = [*leaves]
        for recv, position in self.anchors:
            sinks.append(edge_at(recv.anchors[position]))
        sinks += dead_ends
        outer, running.aside = running.aside, not into_grad
        try:
            if gates:
                self._wait_at_gates(wait)
            if gates or into_grad:
                task = Task()
                sinks.append(self._watch_anchors(task, deliver))
            found: Found = run_backward(
                tuple(outputs),
                tuple(self._seeds),
                how.retain_graph,
                how.create_graph,
                tuple(sinks),
                allow_unreachable=True,
                accumulate_grad=into_grad,
            )
        except BaseException:
            _let_go_of_the_rest()
            raise
        finally:
            running.aside = outer
            if task is not None:
                task.end()
        if into_grad:
            return ()
        return found[: len(leaves)] if gates else found

    def _watch_anchors(self, task: Task, deliver: Deliver) -> Tensor:
        """Have gradients delivered as soon as they get there. Returns what torch must be asked for
        besides."""
        for recv, position in self.anchors:
            recv.watch(position, task, deliver)
        leaf, edge = task.mark()
        self._outputs.append(edge)
        self._seeds.append(leaf.detach())
        return leaf

    def _wait_at_gates(self, wait: Wait) -> None:
        """Torch comes to gates after everything else, the newest first."""
        above = max(_ABOVE_GATES, len(self.gates) + 1)
        if self._region.reach is not None:  # else nothing is out
            _lift(self._region.reach.alive(), above)
        oldest_first = sorted(self.gates, key=lambda gate: gate[0].id)
        for number, (send, position) in enumerate(oldest_first, _LAST + 1):
            made = self._prepared.pop((send.id, position), None)
            node, seed, gate = made or make_gate(send, position)
            gate.wait = wait
            _lift([edge_behind(node).node], above)
            node._set_sequence_nr(number)
            self._outputs.append(edge_at(node))
            self._seeds.append(seed)


#: Torch comes to a node with this number after everything else...
_LAST = 0
#: ... and if there are fewer gates than this, to those with their numbers right before.
_ABOVE_GATES = 1 << 16


def _let_go_of_the_rest() -> None:
    """Torch keeps what a failed run has not come to, and with it the pass, until the thread is
    given something to do that comes after that."""
    leaf, edge = Task().mark()
    edge.node._set_sequence_nr(_LAST)  # type: ignore[attr-defined]
    run_backward((edge,), (leaf.detach(),), False, False, (leaf,), accumulate_grad=False)


def _lift(nodes: Iterable[Any], above: int) -> None:
    """Have torch run nodes before gates. (It counts the nodes that a thread makes from 0, and runs
    what is ready with the highest number first.)"""
    for node in nodes:
        number = node._sequence_nr()
        if number < above:
            node._set_sequence_nr(number + above)


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
        while self._before:
            leaf, gradient, values = self._before.pop()
            if gradient is not None and values is not None:
                gradient.detach().copy_(values)
            leaf.grad = gradient
