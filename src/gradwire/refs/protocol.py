"""Keeping references and owners in agreement.

1. The owner keeps a value while it knows of a fork (`table`).
2. A worker that sends a reference away makes a fork of it first:
   - the owner, by adding the fork to its table;
   - a user, by holding on to its own reference until the receiver has told it that the owner
     knows of the child (RREF_CHILD_ACCEPT).
3. A worker that receives a reference
   - from the owner: is known already;
   - from a user, and is the owner: tells the user so (RREF_CHILD_ACCEPT), unless it came with a
     call: then the answer to that says it. If the connection is lost, the user declares the fork
     void (RREF_USER_DELETE) and so the call, should the owner still have it before it;
   - from a user, and is another user: has the owner add the fork (RREF_FORK_REQUEST), then tells
     the one it came from. The value it came with is not used before.
4. A user that drops its reference tells the owner (RREF_USER_DELETE), once it is confirmed.

These messages are idempotent and sent again until they are answered. A worker that is gone holds
nothing any more: its forks are deleted, and nobody waits for its acceptance.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from gradwire.agent.agent import Agent
from gradwire.agent.calls import ASYNC_MARK, Calls, Deferred
from gradwire.agent.exceptions import detach
from gradwire.agent.futures import Future
from gradwire.agent.peers import Peer
from gradwire.agent.service import Request
from gradwire.config import UNSET_TIMEOUT
from gradwire.errors import CallError, CallTimeout, GradwireError
from gradwire.ids import IdSource, WorkerInfo
from gradwire.refs.rref import RRef
from gradwire.refs.table import Owned, Table
from gradwire.wire.messages import Kind
from gradwire.wire.values import add_passenger, current_decoding

_TAG = "rref"

# (owner's id, owner's name, reference, fork, the worker that made the fork)
_Parts = tuple[int, str, int, int, int]


class Refs:
    """The references of one worker."""

    def __init__(self, agent: Agent, calls: Calls, kind: type[RRef[Any]] = RRef):
        self._agent = agent
        self._kind = kind
        self._calls = calls
        self._ids = IdSource(agent.info.id)
        self.me = agent.info
        self.table = Table()
        #: (The garbage collector may run wherever something is made, and send references.)
        self._lock = threading.RLock()
        #: Our own references that must not go before a fork made of them is known to the owner:
        #: fork -> (reference, the worker the fork went to, once it has left).
        self._children: dict[int, tuple[RRef[Any], int | None]] = {}
        self._dropped: deque[tuple[WorkerInfo, int, int, Future[Any] | None]] = deque()
        self._closed = False
        #: Messages of ours that others have not confirmed yet.
        self._unanswered: set[Future[Any]] = set()
        #: Runs a backward pass in a context, from a tensor of ours. Set by the worker, since the
        #: room of gradients is above this one.
        self.differentiate: Callable[[Tensor, int, bool], None]
        for sent in (RRef, kind):
            agent.codec.teach(sent, "rref", self._take_apart, self._rebuild)
        agent.handle(Kind.PYTHON_REMOTE_CALL, self._serve_remote, runs_user_code=True)
        agent.handle(Kind.PYTHON_RREF_FETCH_CALL, self._serve_fetch)
        agent.handle(Kind.RREF_FORK_REQUEST, self._serve_fork_request)
        agent.handle(Kind.RREF_CHILD_ACCEPT, self._serve_child_accept)
        agent.handle(Kind.RREF_USER_DELETE, self._serve_delete)
        agent.on_gone.append(self._clear_up_after)

    @property
    def patience(self) -> float:
        return self._agent.options.rpc_seconds

    def next_id(self) -> int:
        return self._ids.next()

    # -- making references

    def remote(
        self,
        to: Peer,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
    ) -> RRef[Any]:
        """Run a function on a worker and leave its result there."""
        id = self.next_id()
        home = to.info.id == self.me.id
        fork = id if home else self.next_id()
        encoded = self._agent.codec.encode_call(func, args, kwargs)
        rref: RRef[Any] = self._kind.__new__(self._kind)
        if home:
            owned = Owned(id)
            self.table.add(owned)
        # Beside the call, so that the owner knows whose value it is even if it cannot read it.
        tags = {_TAG: (id, fork)}
        created = self._agent.call_async(to, Kind.PYTHON_REMOTE_CALL, func, encoded, timeout, tags)
        created.expect_failure()  # it comes to light when the value is asked for
        if home:
            rref._set_up(self, id, self.me, owned, 0, created)
            created.add_done_callback(partial(self._check_made_at_home, weakref.ref(owned)))
        else:
            rref._set_up(self, id, to.info, None, fork, created)
        return rref

    @staticmethod
    def _check_made_at_home(owned: weakref.ref[Owned], created: Future[Any]) -> None:
        value, error = owned(), created.exception()
        if value is not None and error is not None and not value.future.done():
            not_made = _creation_failed(error)
            with contextlib.suppress(RuntimeError):  # it was made this very moment
                value.set_error(not_made)
                value.not_made = not_made

    def _serve_remote(self, request: Request) -> None:
        assert request.tags is not None
        id, fork = request.tags[_TAG]
        owned = self.table.get(id)
        if request.caller.id != self.me.id:
            self.table.add_fork(id, fork, request.caller.id)

        def deliver(value: Any) -> None:
            owned.set_value(value)
            request.answer(None)

        def fail(error: BaseException, what: str) -> None:
            owned.set_error(detach(error, f'{what} on worker "{self.me.name}" raised:'))
            request.answer(None)

        self._calls.serve_function(request, deliver, fail)

    # -- using references

    def fetch(self, rref: RRef[Any], timeout: float) -> Any:
        timeout = self._agent.timeout(timeout)
        if rref._owned is not None:
            return self.wait_for(rref._owned.future, timeout)
        self._check_creation(rref)
        peer = self._agent.peers.find(rref._owner)
        encoded = self._agent.codec.encode((rref._id, rref._fork))
        try:
            value = self._agent.call_sync(
                peer, Kind.PYTHON_RREF_FETCH_CALL, "RRef.to_here()", encoded, timeout
            )
            rref._confirmation = None  # it has the value, so it knows who wanted it
            return value
        except CallError:
            self._check_creation(rref)  # if that failed, it is the better explanation
            raise

    def _check_creation(self, rref: RRef[Any]) -> None:
        if rref._owned is not None:
            if rref._owned.not_made is not None:
                raise rref._owned.not_made
            return
        confirmation = rref._confirmation
        if confirmation is None or not confirmation.done():
            return
        error = confirmation.exception()
        if error is not None:
            raise _creation_failed(error)

    def wait_for(self, future: Future[Any], timeout: float) -> Any:
        """The value of a future that something on this worker completes."""
        if not future.done():
            done = threading.Event()
            future.add_done_callback(lambda _: done.set())
            with self._agent.executor.aside():
                came = done.wait(timeout or None)
            if not came:
                raise CallTimeout(
                    f"a value of worker {self.me.name!r} itself was not there after "
                    f"{timeout:g} s: the function that makes it is still running",
                    worker=self.me.name,
                )
        return future.wait()

    def _serve_fetch(self, request: Request) -> None:
        id, fork = request.decode()
        if self.table.is_deleted(fork):
            raise GradwireError(
                f"worker {self.me.name!r} has dropped the value of this reference: it had given up "
                f"worker {request.caller.name!r} as lost, or was told that the reference is gone"
            )
        owned = self.table.get(id)
        request.subject = "RRef.to_here()"

        # The callback keeps the promise of the value alive until it is kept or nobody asks.
        def answer(future: Future[Any], _promise: Owned = owned) -> None:
            error = future.exception()
            if error is not None:
                request.fail(error, "the function that should have made this value")
            else:
                self._calls.answer(request, future.value())

        owned.future.add_done_callback(answer)

    # -- calls on the value of a reference

    def call_method(
        self, rref: RRef[Any], name: str, args: Any, kwargs: Any, timeout: float
    ) -> Any:
        return self._calls.sync(*self._method_call(rref, name, args, kwargs, timeout))

    def begin_method(
        self, rref: RRef[Any], name: str, args: Any, kwargs: Any, timeout: float
    ) -> Future[Any]:
        return self._calls.begin(*self._method_call(rref, name, args, kwargs, timeout))

    def remote_method(
        self, rref: RRef[Any], name: str, args: Any, kwargs: Any, timeout: float
    ) -> RRef[Any]:
        return self.remote(*self._method_call(rref, name, args, kwargs, timeout))

    def _method_call(
        self, rref: RRef[Any], name: str, args: Any, kwargs: Any, timeout: float
    ) -> tuple[Peer, Any, tuple[Any, ...], dict[str, Any], float]:
        owner, arguments = self._agent.peers.find(rref._owner), (rref, name, args, kwargs)
        return owner, call_method, arguments, {}, self._agent.timeout(timeout)

    def backward(self, rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
        if rref._owned is None:
            owner, timeout = self._agent.peers.find(rref._owner), self._agent.timeout(UNSET_TIMEOUT)
            self._calls.sync(owner, RRef.backward, (rref, context_id, retain_graph), {}, timeout)
            return
        root = rref.local_value()
        if not isinstance(root, Tensor):
            raise GradwireError(
                f"RRef should contain a tensor for .backward(); it has a {type(root).__name__}"
            )
        if context_id == -1:
            root.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        else:
            self.differentiate(root, context_id, retain_graph)

    # -- sending and receiving references

    def _take_apart(self, rref: RRef[Any]) -> _Parts:
        if rref._refs is not self:
            raise GradwireError(f"{rref!r} belongs to another worker of this process")
        fork = self.next_id()
        self._check_creation(rref)  # else everybody it goes to would wait for a value in vain
        if rref._owned is not None:
            self.table.add(rref._owned)
            self.table.add_fork(rref._id, fork, None)
        else:
            with self._lock:
                self._children[fork] = (rref, None)
        add_passenger(_Passenger(self, rref, fork))
        return rref._owner.id, rref._owner.name, rref._id, fork, self.me.id

    def owner_sent(self, id: int, fork: int, to: WorkerInfo | None) -> None:
        if to is None:
            self.table.delete_fork(id, fork)
        else:
            self.table.held_by(id, fork, to.id)

    def user_sent(self, fork: int, to: WorkerInfo | None) -> None:
        with self._lock:
            child = self._children.pop(fork, None)
            if child is not None and to is not None and not self.table.is_gone(to.id):
                self._children[fork] = (child[0], to.id)
        del child

    def _rebuild(self, parts: _Parts) -> RRef[Any]:
        owner_id, owner_name, id, fork, parent = parts
        rref: RRef[Any] = self._kind.__new__(self._kind)
        if owner_id == self.me.id:
            rref._set_up(self, id, self.me, self.table.get(id), 0, None)
            if parent == self.me.id:
                self.table.delete_fork(id, fork)  # it went out and came home
            elif not current_decoding().is_call:  # the answer to a call says as much
                self._accept_child(parent, fork)
            elif self.table.is_deleted(fork):
                raise GradwireError("the caller has given up this call, and what it refers to")
            return rref
        owner = WorkerInfo(owner_name, owner_id)
        if parent == owner_id:
            rref._set_up(self, id, owner, None, fork, None)
            return rref
        confirmation = self._insist(owner, Kind.RREF_FORK_REQUEST, (id, fork))
        confirmation.add_done_callback(lambda _: self._accept_child(parent, fork))
        rref._set_up(self, id, owner, None, fork, confirmation)
        current_decoding().unsettled.append(confirmation)
        return rref

    def _accept_child(self, parent: int, fork: int) -> None:
        try:
            self._insist(self._agent.peers.find(parent).info, Kind.RREF_CHILD_ACCEPT, fork)
        except GradwireError:
            pass  # the parent is gone, and so is its reference

    def _serve_fork_request(self, request: Request) -> None:
        id, fork = request.decode()
        self.table.add_fork(id, fork, request.caller.id)
        request.answer(None)

    def _serve_child_accept(self, request: Request) -> None:
        self.let_child_go(request.decode())
        request.answer(None)

    def let_child_go(self, fork: int) -> None:
        """A fork that was sent is known to the owner."""
        with self._lock:
            child = self._children.pop(fork, None)
        del child  # perhaps the last hold on our own reference: outside the lock

    def child_lost(self, rref: RRef[Any], fork: int) -> None:
        """A fork went to the owner with a call that nobody hears of any more. The owner may still
        come to it: it must know first that the fork is void."""

        def tell() -> None:
            told = self._insist(rref._owner, Kind.RREF_USER_DELETE, (rref._id, fork))
            told.add_done_callback(lambda _: self.let_child_go(fork))

        if not self._closed:
            self._agent.executor.submit(tell)

    # -- dropping references

    def dropped(
        self, owner: WorkerInfo, id: int, fork: int, confirmation: Future[Any] | None
    ) -> None:
        """A user's reference died. Called by the garbage collector, anywhere: only take note."""
        if not self._closed:
            self._dropped.append((owner, id, fork, confirmation))
            self._agent.executor.post(self._tell_owners)

    def _tell_owners(self) -> None:
        while self._dropped:
            try:
                owner, id, fork, confirmation = self._dropped.popleft()
            except IndexError:
                return  # another thread was faster
            if confirmation is None or confirmation.done():
                self._tell_owner(owner, id, fork, confirmation)
            else:
                confirmation.add_done_callback(partial(self._tell_owner, owner, id, fork))

    def _tell_owner(
        self, owner: WorkerInfo, id: int, fork: int, confirmation: Future[Any] | None
    ) -> None:
        error = None if confirmation is None else confirmation.exception()
        if isinstance(error, CallError) and not error.may_have_run:
            return  # the owner never heard of it
        if not self._closed:
            self._insist(owner, Kind.RREF_USER_DELETE, (id, fork))

    def _insist(self, to: WorkerInfo, kind: Kind, value: Any) -> Future[Any]:
        outcome = self._agent.insist(to, kind, value)
        self._unanswered.add(outcome)
        outcome.add_done_callback(self._unanswered.discard)
        return outcome

    def _serve_delete(self, request: Request) -> None:
        self.table.delete_fork(*request.decode())
        request.answer(None)

    def _clear_up_after(self, info: WorkerInfo) -> None:
        self.table.delete_forks_of(info.id)
        with self._lock:
            orphans = [fork for fork, (_, to) in self._children.items() if to == info.id]
            released = [self._children.pop(fork) for fork in orphans]
        del released

    # -- the end

    def debug_info(self) -> dict[str, int]:
        values, forks = self.table.counts()
        with self._lock:
            children = len(self._children)
        return {
            "num_owner_rrefs": values,
            "num_forks": forks,
            "num_pending_children": children,
            "num_pending_messages": len(self._unanswered) + len(self._dropped),
        }

    def close(self) -> None:
        """The group parts: nobody holds anything for anybody any more."""
        self._closed = True
        with self._lock:
            children, self._children = self._children, {}
        self.table.clear()
        self._dropped.clear()
        del children


class _Passenger:
    """A reference on its way."""

    __slots__ = ("_fork", "_refs", "_rref")

    def __init__(self, refs: Refs, rref: RRef[Any], fork: int):
        self._refs = refs
        self._rref = rref
        self._fork = fork

    def left(self, to: WorkerInfo | None) -> None:
        if self._rref._owned is not None:
            self._refs.owner_sent(self._rref._id, self._fork, to)
        else:
            self._refs.user_sent(self._fork, to)

    def answered(self, by: WorkerInfo) -> None:
        if by.id == self._rref._owner.id:
            self._refs.let_child_go(self._fork)

    def lost(self, by: WorkerInfo) -> None:
        if by.id == self._rref._owner.id and self._rref._owned is None:
            self._refs.child_lost(self._rref, self._fork)


def _creation_failed(error: BaseException) -> BaseException:
    """What comes of using a reference whose value could not be made, for this reason."""
    if not isinstance(error, CallError):
        return error
    how = "timed out" if isinstance(error, CallTimeout) else "failed"
    explained = type(error)(
        f"RRef creation via rpc.remote() {how}: {error}",
        worker=error.worker,
        call=error.call,
        may_have_run=error.may_have_run,
    )
    explained.__cause__ = error
    return explained


def call_method(rref: RRef[Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs on the owner: a method of the value of a reference."""
    method = getattr(rref.local_value(), name)
    result = method(*args, **kwargs)
    return Deferred(result) if hasattr(method, ASYNC_MARK) else result
