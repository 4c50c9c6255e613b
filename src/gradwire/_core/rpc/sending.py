"""Sending calls and messages to other workers, and receiving the replies.

| method | what is sent | the reply |
|---|---|---|
| `call` | a user call | the caller waits for it |
| `call_async` | a user call | a future |
| `request` | a value, for the layers above | a future |
| `request_encoded` | an encoded value, for the layers above | a future |
| `send_request`, `wait_for_reply` | an encoded value, for the layers above | the caller waits |
| `send_until_answered` | an idempotent message, repeated until it is answered | a future |

Interceptors see user calls only. Every method uses `_send`, which connects to the peer if there is
no connection yet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from gradwire._core.ids import To, WorkerInfo
from gradwire._core.rpc.confirmation import complete_when_confirmed, wait_until_confirmed
from gradwire._core.rpc.decoding import Decoder
from gradwire._core.rpc.exceptions import decode_exception
from gradwire._core.rpc.executor import Executor
from gradwire._core.rpc.futures import Future
from gradwire._core.rpc.interceptors import Interceptor
from gradwire._core.rpc.open_call import OpenCall
from gradwire._core.rpc.peers import Peer, Peers
from gradwire._core.rpc.retry import RetryQueue
from gradwire._core.rpc.timers import Timers
from gradwire._core.tracebacks import worth_showing
from gradwire._core.wire.codec import Codec
from gradwire._core.wire.encoding import Encoded
from gradwire._core.wire.frames import Frame
from gradwire._core.wire.messages import Kind, Tags, carries_references, unpack
from gradwire.errors import CallError, RemoteError
from gradwire.options import UNSET_TIMEOUT

logger = logging.getLogger("gradwire")

_EXCEPTION = Kind.EXCEPTION
_PYTHON_CALL = Kind.PYTHON_CALL


class Sender:
    """Sends the calls and messages of one worker. The text of the module lists the methods."""

    def __init__(
        self,
        codec: Codec,
        decoder: Decoder,
        peers: Peers,
        interceptors: Sequence[Interceptor],
        executor: Executor,
        timers: Timers,
        resolve_timeout: Callable[[float], float],
        retry_timeout: float,
    ):
        self._codec = codec
        self._decode = decoder.decode
        self._peers = peers
        self._interceptors = interceptors
        self._executor = executor
        self._timers = timers
        self._resolve_timeout = resolve_timeout
        self.retries = RetryQueue(
            # `wait=False`: no thread needs the answer to a repeated message at once, so the thread
            # that sends such a message must not wait while the receiver takes no data.
            lambda to, kind, value: self.request(to, kind, value, retry_timeout, wait=False),
            timers,
        )

    # -- user calls

    def call(self, peer: Peer, kind: Kind, subject: Any, encoded: Encoded, timeout: float) -> Any:
        """Make a user call, and return its result."""
        tags: Tags = {}
        call = self._send(peer, kind, subject, encoded, timeout, tags, self._interceptors, None)
        try:
            if tags:
                self.use_idle_time(tags)
            assert call.channel is not None
            call.channel.wait(call)
        except BaseException:  # This thread was interrupted. Nobody will take the reply.
            call.give_up()
            raise
        value, unconfirmed = self._open_reply(call)
        if unconfirmed:
            wait_until_confirmed(call, unconfirmed, self._executor)
        return value

    def call_async(
        self,
        peer: Peer,
        kind: Kind,
        subject: Any,
        encoded: Encoded,
        timeout: float,
        tags: Tags | None = None,
    ) -> Future[Any]:
        """Make a user call. The returned future gets its result or its error."""
        future: Future[Any] = Future()
        tags = {} if tags is None else tags
        self._send(peer, kind, subject, encoded, timeout, tags, self._interceptors, future)
        return future

    def use_idle_time(self, tags: Tags) -> None:
        """Let the interceptors (objects of the layers above) do work that will be needed later.
        This is called after a call or a result with `tags` was sent: this thread has nothing to do
        while the other worker is busy."""
        for interceptor in self._interceptors:
            interceptor.waiting(tags)

    # -- messages of the layers above

    def request(
        self,
        to: To,
        kind: Kind,
        value: Any,
        timeout: float = UNSET_TIMEOUT,
        *,
        wait: bool = True,
    ) -> Future[Any]:
        """Send a message. The returned future gets the answer or the error. If `wait` is False, do
        not wait while the receiver takes no data; see `ClientChannel.send`."""
        future: Future[Any] = Future()
        peer, seconds = self._peers.find(to), self._resolve_timeout(timeout)
        encoded = self._codec.encode(value)
        self._send(peer, kind, kind.name, encoded, seconds, None, (), future, wait)
        return future

    def request_encoded(
        self,
        to: To,
        kind: Kind,
        subject: str,
        encoded: Encoded,
        timeout: float,
        tags: Tags | None = None,
    ) -> Future[Any]:
        """Send a message that is encoded already. The returned future gets the answer or the
        error."""
        future: Future[Any] = Future()
        self._send(self._peers.find(to), kind, subject, encoded, timeout, tags, (), future)
        return future

    def send_request(
        self,
        to: To,
        kind: Kind,
        subject: str,
        encoded: Encoded,
        timeout: float,
        tags: Tags | None = None,
    ) -> OpenCall:
        """Send an encoded message. To get the answer, pass the returned object to `wait_for_reply`.
        Raise CallError if the message cannot be sent."""
        return self._send(self._peers.find(to), kind, subject, encoded, timeout, tags, (), None)

    def wait_for_reply(self, call: OpenCall) -> Any:
        """Return the answer to a message that `send_request` has sent. Wait for it if necessary."""
        assert call.channel is not None
        call.channel.wait(call)
        return self._open_reply(call)[0]

    def send_until_answered(self, to: WorkerInfo, kind: Kind, value: Any) -> Future[Any]:
        """Send a message of an idempotent kind, and repeat it until it is answered. The returned
        future gets the answer, or the error of the last attempt."""
        return self.retries.send(to, kind, value)

    # -- the one way out

    def _send(
        self,
        peer: Peer,
        kind: Kind,
        subject: Any,
        encoded: Encoded,
        timeout: float,
        tags: Tags | None,
        interceptors: Sequence[Interceptor],
        future: Future[Any] | None,
        wait: bool = True,
    ) -> OpenCall:
        """Send a call. Connect to the peer first if there is no connection. If the call cannot be
        sent, the future gets the CallError; without a future, the CallError is raised."""
        call = OpenCall(kind, subject, peer.info, timeout)
        if future is not None:
            future.completed_by(call)
            call.future = future
        try:
            channel = peer.channel or self._peers.connect(peer, call.name, timeout)
            for interceptor in interceptors:
                assert tags is not None
                interceptor.leaving(peer.info, subject, encoded.differentiable, tags)
            channel.send(call, encoded, tags, wait)
        except BaseException as error:
            encoded.notify_attachments(None)
            if future is None or not isinstance(error, CallError):
                raise
            future.set_exception(error)
        return call

    # -- replies

    def _open_reply(self, call: OpenCall) -> tuple[Any, Sequence[Any]]:
        """Return the value in the reply to a call, and the futures that must be done before the
        value may be used. Raise the error of a call that failed."""
        if call.error is not None:
            raise call.error
        reply, channel = call.reply, call.channel
        assert reply is not None
        assert channel is not None
        # The decoded tensors use the memory of the reply, and that memory should be freed together
        # with the tensors. The call may exist longer than the tensors, so it must not refer to the
        # reply.
        call.reply = None
        kind, _, tags, payload = unpack(reply.head)
        if kind == _EXCEPTION:
            raise decode_exception(
                self._codec,
                payload,
                reply.buffers,
                channel.peer.name,
                call=call.name,
                func=call.subject if call.kind == _PYTHON_CALL else None,
            )
        try:
            return self._decode(payload, reply.buffers, channel.peer.id, tags)
        except Exception as error:
            callee = channel.peer.name
            raise RemoteError(
                f"the result of {call.name} on worker {callee!r} cannot be decoded on this worker: "
                f"{error!r}",
                worker=callee,
                call=call.name,
            ) from worth_showing(error)

    def complete(self, call: OpenCall) -> None:
        """Complete the future of an asynchronous call that has its reply, or an error."""
        future = call.future
        assert future is not None
        try:
            value, unconfirmed = self._open_reply(call)
        except BaseException as error:
            # The traceback is removed, because it shows only gradwire's own decoding, and would
            # keep this function's variables in memory.
            future.complete(None, error.with_traceback(None))
            return
        if unconfirmed:
            complete_when_confirmed(future, value, call, unconfirmed, self._timers)
        else:
            future.complete(value, None)

    def discard(self, frame: Frame) -> None:
        """Drop a reply whose call has failed already. If the reply carries RRefs, decode it first:
        when the decoded RRefs are dropped, their owners learn that this worker does not use
        them."""
        if carries_references(frame.head):
            _, _, _, payload = unpack(frame.head)
            self._executor.submit(lambda: self._decode_and_drop(payload, frame))

    def _decode_and_drop(self, payload: memoryview, frame: Frame) -> None:
        try:
            self._codec.decode(payload, frame.buffers)
        except Exception:
            logger.debug("a late reply could not be decoded", exc_info=True)
