"""gradwire: call functions on other PyTorch workers and differentiate through the calls."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradwire._version import __version__

if TYPE_CHECKING:
    from gradwire import autograd, errors, nn, optim, rpc
    from gradwire._core.ids import WorkerInfo
    from gradwire._core.rpc.futures import Future
    from gradwire._core.rref.rref import RRef
    from gradwire.errors import GradwireError
    from gradwire.options import Options
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

#: For each public name, the module that defines it. A module is imported when one of its names is
#: first used. These modules import torch, which takes more than a second, and the `gradwire`
#: command does not need torch.
_DEFINED_IN = {
    "Future": "gradwire._core.rpc.futures",
    "GradwireError": "gradwire.errors",
    "Options": "gradwire.options",
    "RRef": "gradwire._core.rref.rref",
    "Worker": "gradwire.worker",
    "WorkerInfo": "gradwire._core.ids",
}
_MODULES = ("autograd", "errors", "nn", "optim", "rpc")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"gradwire.{name}")
    if name not in _DEFINED_IN:
        raise AttributeError(f"module 'gradwire' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_DEFINED_IN[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
