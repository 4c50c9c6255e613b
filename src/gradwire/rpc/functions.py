"""What a function called by others may say about itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from gradwire.agent.calls import ASYNC_MARK


def async_execution(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that returns a future of its result.

    The caller gets the value of the future when it is there; until then no thread is held up.

        >>> @async_execution                                             # doctest: +SKIP
        ... def add_elsewhere(to, x, y):
        ...     return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda f: f.wait() + 1)
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    setattr(wrapper, ASYNC_MARK, wrapper)
    return wrapper
