"""Contexts and graphs as programs written for torch look at them.

torch puts a node into the graph where a message left and where one arrived. gradwire has none
there, so the nodes shown here are views: of what was sent, of what came, and of torch's own nodes
in between, which lead on to such views.
"""

from __future__ import annotations

from typing import Any

from gradwire.gradients.context import Context
from gradwire.gradients.functions import Recv, Send

_NAMESPACE = "torch::distributed::autograd"


class DistAutogradContext:
    """A context on this worker."""

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
    """Where a message left: leads to the history of the tensors in it."""

    def __init__(self, context: Context, send: Send):
        self._context = context
        self._send = send

    def name(self) -> str:
        return f"{_NAMESPACE}::SendRpcBackward"

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        edges = [self._send.edge(position) for position in range(len(self._send.ends))]
        return tuple(_shown(self._context, edge.node, edge.output_nr) for edge in edges)


class RecvNode:
    """Where a message arrived; equal to the node torch has there."""

    next_functions: tuple[tuple[Any, int], ...] = ()

    def __init__(self, recv: Recv):
        self._recv = recv

    def name(self) -> str:
        return f"{_NAMESPACE}::RecvRpcBackward"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RecvNode):
            return other._recv is self._recv
        return _leads_to(other, self._recv)

    def __hash__(self) -> int:
        return hash(self._recv)


class Node:
    """One of torch's nodes; leads to views."""

    def __init__(self, context: Context, node: Any):
        self._context = context
        self._node = node

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        edges = self._node.next_functions
        return tuple(_shown(self._context, node, number) for node, number in edges)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def __eq__(self, other: object) -> bool:
        return (other._node if isinstance(other, Node) else other) is self._node

    def __hash__(self) -> int:
        return hash(self._node)


def _shown(context: Context, node: Any, number: int) -> tuple[Any, int]:
    for recv in list(context.recvs.values()):
        if _leads_to(node, recv):
            return RecvNode(recv), number
    return (None if node is None else Node(context, node)), number


def _leads_to(node: Any, recv: Recv) -> bool:
    """Whether a node is where one of the tensors of a message comes from."""
    return any(node is anchor for anchor in recv.anchors)
