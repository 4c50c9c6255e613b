"""The table of the values that this worker owns and to which remote references (RRefs) refer.

A *fork* is an RRef on another worker, or in a message to another worker. The table keeps a value
alive while there is a fork that refers to the value. RRefs on the owner itself keep the value alive
directly.

The messages that add and delete forks may arrive in any order, and more than once. The table
remembers the ids of deleted forks for a while, so that a late duplicate of the message that added a
fork does not add it again.

When a worker is gone, the table deletes the forks on that worker. The worker may have been frozen,
and come back: then the RRefs that it held are *void*. If the worker says that the fork is
confirmed, the table recognizes a void RRef without remembering it: the table does not list the
fork. Otherwise, the message that adds the fork may not have arrived yet. Then the fork is void only
if the table remembers that it was deleted.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from typing import Any

from gradwire._core.rpc.futures import Future
from gradwire._core.rpc.liveness import Stay

_REMEMBERED_DELETES = 100_000


class OwnedValue:
    """The value of a remote reference (RRef), on the worker that owns the value. The value may not
    exist yet. When it exists, it is the result of `future`."""

    __slots__ = ("__weakref__", "creation_error", "future", "rref_id")

    def __init__(self, rref_id: int):
        self.rref_id = rref_id
        self.future: Future[Any] = Future(None, "the value of a remote reference")
        #: A value that `rpc.remote` makes is the result of a function. If the call that runs the
        #: function fails, for example by a timeout, this is the error of the call. If the function
        #: itself raises an exception, this stays None. In both cases `future` has the error.
        self.creation_error: BaseException | None = None

    def set_value(self, value: Any) -> None:
        self.future.set_result(value)

    def set_error(self, error: BaseException, what: str) -> None:
        """Store the error with which `what`, the function that makes the value, has failed."""
        self.future.rename(f"{what}, which makes the value of a remote reference,")
        self.future.set_exception(error)


class OwnerTable:
    """The owned values and the forks of one worker. Its methods are thread-safe."""

    def __init__(self) -> None:
        #: The lock is reentrant, because while a thread holds it, the garbage collector may run
        #: user code in that thread, and this code may send RRefs.
        self._lock = threading.RLock()
        #: All owned values that are still alive, by the ids of their RRefs.
        self._values: weakref.WeakValueDictionary[int, OwnedValue] = weakref.WeakValueDictionary()
        #: The forks (RRefs on other workers) of each value. The first key is the RRef id of the
        #: value, and the second key is the id of the fork. These keys lead to the stay of the
        #: worker that has the fork, or to None until the message with the fork has been sent.
        self._forks: dict[int, dict[int, Stay | None]] = {}
        #: The values that have forks, by RRef id. The table keeps these values alive.
        self._kept: dict[int, OwnedValue] = {}
        self._deleted_forks: OrderedDict[int, None] = OrderedDict()

    def get(self, rref_id: int) -> OwnedValue:
        """Return the object that holds the value of an RRef. The object is created if it is
        missing, so the value itself may not exist yet."""
        with self._lock:
            return self._get(rref_id)

    def _get(self, rref_id: int) -> OwnedValue:
        owned = self._values.get(rref_id)
        if owned is None:
            new = OwnedValue(rref_id)
            owned = self._values.setdefault(rref_id, new)
        return owned

    def is_deleted(self, fork_id: int) -> bool:
        """Return whether a fork (an RRef on another worker) was deleted. Only recent deletions are
        known, because the table forgets the oldest ones."""
        with self._lock:
            return fork_id in self._deleted_forks

    def lists(self, rref_id: int, fork_id: int) -> bool:
        """Return whether the table lists a fork of a value."""
        with self._lock:
            return fork_id in self._forks.get(rref_id, ())

    def is_void(self, rref_id: int, fork_id: int, confirmed: bool) -> bool:
        """Return whether a fork is void, so that its value may have been dropped. `confirmed` says
        whether the worker that has the fork knows that the fork was added to the table."""
        return not self.lists(rref_id, fork_id) if confirmed else self.is_deleted(fork_id)

    def add(self, owned: OwnedValue) -> None:
        """Add a value to the table under its RRef id."""
        with self._lock:
            self._values[owned.rref_id] = owned

    def add_fork(self, rref_id: int, fork_id: int, holder: Stay | None) -> None:
        """Record a fork, and keep its value alive as long as the worker that has the fork stays.
        Do nothing if the fork was deleted earlier."""
        with self._lock:
            if fork_id in self._deleted_forks:
                return
            if holder is not None and holder.ended:
                self._deleted_forks[fork_id] = None
                return
            self._kept[rref_id] = self._get(rref_id)
            self._forks.setdefault(rref_id, {})[fork_id] = holder

    def set_fork_holder(self, rref_id: int, fork_id: int, holder: Stay) -> None:
        """Record the worker to which a fork (a copy of an RRef) was sent."""
        with self._lock:
            forks = self._forks.get(rref_id)
            if forks is not None and fork_id in forks:
                forks[fork_id] = holder
        if holder.ended:
            self.delete_fork(rref_id, fork_id)

    def delete_fork(self, rref_id: int, fork_id: int) -> None:
        """Delete a fork, an RRef on another worker. Release the value if this was its last fork."""
        # Freeing a value may run user code. So this variable keeps the value alive until the lock
        # is released.
        released = None
        with self._lock:
            self._deleted_forks[fork_id] = None
            while len(self._deleted_forks) > _REMEMBERED_DELETES:
                self._deleted_forks.popitem(last=False)
            forks = self._forks.get(rref_id)
            if forks is not None:
                forks.pop(fork_id, None)
                if not forks:
                    del self._forks[rref_id]
                    released = self._kept.pop(rref_id)
        del released

    def delete_ended_forks(self) -> None:
        """Delete all forks (RRefs) on workers whose stay has ended."""
        with self._lock:
            deleted = [
                (rref_id, fork_id)
                for rref_id, forks in self._forks.items()
                for fork_id, holder in forks.items()
                if holder is not None and holder.ended
            ]
        for rref_id, fork_id in deleted:
            self.delete_fork(rref_id, fork_id)

    def clear(self) -> None:
        """Delete all forks (RRefs on other workers), so that their values are released."""
        with self._lock:
            kept, self._kept, self._forks = self._kept, {}, {}
        del kept

    def counts(self) -> tuple[int, int]:
        """Return the number of values that have forks, and the number of forks."""
        with self._lock:
            return len(self._kept), sum(len(forks) for forks in self._forks.values())
