"""Which worker module-level functions mean.

A handler sees the worker it runs on, code inside ``with worker:`` that one, everything else the
worker that `init_rpc` made for the process.
"""

from __future__ import annotations

import contextvars
import os
from typing import Any

from gradwire.errors import NotInitializedError

_current: contextvars.ContextVar[Any] = contextvars.ContextVar("gradwire_worker", default=None)
_process_default: Any = None


def worker() -> Any:
    """The current worker. Raises NotInitializedError when there is none."""
    found = _current.get() or _process_default
    if found is None:
        raise NotInitializedError(
            "RPC has not been initialized: call gradwire.rpc.init_rpc(...) first, or enter a "
            "gradwire.Worker"
        )
    return found


def enter(worker: Any) -> contextvars.Token[Any]:
    return _current.set(worker)


def exit(token: contextvars.Token[Any]) -> None:
    _current.reset(token)


def context_of(worker: Any) -> contextvars.Context:
    """A context in which `worker` is the current one."""
    context = contextvars.Context()
    context.run(_current.set, worker)
    return context


def set_process_default(worker: Any) -> None:
    global _process_default
    _process_default = worker


def _forget() -> None:
    set_process_default(None)
    _current.set(None)


if hasattr(os, "register_at_fork"):
    # The connections belong to the parent: a forked child starts without a worker.
    os.register_at_fork(after_in_child=_forget)


def process_default() -> Any:
    return _process_default
