"""gradwire: call functions on other PyTorch workers and differentiate through the calls."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradwire._version import __version__

if TYPE_CHECKING:
    from gradwire import autograd, errors, nn, optim, rpc
    from gradwire.agent.futures import Future
    from gradwire.config import Options
    from gradwire.errors import GradwireError
    from gradwire.ids import WorkerInfo
    from gradwire.refs.rref import RRef
    from gradwire.worker import Worker

__all__ = [
    "Future",
    "GradwireError",
    "Options",
    "RRef",
    "Worker",
    "WorkerInfo",
    "__version__",
    "autograd",
    "errors",
    "nn",
    "optim",
    "rpc",
]

#: Where the public names live. They are imported when first asked for: torch takes more than a
#: second to import, and the `gradwire` command, which only starts processes, does without it.
_HOMES = {
    "Future": "gradwire.agent.futures",
    "GradwireError": "gradwire.errors",
    "Options": "gradwire.config",
    "RRef": "gradwire.refs.rref",
    "Worker": "gradwire.worker",
    "WorkerInfo": "gradwire.ids",
}
_MODULES = ("autograd", "errors", "nn", "optim", "rpc")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"gradwire.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'gradwire' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
