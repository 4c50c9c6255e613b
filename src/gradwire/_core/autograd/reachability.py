"""Reachability: which nodes of a region, a connected part of the graph, a gradient will reach.

In one process torch runs the nodes on paths from the roots to leaves, and no others. With several
workers, the graphs of other workers decide which nodes those are. An *entry* of the region is the
place where the gradient of a root or of a sent tensor enters. It is *alive* if a gradient will
enter there, and *dead* if not. A node is alive if an entry that leads to it is alive, and dead if
all entries that lead to it are dead.

Two textbook algorithms find these nodes. A search from each entry that is alive marks all nodes
that it reaches as alive, like the mark phase of a garbage collector (J. McCarthy, 1960). To find
the dead nodes, each node has a count of the edges into it that are not known to be dead. A node
whose count drops to 0 is dead, and so are the edges out of it, as in Kahn's topological sorting (A.
B. Kahn, 1962). The class `Reachability` differs from the textbook in two ways. It learns about the
entries one at a time and in any order, and it stops counting down at nodes that are alive. It
visits a node at most three times: to count the edges, to mark the node as alive, and to find that
the node is dead.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch.autograd.graph import GradientEdge

from gradwire._core.autograd.boundary import ReceivedTensor, Send, SentTensor


class Reachability:
    """Tells which nodes of one region are known to get a gradient (alive) or to get none (dead).

    The region refers to this object. To avoid a reference cycle, this object refers only to parts
    of the region.
    """

    def __init__(
        self,
        entries: Sequence[tuple[object, int, GradientEdge]],
        recv_nodes: Sequence[ReceivedTensor],
    ):
        self._entries = entries
        self._all_received = recv_nodes
        #: The received tensor of each recv node.
        self._received = {recv.recv_nodes[n]: (recv, n) for recv, n in recv_nodes}
        self._alive: set[Any] = set()
        #: Maps each node to the number of edges into it that may still bring a gradient. The edges
        #: are counted when it first becomes known that a sent tensor gets no gradient.
        self._edge_counts: dict[Any, int] = {}
        #: For each sent tensor that may or may not get a gradient: the node where the gradient
        #: would enter.
        self._unknown: dict[SentTensor, Any] = {}
        #: For each node where gradients may enter: the sent tensors of `_unknown` whose gradients
        #: would enter there. A node that is known to get a gradient is left out, because another
        #: gradient would make no difference there.
        self._undecided: dict[Any, set[SentTensor]] = {}
        for source, position, edge in entries:
            if type(source) is Send:
                entry = source.id, position
                self._unknown[entry] = edge.node
                self._undecided.setdefault(edge.node, set()).add(entry)

    @property
    def is_known(self) -> bool:
        """True if enough is known about the sent tensors to say which nodes get a gradient."""
        return not self._undecided

    def open_sends(self) -> set[int]:
        """Return the ids of the sent messages to ask about. It is unknown whether some of their
        tensors will get a gradient, and the answer matters to the nodes of this region."""
        return {send for entries in self._undecided.values() for send, _ in entries}

    def includes(self, recv_node: Any) -> bool:
        """Return whether the recv node of a received tensor is known to get a gradient."""
        return recv_node in self._alive

    def alive(self) -> Collection[Any]:
        """Return the nodes that are known to get a gradient. If gradients enter the region at one
        place only, they reach all its nodes or none, so no search is made. Then all nodes except
        recv nodes (the nodes that received tensors come from) may be missing from the result."""
        return self._alive

    def resolve(self, send: int, position: int, *, alive: bool) -> Sequence[ReceivedTensor]:
        """Note whether a sent tensor will get a gradient (`alive`). If it will, return the received
        tensors that are now known to get a gradient. If it will not, return the received tensors
        that are now known to get none."""
        node = self._unknown.pop((send, position), None)
        if node is None:
            return []
        # If gradients enter the region at one place only, that place leads to all nodes of the
        # region, so no search is needed.
        if len(self._entries) == 1:
            self._undecided.clear()
            self._alive.update(self._received if alive else ())
            return self._all_received
        if alive:
            return self.mark_alive(node)
        if node in self._undecided:
            self._undecided[node].discard((send, position))
            if not self._undecided[node]:
                del self._undecided[node]
        return self._remove_edge(node)

    def mark_alive(self, node: Any) -> list[ReceivedTensor]:
        """Note that a gradient will reach a node and all nodes that it leads to. Return the
        received tensors that are now known to get a gradient."""
        now_alive = []
        stack = [node]
        while stack:
            node = stack.pop()
            if node in self._alive:
                continue
            self._alive.add(node)
            self._undecided.pop(node, None)
            if node in self._received:
                now_alive.append(self._received[node])
            else:
                stack += [child for child, _ in node.next_functions if child is not None]
        return now_alive

    def _remove_edge(self, node: Any) -> list[ReceivedTensor]:
        """Note that one edge into a node brings no gradient. Return the received tensors that are
        now known to get no gradient."""
        if not self._edge_counts:
            self._count_edges()
        now_dead = []
        stack = [node]
        while stack:
            node = stack.pop()
            self._edge_counts[node] -= 1
            if self._edge_counts[node] or node in self._alive:
                continue
            if node in self._received:
                now_dead.append(self._received[node])
            else:
                stack += [child for child, _ in node.next_functions if child is not None]
        return now_dead

    def _count_edges(self) -> None:
        counts = self._edge_counts
        stack = [edge.node for _, _, edge in self._entries]
        while stack:
            node = stack.pop()
            count = counts.get(node, 0)
            counts[node] = count + 1
            if not count and node not in self._received:
                stack += [child for child, _ in node.next_functions if child is not None]
