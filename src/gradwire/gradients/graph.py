"""What a backward pass has to do on one worker: pure planning.

Sources are what gradients come from: the roots, and the sends of the context; they enter the local
graph at their *starts*. Sinks are where they leave it: leaves, and the anchors of recvs. The graph
between them falls into connected *regions*; each is run by itself.

The walk visits every node once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gradwire.gradients.functions import Recv, Send, edge_at

if TYPE_CHECKING:
    from gradwire.gradients.reach import Reach

_Leaf: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


@dataclass(slots=True)
class Root:
    """Something `backward` was called on."""

    tensor: Tensor
    gradient: Tensor


def make_roots(
    tensors: Sequence[Tensor], gradients: Sequence[Tensor | None] | None = None
) -> list[Root]:
    """Check what backward is called on."""
    if not tensors:
        raise ValueError("No tensors provided for gradient computation.")
    given = gradients if gradients is not None else [None] * len(tensors)
    if len(given) != len(tensors):
        raise ValueError(f"{len(tensors)} roots, but {len(given)} gradients for them")
    roots = []
    for tensor, gradient in zip(tensors, given, strict=True):
        if not tensor.requires_grad:
            raise ValueError(f"requires_grad not set on root {tensor!r}")
        if gradient is None and tensor.numel() != 1:
            raise ValueError(
                f"root of shape {tuple(tensor.shape)} is not a scalar, all roots need to be scalar "
                "unless grad_tensors gives their gradients"
            )
        if tensor.grad_fn is None:
            raise ValueError("a root does not have a valid gradient function: it is a leaf")
        if gradient is not None and gradient.shape != tensor.shape:
            raise ValueError(
                f"a root of shape {tuple(tensor.shape)} has a gradient of shape "
                f"{tuple(gradient.shape)}"
            )
        roots.append(Root(tensor, torch.ones_like(tensor) if gradient is None else gradient))
    return roots


Source = Root | Send
#: A source, which of its tensors, and where in the graph the gradient of that goes to.
Start = tuple[Source, int, GradientEdge]
#: A recv, and which of its tensors.
Anchor = tuple[Recv, int]


class Region:
    """A connected part of the graph, and how far a pass has got with it."""

    __slots__ = (
        "anchors", "asking", "has_gradient", "leaves", "out", "queued", "reach", "sources",
        "starts",
    )  # fmt: skip

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self.starts: list[Start] = []
        #: Whose gradients are asked for.
        self.leaves: list[Tensor] = []
        self.anchors: list[Anchor] = []
        #: How many of its sources have not been answered yet.
        self.out = 0
        self.has_gradient = False
        self.queued = False
        #: Where gradients can come to; worked out where that matters.
        self.reach: Reach | None = None
        #: Whether others were asked for that.
        self.asking = False


@dataclass(slots=True)
class Plan:
    """The regions, and what is in none of them."""

    regions: list[Region]
    #: Anchors that no source reaches.
    unreached: list[Anchor]
    #: By send, which of its tensors are loose.
    loose: dict[int, set[int]]
    #: By recv, how many anchors it has.
    sizes: dict[int, int]


def is_loose(end: Tensor) -> bool:
    """A leaf that was sent, and that nobody watches: what it is sent back is its gradient, with no
    need to go through the graph. (Hooks must see the sum of all its gradients.)"""
    return end.is_leaf and end._backward_hooks is None


def make_plan(
    sources: Sequence[Source],
    recvs: Sequence[Recv],
    wanted: Sequence[Tensor] | None = None,
    *,
    loose: bool = False,
) -> Plan:
    """Plan a pass. `wanted` are the tensors whose gradients are asked for; None: all leaves.
    `loose`: loose ends are left out; a send that has no others is in no region."""
    # One that is arriving just now has more of them a moment later, which nothing depends on yet.
    arrived = [(recv, tuple(recv.anchors)) for recv in recvs]
    anchors = {anchor: (recv, n) for recv, found in arrived for n, anchor in enumerate(found)}
    part_of: dict[Any, int] = {}
    parts = _Parts(len(sources))
    sinks: list[tuple[int, Any]] = []
    left_out: dict[int, set[int]] = {}
    members: list[tuple[int, Source, list[Start]]] = []
    for part, source in enumerate(sources):
        starts = _starts_of(source, left_out if loose else None)
        for _, _, edge in starts:
            _walk(edge.node, part, part_of, parts, anchors, sinks)
        if starts:
            members.append((part, source, starts))
    regions: dict[int, Region] = {}
    for part, source, starts in members:
        found = parts.find(part)
        if found not in regions:
            regions[found] = Region()
        regions[found].sources.append(source)
        regions[found].starts += starts
    asked = None if wanted is None else {id(tensor): tensor for tensor in wanted}
    for part, node in sinks:
        region = regions[parts.find(part)]
        if type(node) is not _Leaf:
            region.anchors.append(anchors.pop(node))
        elif asked is None or id(node.variable) in asked:
            region.leaves.append(node.variable)
    for tensor in asked.values() if asked else ():
        if tensor.grad_fn in part_of:
            regions[parts.find(part_of[tensor.grad_fn])].leaves.append(tensor)
    sizes = {recv.id: len(found) for recv, found in arrived}
    return Plan(list(regions.values()), list(anchors.values()), left_out, sizes)


def _starts_of(source: Source, left_out: dict[int, set[int]] | None) -> list[Start]:
    if type(source) is Root:
        tensor = source.tensor
        return [(source, 0, edge_at(tensor.grad_fn, tensor.output_nr))]
    assert type(source) is Send
    starts: list[Start] = []
    for position, end in enumerate(source.ends):
        if left_out is not None and is_loose(end):
            left_out.setdefault(source.id, set()).add(position)
        else:
            starts.append((source, position, source.edge(position)))
    return starts


def _walk(
    start: Any,
    part: int,
    part_of: dict[Any, int],
    parts: _Parts,
    anchors: dict[Any, Anchor],
    sinks: list[tuple[int, Any]],
) -> None:
    """Mark all nodes that a source reaches and nobody has marked, and find the sinks there."""
    found = part_of.get(start, -1)
    if found >= 0:
        parts.join(part, found)
        return
    part_of[start] = part
    stack = [start]
    while stack:
        node = stack.pop()
        if type(node) is _Leaf or node in anchors:
            sinks.append((part, node))
            continue
        for child, _ in node.next_functions:
            if child is not None:
                found = part_of.get(child, -1)
                if found < 0:
                    part_of[child] = part
                    stack.append(child)
                elif found != part:
                    parts.join(part, found)


class _Parts:
    """Which sources lead into the same region (union-find)."""

    def __init__(self, count: int):
        self._parent = list(range(count))

    def find(self, part: int) -> int:
        parent = self._parent
        while parent[part] != part:
            parent[part] = part = parent[parent[part]]
        return part

    def join(self, a: int, b: int) -> None:
        self._parent[self.find(b)] = self.find(a)


def lift_nodes(region: Region, count: int) -> None:
    """Have torch run all nodes of a region before those numbered below `count`. (Torch counts the
    nodes that a thread makes from 0, and runs what is ready with the highest number first.)"""
    seen = {edge.node for _, _, edge in region.starts}
    stack = list(seen)
    while stack:
        node: Any = stack.pop()
        number = node._sequence_nr()
        if number < count:
            node._set_sequence_nr(number + count)
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
