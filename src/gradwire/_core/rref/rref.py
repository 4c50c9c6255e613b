"""`RRef`: a reference to a value on some worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from gradwire._core import current
from gradwire._core.ids import WorkerInfo, creator, serial
from gradwire._core.rpc.futures import Future
from gradwire._core.rref.owner_table import OwnedValue
from gradwire._core.wire.codec import call_name
from gradwire.errors import EncodingError, GradwireError
from gradwire.options import UNSET_TIMEOUT

T = TypeVar("T")


class RRefOperations(Protocol):
    """The operations that an RRef needs from its worker. `protocol.RRefs` implements them."""

    #: The name and id of the worker.
    info: WorkerInfo

    @property
    def default_timeout(self) -> float:
        """The timeout, in seconds, of operations for which the program gives no timeout."""

    def next_id(self) -> int:
        """Return an id that is unique in the group, for an RRef or a fork."""

    def fetch(self, rref: RRef[Any], timeout: float) -> Any:
        """Return the value of an RRef, copied from its owner."""

    def wait_for(self, future: Future[Any], timeout: float) -> Any:
        """Wait until this worker completes a future, and return the result of the future."""

    def call_method(
        self, rref: RRef[Any], name: str, args: Any, kwargs: Any, timeout: float
    ) -> Any:
        """Call a method of an RRef's value on its owner, and return the result."""

    def call_method_async(
        self, rref: RRef[Any], name: str, args: Any, kwargs: Any, timeout: float
    ) -> Future[Any]:
        """Call a method of an RRef's value on its owner, and return a future of the result."""

    def remote_method(
        self, rref: RRef[Any], name: str, args: Any, kwargs: Any, timeout: float
    ) -> RRef[Any]:
        """Call a method of an RRef's value on its owner, and return an RRef to the result."""

    def backward(self, rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
        """Run a backward pass from the value of an RRef, on its owner."""

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


class RRef(Generic[T]):
    """A reference to a value that stays on one worker, its owner.

    ``RRef(value)`` refers to a value of this worker. `rpc.remote` makes a value on another worker
    and returns an RRef to it. RRefs can be sent to any worker, in arguments and in results. The
    value lives until the last RRef to it is deleted.

        >>> rref = rpc.remote("worker1", torch.ones, args=(2,))  # doctest: +SKIP
        >>> rref.to_here()                                       # doctest: +SKIP
        tensor([1., 1.])
        >>> rref.rpc_sync().add(1)                               # doctest: +SKIP
        tensor([2., 2.])
    """

    _rrefs: RRefOperations
    _rref_id: int
    _owner: WorkerInfo
    #: The value if this worker owns it, otherwise None.
    _owned: OwnedValue | None
    #: The id by which the owner knows this RRef. If this worker is the owner, the id is 0.
    _fork_id: int
    #: A future that is done when the owner has made the value or has learnt of this RRef. None
    #: means that the owner already knows of this RRef.
    _confirmation: Future[Any] | None
    #: The function that makes the value, or its name, if this RRef was made by `rpc.remote`.
    _made_by: Any = None

    def __init__(self, value: T, type_hint: Any = None):  # noqa: ARG002
        rrefs: RRefOperations = current.runtime().rrefs
        owned = OwnedValue(rrefs.next_id())
        owned.set_value(value)
        self._set_up(rrefs, owned.rref_id, rrefs.info, owned, 0, None)

    def _set_up(
        self,
        rrefs: RRefOperations,
        rref_id: int,
        owner: WorkerInfo,
        owned: OwnedValue | None,
        fork_id: int,
        confirmation: Future[Any] | None,
    ) -> None:
        self._rrefs = rrefs
        self._rref_id = rref_id
        self._owner = owner
        self._owned = owned
        self._fork_id = fork_id
        self._confirmation = confirmation

    # -- the owner

    def is_owner(self) -> bool:
        """Return whether the value is on this worker."""
        return self._owned is not None

    def owner(self) -> WorkerInfo:
        """Return the name and id of the worker that has the value."""
        return self._owner

    def owner_name(self) -> str:
        """Return the name of the worker that has the value."""
        return self._owner.name

    def confirmed_by_owner(self) -> bool:
        """Return whether the owner has confirmed that it knows of this RRef."""
        confirmation = self._confirmation
        if confirmation is None or self._owned is not None:
            return True
        return confirmation.done() and confirmation.exception() is None

    # -- the value

    def to_here(self, timeout: float = UNSET_TIMEOUT) -> T:
        """Return a copy of the value. On the owner, return the value itself.

        If the function that makes the value raised an exception, this method raises that exception.
        """
        value: T = self._rrefs.fetch(self, timeout)
        return value

    def local_value(self) -> T:
        """Return the value itself. This works only on the owner, the worker that has the value."""
        if self._owned is None:
            raise GradwireError(
                f"local_value() of an RRef works only on its owner, worker {self._owner.name!r}; "
                "call to_here() for a copy, or rpc_sync() for a call on it"
            )
        value: T = self._rrefs.wait_for(self._owned.future, self._rrefs.default_timeout)
        return value

    # -- calls on the value

    def rpc_sync(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """Return an object with the methods of the value. Each method runs on the owner and returns
        the result."""
        return _Proxy(self, self._rrefs.call_method, timeout)

    def rpc_async(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """Return an object with the methods of the value. Each method runs on the owner and returns
        a future of the result."""
        return _Proxy(self, self._rrefs.call_method_async, timeout)

    def remote(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """Return an object with the methods of the value. Each method runs on the owner and returns
        an RRef to the result, which stays on the owner."""
        return _Proxy(self, self._rrefs.remote_method, timeout)

    # -- gradients

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run a backward pass from the value, a scalar tensor, on its owner.

        With the id of an autograd context, each worker collects its gradients in that context.
        Without a context, this works only on the owner: torch runs the backward pass within this
        process and accumulates the gradients into `.grad`.

            >>> with autograd.context() as context_id:                  # doctest: +SKIP
            ...     loss = rpc.remote("worker1", compute_loss, args=(x,))
            ...     loss.backward(context_id)
        """
        if self._owned is None and dist_autograd_ctx_id == -1:
            raise GradwireError(
                "User RRefs require 'dist_autograd_ctx_id' to be specified: the value is on worker "
                f"{self._owner.name!r}, so the pass needs a context, backward(context_id)"
            )
        self._rrefs.backward(self, dist_autograd_ctx_id, retain_graph)

    # -- deletion and pickling

    def __del__(self) -> None:
        try:
            rrefs, owned = self._rrefs, self._owned
        except AttributeError:
            return  # `_set_up` was never called, so the owner does not know of this RRef.
        if owned is None:
            rrefs.delete_user(self._owner, self._rref_id, self._fork_id, self._confirmation)

    def __reduce__(self) -> Any:
        raise EncodingError(
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC: pass "
            "it in the arguments or the result of a remote call"
        )

    def __repr__(self) -> str:
        # `repr` must not wait. So this method uses only what this worker knows already.
        try:
            rref_id, owner, owned, confirmation = (
                self._rref_id,
                self._owner.name,
                self._owned,
                self._confirmation,
            )
        except AttributeError:
            return "<RRef that refers to nothing yet>"
        what = "a value" if self._made_by is None else f"the result of {call_name(self._made_by)}"
        if owned is not None:
            where, state = f"this worker, {owner!r}", owned.future.state
            if state == "done":
                what, state = f"a value of type {type(owned.future.value()).__name__}", "ready"
        else:
            where = f"worker {owner!r}"
            state = "confirmed" if confirmation is None else confirmation.state
            state = {"done": "confirmed", "pending": "not confirmed yet"}.get(state, state)
        number = f"{creator(rref_id)}:{serial(rref_id)}"
        return f"<RRef {number} to {what} on {where}, {state}>"


# The special methods that a `_Proxy` object calls on the value: the methods of operators,
# conversions, containers and the with statement. Python looks for the `__len__` of `len(proxy)`
# only in the class `_Proxy`. So if the `_Proxy` object itself is asked for `__len__`, a program has
# written `proxy.__len__()`, and wants to call the method of the value.
_METHODS = [
    *("len", "length_hint", "getitem", "setitem", "delitem", "missing", "contains", "iter", "next"),
    *("reversed", "enter", "exit", "bool", "int", "float", "complex", "index", "bytes", "fspath"),
    *("neg", "pos", "abs", "invert", "round", "trunc", "floor", "ceil", "divmod", "rdivmod"),
]
_OPERATORS = [
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift"),
    *("and", "or", "xor"),
]
_SPECIAL = {
    f"__{name}__"
    for name in [*_METHODS, *(side + name for side in ("", "r", "i") for name in _OPERATORS)]
}


class _Proxy:
    """An object that stands for the value of an RRef. Its methods call the methods of the value."""

    __slots__ = ("_call", "_rref", "_timeout")

    def __init__(self, rref: RRef[Any], call: Callable[..., Any], timeout: float):
        self._rref = rref
        self._call = call
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__") and name.endswith("__") and name not in _SPECIAL:
            # Libraries such as copy, inspect and numpy look for other special methods in every
            # object they get. They must not find these methods here, because they would call them
            # on the remote value.
            raise AttributeError(name)

        def method(*args: Any, **kwargs: Any) -> Any:
            return self._call(self._rref, name, args, kwargs, self._timeout)

        return method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._rref, "__call__", args, kwargs, self._timeout)

    def __repr__(self) -> str:
        return f"<the methods of {self._rref!r}>"
