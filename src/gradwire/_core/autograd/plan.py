"""Plans: the parts of a worker's graph that a backward pass must run.

Gradients come from *sources*. A source is a root (a tensor that `backward` was called on) or a send
(a message with differentiable tensors that this worker has sent). Gradients enter the local graph
at the *entries* of the sources. Each root and each sent tensor has one entry. Gradients leave the
graph at leaves, and at recv nodes, which are the nodes that received tensors come from. The part of
the graph that gradients can reach falls into connected *regions*. Torch's engine runs each region
in one go.

The regions are connected components. They are found by a search that visits every node once, and by
union-find (R. E. Tarjan, 1975), with union by size and path halving. The textbook unites single
nodes. Here a search assigns all nodes that it reaches to one region, and two regions are united
when the search from one meets a node of the other.

Planning sends no messages to other workers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gradwire._core.autograd.boundary import (
    OPEN,
    Gradient,
    ReceivedTensor,
    Recv,
    Send,
    SentTensor,
)
from gradwire._core.autograd.edges import edge_at
from gradwire._core.autograd.gates import PreparedGate, make_gate
from gradwire._core.autograd.reachability import Reachability
from gradwire._core.torch_internals import AccumulateGrad

_NO_LIMIT = repeat(None)
#: The text of the error that is raised if a tensor is given instead of a list. Without this error
#: the elements of the tensor would be taken for roots, because a tensor is also a sequence.
_NOT_A_LIST = "roots are given as a list, and so are gradients for them: write [loss]"


class Root:
    """A tensor that a backward pass begins at, and the gradient of that tensor."""

    __slots__ = ("gradient", "id", "tensor")

    def __init__(self, tensor: Tensor, gradient: Tensor):
        self.tensor = tensor
        self.gradient = gradient
        # Code that handles roots and sent messages alike looks for messages by this id. No message
        # has the id 0, so it finds none for a root.
        self.id = 0


def make_roots(
    tensors: Sequence[Tensor], gradients: Sequence[Tensor | None] | None = None
) -> list[Root]:
    """Check the arguments of `backward`, and return the roots.

    >>> [root] = make_roots([(torch.ones(2, requires_grad=True) * 3).sum()])
    >>> root.gradient
    tensor(1.)
    """
    if isinstance(tensors, Tensor):  # type: ignore[unreachable]
        raise TypeError(_NOT_A_LIST)
    if gradients is not None and isinstance(gradients, Tensor):  # type: ignore[unreachable]
        raise TypeError(_NOT_A_LIST)
    if not tensors:
        raise ValueError("No tensors provided for gradient computation.")
    if gradients is None:
        return [_make_root(tensor, None) for tensor in tensors]
    if len(gradients) != len(tensors):
        raise ValueError(f"there are {len(tensors)} roots, but {len(gradients)} gradients for them")
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
            raise ValueError("a root is complex: give its gradient with grad_tensors")
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
#: A place where gradients enter the local graph. It is given by a source (a root, or a message that
#: was sent), the position of one of its tensors, and the edge at which the gradient of that tensor
#: enters.
Entry = tuple[Source, int, GradientEdge]


class Region:
    """A connected part of the local graph, and the state of a backward pass in it. The sources of a
    region are the roots and sent messages whose gradients enter the region."""

    __slots__ = (
        "asking",
        "bypassed",
        "dead_ends",
        "entries",
        "has_gradient",
        "leaves",
        "merged_into",
        "out",
        "queued",
        "reach",
        "recv_nodes",
        "sources",
    )

    def __init__(self, source: Source, entries: list[Entry]) -> None:
        self.sources: list[Source] = [source]
        self.entries = entries
        #: The tensors of this region whose gradients the pass computes: leaves, and other tensors
        #: if the program has asked for their gradients.
        self.leaves: list[Tensor] = []
        #: The places where the graph ends, but no gradient is needed: leaves that no longer require
        #: gradients, and nodes that lead to no other node. Torch runs the paths to these places all
        #: the same, because tensors on these paths may have hooks, which must be called.
        self.dead_ends: list[GradientEdge] = []
        self.recv_nodes: list[ReceivedTensor] = []
        #: Whether at least one gradient that enters this region is known.
        self.has_gradient = type(source) is Root
        #: The number of sent messages among the sources whose gradients have not come back yet.
        self.out = 0 if self.has_gradient else 1
        #: Whether the region was put into the queue of regions to run.
        self.queued = False
        #: Whether another worker was offered to skip this region. That worker can use a gradient
        #: itself, instead of sending it here and getting it back unchanged (see `ShortcutOffer`).
        self.bypassed = False
        #: Tells which nodes of this region gradients will reach. It is None until a pass needs to
        #: know this.
        self.reach: Reachability | None = None
        #: Whether other workers were asked which sent tensors of this region will get gradients.
        self.asking = False
        #: The region that this region has become a part of: its parent in the union-find forest.
        self.merged_into: Region | None = None

    def is_passthrough(self) -> bool:
        """Return whether the region consists of one tensor that was received and sent on unchanged.
        If user code has registered a hook on the tensor or called `retain_grad`, the result is
        False. If the result is True, torch's engine need not run: the gradient can be sent back as
        it is."""
        if len(self.entries) != 1 or len(self.recv_nodes) != 1 or self.leaves or self.dead_ends:
            return False
        recv, position = self.recv_nodes[0]
        return self.entries[0][2].node is recv.recv_nodes[position] and not recv.is_watched(
            position
        )

    def find(self) -> Region:
        """Return the region that this one was merged into, or this one if it was not merged. This
        is the find operation of union-find."""
        region = self
        while (parent := region.merged_into) is not None:
            # This step is called path halving. It makes later searches shorter.
            region.merged_into = parent.merged_into or parent
            region = parent
        return region

    def union(self, other: Region) -> None:
        """Merge two regions, because an edge of the graph connects them."""
        large, small = self.find(), other.find()
        if large is small:
            return
        if len(large.entries) < len(small.entries):
            large, small = small, large
        large.sources += small.sources
        large.entries += small.entries
        large.leaves += small.leaves
        large.dead_ends += small.dead_ends
        large.recv_nodes += small.recv_nodes
        large.out += small.out
        large.has_gradient |= small.has_gradient
        small.merged_into = large


class Reply:
    """The answer to a received message: the gradients of its tensors, as a pass finds them."""

    __slots__ = ("alive", "gradients", "has_gradient", "open", "sender", "shortcut", "told")

    def __init__(self, sender: int, size: int):
        self.sender = sender
        #: The positions of the tensors that will certainly get a gradient.
        self.alive: set[int] = set()
        #: Whether the sender of the message was told which of its tensors get a gradient.
        self.told = False
        #: The number of gradients that are not known yet.
        self.open = size
        self.gradients: list[Gradient] = [OPEN] * size
        self.has_gradient = False
        #: A shortcut that the sender of the message offers: this worker can use a gradient itself,
        #: because the sender would only return the gradient unchanged. The first number is the
        #: position of the gradient. The second number is the id of the earlier message in which
        #: this worker sent the tensor.
        self.shortcut: tuple[int, int] | None = None


class Plan:
    """The regions (connected parts) of a worker's graph, and the messages that are in no region.

    The messages of a context can be added while the forward pass goes on, so little is left to do
    when a backward pass begins.

    `wanted` are the tensors whose gradients the pass computes. If it is None, these are all leaves.
    `direct_leaves` tells whether leaves that were sent, and have no hooks, are kept out of the
    regions. A gradient that the receiver sends back for such a leaf needs no run of torch's engine.
    `on_the_way` are the sent and received tensors that are on a path to a wanted tensor. If it is
    None, any tensor may be on such a path.
    """

    def __init__(
        self,
        wanted: Sequence[Tensor] | None = None,
        *,
        direct_leaves: bool = False,
        on_the_way: Collection[SentTensor] | None = None,
    ):
        #: The nodes that `add` has not visited yet, because it reached its limit. Each item is a
        #: list of nodes and the region that these nodes belong to.
        self._unvisited: list[tuple[list[Any], Region]] = []
        #: The recv nodes (the nodes of received tensors) that the search has not reached yet.
        self._recv_nodes: dict[Any, ReceivedTensor] = {}
        #: Maps each node that the search has reached to its region.
        self._region_of_node: dict[Any, Region] = {}
        # When this object dies, Python clears its attributes in the order in which they were set.
        # So the attributes above, which hold nodes, are set before those below, which hold edges.
        # An edge keeps its node alive in C++. If Python had the last reference to the node of a
        # leaf, threads could deadlock (see `edges.edge_of_leaf`).
        self.regions: list[Region] = []
        #: Maps the id of a sent message to the region where the gradients of its tensors enter.
        self._region_of_send: dict[int, Region] = {}
        #: Maps the id of a sent message to the positions of those leaves in it that belong to no
        #: region. Torch's engine need not run for such a leaf: its gradient is accumulated as soon
        #: as the receiver sends it back.
        self.direct_leaves: dict[int, list[int]] = {}
        #: The sent messages by their ids.
        self.sends: dict[int, Send] = {}
        #: The received messages by their ids.
        self.recvs: dict[int, Recv] = {}
        #: The answers to the received messages, by the ids of these messages.
        self.replies: dict[int, Reply] = {}
        #: The ids of received messages that had no decoded tensor yet when they were added to the
        #: plan.
        self.empty: list[int] = []
        #: Received tensors that no gradient can reach, or that are on no path to a wanted tensor.
        self.unreached: list[ReceivedTensor] = []
        #: Maps the id of a message to the positions of its tensors that will get a gradient. A
        #: message is listed only if this is known before its gradients arrive.
        self.forecast: dict[int, set[int]] = {}
        #: The gates (nodes where torch will wait for the gradient of a sent tensor) that were made
        #: before the pass.
        self.gates: dict[SentTensor, PreparedGate] = {}
        #: The entries (places where gradients enter) that `make_gates` has not looked at yet.
        self._new_entries: list[Entry] = []
        self._wanted = None if wanted is None else {id(tensor): tensor for tensor in wanted}
        self._skips_direct_leaves = direct_leaves
        self._on_the_way = on_the_way
        #: Leaves that did not require gradients when they were added to the plan.
        self._frozen: list[Tensor] = []
        #: For each leaf that was sent and belongs to a region: the message that carried the leaf,
        #: the position of the leaf in that message, and the edge where its gradient enters the
        #: local graph.
        self._leaf_entries: list[tuple[Send, int, GradientEdge]] = []
        #: An iterator that yields one item for each node that may still be visited.
        self._visits_allowed = _NO_LIMIT

    def add(
        self, sends: Mapping[int, Send], recvs: Mapping[int, Recv], limit: int | None = None
    ) -> None:
        """Add the messages of a context that were recorded since the last call.

        If `limit` is given, at most that many nodes are visited. The next call visits the rest.
        """
        self._visits_allowed = _NO_LIMIT if limit is None else repeat(None, limit)
        # The sent messages are read before the received ones. In the other order, another thread
        # could record a received message, and then a sent message that depends on it, between the
        # two lines. Only the sent message would then be added.
        new_sends = [*sends.values()][len(self.sends) :] if len(sends) > len(self.sends) else ()
        new_recvs = [*recvs.values()][len(self.recvs) :] if len(recvs) > len(self.recvs) else ()
        unvisited, self._unvisited = self._unvisited, []
        for stack, region in unvisited:
            self._visit(stack, region)
        on_the_way = self._on_the_way
        for recv in new_recvs:
            # A message that is still being decoded gets more recv nodes later. They may be missing
            # here, because no sent message can depend on them yet.
            arrived = tuple(recv.recv_nodes)
            self.recvs[recv.id] = recv
            self.replies[recv.id] = Reply(recv.sender, len(arrived))
            if not arrived:
                self.empty.append(recv.id)
            for number, recv_node in enumerate(arrived):
                if on_the_way is None or (recv.id, number) in on_the_way:
                    self._recv_nodes[recv_node] = (recv, number)
                else:
                    self.unreached.append((recv, number))
        for send in new_sends:
            self.sends[send.id] = send
            entries = self._entries_of(send)
            if entries:
                region = self._region_of_send[send.id] = Region(send, entries)
                self.regions.append(region)
                self._new_entries += entries
                for _, _, edge in [*entries]:
                    self._walk(edge.node, region)

    def make_gates(self) -> None:
        """Make the gates that torch will probably need, before the pass begins.

        A gate is a node where torch waits for the gradient of a sent tensor. A gate will probably
        be needed if several roots or messages bring gradients to the region of the tensor, and the
        region has recv nodes.
        """
        new_entries, self._new_entries = self._new_entries, []
        for source, position, _ in new_entries:
            region = self.region_of(source.id)
            if type(source) is Send and region and region.recv_nodes and len(region.sources) > 1:
                self.gates[source.id, position] = make_gate(source, position)

    def still_holds(self) -> bool:
        """Return whether the messages and leaves of this plan are unchanged since they were added,
        so that a pass can use the plan."""
        for recv_id, recv in self.recvs.items():
            if len(recv.recv_nodes) != self.replies[recv_id].open:
                return False
        for leaf in self._frozen:
            if leaf.requires_grad:
                return False
        for region in self.regions:
            for leaf in region.leaves:
                if not leaf.requires_grad:
                    return False
        for send, position, edge in self._leaf_entries:
            # User code may have frozen the leaf. Or it may have replaced the `data` of the leaf,
            # which can give the leaf another node. In both cases the plan no longer holds.
            leaf = send.proxies[position]
            if not leaf.requires_grad or send.edge(position).node is not edge.node:
                return False
        for send_id, positions in self.direct_leaves.items():
            proxies = self.sends[send_id].proxies
            for position in positions:
                leaf = proxies[position]
                if not leaf.requires_grad or leaf._backward_hooks is not None:
                    return False
        return True

    def finish(self, roots: Sequence[Root]) -> None:
        """Add the roots of a pass. Afterwards, no messages of the context can be added."""
        self._visits_allowed = _NO_LIMIT
        for root in roots:
            edge = edge_at(root.tensor.grad_fn, root.tensor.output_nr)
            region = Region(root, [(root, 0, edge)])
            self.regions.append(region)
            self._walk(edge.node, region)
        if self._wanted is not None:
            self._add_wanted(self._wanted.values())
        self.regions = [region for region in self.regions if region.merged_into is None]
        self.unreached += self._recv_nodes.values()
        for message, position in self._on_the_way or ():
            self.forecast.setdefault(message, set()).add(position)
        self._region_of_node = {}

    def region_of(self, send_id: int) -> Region | None:
        """Return the region where the gradients of a sent message's tensors enter. Return None if
        they enter no region."""
        region = self._region_of_send.get(send_id)
        return region if region is None or region.merged_into is None else region.find()

    def _add_wanted(self, wanted: Collection[Tensor]) -> None:
        """Add wanted tensors that are not leaves to their regions. Wanted tensors are those whose
        gradients the pass computes."""
        for tensor in wanted:
            if tensor.grad_fn in self._region_of_node:
                self._region_of_node[tensor.grad_fn].find().leaves.append(tensor)
        if wanted and len(self.regions) == 1:
            (region,) = self.regions
            if not (region.leaves or region.recv_nodes):
                # No path leads from the roots to a wanted tensor. Torch calls the hooks of a single
                # root even then, so the region must run. A region without leaves would not be run,
                # so list the wanted tensors as its leaves.
                region.leaves += wanted

    def _entries_of(self, send: Send) -> list[Entry]:
        on_the_way = self._on_the_way
        entries: list[Entry] = []
        for position, proxy in enumerate(send.proxies):
            if on_the_way is not None and (send.id, position) not in on_the_way:
                continue
            if proxy.is_leaf:
                # No gradient enters at a leaf that does not require gradients now. User code may
                # have frozen the leaf after it was sent, or the leaf is a view made under
                # `no_grad`.
                if not proxy.requires_grad:
                    self._frozen.append(proxy)
                    continue
                # A leaf with hooks must be part of a region, which torch's engine runs. The hooks
                # must see the sum of all gradients of the leaf, and only the engine makes that sum
                # before it calls hooks.
                if self._skips_direct_leaves and proxy._backward_hooks is None:
                    self.direct_leaves.setdefault(send.id, []).append(position)
                    continue
            edge = send.edge(position)
            entries.append((send, position, edge))
            if proxy.is_leaf:
                self._leaf_entries.append((send, position, edge))
        return entries

    def _walk(self, start: Any, region: Region) -> None:
        """Visit a start node of a region, and all nodes that it leads to and that are in no region
        yet. If the search meets a node of another region, merge the two regions."""
        region_of_start = self._region_of_node.get(start)
        if region_of_start is not None:
            region.union(region_of_start)
            return
        self._region_of_node[start] = region if region.merged_into is None else region.find()
        self._visit([start], region)

    def _visit(self, stack: list[Any], region: Region) -> None:
        """Visit the nodes of a stack and all nodes that they lead to, but no more nodes than the
        limit of `add` allows. Add the leaves and recv nodes among them to the region."""
        region_of_node, recv_nodes, wanted = self._region_of_node, self._recv_nodes, self._wanted
        if region.merged_into is not None:
            region = region.find()
        for _ in self._visits_allowed:
            if not stack:
                return
            node = stack.pop()
            if type(node) is AccumulateGrad:
                leaf = node.variable
                if not leaf.requires_grad:
                    region.dead_ends.append(edge_at(node))
                    self._frozen.append(leaf)
                elif wanted is None or id(leaf) in wanted:
                    region.leaves.append(leaf)
                continue
            received = recv_nodes.pop(node, None)
            if received is not None:
                region.recv_nodes.append(received)
                continue
            is_dead_end = True
            for child, _ in node.next_functions:
                if child is not None:
                    is_dead_end = False
                    other = region_of_node.get(child)
                    if other is None:
                        region_of_node[child] = region
                        stack.append(child)
                    elif other is not region:
                        region.union(other)
                        region = region.find()
            if is_dead_end:
                region.dead_ends.append(edge_at(node))
        self._unvisited.append((stack, region))
