"""Which ways lead to given tensors, through whichever workers.

When gradients are asked for given tensors, torch runs the nodes on a way from the outputs to those
tensors, and no others. On one of many workers it takes the graphs of others to know which those
are. So the worker that starts such a pass surveys first: it asks the workers that the outputs come
from for *charts* of their graphs, each once, and finds the tensors that were sent *on the way*. The
pass then concerns these, and the workers that have sent or received them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor

from gradwire.gradients.functions import Recv, Send, SentTensor
from gradwire.gradients.graph import Leaf
from gradwire.ids import creator

#: What the graph of a worker leads to: a tensor that it has received, one of several things (the
#: number of a junction), or what is asked for.
Place = SentTensor | int
WANTED = -1
#: Where the tensors that a worker has sent come from, and its junctions: what each leads to.
Chart = tuple[dict[SentTensor, Place], list[set[Place]]]
#: By worker: the tensors on the way that it has sent or received.
Shares = dict[int, set[SentTensor]]


class Charting:
    """Draws the chart of one worker's graph, and visits every node of it once."""

    def __init__(self, recvs: Iterable[Recv], wanted: Iterable[Tensor] = ()):
        self._received = {
            anchor: (recv.id, position)
            for recv in recvs
            for position, anchor in enumerate(tuple(recv.anchors))
        }
        self._wanted_leaves = {id(tensor) for tensor in wanted if tensor.is_leaf}
        self._wanted_nodes = {tensor.grad_fn for tensor in wanted if not tensor.is_leaf}
        self._found: dict[Any, Place | None] = {}
        self._junctions: list[set[Place]] = []

    def draw(self, sends: Iterable[Send]) -> Chart:
        ways: dict[SentTensor, Place] = {}
        for send in sends:
            for position, end in enumerate(send.ends):
                if not end.is_leaf:
                    place = self.place_of(send.edge(position).node)
                else:
                    place = WANTED if id(end) in self._wanted_leaves else None
                if place is not None:
                    ways[send.id, position] = place
        return ways, self._junctions

    def place_of(self, start: Any) -> Place | None:
        """Where a node leads to; None: nowhere that matters."""
        found = self._found
        stack = [start]
        while stack:
            node = stack[-1]
            if node in found:
                stack.pop()
                continue
            places: set[Place | None]
            if node in self._received:
                places = {self._received[node]}
            else:
                children = [child for child, _ in node.next_functions if child is not None]
                below = [child for child in children if child not in found]
                if below:
                    stack += below
                    continue
                places = {found[child] for child in children}
            stack.pop()
            found[node] = self._join(node, places)
        return found[start]

    def _join(self, node: Any, places: set[Place | None]) -> Place | None:
        places.discard(None)
        if node in self._wanted_nodes or (
            type(node) is Leaf and id(node.variable) in self._wanted_leaves
        ):
            places.add(WANTED)
        if len(places) < 2:
            return places.pop() if places else None
        for place in places - {WANTED}:  # ways that part may meet again
            if type(place) is int and self._junctions[place] >= places - {place}:
                return place
        self._junctions.append({place for place in places if place is not None})
        return len(self._junctions) - 1


class Survey:
    """Puts charts together. It begins at the outputs, with the chart of the worker they are on."""

    def __init__(self, me: int, chart: Chart, outputs: Iterable[Place | None]):
        #: Where everything leads to; of the workers whose charts are known.
        self._ways: dict[SentTensor, Place] = {}
        self._junctions: list[Collection[Place]] = []
        self._receivers: dict[SentTensor, int] = {}
        self._charted: set[int] = set()
        #: By place: what leads there directly, and comes from the outputs.
        self._before: dict[Place, list[Place]] = {}
        #: By worker: what was found, and only its chart can say where that leads.
        self._unknown: dict[int, list[Place]] = {}
        self._me = me
        ways, junctions = chart
        self._add(me, (ways, [*junctions, {place for place in outputs if place is not None}]))
        self._follow([len(self._junctions) - 1])

    def missing(self) -> set[int]:
        """The workers whose charts it takes to go on; none when all is known."""
        return set(self._unknown)

    def take(self, worker: int, chart: Chart) -> None:
        self._add(worker, chart)
        self._follow(self._unknown.pop(worker, []))

    def _add(self, worker: int, chart: Chart) -> None:
        ways, junctions = chart
        count = len(self._junctions)

        def renumbered(place: Place) -> Place:
            if type(place) is int:
                return place if place == WANTED else place + count
            assert type(place) is tuple
            self._receivers[place] = worker
            return place

        self._charted.add(worker)
        self._ways.update({sent: renumbered(place) for sent, place in ways.items()})
        self._junctions += [[renumbered(place) for place in places] for places in junctions]

    def _follow(self, places: list[Place]) -> None:
        """Go wherever these lead to."""
        stack = places
        while stack:
            place = stack.pop()
            if place == WANTED:
                continue
            if type(place) is int:
                following: Collection[Place] = self._junctions[place]
            else:
                assert type(place) is tuple
                sender = creator(place[0])
                if sender not in self._charted:
                    self._unknown.setdefault(sender, []).append(place)
                    continue
                following = [self._ways[place]] if place in self._ways else []
            for found in following:
                if found not in self._before:
                    self._before[found] = []
                    stack.append(found)
                self._before[found].append(place)

    def shares(self) -> Shares:
        """What is on the way to what is asked for; the one that asks always has a share."""
        shares: Shares = {self._me: set()}
        seen: set[Place] = {WANTED}
        stack: list[Place] = [WANTED]
        while stack:
            place = stack.pop()
            if type(place) is tuple:
                for worker in (creator(place[0]), self._receivers[place]):
                    shares.setdefault(worker, set()).add(place)
            for before in self._before.get(place, ()):
                if before not in seen:
                    seen.add(before)
                    stack.append(before)
        return shares
