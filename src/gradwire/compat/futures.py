"""`torch.futures.wait_all` and `collect_all` for gradwire's futures.

Both functions fail as soon as one future fails. torch's versions look for a failure in a field that
only torch's C++ code can set. So torch's versions would not notice that a gradwire future has
failed, and would wait for all the other futures.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradwire._core.rpc.futures import Future


def _first_error_or_all(futures: Sequence[Any]) -> Future[list[Any]]:
    """Return a future that is done when all futures are done, or as soon as one has failed."""
    outcome: Future[list[Any]] = Future(None, "waiting for futures")
    outcome.expect_failure()
    # The callbacks of the futures run in several threads. `next` on a counter is atomic, so the
    # counters need no lock.
    remaining = itertools.count(len(futures) - 1, -1)
    failures = itertools.count()

    def on_done(future: Any) -> None:
        try:
            future.value()
        except Exception as error:
            if next(failures) == 0:
                outcome.set_exception(error)
        if next(remaining) == 0 and next(failures) == 0:
            outcome.set_result(list(futures))

    for future in futures:
        future.add_done_callback(on_done)
    return outcome


def _has_gradwire_future(futures: Sequence[Any]) -> bool:
    return any(isinstance(future, Future) for future in futures)


def wrap_wait_all(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `wait_all` that supports gradwire's futures. If all futures are torch's own, the
    returned function calls torch's own `wait_all`."""

    def wait_all(futures: Sequence[Any]) -> list[Any]:
        """Return the values of all futures. If one fails, raise its error without waiting for the
        others."""
        if not _has_gradwire_future(futures):
            values: list[Any] = original(futures)
            return values
        # A thread that waits must not count towards the limit of running user functions. gradwire
        # recognizes such a thread because it is in a function of `torch.futures`. So call torch's
        # own `wait` here.
        torch.futures.Future.wait(_first_error_or_all(futures))
        return [future.wait() for future in futures]

    return wait_all


def wrap_collect_all(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `collect_all` that supports gradwire's futures. If all futures are torch's own, the
    returned function calls torch's own `collect_all`."""

    def collect_all(futures: Sequence[Any]) -> Any:
        """Return a future whose value is the list of these futures. The returned future is done
        when all of them are done, or as soon as one of them has failed."""
        if not _has_gradwire_future(futures):
            return original(futures)
        return _first_error_or_all(futures)

    return collect_all
