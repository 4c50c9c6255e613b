"""`RRef`: a reference to a value on some worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gradwire import current
from gradwire.config import UNSET_TIMEOUT
from gradwire.errors import EncodingError, GradwireError
from gradwire.ids import WorkerInfo, creator, serial
from gradwire.refs.table import Owned

if TYPE_CHECKING:
    from gradwire.agent.futures import Future
    from gradwire.refs.protocol import Refs

T = TypeVar("T")


class RRef(Generic[T]):
    """A reference to a value that lives on one worker, its owner, and can be held by any.

    ``RRef(value)`` makes one for a value of this worker; `rpc.remote` makes the value elsewhere. An
    RRef can be passed in arguments and results, also to third workers; its value lives until the
    last reference is gone.

        >>> rref = rpc.remote("worker1", torch.ones, args=(2,))  # doctest: +SKIP
        >>> rref.to_here()                                       # doctest: +SKIP
        tensor([1., 1.])
        >>> rref.rpc_sync().add(1)                               # doctest: +SKIP
        tensor([2., 2.])
    """

    _refs: Refs
    _id: int
    _owner: WorkerInfo
    #: On the owner: the value.
    _owned: Owned | None
    #: On a user: which of the references to the value this one is.
    _fork: int
    #: Done when the owner has made the value, or knows of this reference.
    _confirmation: Future[Any] | None

    def __init__(self, value: T, type_hint: Any = None):  # noqa: ARG002
        refs: Refs = current.worker().refs
        owned = Owned(refs.next_id())
        owned.set_value(value)
        self._set_up(refs, owned.id, refs.me, owned, 0, None)

    def _set_up(
        self,
        refs: Refs,
        id: int,
        owner: WorkerInfo,
        owned: Owned | None,
        fork: int,
        confirmation: Future[Any] | None,
    ) -> None:
        self._refs = refs
        self._id = id
        self._owner = owner
        self._owned = owned
        self._fork = fork
        self._confirmation = confirmation

    # -- what it is

    def is_owner(self) -> bool:
        """Whether the value is on this worker."""
        return self._owned is not None

    def owner(self) -> WorkerInfo:
        """The worker that has the value."""
        return self._owner

    def owner_name(self) -> str:
        return self._owner.name

    def confirmed_by_owner(self) -> bool:
        """Whether the owner has made the value, or knows of this reference to it."""
        confirmation = self._confirmation
        if confirmation is None or self._owned is not None:
            return True
        return confirmation.done() and confirmation.exception() is None

    # -- the value

    def to_here(self, timeout: float = UNSET_TIMEOUT) -> T:
        """A copy of the value, on this worker; on the owner, the value itself. Raises what the
        function that should have made it raised."""
        value: T = self._refs.fetch(self, timeout)
        return value

    def local_value(self) -> T:
        """The value itself. On its owner only."""
        if self._owned is None:
            raise GradwireError(
                f"local_value() of an RRef works only on its owner, worker {self._owner.name!r}; "
                "call to_here() for a copy, or rpc_sync() for a call on it"
            )
        value: T = self._refs.wait_for(self._owned.future, self._refs.patience)
        return value

    # -- calls on the value

    def rpc_sync(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """A proxy: its methods are those of the value, run on the owner, and give the result."""
        return _Proxy(self, self._refs.call_method, timeout)

    def rpc_async(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """A proxy whose methods run on the owner and give a future of the result."""
        return _Proxy(self, self._refs.begin_method, timeout)

    def remote(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """A proxy whose methods run on the owner and give an RRef to the result there."""
        return _Proxy(self, self._refs.remote_method, timeout)

    # -- gradients

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run a backward pass from the value, a scalar tensor, on its owner. With the id of a
        context the gradients are collected there, on every worker; without one the pass is an
        ordinary one of this process, into `.grad`, and only the owner can start it.

            >>> with autograd.context() as context_id:                  # doctest: +SKIP
            ...     loss = rpc.remote("worker1", compute_loss, args=(x,))
            ...     loss.backward(context_id)
        """
        if self._owned is None and dist_autograd_ctx_id == -1:
            raise GradwireError(
                "User RRefs require 'dist_autograd_ctx_id' to be specified: the value is on worker "
                f"{self._owner.name!r}, so the pass needs a context, backward(context_id)"
            )
        self._refs.backward(self, dist_autograd_ctx_id, retain_graph)

    # -- its life

    def __del__(self) -> None:
        try:
            refs, owned = self._refs, self._owned
        except AttributeError:
            return  # it never came to be
        if owned is None:
            refs.dropped(self._owner, self._id, self._fork, self._confirmation)

    def __reduce__(self) -> Any:
        raise EncodingError(
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC: pass "
            "it in the arguments or the result of a remote call"
        )

    def __repr__(self) -> str:
        name = f"GloballyUniqueId(created_on={creator(self._id)}, local_id={serial(self._id)})"
        if self.is_owner():
            return f"OwnerRRef({name})"
        fork = f"GloballyUniqueId(created_on={creator(self._fork)}, local_id={serial(self._fork)})"
        return f"UserRRef(RRefId = {name}, ForkId = {fork})"


# Special methods that proxies pass on: those of operators, containers and ``with``. Python itself
# looks for them in classes only, so whoever asks an object for one means to call it.
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
    """Turns attribute access into calls on the value of an RRef."""

    __slots__ = ("_call", "_rref", "_timeout")

    def __init__(self, rref: RRef[Any], call: Callable[..., Any], timeout: float):
        self._rref = rref
        self._call = call
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__") and name.endswith("__") and name not in _SPECIAL:
            raise AttributeError(name)  # copy, inspect, numpy and the like ask for these

        def method(*args: Any, **kwargs: Any) -> Any:
            return self._call(self._rref, name, args, kwargs, self._timeout)

        return method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._rref, "__call__", args, kwargs, self._timeout)
