"""What a backward pass has to do on one worker: pure planning.

Sources are where gradients enter the local graph: the roots, and the sends of the context. Sinks
are where they leave it: leaves and recvs. The graph between them falls into connected *regions*;
each is run by itself. For every recv the plan says which sources reach it.

The walk cuts at recvs and leaves, visits every node once, and carries the set of sources that reach
a node as the bits of an integer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gradwire.gradients.functions import Recv, Send


@dataclass(slots=True)
class Root:
    """Something `backward` was called on."""

    tensor: Tensor
    gradient: Tensor | None


Source = Root | Send


@dataclass(slots=True)
class Region:
    """A connected part of the graph."""

    sources: list[Source] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)
    recvs: list[Recv] = field(default_factory=list)
    #: All nodes but those of leaves.
    nodes: list[Any] = field(default_factory=list)
    #: Per recv, the sources that reach it, as bits by their position in the plan.
    reached: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Plan:
    """The regions with sources, and the recvs that no source reaches."""

    regions: list[Region]
    unreached: list[Recv]


def _node(source: Source) -> Any:
    return source.tensor.grad_fn if isinstance(source, Root) else source.node


def make_plan(sources: Sequence[Source], recvs: Sequence[Recv]) -> Plan:
    """Plan a pass."""
    recv_nodes = {recv.node: recv for recv in recvs}
    order = _topological(sources, recv_nodes)
    masks: dict[Any, int] = dict.fromkeys(order, 0)
    for bit, source in enumerate(sources):
        masks[_node(source)] |= 1 << bit
    regions = _Sets(order)
    for node in order:
        if node in recv_nodes:
            continue
        mask = masks[node]
        for child, _ in node.next_functions:
            if child is not None:
                masks[child] |= mask
                regions.join(node, child)
    return _collect(sources, recvs, recv_nodes, order, masks, regions)


def _topological(sources: Sequence[Source], recv_nodes: dict[Any, Recv]) -> list[Any]:
    """All nodes the sources reach, every node before those it leads to."""
    finished: list[Any] = []
    seen: set[Any] = set()
    for source in sources:
        start = _node(source)
        if start in seen:
            continue
        seen.add(start)
        stack = [(start, iter(() if start in recv_nodes else start.next_functions))]
        while stack:
            node, children = stack[-1]
            for child, _ in children:
                if child is not None and child not in seen:
                    seen.add(child)
                    below = () if child in recv_nodes else child.next_functions
                    stack.append((child, iter(below)))
                    break
            else:
                finished.append(node)
                stack.pop()
    finished.reverse()
    return finished


class _Sets:
    """Union-find over nodes."""

    def __init__(self, nodes: Sequence[Any]):
        self._parent = {node: node for node in nodes}

    def find(self, node: Any) -> Any:
        parent = self._parent
        while parent[node] is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    def join(self, a: Any, b: Any) -> None:
        a, b = self.find(a), self.find(b)
        if a is not b:
            self._parent[b] = a


def _collect(
    sources: Sequence[Source],
    recvs: Sequence[Recv],
    recv_nodes: dict[Any, Recv],
    order: Sequence[Any],
    masks: dict[Any, int],
    sets: _Sets,
) -> Plan:
    regions: dict[Any, Region] = {}
    for source in sources:
        regions.setdefault(sets.find(_node(source)), Region()).sources.append(source)
    for node in order:
        region = regions[sets.find(node)]
        if hasattr(node, "variable"):
            region.leaves.append(node.variable)
            continue
        region.nodes.append(node)
        if node in recv_nodes:
            region.recvs.append(recv_nodes[node])
            region.reached.append(masks[node])
    unreached = [recv for recv in recvs if recv.node not in masks]
    return Plan(list(regions.values()), unreached)
