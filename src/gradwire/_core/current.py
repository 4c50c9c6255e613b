"""The current runtime, which module-level functions such as `gradwire.rpc.rpc_sync` use.

In a function that another worker called, the current runtime is that of the worker that runs the
function. Inside ``with worker:`` it is the runtime of `worker`. Elsewhere it is the process
default, which `init_rpc` sets.

The module `runtime` imports this module. So this module cannot import the class `Runtime`, and its
annotations say `Any` instead. For callers that need the exact type, the module `runtime` defines
`current_runtime`. It is the function `runtime` of this module, annotated to return a `Runtime`.
"""

from __future__ import annotations

import contextvars
import os
from typing import Any

from gradwire.errors import NotInitializedError

_current: contextvars.ContextVar[Any] = contextvars.ContextVar("gradwire_worker", default=None)
_process_default: Any = None


def runtime() -> Any:
    """Return the runtime of the current worker. Raise NotInitializedError if there is none."""
    current = _current.get() or _process_default
    if current is None:
        raise NotInitializedError(
            "RPC has not been initialized: call gradwire.rpc.init_rpc(...) first, or enter a "
            "gradwire.Worker"
        )
    return current


def worker_name() -> str | None:
    """Return the name of the current worker, or None if there is none."""
    current = _current.get() or _process_default
    return None if current is None else str(current.info.name)


def enter(runtime: Any) -> contextvars.Token[Any]:
    """Make `runtime` the current one in this thread or task, until `leave` is called with the
    `contextvars.Token` that this function returns."""
    return _current.set(runtime)


def leave(token: contextvars.Token[Any]) -> None:
    _current.reset(token)


def context_of(runtime: Any) -> contextvars.Context:
    """Return a new set of context variables in which `runtime` is the current one."""
    context = contextvars.Context()
    context.run(_current.set, runtime)
    return context


def process_default() -> Any:
    """Return the runtime that `init_rpc` made for this process, or None."""
    return _process_default


def set_process_default(runtime: Any) -> None:
    global _process_default
    _process_default = runtime


def _reset() -> None:
    set_process_default(None)
    _current.set(None)


if hasattr(os, "register_at_fork"):
    # A forked child starts without a worker, because the connections belong to the parent process.
    os.register_at_fork(after_in_child=_reset)
