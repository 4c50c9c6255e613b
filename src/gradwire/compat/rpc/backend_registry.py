"""The registry of RPC backends. gradwire's own backend is registered under the name of torch's
backend, TENSORPIPE. Programs may register backends of their own."""

from __future__ import annotations

import enum
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from gradwire._core.group.membership import StoreMembership
from gradwire._core.ids import WorkerInfo
from gradwire._core.rpc.interceptors import Interceptor
from gradwire._core.rpc.server import Request
from gradwire._core.runtime import Runtime
from gradwire.compat import ddp, scripting
from gradwire.compat.rpc import api
from gradwire.compat.rpc.agents import TensorPipeAgent
from gradwire.compat.rpc.constants import DEFAULT_INIT_METHOD, DEFAULT_RPC_TIMEOUT_SEC
from gradwire.compat.rpc.internal import builtin_name
from gradwire.compat.rpc.options import TensorPipeRpcBackendOptions
from gradwire.compat.rpc.rref import RRef

__all__ = [
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
]


class BackendValue(NamedTuple):
    """A backend: the function that makes the options of a worker, and the function that makes its
    agent (the object that represents the worker)."""

    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any]


class _Backend(enum.Enum):
    """The base class of `BackendType`, whose members are the registered backends."""

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"


_make_enum: Any = _Backend
BackendType: Any = _make_enum("BackendType", {})


def backend_registered(backend_name: str) -> bool:
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> Any:
    """Register a backend under a name. One of the two given functions makes the options of a
    worker, and the other one makes its agent; see `BackendValue`."""
    global BackendType
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    new = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    # An enumeration cannot be extended, so a new enumeration replaces the old one.
    known = {member.name: member.value for member in BackendType}
    BackendType = _make_enum("BackendType", {**known, backend_name: new})
    return BackendType[backend_name]


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    make_options = backend.value.construct_rpc_backend_options_handler
    return make_options(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    return backend.value.init_backend_handler(*args, **kwargs)


# -- the backend of gradwire


class TorchRuntime(Runtime):
    """A gradwire worker for programs written for torch's RPC. Its remote references have torch's
    private methods. It can send TorchScript functions, and it supports
    `DistributedDataParallel`."""

    rref_type = RRef
    refuses_unrecorded = False

    def __init__(self, *args: Any, torch_options: Any, store: Any, **kwargs: Any):
        # Set `as_agent` before the runtime starts, because requests that use it can arrive as soon
        # as the runtime runs.
        self.as_agent = TensorPipeAgent(self, torch_options, store)
        self._leaks_at_departures = 0
        super().__init__(*args, **kwargs)

    def _get_ready(self) -> None:
        scripting.register_type(self.agent.codec)
        self.engine.register_leaf_groups(ddp.averaged_parameters)
        self.agent.interceptors.append(ErrorPrinter())
        # When a worker is gone, the functions in `on_gone` are called in order. `_note_departure`
        # counts the values of this worker to which other workers, including the one that is gone,
        # have references. So `_note_departure` must come first: later functions delete the
        # references of the worker that is gone.
        self.agent.on_gone.insert(0, self._note_departure)

    def _note_departure(self, _info: WorkerInfo) -> None:
        self._leaks_at_departures = max(self._leaks_at_departures, self._held_by_others())

    def _held_by_others(self) -> int:
        return self.rrefs.debug_info()["num_owner_rrefs"]

    def count_leaks(self) -> int:
        """Return the number of values on this worker to which other workers still had references at
        shutdown."""
        return max(self._leaks_at_departures, self._held_by_others())


class ErrorPrinter(Interceptor):
    """Prints the error of a called function on the worker that runs the function, as torch does.

    This class also changes one error: if a builtin operator rejects its arguments with a TypeError,
    the caller gets a RuntimeError with torch's text, as from torch's RPC.
    """

    def serving(self, request: Request) -> AbstractContextManager[object]:
        return _printing_errors(request)


@contextmanager
def _printing_errors(request: Request) -> Iterator[None]:
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
    runtime_type: type[TorchRuntime],
    store: Any,
    name: str,
    rank: int,
    world_size: int | None,
    torch_options: Any,
) -> TensorPipeAgent:
    """Make a worker from torch's arguments. From then on, RPC functions called in this process act
    for this worker."""
    options = torch_options.to_gradwire()
    membership = StoreMembership(store, rank, world_size or None, options.init_timeout)
    runtime = runtime_type(
        name,
        rank,
        world_size,
        options,
        membership=membership,
        torch_options=torch_options,
        store=store,
    )
    api._init_rpc_states(runtime.as_agent)
    return runtime.as_agent


def _tensorpipe_init_backend_handler(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any
) -> TensorPipeAgent:
    if not isinstance(rpc_backend_options, TensorPipeRpcBackendOptions):
        raise TypeError(
            "`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`, not "
            f"{rpc_backend_options!r}"
        )
    return make_agent(TorchRuntime, store, name, rank, world_size, rpc_backend_options)


_tensorpipe_construct_rpc_backend_options_handler = TensorPipeRpcBackendOptions
register_backend(
    "TENSORPIPE",
    _tensorpipe_construct_rpc_backend_options_handler,
    _tensorpipe_init_backend_handler,
)
