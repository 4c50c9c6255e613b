"""What a backward pass has to do on one worker: pure planning.

Sources are what gradients come from: the roots, and the sends of the context; they enter the local
graph at their *starts*. Sinks are where they leave it: leaves, and the anchors of recvs. The graph
between them falls into connected *regions*; each is run by itself.

The walk visits every node once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gradwire.gradients.functions import (
    OPEN,
    Gradient,
    PreparedGate,
    Recv,
    Send,
    SentTensor,
    edge_at,
    make_gate,
)

if TYPE_CHECKING:
    from gradwire.gradients.reach import Reach

Leaf: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]

_NO_LIMIT = repeat(None)
#: A tensor is a sequence too, and would be taken apart.
_NO_LIST = "roots are given as a list, and so are gradients for them: write [loss]"


class Root:
    """Something `backward` was called on."""

    __slots__ = ("gradient", "id", "tensor")

    def __init__(self, tensor: Tensor, gradient: Tensor):
        self.tensor = tensor
        self.gradient = gradient
        #: No message has this id.
        self.id = 0


def make_roots(
    tensors: Sequence[Tensor], gradients: Sequence[Tensor | None] | None = None
) -> list[Root]:
    """Check what backward is called on."""
    if isinstance(tensors, Tensor):  # type: ignore[unreachable]
        raise TypeError(_NO_LIST)
    if gradients is not None and isinstance(gradients, Tensor):  # type: ignore[unreachable]
        raise TypeError(_NO_LIST)
    if not tensors:
        raise ValueError("No tensors provided for gradient computation.")
    if gradients is None:
        return [_make_root(tensor, None) for tensor in tensors]
    if len(gradients) != len(tensors):
        raise ValueError(f"{len(tensors)} roots, but {len(gradients)} gradients for them")
    return [_make_root(*pair) for pair in zip(tensors, gradients, strict=True)]


def _make_root(tensor: Tensor, gradient: Tensor | None) -> Root:
    if not tensor.requires_grad:
        raise ValueError(f"requires_grad not set on root {tensor!r}")
    if gradient is None:
        if tensor.numel() != 1:
            raise ValueError(
                f"root of shape {tuple(tensor.shape)} is not a scalar, all roots need to be scalar "
                "unless grad_tensors gives their gradients"
            )
        if tensor.is_complex():
            raise ValueError("a root is complex: say with grad_tensors what its gradient is")
    if tensor.grad_fn is None:
        raise ValueError("a root does not have a valid gradient function: it is a leaf")
    if gradient is None:
        return Root(tensor, torch.ones_like(tensor))
    if gradient.shape != tensor.shape:
        raise ValueError(
            f"a root of shape {tuple(tensor.shape)} has a gradient of shape {tuple(gradient.shape)}"
        )
    return Root(tensor, gradient)


Source = Root | Send
#: A source, which of its tensors, and where in the graph the gradient of that goes to.
Start = tuple[Source, int, GradientEdge]
#: A recv, and which of its tensors.
Anchor = tuple[Recv, int]


class Region:
    """A connected part of the graph, and how far a pass has got with it."""

    __slots__ = (
        "anchors", "asking", "bypassed", "dead_ends", "has_gradient", "leaves", "out", "part_of",
        "queued", "reach", "sources", "starts",
    )  # fmt: skip

    def __init__(self, source: Source, starts: list[Start]) -> None:
        self.sources: list[Source] = [source]
        self.starts = starts
        #: Whose gradients are asked for.
        self.leaves: list[Tensor] = []
        #: Leaves that do not require gradients any more, and nodes behind which there is nothing.
        #: Torch goes there all the same, and calls hooks of tensors on the way.
        self.dead_ends: list[GradientEdge] = []
        self.anchors: list[Anchor] = []
        #: How many of its sources have not been answered yet; whether one has a gradient.
        self.has_gradient = type(source) is Root
        self.out = 0 if self.has_gradient else 1
        self.queued = False
        #: Whether another worker was told of a shortcut past it.
        self.bypassed = False
        #: Where gradients can come to; worked out where that matters.
        self.reach: Reach | None = None
        #: Whether others were asked for that.
        self.asking = False
        #: Another one that this has turned out to be a part of, and has gone over to.
        self.part_of: Region | None = None

    def is_straight(self) -> bool:
        """Whether something was received and sent on as it is, and nobody watches that. What comes
        back goes back as it is, and torch need not be asked."""
        if len(self.starts) != 1 or len(self.anchors) != 1 or self.leaves or self.dead_ends:
            return False
        recv, position = self.anchors[0]
        return self.starts[0][2].node is recv.anchors[position] and not recv.is_watched(position)

    def whole(self) -> Region:
        region = self
        while (above := region.part_of) is not None:
            region.part_of = above.part_of or above  # the next one has less far to go
            region = above
        return region

    def join(self, other: Region) -> None:
        """There is a way between the two: they are one."""
        large, small = self.whole(), other.whole()
        if large is small:
            return
        if len(large.starts) < len(small.starts):
            large, small = small, large
        large.sources += small.sources
        large.starts += small.starts
        large.leaves += small.leaves
        large.dead_ends += small.dead_ends
        large.anchors += small.anchors
        large.out += small.out
        large.has_gradient |= small.has_gradient
        small.part_of = large


class Reply:
    """The answer of a recv, and how far a pass has got with it."""

    __slots__ = ("alive", "gradients", "has_gradient", "open", "sender", "shortcut", "told")

    def __init__(self, sender: int, size: int):
        self.sender = sender
        #: Which tensors gradients will come to, as far as known; whether the sender was told.
        self.alive: set[int] = set()
        self.told = False
        self.open = size
        self.gradients: list[Gradient] = [OPEN] * size
        self.has_gradient = False
        #: Which gradient the sender would send back as it is, and to which send of this worker.
        self.shortcut: tuple[int, int] | None = None


class Plan:
    """The regions, and what is in none of them.

    The messages of a context can be added as they come, when there is time; when the pass begins
    little is left to do. `wanted` are the tensors whose gradients are asked for; None: all leaves.
    `loose`: loose ends are left out; a send that has no others is in no region. `on_the_way` to
    what is asked for are these, of the tensors that were sent and received; None: all may be.
    """

    def __init__(
        self,
        wanted: Sequence[Tensor] | None = None,
        *,
        loose: bool = False,
        on_the_way: Collection[SentTensor] | None = None,
    ):
        # (First those that go first: nodes of leaves must not be held by Python alone.)
        #: Nodes that are still to be visited, if the limit was reached.
        self._unvisited: list[tuple[list[Any], Region]] = []
        #: Anchors that no source has reached yet; and the nodes that were visited.
        self._anchors: dict[Any, Anchor] = {}
        self._marked: dict[Any, Region] = {}
        self.regions: list[Region] = []
        #: By send, the region that it is a source of, and which of its tensors are loose.
        self._region_of: dict[int, Region] = {}
        self.loose: dict[int, list[int]] = {}
        #: The messages that were added; and the answers to those that have arrived.
        self.sends: dict[int, Send] = {}
        self.recvs: dict[int, Recv] = {}
        self.replies: dict[int, Reply] = {}
        #: Recvs of which nothing was decoded, or nothing yet.
        self.empty: list[int] = []
        #: Anchors that no source reaches, or that nobody asks for.
        self.unreached: list[Anchor] = []
        #: By message, to which of its tensors gradients will come, where that is known beforehand.
        self.prospects: dict[int, set[int]] = {}
        #: Gates that were made when there was time; and the starts that were added since.
        self.gates: dict[SentTensor, PreparedGate] = {}
        self._recent: list[Start] = []
        self._wanted = None if wanted is None else {id(tensor): tensor for tensor in wanted}
        self._leaves_out_loose = loose
        self._on_the_way = on_the_way
        #: Leaves that do not require gradients any more; and which starts are leaves, and where.
        self._frozen: list[Tensor] = []
        self._leaf_starts: list[tuple[Send, int, GradientEdge]] = []
        #: One for each node that may be visited.
        self._steps = _NO_LIMIT

    def add(
        self, sends: Mapping[int, Send], recvs: Mapping[int, Recv], limit: int | None = None
    ) -> None:
        """Add the messages of a context that were not there the last time. No more nodes are
        visited than the limit, if there is one; the next time it goes on there."""
        self._steps = _NO_LIMIT if limit is None else repeat(None, limit)
        # In this order: what was sent may depend on what had arrived.
        new_sends = [*sends.values()][len(self.sends) :] if len(sends) > len(self.sends) else ()
        new_recvs = [*recvs.values()][len(self.recvs) :] if len(recvs) > len(self.recvs) else ()
        unvisited, self._unvisited = self._unvisited, []
        for stack, region in unvisited:
            self._visit(stack, region)
        on_the_way = self._on_the_way
        for recv in new_recvs:
            # One that is arriving just now has more of them later; nothing depends on those yet.
            arrived = tuple(recv.anchors)
            self.recvs[recv.id] = recv
            self.replies[recv.id] = Reply(recv.sender, len(arrived))
            if not arrived:
                self.empty.append(recv.id)
            for number, anchor in enumerate(arrived):
                if on_the_way is None or (recv.id, number) in on_the_way:
                    self._anchors[anchor] = (recv, number)
                else:
                    self.unreached.append((recv, number))
        for send in new_sends:
            self.sends[send.id] = send
            starts = self._starts_of(send)
            if starts:
                region = self._region_of[send.id] = Region(send, starts)
                self.regions.append(region)
                self._recent += starts
                for _, _, edge in [*starts]:
                    self._walk(edge.node, region)

    def make_gates(self) -> None:
        """There is time to make those that a run will need as it looks: where what was sent has a
        part in something else here, and goes back to something that was received."""
        recent, self._recent = self._recent, []
        for source, position, _ in recent:
            region = self.region_of(source.id)
            if type(source) is Send and region and region.anchors and len(region.sources) > 1:
                self.gates[source.id, position] = make_gate(source, position)

    def still_holds(self) -> bool:
        """Whether all is as it was when it was added."""
        for id, recv in self.recvs.items():
            if len(recv.anchors) != self.replies[id].open:
                return False
        for leaf in self._frozen:
            if leaf.requires_grad:
                return False
        for region in self.regions:
            for leaf in region.leaves:
                if not leaf.requires_grad:
                    return False
        for send, number, edge in self._leaf_starts:
            # It was frozen, or its data was exchanged.
            if not send.ends[number].requires_grad or send.edge(number).node is not edge.node:
                return False
        for id, positions in self.loose.items():
            ends = self.sends[id].ends
            for position in positions:
                end = ends[position]
                if not end.requires_grad or end._backward_hooks is not None:
                    return False
        return True

    def finish(self, roots: Sequence[Root]) -> None:
        """Add what a pass begins with."""
        self._steps = _NO_LIMIT
        for root in roots:
            start = edge_at(root.tensor.grad_fn, root.tensor.output_nr)
            region = Region(root, [(root, 0, start)])
            self.regions.append(region)
            self._walk(start.node, region)
        if self._wanted is not None:
            self._look_for(self._wanted.values())
        self.regions = [region for region in self.regions if region.part_of is None]
        self.unreached += self._anchors.values()
        for message, position in self._on_the_way or ():
            self.prospects.setdefault(message, set()).add(position)
        self._marked = {}

    def region_of(self, send: int) -> Region | None:
        """The region that a send is a source of."""
        region = self._region_of.get(send)
        return region if region is None or region.part_of is None else region.whole()

    def _look_for(self, wanted: Collection[Tensor]) -> None:
        """Find the tensors that are asked for and are no leaves."""
        for tensor in wanted:
            if tensor.grad_fn in self._marked:
                self._marked[tensor.grad_fn].whole().leaves.append(tensor)
        if wanted and len(self.regions) == 1:
            (region,) = self.regions
            if not (region.leaves or region.anchors):
                region.leaves += wanted  # torch calls the hooks of an only root in any case

    def _starts_of(self, send: Send) -> list[Start]:
        on_the_way = self._on_the_way
        starts: list[Start] = []
        for position, end in enumerate(send.ends):
            if on_the_way is not None and (send.id, position) not in on_the_way:
                continue
            if end.is_leaf:
                if not end.requires_grad:  # it was frozen, or could not have a gradient
                    self._frozen.append(end)
                    continue
                # A loose end is a leaf that was sent, and that nobody watches: what it is sent back
                # is its gradient, with no need to go through the graph. (Hooks must see the sum.)
                if self._leaves_out_loose and end._backward_hooks is None:
                    self.loose.setdefault(send.id, []).append(position)
                    continue
            edge = send.edge(position)
            starts.append((send, position, edge))
            if end.is_leaf:
                self._leaf_starts.append((send, position, edge))
        return starts

    def _walk(self, start: Any, region: Region) -> None:
        """Visit all nodes that a start of a region reaches and nobody has marked."""
        found = self._marked.get(start)
        if found is not None:
            region.join(found)
            return
        self._marked[start] = region if region.part_of is None else region.whole()
        self._visit([start], region)

    def _visit(self, stack: list[Any], region: Region) -> None:
        """Go on from nodes that are marked, as far as the limit allows. Leaves and anchors that are
        found go over to the region."""
        marked, anchors, wanted = self._marked, self._anchors, self._wanted
        if region.part_of is not None:
            region = region.whole()
        for _ in self._steps:
            if not stack:
                return
            node = stack.pop()
            if type(node) is Leaf:
                leaf = node.variable
                if not leaf.requires_grad:
                    region.dead_ends.append(edge_at(node))
                    self._frozen.append(leaf)
                elif wanted is None or id(leaf) in wanted:
                    region.leaves.append(leaf)
                continue
            anchor = anchors.pop(node, None)
            if anchor is not None:
                region.anchors.append(anchor)
                continue
            is_end = True
            for child, _ in node.next_functions:
                if child is not None:
                    is_end = False
                    found = marked.get(child)
                    if found is None:
                        marked[child] = region
                        stack.append(child)
                    elif found is not region:
                        region.join(found)
                        region = region.whole()
            if is_end:
                region.dead_ends.append(edge_at(node))
        self._unvisited.append((stack, region))
