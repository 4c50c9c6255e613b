"""Who takes part in a pass, as one worker sees it, and who of them is done.

Everybody is told. Whoever told a worker first is its parent (in a pass for given tensors the worker
that started it); a worker that is done, with all its children, says so to its parent, and the one
without a parent knows then that all are.
"""

from __future__ import annotations

#: How a worker stands to another in a pass.
NO_CHILD, CHILD, CHILD_DONE = range(3)


class Family:
    """See the module's text."""

    __slots__ = ("_done", "_parent_knows", "finished", "involved", "parent", "untold", "waits_for")

    def __init__(self, parent: int | None):
        #: Who has to hear that this worker is done; None where the pass was started.
        self.parent = parent
        #: Everybody who knows of the pass, as far as this worker knows.
        self.involved: set[int] = set() if parent is None else {parent}
        #: Workers that must still hear that there is a pass; known once there is a plan.
        self.untold: set[int] = set()
        #: Workers that were told and have not said yet whether they are children; and children.
        self.waits_for: set[int] = set()
        #: Children that are done. (What they said before may come later.)
        self._done: frozenset[int] = frozenset()
        self._parent_knows = False
        #: This worker's part is done, and so are those of its children.
        self.finished = False

    def hear_from(self, worker: int, standing: int, was_told: bool) -> None:
        """A worker says how it stands to this one. `was_told`: it answers our first message."""
        self.involved.add(worker)
        if was_told or standing == CHILD_DONE:
            self.waits_for.discard(worker)
        if standing == CHILD_DONE:
            self._done = self._done | {worker}
        elif standing == CHILD and worker not in self._done:
            self.waits_for.add(worker)

    def expect(self, worker: int) -> bool:
        """A message that will be answered goes to a worker; True if it has not been told before."""
        first = worker in self.untold
        if first:
            self.waits_for.add(worker)
        return first

    def tell(self, worker: int) -> bool:
        """A worker is told something; True if it has not been told of the pass before."""
        self.involved.add(worker)
        first = worker in self.untold
        if first:
            self.untold.remove(worker)
        return first

    def standing_to(self, worker: int) -> int:
        """How this worker stands to one that is told now."""
        if worker != self.parent:
            return NO_CHILD
        self._parent_knows = self.finished
        return CHILD_DONE if self.finished else CHILD

    def conclude(self) -> None:
        """This worker has nothing left to do itself."""
        if not self.waits_for and (not self.untold or self.untold == {self.parent}):
            self.finished = True

    def owes_parent(self) -> bool:
        """Whether the parent must hear that this worker is done."""
        return self.finished and self.parent is not None and not self._parent_knows
