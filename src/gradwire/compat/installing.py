"""Putting gradwire where programs look for torch's RPC, and taking it away again.

A program finds a module in two ways, in `sys.modules` and as an attribute of its parent; both are
replaced. Names that were imported from torch's modules before stay what they were, so this comes
first in a program.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_HERE = "gradwire.compat"
_FOR_TESTS = "torch.distributed.rpc._testing"
#: torch's module -> the one here that stands in for it.
_MODULES = {
    "torch.distributed.rpc": f"{_HERE}.rpc",
    "torch.distributed.rpc.api": f"{_HERE}.rpc.api",
    "torch.distributed.rpc.backend_registry": f"{_HERE}.rpc.backend_registry",
    "torch.distributed.rpc.constants": f"{_HERE}.rpc.constants",
    "torch.distributed.rpc.functions": f"{_HERE}.rpc.functions",
    "torch.distributed.rpc.internal": f"{_HERE}.rpc.internal",
    "torch.distributed.rpc.options": f"{_HERE}.rpc.options",
    _FOR_TESTS: f"{_HERE}.rpc._testing",
    "torch.distributed.autograd": f"{_HERE}.autograd",
}
#: (torch's module, name in it) -> the module here that has it.
_NAMES = {
    ("torch.distributed.optim", "DistributedOptimizer"): f"{_HERE}.optim",
    ("torch.distributed.optim.optimizer", "DistributedOptimizer"): f"{_HERE}.optim",
    ("torch.distributed.nn", "RemoteModule"): f"{_HERE}.nn",
    ("torch.distributed.nn.api.remote_module", "RemoteModule"): f"{_HERE}.nn",
    ("torch.distributed.nn.api.remote_module", "_RemoteModule"): f"{_HERE}.nn",
    ("torch.nn.parallel.distributed", "RRef"): f"{_HERE}.rpc",
}

#: What was there before: modules by name, and attributes by (module or class, name).
_modules_before: dict[str, ModuleType | None] = {}
_attributes_before: dict[tuple[Any, str], Any] = {}
_MISSING = object()


def install() -> None:
    """Let `torch.distributed.rpc`, `torch.distributed.autograd`, `DistributedOptimizer` and
    `RemoteModule` of torch be gradwire's, in this process and in those that `multiprocessing`
    starts from it. Does nothing the second time.

        >>> install()                                      # doctest: +SKIP
        >>> from torch.distributed import rpc              # doctest: +SKIP
    """
    if is_installed():
        return
    # torch's own modules come first: they import each other, and must find themselves. But for what
    # is there for torch's tests: importing it makes torch refuse its own default backend.
    for name in {*_MODULES, *(module for module, _ in _NAMES)} - {_FOR_TESTS}:
        importlib.import_module(name)
    if sys.modules["torch.distributed.rpc"]._is_current_rpc_agent_set():
        raise RuntimeError(
            "torch's own RPC is running in this process already: call gradwire.compat.install() "
            "before init_rpc, best as the first line of the program"
        )
    for theirs, ours in _MODULES.items():
        module = importlib.import_module(ours)
        _modules_before[theirs] = sys.modules.get(theirs)
        sys.modules[theirs] = module
        parent, _, name = theirs.rpartition(".")
        if parent not in _MODULES:
            _replace(sys.modules[parent], name, module)
    for (theirs, name), ours in _NAMES.items():
        _replace(sys.modules[theirs], name, getattr(importlib.import_module(ours), name))
    for (theirs, name), wrap in _WRAPPED.items():
        owner = pkgutil.resolve_name(theirs)
        _replace(owner, name, wrap(getattr(owner, name)))


def uninstall() -> None:
    """Put everything back as it was. Call it when no worker is running.

    >>> uninstall()                                        # doctest: +SKIP
    """
    for name, module in _modules_before.items():
        if module is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = module
    for (owner, name), value in _attributes_before.items():
        if value is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
    _modules_before.clear()
    _attributes_before.clear()


def is_installed() -> bool:
    return bool(_modules_before)


def _replace(owner: Any, name: str, value: Any) -> None:
    _attributes_before[owner, name] = getattr(owner, name, _MISSING)
    setattr(owner, name, value)


# -- processes started by multiprocessing


class _Installation:
    """Unpickling it installs gradwire."""

    def __reduce__(self) -> Any:
        return install, ()


def _preparing_with_gradwire(original: Callable[..., Any]) -> Callable[..., Any]:
    """What a spawned process is told before it imports the program's main module, which will import
    torch's RPC."""

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {"gradwire": _Installation(), **original(name)}

    return get_preparation_data


def _wrapped_here(module: str, function: str) -> Callable[..., Any]:
    """A function of this room that wraps one of torch's; it is imported when it is needed."""

    def wrap(original: Callable[..., Any]) -> Any:
        return getattr(importlib.import_module(f"{_HERE}.{module}"), function)(original)

    return wrap


#: (module or module:class, function in it) -> what wraps it.
_WRAPPED = {
    ("multiprocessing.spawn", "get_preparation_data"): _preparing_with_gradwire,
    ("torch.futures", "wait_all"): _wrapped_here("futures", "wait_all_like"),
    ("torch.futures", "collect_all"): _wrapped_here("futures", "collect_all_like"),
    ("torch.jit", "script"): _wrapped_here("scripting", "script_like"),
    ("torch.nn.parallel:DistributedDataParallel", "forward"): _wrapped_here("ddp", "forward_like"),
    ("torch.nn.parallel.distributed:_DDPSink", "backward"): _wrapped_here("ddp", "sink_like"),
}
