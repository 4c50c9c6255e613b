"""Calls of user functions: the message, and how it is served."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from gradwire.agent.agent import Agent
from gradwire.agent.futures import Future, when_all
from gradwire.agent.peers import Peer
from gradwire.agent.service import Request
from gradwire.errors import EncodingError
from gradwire.wire.messages import Kind, Tags
from gradwire.wire.values import Encoded, call_name

#: Set on functions that return a future of their result; see `gradwire.rpc.functions`.
ASYNC_MARK = "_wrapped_async_rpc_function"

_PYTHON_CALL = Kind.PYTHON_CALL

Deliver = Callable[[Any], None]
#: Takes the error and the name of what was called.
Fail = Callable[[BaseException, str], None]


class Deferred:
    """Returned by a function served here whose result is the value of a future."""

    __slots__ = ("future",)

    def __init__(self, future: Any):
        self.future = future


class Calls:
    """Makes and serves calls of Python functions."""

    def __init__(self, agent: Agent):
        self._agent = agent
        agent.handle(Kind.PYTHON_CALL, self._serve, runs_user_code=True)

    def sync(
        self,
        to: Peer,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
    ) -> Any:
        encoded = self._agent.codec.encode_call(func, args, kwargs)
        return self._agent.call_sync(to, _PYTHON_CALL, func, encoded, timeout)

    def begin(
        self,
        to: Peer,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
    ) -> Future[Any]:
        encoded = self._agent.codec.encode_call(func, args, kwargs)
        return self._agent.call_async(to, Kind.PYTHON_CALL, func, encoded, timeout)

    def _serve(self, request: Request) -> None:
        self.serve_function(request, partial(self.answer, request), request.fail)

    def serve_function(self, request: Request, deliver: Deliver, fail: Fail) -> None:
        """Run the function in a request when its arguments are ready, then hand its result to
        `deliver`, or its error to `fail`, perhaps much later and from another thread."""
        try:
            (func, args, kwargs), unsettled = self._agent.decode(
                request.payload, request.buffers, request.caller.id, request.tags, True
            )
        except (AttributeError, ImportError) as error:
            unknown = EncodingError(
                f"the call cannot be read on worker {self._agent.info.name!r}: {error}. The RPC "
                "pickler does not serialize the code of functions and classes: there must be one "
                "of that name in that module there too"
            )
            unknown.__cause__ = error
            fail(unknown, "reading the arguments")
            return
        except BaseException as error:
            fail(error, "reading the arguments")
            return
        # The tensors own the memory now; the request must not keep it until it is answered.
        request.payload, request.buffers = b"", ()
        request.subject = func
        if not unsettled:
            self._run(request, func, args, kwargs, deliver, fail)
        else:
            run = partial(self._run, request, func, args, kwargs, deliver, fail)
            when_all(unsettled, partial(self._go_on, run, func, fail))

    def _go_on(
        self,
        run: Callable[[], None],
        func: Callable[..., Any],
        fail: Fail,
        error: BaseException | None,
    ) -> None:
        """Run a function on a thread of the crew, now that the arguments are ready."""
        if error is not None:
            fail(error, call_name(func))
        else:
            self._agent.executor.submit(lambda: self._agent.run_in_context(run))

    def _run(
        self,
        request: Request,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        deliver: Deliver,
        fail: Fail,
    ) -> None:
        """Run a function inside of what the interceptors want around it."""
        surroundings = None
        try:
            for interceptor in self._agent.interceptors:
                surrounding = interceptor.serving(request)
                if surrounding is not None:
                    surroundings = surroundings or ExitStack()
                    surroundings.enter_context(surrounding)
            if surroundings is None:
                _deliver(func, func(*args, **kwargs), deliver, fail)
            else:
                with surroundings:
                    _deliver(func, func(*args, **kwargs), deliver, fail)
        except BaseException as error:
            fail(error, call_name(func))

    def answer(self, request: Request, value: Any) -> None:
        """Send the result of a user call, tagged by the interceptors; if that cannot be, an error
        that says why."""
        tags: Tags = {}
        encoded: Encoded | None = None
        try:
            encoded = self._agent.codec.encode(value)
            for interceptor in self._agent.interceptors:
                interceptor.answering(request, encoded.differentiable, tags)
        except BaseException as error:
            if encoded is not None:
                encoded.tell_passengers(None)
            request.fail(error, "sending the result")
            if not isinstance(error, Exception):
                raise
            return
        request.answer_encoded(encoded, tags)
        if tags and request.service.is_idle:
            self._agent.do_ahead(tags)


def _deliver(func: Callable[..., Any], result: Any, deliver: Deliver, fail: Fail) -> None:
    """Hand over the result of a function, or see to it that this happens when it is there."""
    if type(result) is Deferred:
        _deliver_later(func, result.future, deliver, fail)
    elif hasattr(func, ASYNC_MARK):
        _deliver_later(func, result, deliver, fail)
    else:
        deliver(result)


def _deliver_later(func: Callable[..., Any], result: Any, deliver: Deliver, fail: Fail) -> None:
    """Hand over what a future has, as soon as it has it."""
    if not isinstance(result, torch._C.Future):
        raise TypeError(
            "Functions decorated with @rpc.functions.async_execution must return a "
            f"torch.futures.Future, but {call_name(func)} returned {type(result)}"
        )

    def take_over(future: Any) -> None:
        try:
            deliver(future.wait())
        except BaseException as error:
            fail(error, call_name(func))

    result.add_done_callback(take_over)
