"""`RRef` with the names and the wording that torch's has beside the public ones."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch.futures import Future

from gradwire import current
from gradwire.compat.rpc.agents import _get_current_rpc_agent
from gradwire.compat.rpc.constants import UNSET_RPC_TIMEOUT
from gradwire.compat.rpc.internal import RPCExecMode, _internal_rpc_pickler, _recorded
from gradwire.ids import creator, serial
from gradwire.refs.rref import RRef as _RRef
from gradwire.refs.rref import _Proxy

T = TypeVar("T")

#: The references of this process to values on other workers.
users: weakref.WeakSet[RRef[Any]] = weakref.WeakSet()
_adding = threading.RLock()


def users_now() -> list[RRef[Any]]:
    """Those there are; others may come and go meanwhile."""
    with _adding:
        return list(users)


class RRef(_RRef[T]):
    """A reference to a value on some worker; see `gradwire.RRef`."""

    _type: Any = None
    _created: Any = None
    _profiling_future: Any = None
    _is_deleted = False

    def __init__(self, value: T, type_hint: Any = None):
        _get_current_rpc_agent()
        super().__init__(value, type_hint)

    def _set_up(self, *args: Any) -> None:
        super()._set_up(*args)
        self._created = self._confirmation
        if not self.is_owner():
            with _adding:
                users.add(self)

    # -- its life

    def is_pending(self) -> bool:
        """Whether the owner has not yet confirmed that it knows of this reference."""
        return self._confirmation is not None and not self._confirmation.done()

    def let_go(self) -> None:
        """Tell the owner that this reference is no more, although the object is still there."""
        self._is_deleted = True
        self._refs.dropped(self._owner, self._id, self._fork, self._confirmation)

    def _get_future(self) -> Any:
        """Done when the value has been made."""
        if self._created is None:
            self._created = _done(None)
        return self._created

    def _get_profiling_future(self) -> Any:
        return self._profiling_future or self._get_future()

    def _set_profiling_future(self, future: Any) -> None:
        self._profiling_future = future

    # -- its value

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        if self._is_deleted:
            raise RuntimeError(f"{self!r} was deleted. Cannot call to_here() on it after deletion.")
        return super().to_here(timeout)

    def local_value(self) -> T:
        if not self.is_owner():
            raise RuntimeError(
                f"For UserRRef(rref_id={_unique(self._id)}, fork_id={_unique(self._fork)}), can't "
                f"call localValue() on user {self._refs.me}. Call it on owner {self._owner}"
            )
        return super().local_value()

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """A proxy whose methods run on the owner and give an RRef to the result there. That there
        is such a method is checked at once: nobody may ever look at the result."""
        return _Checked(self, self._refs.remote_method, timeout)

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """The type of the value, or a future of it. It is asked for once."""
        asked = self._type
        if asked is None:
            if self.is_owner():
                asked = self._type = _done(type(self.local_value()))
            else:
                worker, function = current.worker(), _rref_typeof_on_owner
                with _recorded(RPCExecMode.ASYNC, function, self._owner):
                    asked = worker.rpc_async(self._owner, function, (self,), timeout=timeout)
                if blocking:
                    asked.wait()
                self._type = asked
                if not blocking:
                    asked.expect_failure()
                    asked.add_done_callback(self._forget_failure)
        return asked.wait() if blocking else asked

    def _forget_failure(self, asked: Any) -> None:
        if asked.exception() is not None:
            self._type = None

    # -- as a value

    def _serialize(self) -> tuple[Any, ...]:
        return _internal_rpc_pickler.serialize(self)

    @staticmethod
    def _deserialize(parts: tuple[Any, ...]) -> Any:
        return _internal_rpc_pickler.deserialize(*parts)

    def __reduce__(self) -> Any:
        if self._is_deleted:
            raise RuntimeError(
                f"{self!r} was deleted. Cannot call fork an UserRRef after deletion."
            )
        return super().__reduce__()


def _rref_typeof_on_owner(rref: RRef[Any]) -> type:
    return type(rref.local_value())


def _unique(id: int) -> str:
    return f"GloballyUniqueId(created_on={creator(id)}, local_id={serial(id)})"


def _done(value: Any) -> Any:
    future: Any = Future()
    future.set_result(value)
    return future


class _Checked(_Proxy):
    """A proxy that knows which methods there are."""

    __slots__ = ()
    _rref: RRef[Any]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = super().__getattr__(name)
        kind = self._rref._get_type(self._timeout)
        if not hasattr(kind, name):
            raise AttributeError(f"type object {kind.__name__!r} has no attribute {name!r}")
        return method
