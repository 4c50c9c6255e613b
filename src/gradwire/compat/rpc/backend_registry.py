"""Backends by name. gradwire registers itself as torch's; programs may add their own."""

from __future__ import annotations

import enum
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from gradwire.agent.interceptors import Interceptor
from gradwire.agent.roster import StoreRoster
from gradwire.agent.service import Request
from gradwire.compat import ddp, scripting
from gradwire.compat.rpc import api
from gradwire.compat.rpc.agents import TensorPipeAgent
from gradwire.compat.rpc.constants import DEFAULT_INIT_METHOD, DEFAULT_RPC_TIMEOUT_SEC
from gradwire.compat.rpc.internal import builtin_name
from gradwire.compat.rpc.options import TensorPipeRpcBackendOptions
from gradwire.compat.rpc.rref import RRef
from gradwire.ids import WorkerInfo
from gradwire.worker import Worker

__all__ = [
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
]

_handlers: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}


class _Backend(enum.Enum):
    """The base of `BackendType`; a value is the pair of functions of its backend."""

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"


_make_enum: Any = _Backend
BackendType: Any = _make_enum("BackendType", {})


def backend_registered(backend_name: str) -> bool:
    return backend_name in _handlers


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> Any:
    """Add a backend: a function that makes its options, and one that makes its agent."""
    global BackendType
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    _handlers[backend_name] = (construct_rpc_backend_options_handler, init_backend_handler)
    # An enumeration cannot grow, so there is a new one. Members are told apart by name.
    BackendType = _make_enum("BackendType", {name: name for name in _handlers})
    return BackendType[backend_name]


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    make_options, _ = _handlers[backend.name]
    return make_options(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    _, make_agent = _handlers[backend.name]
    return make_agent(*args, **kwargs)


# -- gradwire's own


class TorchWorker(Worker):
    """A worker whose references have torch's names too."""

    rref_type = RRef

    def __init__(self, *args: Any, given: Any, **kwargs: Any):
        # Before anything starts: requests may come as soon as the group is complete.
        self.as_agent = TensorPipeAgent(self, given)
        self._leaks_at_departures = 0
        super().__init__(*args, **kwargs)

    def _get_ready(self) -> None:
        scripting.teach(self.agent.codec)
        self.engine.groups = ddp.averaged_parameters
        self.agent.interceptors.append(Announcer())
        # First: the others drop what those who leave had held.
        self.agent.on_gone.insert(0, self._note_departure)

    def _note_departure(self, _info: WorkerInfo) -> None:
        self._leaks_at_departures = max(self._leaks_at_departures, self._held_by_others())

    def _held_by_others(self) -> int:
        return self.refs.debug_info()["num_owner_rrefs"]

    def leaks(self) -> int:
        """How many values others still held when the group parted."""
        return max(self._leaks_at_departures, self._held_by_others())


class Announcer(Interceptor):
    """Lets the errors of functions that others call be seen where they happen, too, and has those
    of builtin operators called with the wrong arguments be what they are in torch."""

    def serving(self, request: Request) -> AbstractContextManager[object]:
        return _announcing(request)


@contextmanager
def _announcing(request: Request) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        trace = "".join(traceback.format_exception(error)).rstrip()
        print(f"called by {request.caller}:\n{trace}", file=sys.stderr)
        if isinstance(error, TypeError) and builtin_name(request.subject):
            raise RuntimeError(
                f"Overloaded torch operator invoked from Python failed to match any schema: {error}"
            ) from error
        raise


def make_agent(
    kind: type[TorchWorker], store: Any, name: str, rank: int, world_size: int | None, given: Any
) -> TensorPipeAgent:
    options = given.for_gradwire()
    roster = StoreRoster(store, world_size or None, options.init_timeout)
    worker = kind(name, rank, world_size, options, roster=roster, given=given)
    api._init_rpc_states(worker.as_agent)
    return worker.as_agent


def _make_tensorpipe_agent(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any
) -> TensorPipeAgent:
    if not isinstance(rpc_backend_options, TensorPipeRpcBackendOptions):
        raise TypeError(
            "`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`, not "
            f"{rpc_backend_options!r}"
        )
    return make_agent(TorchWorker, store, name, rank, world_size, rpc_backend_options)


register_backend("TENSORPIPE", TensorPipeRpcBackendOptions, _make_tensorpipe_agent)
