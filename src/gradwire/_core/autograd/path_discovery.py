"""Path discovery: which sent tensors are on a path to given tensors, across workers.

When gradients are asked for given tensors, torch runs the nodes on paths from the outputs to those
tensors, and no others. With several workers, the graphs of other workers decide which nodes those
are. So the worker that starts such a pass first asks the workers that the outputs come from for
*summaries* of their graphs, and then the workers that those summaries lead to. Each worker is asked
once. The pass then concerns only the sent tensors *on the way*, and their senders and receivers.

The outputs depend on the tensors on the way, and these depend on the given tensors. So the tensors
on the way are the intersection of two program slices (M. Weiser, 1981), a backward and a forward
one. Here the graph is distributed: a worker does not send its graph, but a summary that only says
which sent tensor leads to which received tensors. Each slice is found by a search over the
summaries.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor

from gradwire._core.autograd.boundary import Recv, Send, SentTensor
from gradwire._core.ids import creator
from gradwire._core.torch_internals import AccumulateGrad

#: Where a path through one worker's graph ends. It is a received tensor (given by the id of its
#: message and its position there), WANTED, or the number of a junction. A junction is a point where
#: paths part; it stands for several targets.
Target = SentTensor | int
#: The target of a path that ends at a wanted tensor: one whose gradient the program has asked for.
WANTED = -1
#: What one worker tells about its graph: the target of each sent tensor, and a list of junctions. A
#: junction is a set of targets, and its number is its position in the list.
GraphSummary = tuple[dict[SentTensor, Target], list[set[Target]]]
#: Maps each worker to its sent and received tensors that are on a path from the outputs to a tensor
#: whose gradient the program has asked for.
PathShares = dict[int, set[SentTensor]]


class GraphSummarizer:
    """Makes the summary of one worker's graph. The summary tells which received tensors each sent
    tensor depends on, and whether it depends on a wanted tensor, one whose gradient the program has
    asked for. Every node is visited once."""

    def __init__(self, recvs: Iterable[Recv], wanted: Iterable[Tensor] = ()):
        self._received = {
            recv_node: (recv.id, position)
            for recv in recvs
            for position, recv_node in enumerate(tuple(recv.recv_nodes))
        }
        self._wanted_leaves = {id(tensor) for tensor in wanted if tensor.is_leaf}
        self._wanted_nodes = {tensor.grad_fn for tensor in wanted if not tensor.is_leaf}
        #: Maps each visited node to the target that the node leads to, or to None if it leads to no
        #: target.
        self._targets: dict[Any, Target | None] = {}
        self._junctions: list[set[Target]] = []

    def summarize(self, sends: Iterable[Send]) -> GraphSummary:
        """Return the summary of this worker's graph: the target of each tensor of these messages,
        and all junctions (points where paths part) that were found, also by earlier calls of
        `target_of`."""
        targets: dict[SentTensor, Target] = {}
        for send in sends:
            for position, proxy in enumerate(send.proxies):
                if not proxy.is_leaf:
                    target = self.target_of(send.edge(position).node)
                else:
                    target = WANTED if id(proxy) in self._wanted_leaves else None
                if target is not None:
                    targets[send.id, position] = target
        return targets, self._junctions

    def target_of(self, start: Any) -> Target | None:
        """Return the target that a node leads to: a received tensor, WANTED, or a junction, which
        stands for several targets. Return None if the node leads neither to a received tensor nor
        to a wanted tensor."""
        known = self._targets
        stack = [start]
        while stack:
            node = stack[-1]
            if node in known:
                stack.pop()
                continue
            targets: set[Target | None]
            if node in self._received:
                targets = {self._received[node]}
            else:
                children = [child for child, _ in node.next_functions if child is not None]
                not_visited = [child for child in children if child not in known]
                if not_visited:
                    stack += not_visited
                    continue
                targets = {known[child] for child in children}
            stack.pop()
            known[node] = self._join(node, targets)
        return known[start]

    def _join(self, node: Any, targets: set[Target | None]) -> Target | None:
        """Return the target of a node, that is, what can be reached from it: a received tensor,
        WANTED (a tensor whose gradient is asked for), or the number of a junction, which stands for
        several targets. `targets` are those of the nodes that this node leads to. A node that
        computes a wanted tensor, or belongs to a wanted leaf, adds WANTED to them."""
        targets.discard(None)
        if node in self._wanted_nodes or (
            type(node) is AccumulateGrad and id(node.variable) in self._wanted_leaves
        ):
            targets.add(WANTED)
        if len(targets) < 2:
            return targets.pop() if targets else None
        for target in targets - {WANTED}:
            # If an existing junction stands for all these targets, no new junction is needed. This
            # happens where paths part and meet again.
            if type(target) is int and self._junctions[target] >= targets - {target}:
                return target
        self._junctions.append({target for target in targets if target is not None})
        return len(self._junctions) - 1


class PathDiscovery:
    """Searches the graph summaries of workers for paths from the outputs to the wanted tensors,
    whose gradients the program has asked for.

    The worker that starts the pass makes this search. A junction is a point of a graph where paths
    part. Each summary numbers its junctions from 0. This class renumbers them, so that no two
    junctions have the same number.
    """

    def __init__(self, me: int, summary: GraphSummary, outputs: Iterable[Target | None]):
        #: For each sent tensor, from all summaries that have arrived: its target. That is the place
        #: where the paths from the tensor end on the worker that sent it (see `Target`).
        self._targets: dict[SentTensor, Target] = {}
        #: The targets that each junction stands for, from all summaries that have arrived. The
        #: number of a junction is its position in this list.
        self._junctions: list[Collection[Target]] = []
        #: Maps each sent tensor to the worker that has received it.
        self._receivers: dict[SentTensor, int] = {}
        #: The workers whose summaries have arrived.
        self._summarized: set[int] = set()
        #: Maps each target that the search has reached to the targets that lead to it directly.
        self._origins: dict[Target, list[Target]] = {}
        #: Maps each worker whose summary is still missing to the tensors that it sent and that the
        #: search has reached.
        self._reached: dict[int, list[SentTensor]] = {}
        self._me = me
        targets, junctions = summary
        of_outputs = {target for target in outputs if target is not None}
        self._add(me, (targets, [*junctions, of_outputs]))
        self._search([len(self._junctions) - 1])

    def missing(self) -> set[int]:
        """Return the workers whose summaries the search needs next. If the result is empty, all
        paths are known."""
        return set(self._reached)

    def add_summary(self, worker: int, summary: GraphSummary) -> None:
        self._add(worker, summary)
        self._search([*self._reached.pop(worker, [])])

    def _add(self, worker: int, summary: GraphSummary) -> None:
        targets, junctions = summary
        offset = len(self._junctions)

        def renumbered(target: Target) -> Target:
            if type(target) is int:
                return target if target == WANTED else target + offset
            assert type(target) is tuple
            self._receivers[target] = worker
            return target

        self._summarized.add(worker)
        self._targets.update({sent: renumbered(target) for sent, target in targets.items()})
        self._junctions += [[renumbered(target) for target in members] for members in junctions]

    def _search(self, stack: list[Target]) -> None:
        """Follow the paths that begin at the given targets, as far as the summaries that have
        arrived show them."""
        while stack:
            target = stack.pop()
            if target == WANTED:
                continue
            if type(target) is int:
                following: Collection[Target] = self._junctions[target]
            else:
                assert type(target) is tuple
                sender = creator(target[0])
                if sender not in self._summarized:
                    self._reached.setdefault(sender, []).append(target)
                    continue
                following = [self._targets[target]] if target in self._targets else []
            for next_target in following:
                if next_target not in self._origins:
                    self._origins[next_target] = []
                    stack.append(next_target)
                self._origins[next_target].append(target)

    def shares(self) -> PathShares:
        """Return, for each worker, its sent and received tensors that are on a path from the
        outputs to the wanted tensors. A search back from the wanted tensors finds them. The worker
        that starts the pass is always listed, even if it has no such tensors."""
        shares: PathShares = {self._me: set()}
        seen: set[Target] = {WANTED}
        stack: list[Target] = [WANTED]
        while stack:
            target = stack.pop()
            if type(target) is tuple:
                for worker in (creator(target[0]), self._receivers[target]):
                    shares.setdefault(worker, set()).add(target)
            for origin in self._origins.get(target, ()):
                if origin not in seen:
                    seen.add(origin)
                    stack.append(origin)
        return shares
