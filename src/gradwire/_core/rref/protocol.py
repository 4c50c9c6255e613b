"""The RRef protocol, by which workers agree on how long an owner keeps a value.

The *owner* of an RRef is the worker that has the value. An RRef on any other worker is a *user*.
When an RRef is sent, the receiver gets a new RRef, a *fork*, with an id of its own. The RRef that
was sent is the *parent* of the fork, and the fork is its *child*. A user is *confirmed* when its
worker has learnt that the owner knows of this user.

1. The owner keeps a value while its table (`owner_table`) lists a fork of it. RRefs on the owner
   itself refer to the value directly.
2. `rpc.remote` makes the value and its first user: the caller chooses both ids, and the owner adds
   the fork when it serves the call (PYTHON_REMOTE_CALL). The answer confirms the user.
3. Before an RRef is sent, its worker chooses the id of the child.
   - If the parent is on the owner, the owner adds the fork to its table.
   - If the parent is a user, its worker keeps it alive until the owner knows of the child.
4. What a worker does when it receives an RRef depends on the parent.
   - The parent is on the owner: nothing, since the table lists the fork already.
   - The parent is a user, and the receiver is the owner: the parent's worker must learn that the
     RRef has arrived, because it keeps the parent alive until then. If the RRef came in a call, the
     answer to the call shows this; otherwise the owner sends the message RREF_CHILD_ACCEPT. If the
     connection is lost before the answer, the parent's worker revokes the fork (RREF_USER_DELETE).
     If the owner decodes the call after that, it refuses the call.
   - The parent is a user, and the receiver is a third worker: the receiver has the owner add the
     fork (RREF_FORK_REQUEST). Then it tells the parent's worker that the owner knows of the fork
     (RREF_CHILD_ACCEPT). The value that contains the RRef is not used before the owner has
     answered.
5. When a user is deleted, its worker tells the owner (RREF_USER_DELETE), but only after the user
   was confirmed.

Each of these RREF messages is repeated until it is answered, and does no harm if it arrives twice.
When a worker is gone (lost, or has left the group), the owner deletes the forks on that worker, and
parents are no longer kept alive for children that were sent to it. If the worker comes back (it was
frozen, or the network was cut), the users that it had are *void*. A worker that uses a user sends
the id of its fork, and whether the user is confirmed. The owner answers at once that the user is
void in two cases: the user is confirmed and the table does not list its fork, or the table
remembers that the fork was deleted. A user that is not confirmed may be used before the call that
makes the value has arrived. The owner has not deleted its fork then, so the use waits.

This is torch's protocol ("Remote Reference Protocol" in PyTorch's documentation), a kind of
reference listing (Birrell et al., "Distributed Garbage Collection for Network Objects", 1993): the
owner lists the forks instead of counting them, so a repeated message does no harm. Ours differs
from torch's in two points: if an RRef is sent to its owner in a call, the answer to the call takes
the place of RREF_CHILD_ACCEPT; and no fork is left behind when a connection or a worker is lost.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from gradwire._core.ids import IdSource, To, WorkerInfo
from gradwire._core.rpc.agent import Agent
from gradwire._core.rpc.exceptions import add_place, detach
from gradwire._core.rpc.function_calls import ASYNC_MARK, FunctionCalls, MethodResult
from gradwire._core.rpc.futures import Future
from gradwire._core.rpc.liveness import Stay
from gradwire._core.rpc.server import Request
from gradwire._core.rref.owner_table import OwnedValue, OwnerTable
from gradwire._core.rref.rref import RRef
from gradwire._core.tracebacks import trimmed
from gradwire._core.wire.codec import show_as
from gradwire._core.wire.encoding import add_attachment, current_decoding
from gradwire._core.wire.messages import Kind
from gradwire.errors import CallError, CallTimeout, GradwireError
from gradwire.options import UNSET_TIMEOUT

_TAG = "rref"

#: A message contains this tuple in place of an RRef. The tuple has the owner's id and name, the
#: RRef's id, the id of the new RRef (the fork) that the receiver will make, and the id of the
#: sending worker. Torch calls it RRefForkData. The last item describes the parent if that is a
#: user, and is None if the parent is on the owner.
_ForkData = tuple[int, str, int, int, int, "_UserData | None"]

#: The id of the fork of a user, and whether the user is confirmed. The owner finds out from this
#: pair whether the user is void.
_UserData = tuple[int, bool]


class RRefs:
    """The RRefs of one worker, and this worker's part in the RRef protocol."""

    def __init__(
        self,
        agent: Agent,
        calls: FunctionCalls,
        differentiate: Callable[[Tensor, int, bool], None],
        rref_type: type[RRef[Any]] = RRef,
    ):
        self._agent = agent
        #: The function that runs a backward pass. Its arguments are the tensor to start from, the
        #: id of the autograd context, and `retain_graph`.
        self._differentiate = differentiate
        self._rref_type = rref_type
        self._calls = calls
        self._ids = IdSource(agent.info.id)
        self.info = agent.info
        self._stay_of = agent.liveness.stay_of
        self.table = OwnerTable()
        #: The lock is reentrant, because while a thread holds it, the garbage collector may run
        #: user code in that thread, and this code may send RRefs.
        self._lock = threading.RLock()
        #: The parents: RRefs that this worker has sent. Each is kept alive until the owner knows of
        #: its child, the new RRef that the receiver makes. Maps the id of the child to the parent
        #: and the stay of the receiver (None until the message has been sent).
        self._pending_children: dict[int, tuple[RRef[Any], Stay | None]] = {}
        #: The deleted RRefs to values of other workers. Those workers have not been told of the
        #: deletions yet.
        self._deleted_users: deque[tuple[WorkerInfo, int, int, Future[Any] | None]] = deque()
        self._closed = False
        #: The futures of the protocol messages that have not been answered yet.
        self._unanswered: set[Future[Any]] = set()
        for kind in (RRef, rref_type):
            agent.codec.register_type(kind, "rref", self._fork, self._receive)
        agent.handle(Kind.PYTHON_REMOTE_CALL, self._serve_remote, runs_user_code=True)
        agent.handle(Kind.PYTHON_RREF_FETCH_CALL, self._serve_fetch)
        agent.handle(Kind.RREF_FORK_REQUEST, self._serve_fork_request)
        agent.handle(Kind.RREF_CHILD_ACCEPT, self._serve_child_accept)
        agent.handle(Kind.RREF_USER_DELETE, self._serve_delete)
        agent.on_gone.append(self._forget_worker)

    @property
    def default_timeout(self) -> float:
        return self._agent.options.rpc_seconds

    def next_id(self) -> int:
        return self._ids.next()

    # -- making values on other workers

    def remote(
        self,
        to: To,
        func: Any,
        args: Sequence[Any] | None,
        kwargs: dict[str, Any] | None,
        timeout: float,
        name: str = "",
    ) -> RRef[Any]:
        """Run a function on a worker, and return an RRef to the result, which stays there. Errors
        call the function `name`, if a name is given."""
        peer, seconds = self._agent.peers.find(to), self._agent.timeout(timeout)
        rref_id = self.next_id()
        local = peer.info.id == self.info.id
        fork_id = rref_id if local else self.next_id()
        encoded = self._agent.codec.encode_call(func, args, kwargs)
        rref: RRef[Any] = self._rref_type.__new__(self._rref_type)
        if local:
            owned = OwnedValue(rref_id)
            self.table.add(owned)
        # The ids are sent in a tag, beside the encoded call. So the owner knows the ids even if it
        # cannot decode the call.
        tags = {_TAG: (rref_id, fork_id)}
        created = self._agent.sender.call_async(
            peer, Kind.PYTHON_REMOTE_CALL, name or func, encoded, seconds, tags
        )
        # If the call fails, the error is not logged: the program gets it when it uses the value.
        created.expect_failure()
        rref._made_by = name or func
        if local:
            rref._set_up(self, rref_id, self.info, owned, 0, created)
            created.add_done_callback(partial(self._check_local_creation, weakref.ref(owned)))
        else:
            rref._set_up(self, rref_id, peer.info, None, fork_id, created)
        return rref

    @staticmethod
    def _check_local_creation(owned: weakref.ref[OwnedValue], created: Future[Any]) -> None:
        """If the call that makes a value on this worker has failed, store the error of the call in
        place of the value."""
        value, error = owned(), created.exception()
        if value is not None and error is not None and not value.future.done():
            creation_error = _explain_creation_error(error)
            # The called function may set the value just before `set_error` does. Then `set_error`
            # raises RuntimeError, and the function's value is kept.
            with contextlib.suppress(RuntimeError):
                value.set_error(creation_error, str(created))
                value.creation_error = creation_error

    def _serve_remote(self, request: Request) -> None:
        assert request.tags is not None
        rref_id, fork_id = request.tags[_TAG]
        owned = self.table.get(rref_id)
        if request.caller.id != self.info.id:
            self.table.add_fork(rref_id, fork_id, self._stay_of(request.caller.id))

        def deliver(value: Any) -> None:
            owned.set_value(value)
            request.answer(None)

        def fail(error: BaseException, what: str) -> None:
            detach(error, what, self.info)
            # If the call was decoded, `what` is the name of the function, and a note with that name
            # is added to the error. Otherwise no function was called.
            if request.subject:
                add_place(error, request.subject, what, self.info.name)
            owned.set_error(error, f"{what} on worker {self.info.name!r}")
            request.answer(None)

        self._calls.serve_function(request, deliver, fail)

    # -- reading values

    def fetch(self, rref: RRef[Any], timeout: float) -> Any:
        """Return the value of an RRef if this worker owns it, and a copy of the value otherwise."""
        timeout = self._agent.timeout(timeout)
        try:
            if rref._owned is not None:
                return self.wait_for(rref._owned.future, timeout)
            self._check_creation(rref)
            peer = self._agent.peers.find(rref._owner)
            encoded = self._agent.codec.encode((rref._rref_id, _user_data(rref)))
            value = self._agent.sender.call(
                peer, Kind.PYTHON_RREF_FETCH_CALL, "RRef.to_here()", encoded, timeout
            )
            rref._confirmation = None  # The answer shows that the owner knows of this RRef.
            return value
        except Exception as error:
            # The fetch may have failed because the value could not be made. In this case, the error
            # from making the value is raised, because it explains more than the error of the fetch.
            if isinstance(error, CallError):
                self._check_creation(rref)
            raise trimmed(error)

    def _check_creation(self, rref: RRef[Any]) -> None:
        """If the call that makes the value of an RRef is known to have failed, raise its error."""
        if rref._owned is not None:
            if rref._owned.creation_error is not None:
                raise rref._owned.creation_error
            return
        confirmation = rref._confirmation
        if confirmation is None or not confirmation.done():
            return
        error = confirmation.exception()
        if error is not None:
            raise _explain_creation_error(error)

    def wait_for(self, future: Future[Any], timeout: float) -> Any:
        """Wait until a value that this worker owns has been made, and return the value. `future` is
        the future of the value. When the timeout passes first, raise CallTimeout."""
        if not future.done():
            done = threading.Event()
            future.add_done_callback(lambda _: done.set())
            with self._agent.executor.blocking():
                in_time = done.wait(timeout or None)
            if not in_time:
                raise CallTimeout(
                    f"the value of an RRef, on its owner {self.info.name!r}, was not ready after "
                    f"{timeout:g} s: the function that makes it is still running",
                    worker=self.info.name,
                )
        return future.wait()

    def _serve_fetch(self, request: Request) -> None:
        rref_id, user = request.decode()
        self._check_user(rref_id, user)
        owned = self.table.get(rref_id)
        request.subject = "RRef.to_here()"

        # The default argument of `answer` keeps the value alive until the value is sent. The table
        # of values may have only a weak reference to the value.
        def answer(future: Future[Any], _owned: OwnedValue = owned) -> None:
            error = future.exception()
            if error is not None:
                request.fail(error, "the function that makes the value")
            else:
                self._calls.answer(request, future.value())

        owned.future.add_done_callback(answer)

    def _check_user(self, rref_id: int, user: _UserData) -> None:
        """Raise an error if a user, by which another worker uses a value of this worker, is
        void."""
        fork_id, confirmed = user
        if self.table.is_void(rref_id, fork_id, confirmed):
            raise GradwireError(
                f"worker {self.info.name!r} has dropped the value of this RRef, because it "
                "regarded the worker that held the RRef as lost, or was told that the RRef was "
                "deleted. Make a new RRef"
            )

    # -- calling methods of values

    def call_method(
        self, rref: RRef[Any], name: str, args: Any, kwargs: Any, timeout: float
    ) -> Any:
        arguments = rref, name, args, kwargs
        return self._calls.rpc_sync(rref._owner, call_method, arguments, None, timeout, name)

    def call_method_async(
        self, rref: RRef[Any], name: str, args: Any, kwargs: Any, timeout: float
    ) -> Future[Any]:
        arguments = rref, name, args, kwargs
        return self._calls.rpc_async(rref._owner, call_method, arguments, None, timeout, name)

    def remote_method(
        self, rref: RRef[Any], name: str, args: Any, kwargs: Any, timeout: float
    ) -> RRef[Any]:
        arguments = rref, name, args, kwargs
        return self.remote(rref._owner, call_method, arguments, None, timeout, name)

    def backward(self, rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
        if rref._owned is None:
            arguments = rref, context_id, retain_graph
            self._calls.rpc_sync(rref._owner, RRef.backward, arguments, None, UNSET_TIMEOUT)
            return
        root = rref.local_value()
        if not isinstance(root, Tensor):
            raise GradwireError(
                f"RRef should contain a tensor for .backward(); it has a {type(root).__name__}"
            )
        if context_id == -1:
            root.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        else:
            self._differentiate(root, context_id, retain_graph)

    # -- sending and receiving RRefs

    def _fork(self, rref: RRef[Any]) -> _ForkData:
        """Return the data that stands for an RRef in the message that is being encoded. From this
        data, the receiver makes a new RRef, a fork."""
        if rref._rrefs is not self:
            raise GradwireError(f"{rref!r} belongs to another worker of this process")
        fork_id = self.next_id()
        # If the value could not be made, raise the error now and do not send the RRef. Otherwise
        # the receiver would wait for the value in vain.
        self._check_creation(rref)
        if rref._owned is not None:
            self.table.add(rref._owned)
            self.table.add_fork(rref._rref_id, fork_id, None)
        else:
            with self._lock:
                self._pending_children[fork_id] = (rref, None)
        add_attachment(_RRefAttachment(self, rref, fork_id))
        owner = rref._owner
        parent = None if rref._owned is not None else _user_data(rref)
        return owner.id, owner.name, rref._rref_id, fork_id, self.info.id, parent

    def owner_sent(self, rref_id: int, fork_id: int, to: WorkerInfo | None) -> None:
        """Record that this worker, which owns the value of an RRef, has sent the RRef to the worker
        `to`. If `to` is None, the RRef could not be sent."""
        if to is None:
            self.table.delete_fork(rref_id, fork_id)
        else:
            self.table.set_fork_holder(rref_id, fork_id, self._stay_of(to.id))

    def user_sent(self, fork_id: int, to: WorkerInfo | None) -> None:
        """Record that this worker, which does not own the value of an RRef, has sent the RRef to
        the worker `to`. If `to` is None, the RRef could not be sent."""
        with self._lock:
            pending = self._pending_children.pop(fork_id, None)
            if pending is not None and to is not None:
                stay = self._stay_of(to.id)
                if not stay.ended:
                    self._pending_children[fork_id] = (pending[0], stay)
        # Deleting the last reference to an RRef may run user code, so the lock must not be held
        # here.
        del pending

    def _receive(self, fork_data: _ForkData) -> RRef[Any]:
        """Make the RRef that a received message describes."""
        owner_id, owner_name, rref_id, fork_id, parent_id, parent = fork_data
        rref: RRef[Any] = self._rref_type.__new__(self._rref_type)
        if owner_id == self.info.id:
            if parent is not None:
                self._check_user(rref_id, parent)
            rref._set_up(self, rref_id, self.info, self.table.get(rref_id), 0, None)
            if parent_id == self.info.id:
                # The owner sent the RRef to itself. The table of values lists only the forks on
                # other workers, so remove this fork from the table.
                self.table.delete_fork(rref_id, fork_id)
            # If an RRef came in a call, the answer to the call tells the sender that the RRef
            # arrived. Otherwise, a separate message tells the sender.
            elif not current_decoding().is_call:
                self._accept_child(parent_id, fork_id)
            elif self.table.is_deleted(fork_id):
                raise GradwireError("the caller has given up this call and revoked the RRef in it")
            return rref
        owner = WorkerInfo(owner_name, owner_id)
        if parent_id == owner_id:
            rref._set_up(self, rref_id, owner, None, fork_id, None)
            return rref
        confirmation = self._send_until_answered(
            owner, Kind.RREF_FORK_REQUEST, (rref_id, fork_id, parent)
        )
        confirmation.add_done_callback(lambda _: self._accept_child(parent_id, fork_id))
        rref._set_up(self, rref_id, owner, None, fork_id, confirmation)
        current_decoding().unconfirmed.append(confirmation)
        return rref

    def _accept_child(self, parent_id: int, fork_id: int) -> None:
        try:
            self._send_until_answered(
                self._agent.peers.find(parent_id).info, Kind.RREF_CHILD_ACCEPT, fork_id
            )
        except GradwireError:
            pass  # The worker that sent the RRef is gone, so no message to it is needed.

    def _serve_fork_request(self, request: Request) -> None:
        rref_id, fork_id, parent = request.decode()
        # If the table lists the fork already, this message was repeated. Then the parent is not
        # checked, because it may have been deleted since the message first arrived.
        if not self.table.lists(rref_id, fork_id):
            self._check_user(rref_id, parent)
        self.table.add_fork(rref_id, fork_id, self._stay_of(request.caller.id))
        request.answer(None)

    def _serve_child_accept(self, request: Request) -> None:
        self.delete_pending_child(request.decode())
        request.answer(None)

    def delete_pending_child(self, fork_id: int) -> None:
        """Release an RRef that was kept alive after it was sent. The owner now knows of the RRef
        that the receiver made, which has the id `fork_id`."""
        with self._lock:
            pending = self._pending_children.pop(fork_id, None)
        # Deleting the last reference to an RRef may run user code, so the lock must not be held
        # here.
        del pending

    def revoke_child(self, rref: RRef[Any], fork_id: int) -> None:
        """Cancel the sending of `rref` to its owner in a call, because the connection was lost
        before the call was answered. `rref` was kept alive until now. It is released when the owner
        has confirmed that the sending was cancelled.

        If the owner still receives the call after that, it refuses the call.
        """

        def send_delete() -> None:
            outcome = self._send_until_answered(
                rref._owner, Kind.RREF_USER_DELETE, (rref._rref_id, fork_id)
            )
            outcome.add_done_callback(lambda _: self.delete_pending_child(fork_id))

        if not self._closed:
            self._agent.executor.submit(send_delete)

    # -- deleting users

    def delete_user(
        self,
        owner: WorkerInfo,
        rref_id: int,
        fork_id: int,
        confirmation: Future[Any] | None,
    ) -> None:
        """Queue a message that tells the owner of an RRef that this worker has deleted the RRef.
        The message is not sent here, because the garbage collector may call this method in any
        thread at any moment."""
        if not self._closed:
            self._deleted_users.append((owner, rref_id, fork_id, confirmation))
            self._agent.executor.post(self._send_deletes)

    def _send_deletes(self) -> None:
        while self._deleted_users:
            try:
                owner, rref_id, fork_id, confirmation = self._deleted_users.popleft()
            except IndexError:
                return  # The queue is empty: another thread has taken its last item.
            if confirmation is None or confirmation.done():
                self._send_delete(owner, rref_id, fork_id, confirmation)
            else:
                confirmation.add_done_callback(partial(self._send_delete, owner, rref_id, fork_id))

    def _send_delete(
        self,
        owner: WorkerInfo,
        rref_id: int,
        fork_id: int,
        confirmation: Future[Any] | None,
    ) -> None:
        error = None if confirmation is None else confirmation.exception()
        if isinstance(error, CallError) and not error.may_have_run:
            return  # The owner does not know of this RRef, so no message is needed.
        if not self._closed:
            self._send_until_answered(owner, Kind.RREF_USER_DELETE, (rref_id, fork_id))

    def _send_until_answered(self, to: WorkerInfo, kind: Kind, value: Any) -> Future[Any]:
        outcome = self._agent.sender.send_until_answered(to, kind, value)
        self._unanswered.add(outcome)
        outcome.add_done_callback(self._unanswered.discard)
        return outcome

    def _serve_delete(self, request: Request) -> None:
        self.table.delete_fork(*request.decode())
        request.answer(None)

    def _forget_worker(self, _info: WorkerInfo) -> None:
        """Delete the RRefs that a worker had to values of this worker, because that worker is lost
        or has left. Also release the RRefs that were kept alive because they were sent to that
        worker."""
        self.table.delete_ended_forks()
        with self._lock:
            lost = [
                fork_id
                for fork_id, (_, to) in self._pending_children.items()
                if to is not None and to.ended
            ]
            released = [self._pending_children.pop(fork_id) for fork_id in lost]
        del released

    # -- state and shutdown

    def debug_info(self) -> dict[str, int]:
        """Return four numbers. They count the values to which other workers refer, the RRefs of
        other workers to these values, the sent RRefs that their owners may not know of yet, and the
        messages about RRefs that have not been answered yet."""
        values, forks = self.table.counts()
        with self._lock:
            children = len(self._pending_children)
        return {
            "num_owner_rrefs": values,
            "num_forks": forks,
            "num_pending_children": children,
            "num_pending_messages": len(self._unanswered) + len(self._deleted_users),
        }

    def close(self) -> None:
        """Release all values and RRefs that are kept alive for other workers."""
        self._closed = True
        with self._lock:
            children, self._pending_children = self._pending_children, {}
        self.table.clear()
        self._deleted_users.clear()
        del children


class _RRefAttachment:
    """An RRef in a message. Its methods are called when the message has been sent, answered or
    lost."""

    __slots__ = ("_fork_id", "_parent", "_rrefs")

    def __init__(self, rrefs: RRefs, parent: RRef[Any], fork_id: int):
        self._rrefs = rrefs
        self._parent = parent
        self._fork_id = fork_id

    def sent(self, to: WorkerInfo | None) -> None:
        if self._parent._owned is not None:
            self._rrefs.owner_sent(self._parent._rref_id, self._fork_id, to)
        else:
            self._rrefs.user_sent(self._fork_id, to)

    def answered(self, by: WorkerInfo) -> None:
        if by.id == self._parent._owner.id:
            self._rrefs.delete_pending_child(self._fork_id)

    def lost(self, by: WorkerInfo) -> None:
        if by.id == self._parent._owner.id and self._parent._owned is None:
            self._rrefs.revoke_child(self._parent, self._fork_id)


def _user_data(user: RRef[Any]) -> _UserData:
    """Return the data from which the owner finds out whether a user is void."""
    return user._fork_id, user.confirmed_by_owner()


def _explain_creation_error(error: BaseException) -> BaseException:
    """Return the error to raise where a program uses a value that could not be made."""
    if not isinstance(error, CallError):
        return error
    how = "timed out" if isinstance(error, CallTimeout) else "failed"
    explained = type(error)(
        f"RRef creation via rpc.remote() {how}: {error}",
        worker=error.worker,
        call=error.call,
        may_have_run=error.may_have_run,
    )
    explained.__cause__ = error.__cause__
    return explained


@show_as(lambda _rref, name, args, kwargs: (name, args, kwargs))
def call_method(rref: RRef[Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of an RRef's value. This runs on the owner, the worker with the value."""
    value = rref.local_value()
    method = getattr(value, name)
    result = method(*args, **kwargs)
    return MethodResult(type(value), name, result, hasattr(method, ASYNC_MARK))
