"""Replace torch's RPC modules with those of this package, and put torch's back.

A program finds a module in `sys.modules` or as an attribute of the parent module, so `install`
replaces the module in both places. A program, or torch itself, may have imported the module
earlier. So torch's module object also passes all access on to gradwire's module (`_Replaced`). Only
a name that a program has imported from one of these modules earlier still refers to torch's object.
So a program must install gradwire before it imports such names.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_HERE = "gradwire.compat"
#: Modules that only the tests of torch import. Python loads all of them when a test imports the
#: first one.
_FOR_TESTS = {"torch.distributed.rpc._testing", "torch._C._distributed_rpc_testing"}
#: Maps each of torch's modules to the module that replaces it. The modules of `torch._C` have the
#: same names as those of `torch.distributed` that import them, so one module replaces both.
_MODULES = {
    "torch._C._distributed_rpc": f"{_HERE}.rpc",
    "torch.distributed.rpc": f"{_HERE}.rpc",
    "torch.distributed.rpc._utils": f"{_HERE}.rpc._utils",
    "torch.distributed.rpc.api": f"{_HERE}.rpc.api",
    "torch.distributed.rpc.backend_registry": f"{_HERE}.rpc.backend_registry",
    "torch.distributed.rpc.constants": f"{_HERE}.rpc.constants",
    "torch.distributed.rpc.functions": f"{_HERE}.rpc.functions",
    "torch.distributed.rpc.internal": f"{_HERE}.rpc.internal",
    "torch.distributed.rpc.options": f"{_HERE}.rpc.options",
    "torch.distributed.rpc.rref_proxy": f"{_HERE}.rpc.rref_proxy",
    "torch.distributed.rpc.server_process_global_profiler": (
        f"{_HERE}.rpc.server_process_global_profiler"
    ),
    **dict.fromkeys(_FOR_TESTS, f"{_HERE}.rpc._testing"),
    "torch._C._distributed_autograd": f"{_HERE}.autograd",
    "torch.distributed.autograd": f"{_HERE}.autograd",
}
#: Maps a module of torch and a name in it to the module of gradwire that has the replacement under
#: the same name.
_NAMES = {
    ("torch.distributed.optim", "DistributedOptimizer"): f"{_HERE}.optim",
    ("torch.distributed.optim.optimizer", "DistributedOptimizer"): f"{_HERE}.optim",
    ("torch.distributed.optim.optimizer", "RRef"): f"{_HERE}.rpc",
    ("torch.distributed.nn", "RemoteModule"): f"{_HERE}.nn",
    ("torch.distributed.nn.api.remote_module", "RemoteModule"): f"{_HERE}.nn",
    ("torch.distributed.nn.api.remote_module", "_RemoteModule"): f"{_HERE}.nn",
    ("torch.distributed.nn.api.remote_module", "_internal_rpc_pickler"): f"{_HERE}.rpc.internal",
    ("torch.nn.parallel.distributed", "RRef"): f"{_HERE}.rpc",
}

#: The modules that `uninstall` puts back, by name. None means that torch's module was not imported.
_modules_before: dict[str, ModuleType | None] = {}
#: Maps (module or class, name of an attribute) to the value that `uninstall` puts back.
_attributes_before: dict[tuple[Any, str], Any] = {}
_MISSING = object()


def install() -> None:
    """Replace `torch.distributed.rpc`, `torch.distributed.autograd`, their private modules in
    `torch._C`, and torch's `DistributedOptimizer` and `RemoteModule` with gradwire's, in this
    process and in processes that `multiprocessing` starts from it. A second call does nothing.

        >>> install()                                      # doctest: +SKIP
        >>> from torch.distributed import rpc              # doctest: +SKIP
    """
    if is_installed():
        return
    # Import torch's modules before any of them is replaced. They import each other, and must not
    # get gradwire's modules. The modules for torch's tests are left out, because torch rejects its
    # own default backend once they are imported.
    for name in {*_MODULES, *(module for module, _ in _NAMES)} - _FOR_TESTS:
        importlib.import_module(name)
    if sys.modules["torch.distributed.rpc"]._is_current_rpc_agent_set():
        raise RuntimeError(
            "torch's own RPC is running in this process already: call gradwire.compat.install() "
            "before init_rpc, best in the first line of the program"
        )
    for theirs, ours in _MODULES.items():
        module = importlib.import_module(ours)
        before = _modules_before[theirs] = sys.modules.get(theirs)
        if before is not None:
            before.__class__ = _type_of_replaced(module)
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
    """Put torch's own modules and names back. Call this function only while no worker is running.

    >>> uninstall()                                        # doctest: +SKIP
    """
    for name, module in _modules_before.items():
        if module is None:
            sys.modules.pop(name, None)
        else:
            ModuleType.__setattr__(module, "__class__", ModuleType)
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


class _Replaced(ModuleType):
    """The type of a module of torch while a module of gradwire replaces it. All access to the
    attributes of torch's module goes to gradwire's module. The functions of torch's module still
    find torch's own names, because a function reads its globals from the module's dictionary and
    not through the module's attributes."""

    _replacement: ModuleType

    def __getattribute__(self, name: str) -> Any:
        return getattr(type(self)._replacement, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(type(self)._replacement, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(type(self)._replacement, name)

    def __dir__(self) -> list[str]:
        return dir(type(self)._replacement)


def _type_of_replaced(replacement: ModuleType) -> type[_Replaced]:
    return type("_Replaced", (_Replaced,), {"_replacement": replacement})


# -- processes started by multiprocessing


class _InstallOnUnpickling:
    """An object that installs gradwire in the process that unpickles the object."""

    def __reduce__(self) -> Any:
        return install, ()


def _wrap_get_preparation_data(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for the function `get_preparation_data` of multiprocessing, which makes
    the data that a spawned process needs to start. The replacement adds an object to these data,
    and gradwire is installed when that object is unpickled. The spawned process unpickles the data
    before it imports the program's main module, and so before the program imports torch's RPC."""

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {"gradwire": _InstallOnUnpickling(), **original(name)}

    return get_preparation_data


def _wrapper_in(module: str, function: str) -> Callable[..., Any]:
    """Return a function that wraps a function of torch. It passes the function of torch to
    `function` of the module `gradwire.compat.<module>`, which makes the wrapper. The module is
    imported during `install`, not before."""

    def wrap(original: Callable[..., Any]) -> Any:
        return getattr(importlib.import_module(f"{_HERE}.{module}"), function)(original)

    return wrap


#: The functions that `install` replaces with wrappers. A key gives the module (or module:class) and
#: the name of such a function. The value is a function that takes the original function and returns
#: its wrapper.
_WRAPPED = {
    ("multiprocessing.spawn", "get_preparation_data"): _wrap_get_preparation_data,
    ("torch.futures", "wait_all"): _wrapper_in("futures", "wrap_wait_all"),
    ("torch.futures", "collect_all"): _wrapper_in("futures", "wrap_collect_all"),
    ("torch.jit", "script"): _wrapper_in("scripting", "wrap_script"),
    ("torch.nn.parallel:DistributedDataParallel", "forward"): _wrapper_in("ddp", "forward_like"),
    ("torch.nn.parallel.distributed:_DDPSink", "backward"): _wrapper_in("ddp", "sink_like"),
}
