"""Calls of user functions: making calls, and serving the calls of other workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from gradwire._core.ids import To
from gradwire._core.rpc.agent import Agent
from gradwire._core.rpc.futures import Future, when_all
from gradwire._core.rpc.server import Request
from gradwire._core.torch_internals import CFuture
from gradwire._core.tracebacks import trimmed, worth_showing
from gradwire._core.wire.codec import as_written, call_name, closures_advice
from gradwire._core.wire.encoding import Encoded
from gradwire._core.wire.messages import Kind, Tags
from gradwire.errors import EncodingError

#: The attribute that marks functions which return a future of their result; see
#: `gradwire.rpc.functions.async_execution`.
ASYNC_MARK = "_wrapped_async_rpc_function"

_PYTHON_CALL = Kind.PYTHON_CALL

Deliver = Callable[[Any], None]
#: A function that is called with the error of a call and the name of the function that failed.
Fail = Callable[[BaseException, str], None]


class MethodResult:
    """The result of a method that gradwire called for another worker. A function of gradwire calls
    the method and returns this object, so that error texts name the method and not that function.

    `value` is the result of the method, or a future of the result if the method is marked with
    `ASYNC_MARK`. `owner` is the class of the object with the method, and `method` is the name of
    the method.
    """

    __slots__ = ("is_future", "method", "owner", "value")

    def __init__(self, owner: type, method: str, value: Any, is_future: bool = False):
        self.owner = owner
        self.method = method
        self.value = value
        self.is_future = is_future

    # The code that makes error texts expects a function, and reads these two attributes of it.

    @property
    def __name__(self) -> str:
        return f"{self.owner.__qualname__}.{self.method}"

    @property
    def __code__(self) -> Any:
        return getattr(getattr(self.owner, self.method, None), "__code__", None)


class FunctionCalls:
    """Makes and serves the calls of Python functions for one worker."""

    def __init__(self, agent: Agent):
        self._agent = agent
        agent.handle(Kind.PYTHON_CALL, self._serve, runs_user_code=True)

    def rpc_sync(
        self,
        to: To,
        func: Callable[..., Any],
        args: Sequence[Any] | None,
        kwargs: dict[str, Any] | None,
        timeout: float,
        name: str = "",
    ) -> Any:
        """Run a function on a worker and return its result. If `name` is given, error texts use it
        in place of the function's own name."""
        agent = self._agent
        try:
            peer = agent.peers.find(to)
            seconds = agent.timeout(timeout)
            encoded = agent.codec.encode_call(func, args, kwargs)
            return agent.sender.call(peer, _PYTHON_CALL, name or func, encoded, seconds)
        except Exception as error:
            raise trimmed(error)

    def rpc_async(
        self,
        to: To,
        func: Callable[..., Any],
        args: Sequence[Any] | None,
        kwargs: dict[str, Any] | None,
        timeout: float,
        name: str = "",
    ) -> Future[Any]:
        """Run a function on a worker, and return a future of its result. `name`: as for
        `rpc_sync`."""
        agent = self._agent
        try:
            peer = agent.peers.find(to)
            seconds = agent.timeout(timeout)
            encoded = agent.codec.encode_call(func, args, kwargs)
            return agent.sender.call_async(peer, _PYTHON_CALL, name or func, encoded, seconds)
        except Exception as error:
            raise trimmed(error)

    def _serve(self, request: Request) -> None:
        self.serve_function(request, partial(self.answer, request), request.fail)

    def serve_function(self, request: Request, deliver: Deliver, fail: Fail) -> None:
        """Run the function that a request asks for. Its result goes to `deliver`, its error to
        `fail`; either may be called much later, from another thread."""
        try:
            (func, args, kwargs), unconfirmed = self._agent.decode(
                request.payload, request.buffers, request.caller.id, request.tags, True
            )
        except (AttributeError, ImportError) as error:
            unknown = EncodingError(
                f"the call cannot be decoded on worker {self._agent.info.name!r}: {error}. The RPC "
                "pickler does not serialize the code of functions and classes: that worker must "
                "be able to import the same module, with the same names in it. What is defined in "
                "a notebook or in the main program is sent by value with the option closures=True "
                '(pip install "gradwire[closures]")'
            )
            unknown.__cause__ = worth_showing(error)
            fail(unknown, "reading the arguments")
            return
        except BaseException as error:
            fail(error, "reading the arguments")
            return
        # The decoded tensors use the memory of the buffers, and that memory should be freed
        # together with the tensors. The request exists until the answer is sent, so it must not
        # refer to the buffers.
        request.payload, request.buffers = b"", ()
        request.subject = func
        if not unconfirmed:
            self._run(request, func, args, kwargs, deliver, fail)
        else:
            run = partial(self._run, request, func, args, kwargs, deliver, fail)
            when_all(unconfirmed, partial(self._run_confirmed, run, func, fail))

    def _run_confirmed(
        self,
        run: Callable[[], None],
        func: Callable[..., Any],
        fail: Fail,
        error: BaseException | None,
    ) -> None:
        """Go on with a call that has waited until the RRefs in its arguments are confirmed. If
        `error` is None, all of them are: run the function on a thread of the executor. Otherwise
        the confirmation of an RRef has failed: pass the error to `fail`."""
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
        """Run a user function inside the context managers that the interceptors (objects of the
        layers above) return for this request."""
        managers = None
        try:
            for interceptor in self._agent.interceptors:
                manager = interceptor.serving(request)
                if manager is not None:
                    managers = managers or ExitStack()
                    managers.enter_context(manager)
            if managers is None:
                _deliver(request, func, func(*args, **kwargs), deliver, fail)
            else:
                with managers:
                    _deliver(request, func, func(*args, **kwargs), deliver, fail)
        except BaseException as error:
            fail(error, as_written(func, args, kwargs)[0])

    def answer(self, request: Request, value: Any) -> None:
        """Send the result of a user call, with the tags that the interceptors attach. If the result
        cannot be encoded, send the error of the encoding."""
        tags: Tags = {}
        encoded: Encoded | None = None
        try:
            encoded = self._agent.codec.encode(value)
            for interceptor in self._agent.interceptors:
                interceptor.answering(request, encoded.differentiable, tags)
        except BaseException as error:
            if encoded is not None:
                encoded.notify_attachments(None)
            elif isinstance(error, Exception):
                error = self._explain_unsendable(request, value, error)
            request.fail(error, "sending the result")
            if not isinstance(error, Exception):
                raise
            return
        request.answer_encoded(encoded, tags)
        if tags and request.channel.is_idle:
            self._agent.sender.use_idle_time(tags)

    def _explain_unsendable(self, request: Request, value: Any, error: Exception) -> EncodingError:
        """Return the error for a result that cannot be encoded. `error` is why."""
        call, worker = call_name(request.subject), self._agent.info.name
        explained = EncodingError(
            f"the result of {call} on worker {worker!r} (a {type(value).__name__}) cannot be sent: "
            f"{error}{closures_advice(value, error)}. Return what can be pickled, or leave the "
            "result there: rpc.remote returns a reference to it, and RRef.rpc_sync() calls its "
            "methods"
        )
        explained.__cause__ = worth_showing(error)
        return explained


def _deliver(
    request: Request, func: Callable[..., Any], result: Any, deliver: Deliver, fail: Fail
) -> None:
    """Pass the result of a function to `deliver`. If the function has returned a future of its
    result, `deliver` is called when the future is done."""
    if type(result) is MethodResult:
        request.subject = result
        # The autograd context may keep the `MethodResult` for error texts. The value is removed
        # from the `MethodResult`, because otherwise the context would keep the value in memory too.
        value, result.value = result.value, None
        if result.is_future:
            _deliver_later(result, value, deliver, fail)
        else:
            deliver(value)
    elif hasattr(func, ASYNC_MARK):
        _deliver_later(func, result, deliver, fail)
    else:
        deliver(result)


def _deliver_later(func: Any, result: Any, deliver: Deliver, fail: Fail) -> None:
    """Pass the value of a future to `deliver` when the future is done."""
    if not isinstance(result, CFuture):
        raise TypeError(
            "Functions decorated with @rpc.functions.async_execution must return a "
            f"torch.futures.Future, but {call_name(func)} returned {type(result)}"
        )

    def deliver_value(future: Any) -> None:
        try:
            deliver(future.wait())
        except BaseException as error:
            fail(error, call_name(func))

    result.add_done_callback(deliver_value)
