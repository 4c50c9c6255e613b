"""Messages that are sent again until they are answered."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from gradwire.agent.clock import Clock
from gradwire.agent.futures import Future
from gradwire.errors import CallError, ShutDownError
from gradwire.ids import WorkerInfo
from gradwire.wire.messages import RETRIED, Kind

#: One that failed is sent again after this many seconds, then after twice as long...
_RETRY_SECONDS = 0.1
_RETRIES = 8


class Insistence:
    """Sends idempotent messages until they are answered, or their worker is surely gone."""

    def __init__(self, request: Callable[[WorkerInfo, Kind, Any], Future[Any]], clock: Clock):
        self._request = request
        self._clock = clock
        #: What was not answered yet.
        self.open: dict[Future[Any], tuple[WorkerInfo, Kind]] = {}
        self._stopped = False

    def send(self, to: WorkerInfo, kind: Kind, value: Any) -> Future[Any]:
        assert kind in RETRIED, f"{kind.name} must not be sent twice"
        outcome: Future[Any] = Future(None, f"{kind.name} to worker {to.name!r}")
        outcome.expect_failure()  # whoever needs the answer looks
        self.open[outcome] = (to, kind)
        outcome.at_once(self._forget)
        self._try(outcome, to, kind, value, 0)
        return outcome

    def _try(
        self, outcome: Future[Any], to: WorkerInfo, kind: Kind, value: Any, attempt: int
    ) -> None:
        def settle(future: Future[Any]) -> None:
            if outcome.done():
                return  # it was given up
            error = future.exception()
            if error is None:
                outcome.set_result(future.value())
            elif isinstance(error, CallError) and attempt < _RETRIES and not self._stopped:
                self._clock.later(
                    _RETRY_SECONDS * 2**attempt,
                    lambda: self._try(outcome, to, kind, value, attempt + 1),
                )
            else:
                outcome.set_exception(error)

        try:
            self._request(to, kind, value).add_done_callback(settle)
        except Exception as error:
            outcome.set_exception(error)

    def _forget(self, outcome: Future[Any]) -> None:
        self.open.pop(outcome, None)

    def stop(self) -> None:
        """Send nothing again from now on."""
        self._stopped = True

    def give_up(self) -> None:
        """Nobody answers any more."""
        for outcome, (to, kind) in self.open.copy().items():
            error = ShutDownError(
                f"this worker was shut down before worker {to.name!r} had answered {kind.name}",
                worker=to.name,
                call=kind.name,
            )
            with contextlib.suppress(RuntimeError):  # it was answered this very moment
                outcome.set_exception(error)
