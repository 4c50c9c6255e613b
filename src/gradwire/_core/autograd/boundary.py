"""The two sides of a differentiable message, as nodes of the local autograd graphs.

        worker A                                        worker B

    leaf ── op ── x ── proxy  · · · message · · ·  recv node ── x' ── op ── y
                         ^                             |
             gradients enter here               gradients leave here

A `Send` is a message that leaves; torch's name for it is SendRpcBackward. Each sent tensor has a
*proxy*, an alias of the tensor (see `edges`): the edge behind the proxy is where the gradient of
the sent tensor enters the local graph. A leaf is its own proxy.

A `Recv` is a message that has arrived; torch's name for it is RecvRpcBackward. Each received tensor
comes from a *recv node*. The gradient that backward brings to a recv node is sent to the other
worker, where it enters at the proxy.

A recv node must raise an error in a plain `backward()`, but not in a backward pass of gradwire. The
kind of the context decides how:

- In most contexts, a pass of gradwire does not run the recv nodes. It asks torch for the gradient
  that enters a recv node, and torch returns that gradient without running the node. So the recv
  node is a node that always raises the error when torch runs it.
- In a context whose gradients go into `.grad`, a pass of gradwire does run the recv nodes. So user
  code gets an alias of the received tensor, and the recv node is the node that made the alias. A
  hook of this node raises the error, unless a pass of gradwire has started the run.

The result of a call outside of any context has no recv node, because nothing was recorded. It comes
from a node that raises an error in every backward pass (see `take_unrecorded`).

The module `gates` shows how torch's engine waits for a gradient that another worker has not sent.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gradwire._core.autograd.edges import (
    SMALL_BYTES,
    drop_elements,
    edge_of_leaf,
    is_large,
    make_alias,
    next_edge,
)
from gradwire._core.autograd.graph_task import FIRST_SEQUENCE_NUMBER, GraphTask
from gradwire._core.torch_internals import DelayedError

#: The gradient that a backward pass has found for a tensor. It is None if the pass did not reach
#: the tensor. It is NOTHING if the pass reached the tensor, but brought no gradient; torch still
#: runs the nodes that computed such a tensor.
Gradient: TypeAlias = Tensor | Literal[False] | None
NOTHING: Final = False
#: This value stands for a gradient that is not known yet.
OPEN: Any = object()
#: A worker that takes a shortcut (see `ShortcutOffer`) uses a gradient itself, instead of sending
#: it to another worker. It sends the other worker this value in place of the gradient.
PASSED_ON: Any = ...
Gradients = Sequence[Gradient]
#: One tensor of a sent message: the id of the message, and the position of the tensor in it.
SentTensor = tuple[int, int]

_strided = torch.strided


class Send:
    """A message with differentiable tensors that this worker sends.

    Each sent tensor gets a proxy. A proxy is an alias of the tensor, and its autograd node leads to
    the place where the tensor's gradient enters the local graph. The proxies are made before the
    message leaves, because afterwards the receiver may call a function here that changes the sent
    tensors in place.
    """

    __slots__ = ("about", "id", "proxies", "to")

    def __init__(self, send_id: int, to: int, tensors: Sequence[Tensor], about: Any):
        self.id = send_id
        self.to = to
        #: A function, which error texts name. If the tensors are its results, this is the function
        #: itself. If they are its arguments, this is a tuple that contains only the function.
        self.about = about
        self.proxies: list[Tensor] = []
        for tensor in tensors:
            proxy = tensor
            if not tensor.is_leaf:
                large = is_large(tensor)
                proxy = make_alias(tensor, large)
                if large:
                    drop_elements(proxy)
            elif tensor._is_view() and edge_of_leaf(tensor).node is None:
                # A view made under `no_grad` has no gradient edge. Torch may raise an error when
                # the history of such a view is looked up a second time, so a detached tensor takes
                # its place.
                proxy = tensor.detach()
            self.proxies.append(proxy)

    def edge(self, position: int) -> GradientEdge:
        """Return the edge at which the gradient of a sent tensor enters the local graph."""
        proxy = self.proxies[position]
        return edge_of_leaf(proxy) if proxy.is_leaf else next_edge(proxy.grad_fn)

    def new_alias(self, position: int) -> Tensor:
        """Return a new alias of a sent tensor. Like the node of the proxy, the node of the new
        alias leads to the place where the gradient of the tensor enters the local graph."""
        proxy = self.proxies[position]
        return make_alias(proxy, is_large(proxy))


class Recv:
    """A message with differentiable tensors that has arrived. If `into_grad` is True, backward
    passes put the gradients of leaves into `.grad`."""

    __slots__ = ("_arrived", "_into_grad", "id", "recv_nodes", "sender")

    def __init__(self, recv_id: int, sender: int, into_grad: bool = False):
        self.id = recv_id
        self.sender = sender
        self.recv_nodes: list[Any] = []
        #: For each received tensor: a reference to the tensor that user code has, and its hooks.
        self._arrived: list[tuple[weakref.ref[Tensor], _TensorHooks]] = []
        self._into_grad = into_grad

    def take(self, tensor: Tensor) -> Tensor:
        """Return the tensor that user code gets for a received tensor. It comes from a new recv
        node, where its gradient will leave the local graph."""
        large = tensor.layout is _strided and tensor.nbytes > SMALL_BYTES
        # The dictionary of hooks is registered now, while no other thread can run the recv node.
        # Later torch may run the node in several threads, and it would not be safe to register the
        # dictionary.
        hooks = _TensorHooks()
        if self._into_grad:
            arrived = make_alias(tensor, large)
            recv_node: Any = arrived.grad_fn
            recv_node.register_prehook(hooks.check_task)
        else:
            arrived = _make_refusing_node(tensor)
            recv_node = arrived.grad_fn
        arrived._backward_hooks = hooks
        recv_node._register_hook_dict(arrived)
        self._arrived.append((weakref.ref(arrived), hooks))
        self.recv_nodes.append(recv_node)
        if large:
            drop_elements(tensor)
        return arrived

    def is_watched(self, position: int) -> bool:
        """Return whether user code sees the gradient of a received tensor: it has registered a hook
        on the tensor, or called `retain_grad`."""
        reference, hooks = self._arrived[position]
        arrived = reference()
        return bool(hooks) or (arrived is not None and arrived.retains_grad)

    def watch(self, position: int, task: GraphTask, deliver: Deliver) -> None:
        """Arrange that `deliver` gets a received tensor's gradient as soon as a task of torch's
        engine has computed the gradient.

        A hook of the tensor calls `deliver`. Torch calls such hooks even if it does not run the
        recv node that the tensor comes from. The hook is registered last, so the gradient already
        has the changes that other hooks make.
        """
        # The recv node gets a high sequence number, because torch always runs the ready node with
        # the highest number. So once the gradient is known, torch calls the tensor's hooks before
        # it runs nodes of other operations. Only the first node of the task has a higher number.
        self.recv_nodes[position]._set_sequence_nr(FIRST_SEQUENCE_NUMBER - 1)
        _, hooks = self._arrived[position]
        hooks[task] = partial(_deliver_if_current, task, deliver, self.id, position)
        task.hooked.append(hooks)


#: One tensor of a received message: the message, and the position of the tensor in it.
ReceivedTensor = tuple[Recv, int]


class _TensorHooks(dict[Any, Callable[[Any], Any]]):
    """A dictionary with the hooks of a tensor. Torch needs weak references to such a dictionary,
    which this class allows and a plain `dict` does not."""

    __slots__ = ("__weakref__",)

    def check_task(self, _gradients: Any) -> tuple[None]:
        """Raise an error unless gradwire has started the current task of torch's engine, and that
        task asks for the gradient of this tensor.

        Torch calls this hook before it runs the tensor's recv node. The hook replaces the gradient
        by None, because no other node of this worker needs it.
        """
        if not any(type(key) is GraphTask and key.is_current() for key in list(self)):
            raise RuntimeError(_NOT_IN_ITS_CONTEXT)
        return (None,)


#: A function that takes the gradient of a received tensor. Its arguments are the id of the message,
#: the position of the tensor in the message, and the gradient.
Deliver = Callable[[int, int, Gradient], None]


def _deliver_if_current(
    task: GraphTask, deliver: Deliver, message: int, position: int, gradient: Tensor | None
) -> None:
    if task.is_current():
        deliver(message, position, NOTHING if gradient is None else gradient)


_NOT_IN_ITS_CONTEXT = (
    "a plain backward(), or a pass of another context, has reached a value that came from another "
    "worker. Call gradwire.autograd.backward(context_id, [loss]) with the context in which the "
    "value came; to use it elsewhere, detach() it"
)
#: Returns a tensor that shares the storage of its argument. The node of that tensor raises an error
#: with the text `_NOT_IN_ITS_CONTEXT` when torch runs the node.
_make_refusing_node = DelayedError(_NOT_IN_ITS_CONTEXT, 1)


def take_unrecorded(call: str, tensor: Tensor) -> Tensor:
    """Return the tensor that user code gets for a tensor in the result of a call outside of any
    context. Its node raises an error in every backward pass, because the pass would lose the
    gradient. `call` names the call.

    A `Parameter` is returned as it is, because it belongs to a copy of a module. The program may
    train this copy on this worker, and for that the parameter must stay a leaf.
    """
    if isinstance(tensor, torch.nn.Parameter):
        return tensor
    refuse = DelayedError(
        f"this tensor is the result of {call}, called outside of autograd.context(). The call was "
        "not recorded, so no gradient can go back through it. Call it inside `with "
        "gradwire.autograd.context() as context_id:`, and there call "
        "gradwire.autograd.backward(context_id, [loss]); or, if it needs no gradient, detach() it",
        1,
    )
    # The node must lead to a leaf, the received tensor, because a backward pass runs only nodes
    # that lead to a leaf. So gradient mode is switched on here: without it, the node would lead
    # nowhere, and no pass would raise the error.
    with torch.enable_grad():
        taken = refuse(tensor)
    if is_large(tensor):
        drop_elements(tensor)
    return taken
