"""The decorator `async_execution`, with torch's check of the result and torch's error text."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from gradwire._core.torch_internals import CFuture
from gradwire.rpc import functions

__all__ = ["async_execution"]


def async_execution(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that returns a future, so that a remote caller receives the value of the
    future."""

    @functools.wraps(fn)
    def checked(*args: Any, **kwargs: Any) -> Any:
        result = fn(*args, **kwargs)
        if not isinstance(result, CFuture):
            raise RuntimeError(
                "Functions decorated with @rpc.async_function must return a torch.futures.Future "
                f"object, but {fn.__qualname__} returned a {type(result).__name__}"
            )
        return result

    return functions.async_execution(checked)
