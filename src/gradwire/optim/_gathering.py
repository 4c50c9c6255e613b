"""Calls to all owners of parameters at once."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

from gradwire import rpc
from gradwire._core.ids import WorkerInfo
from gradwire.errors import RemoteTraceback


def gather(calls: Sequence[tuple[WorkerInfo, Callable[[], Any]]]) -> list[Any]:
    """Wait until the calls to several workers have ended, and return their results in the order of
    `calls`.

    The calls to other workers have been sent before, and `gather` only waits for them. The call to
    this worker may run on this thread, so it comes first: it runs while the others are working. If
    a call fails, its error is raised. If several calls fail, the first error is raised, and its
    cause lists all errors.
    """
    results: dict[int, Any] = {}
    errors = []
    me = rpc.get_worker_info().id
    for index, (owner, call) in sorted(enumerate(calls), key=lambda item: item[1][0].id != me):
        try:
            results[index] = call()
        except Exception as error:
            errors.append((owner.name, error))
    if errors:
        first = errors[0][1]
        if len(errors) > 1:
            first.__cause__ = RemoteTraceback(
                f"{len(errors)} of {len(calls)} workers failed:\n\n"
                + "\n\n".join(f"worker {name!r}:\n{_text(error)}" for name, error in errors)
            )
        raise first
    return [results[index] for index in range(len(calls))]


def _text(error: BaseException) -> str:
    return str(error.__cause__ or "".join(traceback.format_exception_only(type(error), error)))
