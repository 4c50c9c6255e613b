"""Results that may not be used yet: they refer to values of workers that must know of it first.

Nobody waits for those longer than the call may take.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from gradwire.agent.clock import Clock
from gradwire.agent.executor import Executor
from gradwire.agent.futures import Future, when_all
from gradwire.agent.opencall import FOREVER, OpenCall
from gradwire.errors import CallTimeout

Unsettled = Sequence[Future[Any]]


def wait_until_settled(call: OpenCall, unsettled: Unsettled, executor: Executor) -> None:
    """Return when the result of a call may be used. Raises what keeps it from that."""
    errors: list[BaseException | None] = []
    known = threading.Event()

    def settle(error: BaseException | None) -> None:
        errors.append(error)
        known.set()

    when_all(unsettled, settle)
    left = call.deadline - time.monotonic()
    with executor.aside():
        in_time = known.wait(None if left == FOREVER else max(0.0, left))
    error = errors[0] if in_time else _late(call, unsettled)
    if error is not None:
        raise error


def complete_when_settled(
    future: Future[Any], value: Any, call: OpenCall, unsettled: Unsettled, clock: Clock
) -> None:
    """Complete the future of a call when its value may be used."""
    #: Taken out by who settles it: nothing else may hold on to it, the clock least of all.
    result = [(future, value)]
    del future, value

    def settle(error: BaseException | None) -> None:
        try:
            future, value = result.pop()
        except IndexError:
            return  # it was settled before
        future.complete(value, error)
        future.run_callbacks()

    when_all(unsettled, settle)
    if result and call.deadline != FOREVER:
        left = max(0.0, call.deadline - time.monotonic())
        clock.later(left, lambda: settle(_late(call, unsettled)))


def _late(call: OpenCall, unsettled: Unsettled) -> CallTimeout:
    missing = ", ".join(str(future) for future in unsettled if not future.done())
    return CallTimeout(
        f"{call}: RPC ran for more than set timeout ({call.timeout * 1000:.0f} ms) and will now be "
        "marked with an error. Its result is here, but refers to values of other workers, which "
        f"have not answered: {missing}",
        worker=call.to.name,
        call=call.name,
    )
