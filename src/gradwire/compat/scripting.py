"""Support for TorchScript.

Functions and modules compiled by TorchScript can be sent and called. Code that mentions RPC or
remote references is not compiled, because the compiler only knows torch's own RPC. Such code runs
as Python.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import io
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch

from gradwire._core.torch_internals import RecursiveScriptModule
from gradwire._core.wire.codec import Codec
from gradwire.compat.nn import RemoteModule

#: A pattern that finds RPC in source code, by names such as `RRef` and `rpc.`. TorchScript can
#: compile code with these names only if they belong to torch's own RPC.
_RPC_IN_SOURCE = re.compile(r"\bRRef\b|\brpc\.|\bdist_autograd\.")


def wrap_script(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for `torch.jit.script` that does not compile code if the code mentions
    RPC or remote references."""

    @functools.wraps(original)
    def script(obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(obj, RemoteModule):
            return obj
        if not _mentions_rpc(obj):
            return original(obj, *args, **kwargs)
        warnings.warn(
            f"{obj.__qualname__} is not compiled: TorchScript does not know gradwire's references. "
            "It runs as Python, with the same results",
            stacklevel=2,
        )
        return obj

    return script


def _mentions_rpc(obj: Any) -> bool:
    """Return whether the source code of a function or class mentions RPC or RRefs."""
    try:
        return bool(_RPC_IN_SOURCE.search(inspect.getsource(obj)))
    except (OSError, TypeError):
        return False


def register_type(codec: Codec) -> None:
    """Make a codec (which encodes messages) send TorchScript functions by name and TorchScript
    modules by value."""
    codec.register_type(torch.jit.ScriptFunction, "script function", _function_name, _function)
    codec.register_type(RecursiveScriptModule, "script module", _module_bytes, _module)


def _function_name(function: Any) -> tuple[str, str]:
    module, _, name = function.qualified_name.removeprefix("__torch__.").rpartition(".")
    return module or "__main__", name


def _function(name: tuple[str, str]) -> Any:
    return getattr(importlib.import_module(name[0]), name[1])


def _module_bytes(module: Any) -> bytes:
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    return buffer.getvalue()


def _module(saved: bytes) -> Any:
    return torch.jit.load(io.BytesIO(saved))  # type: ignore[no-untyped-call]
