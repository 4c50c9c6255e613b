"""`torch.futures.wait_all` and `collect_all` for gradwire's futures.

torch fails as soon as one future does. It looks for errors where only its own C++ code can put
them, so it would wait for all of gradwire's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradwire.agent.futures import Future


def _first_error_or_all(futures: Sequence[Any]) -> Future[list[Any]]:
    """Done when all are, or when one has failed."""
    outcome: Future[list[Any]] = Future(None, "waiting for futures")
    outcome.expect_failure()
    left = itertools.count(len(futures) - 1, -1)
    failed = itertools.count()

    def look(future: Any) -> None:
        try:
            future.value()
        except Exception as error:
            if next(failed) == 0:
                outcome.set_exception(error)
        if next(left) == 0 and next(failed) == 0:
            outcome.set_result(list(futures))

    for future in futures:
        future.add_done_callback(look)
    return outcome


def _are_ours(futures: Sequence[Any]) -> bool:
    return any(isinstance(future, Future) for future in futures)


def wait_all_like(original: Callable[..., Any]) -> Callable[..., Any]:
    def wait_all(futures: Sequence[Any]) -> list[Any]:
        """The values of all futures; raises the first error as soon as it is there."""
        if not _are_ours(futures):
            waited: list[Any] = original(futures)
            return waited
        # torch's own `wait`: a worker knows by it that its thread waits.
        torch.futures.Future.wait(_first_error_or_all(futures))
        return [future.wait() for future in futures]

    return wait_all


def collect_all_like(original: Callable[..., Any]) -> Callable[..., Any]:
    def collect_all(futures: Sequence[Any]) -> Any:
        """A future of all futures, done when all are, or when one has failed."""
        if not _are_ours(futures):
            return original(futures)
        return _first_error_or_all(futures)

    return collect_all
