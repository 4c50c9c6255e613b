"""`RRef` with the names that torch's has beside the public ones."""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

from torch.futures import Future

from gradwire import current
from gradwire.compat.rpc.agents import _get_current_rpc_agent
from gradwire.compat.rpc.constants import UNSET_RPC_TIMEOUT
from gradwire.compat.rpc.internal import _internal_rpc_pickler
from gradwire.refs.rref import RRef as _RRef

T = TypeVar("T")

#: The references of this process to values on other workers.
users: weakref.WeakSet[RRef[Any]] = weakref.WeakSet()


class RRef(_RRef[T]):
    """A reference to a value on some worker; see `gradwire.RRef`."""

    _type: type | None = None
    _created: Any = None
    _profiling_future: Any = None

    def __init__(self, value: T, type_hint: Any = None):
        _get_current_rpc_agent()
        super().__init__(value, type_hint)

    def _set_up(self, *args: Any) -> None:
        super()._set_up(*args)
        self._created = self._confirmation
        if not self.is_owner():
            users.add(self)

    def is_pending(self) -> bool:
        """Whether the owner has not yet confirmed that it knows of this reference."""
        return self._confirmation is not None and not self._confirmation.done()

    def _get_future(self) -> Any:
        """Done when the value has been made."""
        if self._created is None:
            self._created = Future()
            self._created.set_result(None)
        return self._created

    def _get_profiling_future(self) -> Any:
        return self._profiling_future or self._get_future()

    def _set_profiling_future(self, future: Any) -> None:
        self._profiling_future = future

    # -- its type

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """The type of the value, or a future of it. It is asked for once."""
        if self._type is not None:
            return self._type if blocking else _done(self._type)
        if self.is_owner():
            self._type = type(self.local_value())
            return self._type if blocking else _done(self._type)
        asked = current.worker().rpc_async(self.owner(), type_of, (self,), timeout=timeout)
        if not blocking:
            asked.add_done_callback(self._note_type)
            return asked
        self._type = asked.wait()
        return self._type

    def _note_type(self, asked: Any) -> None:
        if asked.exception() is None:
            self._type = asked.value()

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """A proxy whose methods run on the owner and give an RRef to the result there. That there
        is such a method is checked at once: nobody may ever look at the result."""
        return _Checked(self, super().remote(timeout), timeout)

    # -- as a value

    def _serialize(self) -> tuple[Any, ...]:
        return _internal_rpc_pickler.serialize(self)

    @staticmethod
    def _deserialize(parts: tuple[Any, ...]) -> Any:
        return _internal_rpc_pickler.deserialize(*parts)


def type_of(rref: RRef[Any]) -> type:
    """Runs on the owner."""
    return type(rref.local_value())


def _done(value: Any) -> Any:
    future: Any = Future()
    future.set_result(value)
    return future


class _Checked:
    """A proxy that knows which methods there are."""

    def __init__(self, rref: RRef[Any], proxy: Any, timeout: float):
        self._rref = rref
        self._proxy = proxy
        self._timeout = timeout

    def __getattr__(self, name: str) -> Any:
        kind = self._rref._get_type(self._timeout)
        if not hasattr(kind, name):
            raise AttributeError(f"type object {kind.__name__!r} has no attribute {name!r}")
        return getattr(self._proxy, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._proxy(*args, **kwargs)
