"""Passing the requests of other workers to their handlers."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import TypeVar

from gradwire._core.rpc.executor import Executor
from gradwire._core.rpc.server import Request

T = TypeVar("T")
Handler = Callable[[Request], None]


class Dispatcher:
    """Holds the handlers of one worker: for each kind of request, the function that answers it."""

    def __init__(self, executor: Executor, context: contextvars.Context):
        self._executor = executor
        #: Each handler runs in a copy of these context variables, which name the current worker.
        self._context = context
        #: Maps a kind of request to (handler, whether the handler runs user code).
        self.handlers: dict[int, tuple[Handler, bool]] = {}

    def handle(self, kind: int, handler: Handler, *, runs_user_code: bool = False) -> None:
        """Register the handler for a kind of request. The handler must answer each request, but may
        do so after it has returned. A handler that runs no user code must be quick, because all
        other requests wait for it.

            >>> agent.handle(Kind.HEARTBEAT, lambda request: request.answer(None)) # doctest: +SKIP
        """
        self.handlers[kind] = (handler, runs_user_code)

    def serve(self, request: Request) -> None:
        """Pass a request to its handler. The executor's leader, the thread that reads the requests,
        calls this method."""
        try:
            handler, runs_user_code = self.handlers[request.kind]
        except KeyError:
            request.fail(
                NotImplementedError(
                    f"this worker has no handler for messages of kind {request.kind}"
                )
            )
            return
        if runs_user_code:
            self._executor.run(self._run, handler, request)
        else:
            self._run(handler, request)

    def _run(self, handler: Handler, request: Request) -> None:
        try:
            self._context.copy().run(handler, request)
        except BaseException as error:
            request.fail(error)

    def run_in_context(self, action: Callable[[], T]) -> T:
        """Run `action` in a context where this worker is the current worker, and return the
        result."""
        return self._context.copy().run(action)
