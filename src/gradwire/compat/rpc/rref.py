"""The class `RRef` (remote reference) with torch's private methods and torch's error texts."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch.futures import Future

from gradwire._core import current
from gradwire._core.ids import creator, serial
from gradwire._core.rref.rref import RRef as _RRef
from gradwire._core.rref.rref import _Proxy
from gradwire.compat.rpc.agents import _get_current_rpc_agent
from gradwire.compat.rpc.constants import UNSET_RPC_TIMEOUT
from gradwire.compat.rpc.internal import RPCExecMode, _internal_rpc_pickler, _profiled

T = TypeVar("T")

#: The references in this process to values on other workers. torch calls them user RRefs.
user_rrefs: weakref.WeakSet[RRef[Any]] = weakref.WeakSet()
_user_rrefs_lock = threading.RLock()


def current_user_rrefs() -> list[RRef[Any]]:
    """Return the references to values on other workers that exist now. The result is a copy, since
    other threads may create and delete references."""
    with _user_rrefs_lock:
        return list(user_rrefs)


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
            with _user_rrefs_lock:
                user_rrefs.add(self)

    # -- its lifetime

    def is_pending(self) -> bool:
        """Return whether the owner has not confirmed this reference yet. The owner confirms it when
        it has made the value or knows that this worker refers to the value."""
        return self._confirmation is not None and not self._confirmation.done()

    def drop(self) -> None:
        """Tell the owner of the value that this reference no longer exists. The Python object may
        exist longer, but it cannot be used any more."""
        self._is_deleted = True
        self._rrefs.delete_user(self._owner, self._rref_id, self._fork_id, self._confirmation)

    def _get_future(self) -> Any:
        """Return a future that is done when the owner has made the value."""
        if self._created is None:
            self._created = _done_future(None)
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
                f"For UserRRef(rref_id={_global_id(self._rref_id)}, "
                f"fork_id={_global_id(self._fork_id)}), can't call localValue() on user "
                f"{self._rrefs.info}. Call it on owner {self._owner}"
            )
        return super().local_value()

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return an object with the methods of the value. Each method runs on the owner of the
        value, leaves its result there, and returns an RRef to the result.

        If the type of the value has no such method, AttributeError is raised at once. Otherwise the
        error could stay unnoticed, because a program may never fetch the result.
        """
        return _CheckedProxy(self, self._rrefs.remote_method, timeout)

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """Return the type of the value, or a future of the type if `blocking` is False. This
        reference keeps the type, so that later calls need not ask the owner again."""
        future = self._type
        if future is None:
            if self.is_owner():
                future = self._type = _done_future(type(self.local_value()))
            else:
                calls, function = current.runtime().calls, _rref_typeof_on_owner
                with _profiled(RPCExecMode.ASYNC, function, self._owner):
                    future = calls.rpc_async(self._owner, function, (self,), None, timeout)
                if blocking:
                    future.wait()
                self._type = future
                if not blocking:
                    future.expect_failure()
                    future.add_done_callback(self._forget_failure)
        return future.wait() if blocking else future

    def _forget_failure(self, future: Any) -> None:
        """Forget the request for the type of the value if it has failed, so that the next
        `_get_type` asks the owner again."""
        if future.exception() is not None:
            self._type = None

    # -- as a value

    def __repr__(self) -> str:
        if self.is_owner():
            return f"OwnerRRef({_global_id(self._rref_id)})"
        rref_id, fork_id = _global_id(self._rref_id), _global_id(self._fork_id)
        return f"UserRRef(RRefId = {rref_id}, ForkId = {fork_id})"

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


def _rref_typeof_on_user(
    rref: RRef[Any], timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True
) -> Any:
    return rref._get_type(timeout, blocking)


def _global_id(number: int) -> str:
    return f"GloballyUniqueId(created_on={creator(number)}, local_id={serial(number)})"


def _done_future(value: Any) -> Any:
    future: Any = Future()
    future.set_result(value)
    return future


class _CheckedProxy(_Proxy):
    """An object whose methods call the methods of a remote value. It raises AttributeError for a
    method that the type of the value does not have."""

    __slots__ = ()
    _rref: RRef[Any]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = super().__getattr__(name)
        value_type = self._rref._get_type(self._timeout)
        if not hasattr(value_type, name):
            raise AttributeError(f"type object {value_type.__name__!r} has no attribute {name!r}")
        return method
