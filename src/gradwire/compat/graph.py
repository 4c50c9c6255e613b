"""Autograd contexts and autograd graphs in the form in which torch shows them to programs.

For each message with tensors, torch puts a node into the sender's autograd graph and another node
into the receiver's. gradwire has no such nodes. So the classes here are views: objects that look
like torch's nodes. There is a view of a sent message, of a received message, and of an ordinary
autograd node. The `next_functions` of a view lead to further views.
"""

from __future__ import annotations

from typing import Any

from gradwire._core.autograd.boundary import Recv, Send
from gradwire._core.autograd.context import Context

_NAMESPACE = "torch::distributed::autograd"


class DistAutogradContext:
    """A view of a distributed autograd context, with the private methods that torch's tests
    call."""

    def __init__(self, context: Context):
        self._context = context

    def _context_id(self) -> int:
        return self._context.id

    def _known_worker_ids(self) -> set[int]:
        return set(self._context.known)

    def _send_functions(self) -> dict[int, Any]:
        return {send.id: SendNode(self._context, send) for send in self._context.messages()[0]}

    def _recv_functions(self) -> dict[int, Any]:
        return {recv.id: RecvNode(recv) for recv in self._context.messages()[1]}


class SendNode:
    """A view of a sent message as an autograd node. Its `next_functions` lead to the autograd
    history of the tensors in the message."""

    def __init__(self, context: Context, send: Send):
        self._context = context
        self._send = send

    def name(self) -> str:
        return f"{_NAMESPACE}::SendRpcBackward"

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        edges = [self._send.edge(position) for position in range(len(self._send.proxies))]
        return tuple(_view_of(self._context, edge.node, edge.output_nr) for edge in edges)


class RecvNode:
    """A view of a received message as an autograd node. The view compares as equal (`==`) to the
    autograd node of each tensor in the message."""

    next_functions: tuple[tuple[Any, int], ...] = ()

    def __init__(self, recv: Recv):
        self._recv = recv

    def name(self) -> str:
        return f"{_NAMESPACE}::RecvRpcBackward"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RecvNode):
            return other._recv is self._recv
        return _is_recv_node(other, self._recv)

    def __hash__(self) -> int:
        return hash(self._recv)


class Node:
    """A view of one of torch's autograd nodes. Its `next_functions` contain views instead of
    torch's nodes."""

    def __init__(self, context: Context, node: Any):
        self._context = context
        self._node = node

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        edges = self._node.next_functions
        return tuple(_view_of(self._context, node, output) for node, output in edges)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def __eq__(self, other: object) -> bool:
        return (other._node if isinstance(other, Node) else other) is self._node

    def __hash__(self) -> int:
        return hash(self._node)


def _view_of(context: Context, node: Any, output: int) -> tuple[Any, int]:
    """Return a pair like those in torch's `next_functions`: a view of an autograd node, and the
    number of one of its outputs."""
    for recv in list(context.recvs.values()):
        if _is_recv_node(node, recv):
            return RecvNode(recv), output
    return (None if node is None else Node(context, node)), output


def _is_recv_node(node: Any, recv: Recv) -> bool:
    return any(node is recv_node for recv_node in recv.recv_nodes)
