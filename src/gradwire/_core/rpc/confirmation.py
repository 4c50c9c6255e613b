"""Results that may not be used yet, because they contain RRefs that are not confirmed.

An RRef is confirmed when the worker that owns the value knows of this reference. A call waits for
the confirmations of the RRefs in its result, but no longer than its timeout.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from gradwire._core.rpc.deadlines import FOREVER, timeout_text
from gradwire._core.rpc.executor import Executor
from gradwire._core.rpc.futures import Future, when_all
from gradwire._core.rpc.open_call import OpenCall
from gradwire._core.rpc.timers import Timers
from gradwire.errors import CallTimeout

#: Futures, each of which is done when an RRef in a received value is confirmed by its owner.
Unconfirmed = Sequence[Future[Any]]


def wait_until_confirmed(call: OpenCall, unconfirmed: Unconfirmed, executor: Executor) -> None:
    """Wait until all RRefs in the result of a call are confirmed. If the confirmation of one fails,
    raise its error. At the deadline of the call, raise CallTimeout."""
    errors: list[BaseException | None] = []
    confirmed = threading.Event()

    def note(error: BaseException | None) -> None:
        errors.append(error)
        confirmed.set()

    when_all(unconfirmed, note)
    left = call.deadline - time.monotonic()
    with executor.blocking():
        in_time = confirmed.wait(None if left == FOREVER else max(0.0, left))
    error = errors[0] if in_time else _timeout_error(call, unconfirmed)
    if error is not None:
        raise error


def complete_when_confirmed(
    future: Future[Any], value: Any, call: OpenCall, unconfirmed: Unconfirmed, timers: Timers
) -> None:
    """Complete the future of a call with the value when all RRefs in the value are confirmed by
    their owners. If a confirmation fails or the deadline comes first, complete it with an error."""
    # The timer below exists until the deadline, and must not keep the value in memory for so long.
    # So only this list refers to the value, and the thread that completes the future empties it.
    result = [(future, value)]
    del future, value

    def complete(error: BaseException | None) -> None:
        try:
            future, value = result.pop()
        except IndexError:
            return  # another thread has completed the future
        future.complete(value, error)
        future.run_callbacks()

    when_all(unconfirmed, complete)
    if result and call.deadline != FOREVER:
        left = max(0.0, call.deadline - time.monotonic())
        timers.call_later(left, lambda: complete(_timeout_error(call, unconfirmed)))


def _timeout_error(call: OpenCall, unconfirmed: Unconfirmed) -> CallTimeout:
    missing = ", ".join(str(future) for future in unconfirmed if not future.done())
    return CallTimeout(
        f"{call}: {timeout_text(call.timeout)}. Its result has arrived, but contains RRefs whose "
        f"owners have not answered: {missing}",
        worker=call.to.name,
        call=call.name,
    )
