"""How the worker that started a backward pass learns that all workers are done.

This is termination detection for diffusing computations (E. W. Dijkstra and C. S. Scholten,
"Termination detection for diffusing computations", Information Processing Letters, 1980). A pass
spreads from worker to worker. The worker from which another worker first hears of the pass becomes
the *parent* of that worker. So the workers form a tree, and the worker that started the pass is its
root. When a worker and all its children are done, it tells its parent. When the root and all its
children are done, all workers are done.

This implementation differs in three ways:

- Dijkstra and Scholten acknowledge every message, and a worker counts the acknowledgements that it
  waits for. Here a worker says in its answer whether it is a child of the worker it answers.
- In a pass started by `grad`, all workers are children of the worker that started the pass, because
  that worker itself tells each of them of the pass.
- A worker has no second parent in the same pass, because it never becomes active again after it is
  done.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

#: Whether one worker is a child of another in a pass and, if so, whether it is done. The values are
#: plain numbers because they are sent in messages.
Relation: TypeAlias = Literal[0, 1, 2]
NOT_A_CHILD: Final = 0
CHILD: Final = 1
#: A child whose part of the pass is done, with the parts of all its own children.
CHILD_DONE: Final = 2


class TerminationDetector:
    """What one worker knows of the workers that take part in a pass: which are its children, and
    which of these are done."""

    __slots__ = ("_done", "_parent_knows", "finished", "involved", "parent", "untold", "waits_for")

    def __init__(self, parent: int | None):
        #: The worker to notify when this worker is done; None on the worker that started the pass.
        self.parent = parent
        #: The other workers that know of the pass, as far as this worker can tell.
        self.involved: set[int] = set() if parent is None else {parent}
        #: The workers that this worker must still tell of the pass. The set is empty until this
        #: worker has planned its part of the pass.
        self.untold: set[int] = set()
        #: The children that are not done, and the workers that have not said yet whether they are
        #: children of this one.
        self.waits_for: set[int] = set()
        #: The children that are done. They are remembered because an older message, in which such a
        #: child says that it is not done, may arrive late.
        self._done: frozenset[int] = frozenset()
        self._parent_knows = False
        #: Whether this worker and all its children are done.
        self.finished = False

    def hear_from(self, worker: int, relation: Relation, answers_first: bool) -> None:
        """Record a message from `worker`, which says whether that worker is a child of this one
        and, if so, whether it is done. `answers_first`: whether the message is the answer to this
        worker's first message. After that answer, this worker waits for `worker` only if `worker`
        is a child that is not done."""
        self.involved.add(worker)
        if answers_first or relation == CHILD_DONE:
            self.waits_for.discard(worker)
        if relation == CHILD_DONE:
            self._done = self._done | {worker}
        elif relation == CHILD and worker not in self._done:
            self.waits_for.add(worker)

    def expect_answer(self, worker: int) -> bool:
        """Record that this worker now sends another worker a message, which that worker will
        answer. Return whether it is the first message to that worker."""
        first = worker in self.untold
        if first:
            self.waits_for.add(worker)
        return first

    def tell(self, worker: int) -> bool:
        """Record that this worker sends another worker a message or an answer, and so tells it of
        the pass. Return whether that worker was in `untold`, the set of workers that this worker
        must still tell."""
        self.involved.add(worker)
        first = worker in self.untold
        if first:
            self.untold.remove(worker)
        return first

    def relation_to(self, worker: int) -> Relation:
        """Return what to tell another worker: whether this worker is its child and, if so, whether
        this worker is done."""
        if worker != self.parent:
            return NOT_A_CHILD
        self._parent_knows = self.finished
        return CHILD_DONE if self.finished else CHILD

    def conclude(self) -> None:
        """Record that this worker has no work of its own left. It is finished if its children are
        also done, and it has told every worker that it must tell of the pass."""
        if not self.waits_for and (not self.untold or self.untold == {self.parent}):
            self.finished = True

    def owes_parent(self) -> bool:
        """Return whether this worker must still tell its parent that it is done."""
        return self.finished and self.parent is not None and not self._parent_knows
