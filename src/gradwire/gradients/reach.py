"""Where in a region gradients can come to at all.

In one process torch runs the nodes that lead from the roots to leaves, and no others. On one of
many workers it takes the word of others to know which nodes those are: a start is *alive* if
something that the roots depend on was made of the tensor that was sent there, else *dead*. This
says what follows from that for the anchors of the region, and looks at every node at most three
times: to count the ways to it, to bring it to life, and to rule it out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gradwire.gradients.functions import Send, SentTensor
from gradwire.gradients.graph import Anchor, Region


class Reach:
    """See the module's text."""

    def __init__(self, region: Region):
        #: (Not the region itself, which refers to this.)
        self._starts = region.starts
        self._all_anchors = region.anchors
        self._anchors = {recv.anchors[n]: (recv, n) for recv, n in region.anchors}
        self._alive: set[Any] = set()
        #: By node: how many ways into it have not been ruled out.
        self._ways: dict[Any, int] = {}
        #: The starts of which nothing is known yet; and by node those of them that matter: where a
        #: gradient comes anyway it makes no difference whether there is another one.
        self._open: dict[SentTensor, Any] = {}
        self._deciding: dict[Any, set[SentTensor]] = {}
        for source, position, edge in region.starts:
            if type(source) is Send:
                start = source.id, position
                self._open[start] = edge.node
                self._deciding.setdefault(edge.node, set()).add(start)

    def _count_ways(self) -> None:
        stack: list[Any] = []
        for _, _, edge in self._starts:
            self._count(edge.node, stack)
        while stack:
            node = stack.pop()
            if node not in self._anchors:
                for child, _ in node.next_functions:
                    if child is not None:
                        self._count(child, stack)

    def _count(self, node: Any, found: list[Any]) -> None:
        ways = self._ways.get(node, 0)
        self._ways[node] = ways + 1
        if not ways:
            found.append(node)

    @property
    def is_known(self) -> bool:
        """Whether all is known that there is to know."""
        return not self._deciding

    def open_sends(self) -> set[int]:
        """The sends of which something is not known yet that matters."""
        return {send for starts in self._deciding.values() for send, _ in starts}

    def includes(self, anchor: Any) -> bool:
        """Whether an anchor is known to be alive."""
        return anchor in self._alive

    def alive(self) -> Iterable[Any]:
        """The nodes that gradients come to, as far as they are known one by one."""
        return self._alive

    def resolve(self, send: int, position: int, *, alive: bool) -> list[Anchor]:
        """It is known what becomes of a start: returns the anchors that share its fate."""
        node = self._open.pop((send, position), None)
        if node is None:
            return []
        if len(self._starts) == 1:  # there is nothing in the region that it does not reach
            self._deciding.clear()
            self._alive.update(self._anchors if alive else ())
            return self._all_anchors
        if alive:
            return self.bring_to_life(node)
        if node in self._deciding:
            self._deciding[node].discard((send, position))
            if not self._deciding[node]:
                del self._deciding[node]
        return self._rule_out(node)

    def bring_to_life(self, node: Any) -> list[Anchor]:
        """A gradient comes to a node: returns the anchors it reaches, and no other has reached."""
        found = []
        stack = [node]
        while stack:
            node = stack.pop()
            if node in self._alive:
                continue
            self._alive.add(node)
            self._deciding.pop(node, None)
            if node in self._anchors:
                found.append(self._anchors[node])
            else:
                stack += [child for child, _ in node.next_functions if child is not None]
        return found

    def _rule_out(self, node: Any) -> list[Anchor]:
        if not self._ways:
            self._count_ways()
        found = []
        stack = [node]
        while stack:
            node = stack.pop()
            self._ways[node] -= 1
            if self._ways[node] or node in self._alive:
                continue
            if node in self._anchors:
                found.append(self._anchors[node])
            else:
                stack += [child for child, _ in node.next_functions if child is not None]
        return found
