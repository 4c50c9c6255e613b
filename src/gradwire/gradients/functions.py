"""The two ends of a differentiable message, as nodes of the local autograd graphs.

        worker A                                        worker B

    leaf ── op ── x ── end  · · · · message · · · ·  anchor ── x' ── op ── y
                        ^                               |
            gradients enter here                gradients leave here

An *end* hangs on a tensor that has left (a leaf is its own end): giving it a gradient is how
backward goes on from there. It is a *twin* of the tensor: of a small one a copy, of a large one
what an operation of torch makes that gives a tensor the memory of another, like a view, but without
autograd taking it for one. What is done to either in place is nothing to the other's history.

An *anchor* is the node that a tensor which arrived comes from: what backward brings it is what has
to be sent to the end. It is a node that torch refuses to run, as it should where nobody asks for
what comes to the anchor; a pass does, and then torch does not run it. Where gradients go into
`.grad` torch runs all that it is asked for, so there the anchor is that of a twin.

A *gate* is where a run waits for what an end has not got yet: at one more twin, made for that run.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

#: What backward has brought a tensor. None: it has not come there. NOTHING: it has, with nothing:
#: torch then goes on, in one process too, and asks functions for the gradients of no gradient.
Gradient: TypeAlias = Tensor | Literal[False] | None
NOTHING: Final = False
#: In the place of what is not known yet.
OPEN: Any = object()
#: In the place of what came and went on by a shortcut. (It travels as it is.)
PASSED_ON: Any = ...
Gradients = Sequence[Gradient]
#: The id of a message, and which of its tensors.
SentTensor = tuple[int, int]

_alias = torch.ops.aten._unsafe_view.default._op
_strided = torch.strided
_is_grad_enabled = torch.is_grad_enabled
#: To copy this much is faster than not to.
_SMALL_BYTES = 4096


def _is_large(tensor: Tensor) -> bool:
    return tensor.layout is _strided and tensor.nbytes > _SMALL_BYTES


def _twin(tensor: Tensor, large: bool) -> Tensor:
    """A tensor that comes from another, and is equal to it."""
    if _is_grad_enabled():
        twin: Tensor = _alias(tensor, tensor.shape) if large else tensor.clone()
        return twin
    with torch.inference_mode(False), torch.enable_grad():  # whatever the calling code is in
        return _twin(tensor, large)


def _let_go_of_memory(tensor: Tensor) -> None:
    """Keep the place in the graph, and the shape; the elements are not needed there."""
    tensor.data = tensor.data.new_empty(()).expand(tensor.shape)


def edge_behind(node: Any) -> GradientEdge:
    """Where a twin leads to."""
    behind, number = node.next_functions[0]
    return edge_at(behind, number)


def _edge_of_leaf(leaf: Tensor) -> GradientEdge:
    """Torch does not say where it is, unless something leads to it. Nowhere, if it is a view that
    was made under `no_grad`, though torch says that it requires gradients."""
    node: Any = _twin(leaf, _is_large(leaf)).grad_fn
    # A node of a leaf that nobody but Python holds is a trap: threads that use the leaf then wait
    # for the interpreter with a lock of torch's in hand, others for that lock with the interpreter.
    owner = (node, *_REST[1:]) if _REST else ()
    return _edge((*node.next_functions[0], *owner))


def edge_at(node: Any, number: int = 0) -> GradientEdge:
    """Where the gradients of a node come to."""
    return _edge((node, number) + _REST)  # noqa: RUF005 (it is faster)


#: Makes an edge of a tuple, as the class would, without a detour through Python.
_edge: Callable[[tuple[Any, ...]], GradientEdge] = partial(tuple.__new__, GradientEdge)
#: What edges have besides in some versions of torch: first of all who owns the node.
_REST = (None,) * (len(GradientEdge._fields) - 2)


class Send:
    """A differentiable message that leaves. Its ends are made before it does: who receives it may
    call for a change of the very tensors that were sent."""

    __slots__ = ("about", "ends", "id", "to")

    def __init__(self, id: int, to: int, tensors: Sequence[Tensor], about: Any):
        self.id = id
        self.to = to
        #: What has answered, or in a tuple what was called; for errors.
        self.about = about
        self.ends: list[Tensor] = []
        for tensor in tensors:
            end = tensor
            if not tensor.is_leaf:
                large = _is_large(tensor)
                end = _twin(tensor, large)
                if large:
                    _let_go_of_memory(end)
            elif tensor._is_view() and _edge_of_leaf(tensor).node is None:
                end = tensor.detach()  # torch may even refuse to look at it again
            self.ends.append(end)

    def edge(self, position: int) -> GradientEdge:
        """Where the gradient of one of the tensors goes to."""
        end = self.ends[position]
        return _edge_of_leaf(end) if end.is_leaf else edge_behind(end.grad_fn)

    def twin(self, position: int) -> Tensor:
        """Something that leads there, and nobody else knows."""
        end = self.ends[position]
        return _twin(end, _is_large(end))


#: Waits for the gradients of what was sent.
Wait = Callable[[Send], "Gradients | None"]


class Gate:
    """Where a run waits for a gradient that is not there yet."""

    __slots__ = ("_position", "_send", "wait")

    def __init__(self, send: Send, position: int):
        self._send = send
        self._position = position
        #: How; whose run it is knows.
        self.wait: Wait | None = None

    def __call__(self, _seed: Any) -> tuple[Tensor | None]:
        """Torch has come to it."""
        assert self.wait is not None
        send, position = self._send, self._position
        gradients = self.wait(send) or ()
        gradient = gradients[position] if position < len(gradients) else None
        if gradient is None or gradient is NOTHING:
            return (None,)
        # Torch takes nothing sparse in the place of the seed, unless that is sparse too.
        as_it_is = gradient.layout is send.ends[position].layout
        return (gradient if as_it_is else gradient.to_dense(),)


def make_gate(send: Send, position: int) -> PreparedGate:
    """A gate at a twin of what was sent, for one run."""
    twin = send.twin(position)
    node: Any = twin.grad_fn
    gate = Gate(send, position)
    node.register_prehook(gate)
    return node, twin.detach(), gate


#: The node that torch comes to; a seed, whatever that is, for the gradient takes its place; a gate.
PreparedGate = tuple[Any, Tensor, Gate]


class Recv:
    """A differentiable message that has arrived. `into_grad`: torch runs its anchors."""

    __slots__ = ("_arrived", "_into_grad", "anchors", "id", "sender")

    def __init__(self, id: int, sender: int, into_grad: bool = False):
        self.id = id
        self.sender = sender
        self.anchors: list[Any] = []
        #: The tensors, as user code sees them, and their hooks.
        self._arrived: list[tuple[weakref.ref[Tensor], _Hooks]] = []
        self._into_grad = into_grad

    def take(self, tensor: Tensor) -> Tensor:
        """One of its tensors, a leaf; gives the one that user code gets to see."""
        large = tensor.layout is _strided and tensor.nbytes > _SMALL_BYTES
        # Now, while nobody else knows the node: torch may run it in several threads at a time.
        hooks = _Hooks()
        if self._into_grad:
            arrived = _twin(tensor, large)
            anchor: Any = arrived.grad_fn
            anchor.register_prehook(hooks.allow_to_run)
        else:
            arrived = _stop(tensor)
            anchor = arrived.grad_fn
        arrived._backward_hooks = hooks
        anchor._register_hook_dict(arrived)
        self._arrived.append((weakref.ref(arrived), hooks))
        self.anchors.append(anchor)
        if large:
            _let_go_of_memory(tensor)
        return arrived

    def is_watched(self, position: int) -> bool:
        """Whether others want to see what backward brings a tensor."""
        reference, hooks = self._arrived[position]
        arrived = reference()
        return bool(hooks) or (arrived is not None and arrived.retains_grad)

    def watch(self, position: int, task: Task, deliver: Deliver) -> None:
        """Have backward deliver a gradient as soon as it comes to a tensor in the middle of a task,
        until that ends."""
        # A hook of the tensor that comes from the anchor: torch calls those whether or not it runs
        # the node. The last one that was registered sees what all others have made of it.
        self.anchors[position]._set_sequence_nr(_FIRST - 1)
        _, hooks = self._arrived[position]
        hooks[task] = partial(_watch, task, deliver, self.id, position)
        task.watched.append(hooks)


class _Hooks(dict[Any, Callable[[Any], Any]]):
    """The hooks of a tensor, by whatever tells them apart. (Torch must be able to refer to them
    weakly, which no plain dictionary allows.)"""

    __slots__ = ("__weakref__",)

    def allow_to_run(self, _gradients: Any) -> tuple[None]:
        """Torch is about to run an anchor, behind which there is nothing. Only what watches it
        takes what came there."""
        if not any(type(task) is Task and task.is_current() for task in list(self)):
            raise RuntimeError(_NOT_IN_ITS_CONTEXT)
        return (None,)


#: Told which tensor of which message has got which gradient.
Deliver = Callable[[int, int, Gradient], None]


def _watch(
    task: Task, deliver: Deliver, message: int, position: int, gradient: Tensor | None
) -> None:
    if task.is_current():
        deliver(message, position, NOTHING if gradient is None else gradient)


class Task:
    """Something that torch's engine is given to do. Others may come by the same nodes at the same
    time: on other threads, or started by a hook in the middle of this one."""

    __slots__ = ("_number", "watched")

    def __init__(self) -> None:
        self._number = -1
        #: Where there are hooks for it.
        self.watched: list[_Hooks] = []

    def mark(self) -> tuple[Tensor, GradientEdge]:
        """A leaf to ask for, and where to begin for it: torch goes there first of all, and has a
        number for what it does by then."""
        leaf = torch.zeros((), requires_grad=True, device="cpu")
        node: Any = _twin(leaf, large=False).grad_fn
        node._set_sequence_nr(_FIRST)
        node.register_prehook(self._begin)
        return leaf, edge_at(node)

    def _begin(self, _gradients: Any) -> None:
        self._number = _current_task()

    def end(self) -> None:
        for hooks in self.watched:
            hooks.pop(self, None)

    def is_current(self) -> bool:
        return _current_task() == self._number


_current_task: Callable[[], int] = torch._C._current_graph_task_id
#: Of what is ready torch runs the node with the highest number.
_FIRST = 1 << 62


_NOT_IN_ITS_CONTEXT = (
    "a plain backward(), or a pass of another context, has reached a value that came from another "
    "worker. Call gradwire.autograd.backward(context_id, [loss]) with the context in which the "
    "value came; to use it elsewhere, detach() it"
)
#: Gives a tensor with the memory of the one it is called with, and a node behind it that refuses to
#: run and says why.
_stop: Callable[[Tensor], Tensor] = torch._C._functions.DelayedError(_NOT_IN_ITS_CONTEXT, 1)


class Running(threading.local):
    """Whether a thread runs a region of a pass whose gradients do not go into `.grad`."""

    aside = False


running = Running()
