"""Decorators for functions that other workers call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from gradwire._core.rpc.function_calls import ASYNC_MARK


def async_execution(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that returns a future of its result.

    The caller gets the value of that future when the future is done. Until then, no thread of the
    worker that runs the function is blocked.

        >>> @async_execution                                             # doctest: +SKIP
        ... def add_elsewhere(to, x, y):
        ...     return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda f: f.wait() + 1)
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    setattr(wrapper, ASYNC_MARK, wrapper)
    return wrapper
