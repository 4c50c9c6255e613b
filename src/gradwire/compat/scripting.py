"""TorchScript, as far as Python goes.

Compiled functions and modules can be sent and called. What mentions other workers is not compiled,
since the compiler knows torch's own references only, and runs as the Python it is.
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

from gradwire.compat.nn import RemoteModule
from gradwire.wire.values import Codec

_REMOTE = re.compile(r"\bRRef\b|\brpc\.|\bdist_autograd\.")


def script_like(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.jit.script`, but what is about references to other workers comes back as it is."""

    @functools.wraps(original)
    def script(obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(obj, RemoteModule):
            return obj
        if not _is_about_other_workers(obj):
            return original(obj, *args, **kwargs)
        warnings.warn(
            f"{obj.__qualname__} is not compiled: TorchScript does not know gradwire's references. "
            "It runs as Python, with the same results",
            stacklevel=2,
        )
        return obj

    return script


def _is_about_other_workers(obj: Any) -> bool:
    try:
        return bool(_REMOTE.search(inspect.getsource(obj)))
    except (OSError, TypeError):
        return False


def teach(codec: Codec) -> None:
    """Let compiled functions and modules be sent: functions by name, modules by value."""
    codec.teach(torch.jit.ScriptFunction, "script function", _name_of, _function_of)
    codec.teach(torch.jit._script.RecursiveScriptModule, "script module", _bytes_of, _module_of)


def _name_of(function: Any) -> tuple[str, str]:
    module, _, name = function.qualified_name.removeprefix("__torch__.").rpartition(".")
    return module or "__main__", name


def _function_of(name: tuple[str, str]) -> Any:
    return getattr(importlib.import_module(name[0]), name[1])


def _bytes_of(module: Any) -> bytes:
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    return buffer.getvalue()


def _module_of(saved: bytes) -> Any:
    return torch.jit.load(io.BytesIO(saved))  # type: ignore[no-untyped-call]
