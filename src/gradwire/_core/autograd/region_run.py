"""Runs a region, a connected part of a worker's autograd graph, through torch's own engine.

Gradients enter the region at roots and at tensors that were sent. If the gradient of a sent tensor
has not come back yet, it enters at a *gate*: an autograd node with a hook that waits for the
gradient (see `gates`). Gradients leave the region at leaves and at recv nodes, the nodes that
received tensors come from. The run returns these gradients when it ends. But if it has gates, or
if torch puts gradients into `.grad`, the gradient of a recv node is delivered as soon as it is
known.

Among the nodes that are ready, torch runs the one with the highest sequence number. Gates get the
lowest numbers of all. So a run waits only when nothing else is left to do, and it waits first for
the gradients of the message that was sent last.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from gradwire._core.autograd.boundary import NOTHING, OPEN, Deliver, Gradient, Send
from gradwire._core.autograd.edges import edge_at, next_edge
from gradwire._core.autograd.gates import Wait, make_gate
from gradwire._core.autograd.graph_task import GraphTask
from gradwire._core.autograd.pass_messages import PassOptions
from gradwire._core.autograd.pass_state import PassState
from gradwire._core.autograd.plan import Region, Root
from gradwire._core.torch_internals import run_backward

#: The result of running a part of the graph: the gradients of its leaves, then those of the
#: received tensors that it depends on.
RunGradients = Sequence["Tensor | None"]


class _CurrentRun(threading.local):
    """Tells whether the current thread is running torch's engine for a backward pass."""

    #: Whether the thread is in a run of torch's engine whose gradients do not go into `.grad`.
    collects_gradients = False


current_run = _CurrentRun()


class RegionRun:
    """One run of a region (a connected part of the local graph) by torch's engine. The caller holds
    the lock of the backward pass when it makes this object, but not when it calls `run`."""

    __slots__ = ("_options", "_outputs", "_prepared", "_region", "_seeds", "gates", "recv_nodes")

    def __init__(self, region: Region, state: PassState, options: PassOptions):
        self._region = region
        self._options = options
        self._prepared = state.plan.gates
        #: The graph edges where torch begins.
        self._outputs: list[GradientEdge] = []
        #: The gradients that torch begins with, one for each edge in `_outputs`.
        self._seeds: list[Tensor] = []
        #: The sent tensors whose gradients the run will wait for.
        self.gates: list[tuple[Send, int]] = []
        for source, position, edge in region.entries:
            if type(source) is Root:
                gradient: Gradient = source.gradient
            else:
                assert type(source) is Send
                answer = state.answers.get(source.id, OPEN)
                if answer is OPEN:
                    known = state.plan.forecast.get(source.id)
                    is_gate = known is None or position in known
                    gradient = NOTHING if is_gate else None
                else:
                    gradient = answer[position] if answer and position < len(answer) else None
            if gradient is NOTHING:
                # Torch needs a gradient for each edge that it begins at, but there is none yet. So
                # torch begins at a gate instead: a node with a hook that waits for the gradient. A
                # gate is also used if the pass reached the tensor on the worker that received it,
                # but brought no gradient. Torch must then still run the nodes that computed the
                # tensor.
                assert type(source) is Send
                self.gates.append((source, position))
            elif gradient is not None:
                self._outputs.append(edge)
                self._seeds.append(gradient)
        self.recv_nodes = state.open_recv_nodes(region)

    def run(self, wait: Wait, deliver: Deliver, into_grad: bool) -> RunGradients:
        """Run the region. Return the gradients that were neither passed to `deliver` nor put into
        `.grad`: first those of the leaves, then those of the received tensors."""
        options, gates, outputs = self._options, self.gates, self._outputs
        if not outputs and not gates:
            return ()
        leaves = self._region.leaves
        dead_ends = self._region.dead_ends if not options.for_inputs else ()
        if not (self.recv_nodes or leaves or dead_ends):
            return ()
        task: GraphTask | None = None
        inputs: list[Tensor | GradientEdge] = [*leaves]
        for recv, position in self.recv_nodes:
            inputs.append(edge_at(recv.recv_nodes[position]))
        inputs += dead_ends
        outer = current_run.collects_gradients
        current_run.collects_gradients = not into_grad
        try:
            if gates:
                self._add_gates(wait)
            if gates or into_grad:
                task = GraphTask()
                inputs.append(self._watch_recv_nodes(task, deliver))
            gradients: RunGradients = run_backward(
                tuple(outputs),
                tuple(self._seeds),
                options.retain_graph,
                options.create_graph,
                tuple(inputs),
                allow_unreachable=True,
                accumulate_grad=into_grad,
            )
        except BaseException:
            _release_failed_run()
            raise
        finally:
            current_run.collects_gradients = outer
            if task is not None:
                task.remove_hooks()
        if into_grad:
            return ()
        return gradients[: len(leaves)] if gates else gradients

    def _watch_recv_nodes(self, task: GraphTask, deliver: Deliver) -> Tensor:
        """Arrange that `deliver` gets the gradients of received tensors as soon as they are known.
        Return a leaf whose gradient the caller must also ask torch for. Otherwise torch does not
        run the node that tells `task` which run of the engine it belongs to (see
        `GraphTask.make_first_node`)."""
        for recv, position in self.recv_nodes:
            recv.watch(position, task, deliver)
        leaf, edge = task.make_first_node()
        self._outputs.append(edge)
        self._seeds.append(leaf.detach())
        return leaf

    def _add_gates(self, wait: Wait) -> None:
        """Add gates, which are nodes that wait for the gradients of sent tensors, to the places
        where torch begins.

        Gates get sequence numbers below those of all other nodes, so torch runs them last. Among
        the gates, the gate for the newest message gets the highest number, so torch runs it first.
        """
        above = max(_ABOVE_GATES, len(self.gates) + 1)
        # If `reach` is None, all gradients that enter the region are known. No gate will have to
        # wait, so torch need not run the gates last.
        if self._region.reach is not None:
            _raise_above_gates(self._region.reach.alive(), above)
        oldest_first = sorted(self.gates, key=lambda gate: gate[0].id)
        for number, (send, position) in enumerate(oldest_first, _LAST + 1):
            prepared = self._prepared.pop((send.id, position), None)
            node, seed, gate = prepared or make_gate(send, position)
            gate.wait = wait
            _raise_above_gates([next_edge(node).node], above)
            node._set_sequence_nr(number)
            self._outputs.append(edge_at(node))
            self._seeds.append(seed)


#: The sequence number of a node that torch runs after all others.
_LAST = 0
#: Gates (nodes that wait for a gradient) have sequence numbers below this limit. All other nodes of
#: the run have at least this number. Torch runs nodes with higher numbers first, so it runs the
#: gates last. If a run has too many gates for this limit, the run uses a higher limit.
_ABOVE_GATES = 1 << 16


def _raise_above_gates(nodes: Iterable[Any], above: int) -> None:
    """Raise the sequence numbers of these nodes to `above` or more, so that torch runs them before
    the gates, the nodes that wait for gradients. The order among these nodes does not change. A
    node can have a low number because torch numbers the nodes of each thread from 0, and the node
    may be one of the first that its thread has made."""
    for node in nodes:
        number = node._sequence_nr()
        if number < above:
            node._set_sequence_nr(number + above)


def _release_failed_run() -> None:
    """Free the nodes that torch still holds after a run of its engine has failed.

    Torch leaves the nodes that it has not run in a queue of the thread, until the thread runs a
    node with a lower priority. The nodes in the queue would keep all objects of the backward pass
    alive. So this function runs a node with the lowest priority.
    """
    leaf, edge = GraphTask().make_first_node()
    edge.node._set_sequence_nr(_LAST)  # type: ignore[attr-defined]
    run_backward((edge,), (leaf.detach(),), False, False, (leaf,), accumulate_grad=False)


class GradBackup:
    """Remembers the `.grad` of leaves before torch puts gradients there, and restores it."""

    def __init__(self) -> None:
        #: For each leaf: the leaf, its `.grad`, and a copy of the values in `.grad`.
        self._before: list[tuple[Tensor, Tensor | None, Tensor | None]] = []

    def remember(self, leaves: Sequence[Tensor]) -> None:
        for leaf in leaves:
            before = leaf.grad
            self._before.append((leaf, before, None if before is None else before.clone()))

    def restore(self) -> None:
        """Give each leaf the `.grad` tensor that it had before, with the values of that time."""
        while self._before:
            leaf, gradient, values = self._before.pop()
            if gradient is not None and values is not None:
                gradient.detach().copy_(values)
            leaf.grad = gradient
