"""The values this worker owns, and who holds on to them.

A value stays in the table while any *fork* of its reference lives on another worker, or is on its
way there. The owner's own references keep it alive by themselves.

Forks and deletes may arrive in any order and more than once: a fork that was deleted is remembered
for a while, so that a late duplicate of the request that made it does not bring it back.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from typing import Any

from gradwire.agent.futures import Future

_REMEMBERED_DELETES = 100_000


class Owned:
    """A value owned here, there already or still to come."""

    __slots__ = ("__weakref__", "future", "id", "kind", "not_made")

    def __init__(self, id: int):
        self.id = id
        self.future: Future[Any] = Future(None, "the value of a remote reference")
        self.kind: type | None = None
        #: Why the function that should make it was not even called.
        self.not_made: BaseException | None = None

    def set_value(self, value: Any) -> None:
        self.kind = type(value)
        self.future.set_result(value)

    def set_error(self, error: BaseException) -> None:
        self.future.set_exception(error)


class Table:
    """See the module's text. Any thread may use it."""

    def __init__(self) -> None:
        #: (The garbage collector may run wherever something is made, and send references.)
        self._lock = threading.RLock()
        #: Every value that is alive, for whatever reason.
        self._known: weakref.WeakValueDictionary[int, Owned] = weakref.WeakValueDictionary()
        #: Forks of each value that others need: fork -> the worker that holds it, if known.
        self._forks: dict[int, dict[int, int | None]] = {}
        self._kept: dict[int, Owned] = {}
        self._gone: set[int] = set()
        self._deleted: OrderedDict[int, None] = OrderedDict()

    def get(self, id: int) -> Owned:
        """The value of that id; a promise of one if it has not arrived yet."""
        with self._lock:
            return self._get(id)

    def _get(self, id: int) -> Owned:
        owned = self._known.get(id)
        if owned is None:
            made = Owned(id)
            owned = self._known.setdefault(id, made)
        return owned

    def is_deleted(self, fork: int) -> bool:
        with self._lock:
            return fork in self._deleted

    def is_gone(self, holder: int) -> bool:
        """Whether a worker was given up, with all it held."""
        return holder in self._gone

    def add(self, owned: Owned) -> None:
        with self._lock:
            self._known[owned.id] = owned

    def add_fork(self, id: int, fork: int, holder: int | None) -> None:
        """Keep a value for a fork. Says nothing new when it is known or was deleted before."""
        with self._lock:
            if fork in self._deleted:
                return
            if holder in self._gone:
                self._deleted[fork] = None
                return
            self._kept[id] = self._get(id)
            self._forks.setdefault(id, {})[fork] = holder

    def held_by(self, id: int, fork: int, holder: int) -> None:
        """A fork has left for a worker."""
        with self._lock:
            forks = self._forks.get(id)
            if forks is not None and fork in forks:
                forks[fork] = holder
            gone = holder in self._gone
        if gone:
            self.delete_fork(id, fork)

    def delete_fork(self, id: int, fork: int) -> None:
        released = None  # destroyed after the lock is let go: its end may run user code
        with self._lock:
            self._deleted[fork] = None
            while len(self._deleted) > _REMEMBERED_DELETES:
                self._deleted.popitem(last=False)
            forks = self._forks.get(id)
            if forks is not None:
                forks.pop(fork, None)
                if not forks:
                    del self._forks[id]
                    released = self._kept.pop(id)
        del released

    def delete_forks_of(self, holder: int) -> None:
        """A worker is gone, and with it all it held."""
        with self._lock:
            self._gone.add(holder)
            gone = [
                (id, fork)
                for id, forks in self._forks.items()
                for fork, at in forks.items()
                if at == holder
            ]
        for id, fork in gone:
            self.delete_fork(id, fork)

    def clear(self) -> None:
        with self._lock:
            kept, self._kept, self._forks = self._kept, {}, {}
        del kept

    def counts(self) -> tuple[int, int]:
        """(values kept for others, forks)."""
        with self._lock:
            return len(self._kept), sum(len(forks) for forks in self._forks.values())
