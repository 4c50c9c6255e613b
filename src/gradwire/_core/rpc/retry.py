"""Messages that are sent again until they are answered, with exponential backoff."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from gradwire._core.ids import WorkerInfo
from gradwire._core.rpc.futures import Future
from gradwire._core.rpc.timers import Timers
from gradwire._core.wire.messages import RETRIED, Kind
from gradwire.errors import CallError, ShutDownError

#: The pause before the first retry. Each further pause is twice as long.
_RETRY_SECONDS = 0.1
_RETRIES = 8


class RetryQueue:
    """Sends each message again until it is answered, or until all retries have failed. The messages
    must be idempotent, because the receiver may get a message twice."""

    def __init__(self, request: Callable[[WorkerInfo, Kind, Any], Future[Any]], timers: Timers):
        self._request = request
        self._timers = timers
        #: The unanswered messages. Maps the future of each answer to the receiver and the kind.
        self.open: dict[Future[Any], tuple[WorkerInfo, Kind]] = {}
        self._stopped = False

    def send(self, to: WorkerInfo, kind: Kind, value: Any) -> Future[Any]:
        """Send a message until it is answered; see `Sender.send_until_answered`."""
        assert kind in RETRIED, f"{kind.name} must not be sent twice"
        outcome: Future[Any] = Future(None, f"{kind.name} to worker {to.name!r}")
        outcome.expect_failure()
        self.open[outcome] = (to, kind)
        outcome.at_once(self._forget)
        self._try(outcome, to, kind, value, 0)
        return outcome

    def _try(
        self, outcome: Future[Any], to: WorkerInfo, kind: Kind, value: Any, attempt: int
    ) -> None:
        def retry_or_complete(future: Future[Any]) -> None:
            if outcome.done():
                return  # This worker has shut down: `give_up` has completed the future.
            error = future.exception()
            if error is None:
                outcome.set_result(future.value())
            elif isinstance(error, CallError) and attempt < _RETRIES and not self._stopped:
                self._timers.call_later(
                    _RETRY_SECONDS * 2**attempt,
                    lambda: self._try(outcome, to, kind, value, attempt + 1),
                )
            else:
                outcome.set_exception(error)

        try:
            self._request(to, kind, value).add_done_callback(retry_or_complete)
        except Exception as error:
            outcome.set_exception(error)

    def _forget(self, outcome: Future[Any]) -> None:
        self.open.pop(outcome, None)

    def stop(self) -> None:
        """From now on, do not repeat messages that get no answer."""
        self._stopped = True

    def give_up(self) -> None:
        """Complete the futures of all unanswered messages with an error, because this worker has
        shut down."""
        for outcome, (to, kind) in self.open.copy().items():
            error = ShutDownError(
                f"this worker was shut down before worker {to.name!r} had answered {kind.name}",
                worker=to.name,
                call=kind.name,
            )
            # If another thread completes the future with the answer at this moment, `set_exception`
            # raises RuntimeError, and the future keeps the answer.
            with contextlib.suppress(RuntimeError):
                outcome.set_exception(error)
