"""The serving side of a connection: the calls of one peer to this worker, and their answers."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from gradwire._core.ids import WorkerInfo
from gradwire._core.rpc.exceptions import encode_exception
from gradwire._core.rpc.executor import Executor
from gradwire._core.transport.base import Connection
from gradwire._core.transport.poller import Poller
from gradwire._core.wire.codec import Codec
from gradwire._core.wire.encoding import Encoded
from gradwire._core.wire.frames import Frame
from gradwire._core.wire.messages import UNCOUNTED, Kind, Tags, kind_name, pack, unpack
from gradwire.errors import ConnectionClosed, SendTimeout

logger = logging.getLogger("gradwire")

#: If the last answer was sent less than this time ago, an answer is held back, to send it together
#: with the next answers. (It is never held back long: if the next function takes more than a few
#: milliseconds, another thread takes over and sends the answer.)
_HOLD_SECONDS = 200e-6
_PYTHON_RET = Kind.PYTHON_RET
#: How many call ids of a peer are remembered, at least, to recognize a call that arrives twice.
_REMEMBERED_CALLS = 1024


class ServerPort(Protocol):
    """The part of the worker that a `ServerChannel` and its requests use."""

    #: The name and id of this worker.
    info: WorkerInfo
    codec: Codec

    @property
    def poller(self) -> Poller: ...

    @property
    def executor(self) -> Executor: ...

    def serve(self, request: Request) -> None:
        """Pass a request to its handler. The answer may be sent after this has returned. The
        executor's leader, the thread that reads requests, calls this method."""

    def decode(
        self,
        payload: bytes | memoryview,
        buffers: Sequence[Tensor],
        sender: int,
        tags: Tags | None,
        is_call: bool = False,
    ) -> tuple[Any, Sequence[Any]]:
        """Return the decoded value of a message, and the futures that must be done before the value
        may be used."""

    def heard_from(self, peer: WorkerInfo) -> None:
        """Tell the worker that a suspected or lost peer has called."""

    def channel_ended(self, channel: ServerChannel) -> None:
        """Tell the worker that the connection of this channel has ended."""


class Request:
    """A call from a peer. It must be answered exactly once, and any thread may do this later."""

    __slots__ = ("buffers", "caller", "channel", "id", "kind", "payload", "subject", "tags")

    def __init__(
        self,
        channel: ServerChannel,
        kind: int,
        call_id: int,
        tags: Tags | None,
        payload: bytes | memoryview,
        buffers: Sequence[Tensor],
    ):
        self.channel = channel
        self.caller = channel.peer
        self.kind = kind
        self.id = call_id
        self.tags = tags
        self.payload = payload
        self.buffers = buffers
        #: The function that the peer calls; an empty text until the call is decoded.
        self.subject: Any = ""

    def decode(self) -> Any:
        """Return the value in this message. Use this method only for values without RRefs, because
        it does not wait until RRefs are confirmed."""
        return self.channel.port.decode(
            self.payload, self.buffers, self.caller.id, self.tags, True
        )[0]

    def answer(self, value: Any) -> None:
        """Send a value back to the caller. If the value cannot be encoded, send the error."""
        try:
            encoded = self.channel.port.codec.encode(value)
        except Exception as error:
            self.fail(error)
        else:
            self.answer_encoded(encoded, None)

    def answer_encoded(self, encoded: Encoded, tags: Tags | None) -> None:
        self.channel.send(self, _PYTHON_RET, encoded, tags)

    def fail(self, error: BaseException, what: str = "") -> None:
        """Send an exception back to the caller. `what` names the function that raised it."""
        port = self.channel.port
        subject = what or kind_name(self.kind)
        encoded = encode_exception(port.codec, error, subject, port.info)
        self.channel.send(self, Kind.EXCEPTION, encoded, None)


class ServerChannel:
    """One connection, used for calls from a peer to this worker.

    The leader, the thread of the executor that waits for messages, reads the requests and serves
    them one after the other. If it loses the leadership before it has served all of them, the next
    leader continues (see `Executor.set_successor_work`).
    """

    def __init__(self, peer: WorkerInfo, connection: Connection, port: ServerPort):
        self.peer = peer
        self.connection = connection
        self.port = port
        self._executor = port.executor
        self._serve_request = port.serve
        #: Frames (messages) that were read and are not served yet.
        self._inbox: deque[Frame] = deque()
        #: Call id -> the call, for calls that are not answered yet.
        self.requests: dict[int, Request] = {}
        #: The ids of the threads that wait until the caller reads an answer.
        self._blocked_senders: set[int] = set()
        #: Whether so many threads wait for this caller that none of its further calls are served.
        self._paused = False
        self._last_sent = 0.0
        #: Whether answers are held back, and `flush` must send them.
        self._flush_due = False
        #: `_recent` has the ids of the latest calls; `_forgotten` is the number of all earlier
        #: calls.
        self._recent: dict[int, object] = {}
        self._forgotten = 0
        #: Held to count calls and to end the channel. (Reentrant: the garbage collector may run
        #: while the lock is held, and end a channel.)
        self._lock = threading.RLock()
        #: Why the connection ended; None while it lasts.
        self.end_reason: str | None = None
        #: Whether the caller has said goodbye. If so, no call is lost when the connection ends.
        self.farewell = False
        connection.attach(port.poller, self._on_readable)
        connection.arm()

    # -- serving

    def _on_readable(self) -> None:
        """Read the calls that have arrived, and serve them. The executor's leader calls this."""
        if not self.connection.begin_reading():
            # Another thread is reading. It will serve the calls, and then arm the poller again.
            return
        try:
            self._inbox.extend(self.connection.receive())
        except ConnectionClosed as closed:
            self.end(str(closed))
        finally:
            self.connection.end_reading()
        self._serve_inbox()

    def _serve_inbox(self) -> None:
        executor = self._executor
        if not executor.set_successor_work(self._serve_inbox):
            executor.post(self._serve_inbox)
            return
        # The previous leader may have held answers back, and lost the leadership before it sent
        # them.
        self.flush()
        while self._inbox:
            if self._blocked_senders and self._must_pause():
                executor.set_successor_work(None)
                return
            try:
                frame = self._inbox.popleft()
            except IndexError:
                break
            self._serve(frame)
            if not executor.is_leader():
                return
        executor.set_successor_work(None)
        if self.end_reason is not None:
            # A connection that has ended looks readable for ever, so the poller must not watch it
            # again.
            return
        self.flush()
        self.port.poller.expect_more()
        self.connection.arm()

    def _serve(self, frame: Frame) -> None:
        try:
            kind, call_id, tags, payload = unpack(frame.head)
        except Exception:
            logger.exception("worker %s sent a frame that is not a message", self.peer.name)
            self.end("the peer sent a frame that is not a message")
            return
        request = Request(self, kind, call_id, tags, payload, frame.buffers)
        if call_id < UNCOUNTED:
            # When the leader changes, two threads may serve this connection for a moment.
            # `setdefault` is atomic, so only one of them serves a call that has arrived twice.
            mark = object()
            if self._recent.setdefault(call_id, mark) is not mark:
                return  # This call has arrived before. Its function must not run twice.
            if len(self._recent) >= 2 * _REMEMBERED_CALLS:
                self._forget_oldest()
            self.requests[call_id] = request
        try:
            self._serve_request(request)
        except Exception:
            logger.exception(
                "worker %s: error while serving %s", self.port.info.name, kind_name(kind)
            )

    def report_next_call(self) -> None:
        """When the next call of the peer arrives, call `heard_from` of the port, because the call
        shows that the peer still runs."""
        self._serve_request = self._report_and_serve

    def _report_and_serve(self, request: Request) -> None:
        self._serve_request = self.port.serve
        self.port.heard_from(self.peer)
        self.port.serve(request)

    @property
    def is_idle(self) -> bool:
        """Whether no request that was read still waits to be served."""
        return not self._inbox

    def traffic(self) -> tuple[int, int]:
        """Return (calls sent, calls received). The serving side of a connection sends none."""
        with self._lock:
            return 0, self._forgotten + len(self._recent)

    def _forget_oldest(self) -> None:
        with self._lock:
            for call_id in list(self._recent)[:-_REMEMBERED_CALLS]:
                del self._recent[call_id]
                self._forgotten += 1

    # -- answering

    def send(self, request: Request, kind: Kind, encoded: Encoded, tags: Tags | None) -> None:
        """Send an answer. If the connection has ended, this raises no error: the caller notices the
        end of the connection itself."""
        references = bool(encoded.attachments)
        encoded.head = pack(kind, request.id, encoded.payload, tags, references)
        try:
            if not self._inbox or not self._hold(encoded):
                self._last_sent = time.perf_counter()
                self.connection.send(encoded, self._begin_blocked_send)
            if references:
                encoded.notify_attachments(self.peer)
        except ConnectionClosed as closed:
            encoded.notify_attachments(None)
            self.end(str(closed))
        finally:
            if self._blocked_senders:
                self._end_blocked_send()
            self.requests.pop(request.id, None)

    def _hold(self, frame: Frame) -> bool:
        """Hold an answer back while the leader has more calls to serve, to send several answers at
        once. Return False if the answer must be sent now."""
        if time.perf_counter() - self._last_sent > _HOLD_SECONDS:
            return False
        executor = self._executor
        if not executor.is_leader() or not self.connection.hold(frame):
            return False
        self._flush_due = True
        if not executor.is_leader():
            # Another thread has become the leader. A new leader begins by sending the answers that
            # are held back, but it may have done so before this answer was held back. So this
            # thread sends the answer now.
            self.flush()
        return True

    def flush(self) -> None:
        """Send the answers that are held back."""
        if not self._flush_due:
            return
        # `_flush_due` is reset before the answers are sent. So if another answer is held back while
        # they are sent, `_flush_due` is True again, and `flush` sends that answer the next time.
        self._flush_due = False
        try:
            self.connection.flush(self._begin_blocked_send)
        except ConnectionClosed as closed:
            self.end(str(closed))
        finally:
            if self._blocked_senders:
                self._end_blocked_send()

    def _begin_blocked_send(self) -> None:
        """Let another thread serve calls while this thread waits. This thread must wait, because
        the connection takes no more data until the caller reads an answer."""
        self._blocked_senders.add(threading.get_ident())
        self._executor.begin_blocked_send()

    def _end_blocked_send(self) -> None:
        """Record that this thread no longer waits for the caller to read an answer. If the worker
        has stopped serving this caller because too many threads waited, the worker now serves the
        caller again."""
        self._blocked_senders.discard(threading.get_ident())
        self._executor.end_blocked_send()
        if self._paused:
            self._paused = False
            self._executor.post(self._serve_inbox)

    def _must_pause(self) -> bool:
        """Return whether so many threads wait for this caller that no more of its calls may be read
        or served until the caller has read an answer."""
        # `_paused` is set before the threads are counted. So a thread whose wait ends after the
        # count finds that `_paused` is True, and makes the worker serve the caller again.
        self._paused = True
        self._paused = len(self._blocked_senders) >= self._executor.limit
        return self._paused

    def say_farewell(self) -> None:
        """Tell the peer that this worker leaves, unless sending would block."""
        try:
            self.connection.try_send(Frame(pack(Kind.FAREWELL, UNCOUNTED, b"")))
        except ConnectionClosed:
            pass

    # -- ending

    def end(self, reason: str) -> None:
        """Close the connection. Calls that are being served run to their end, but their answers are
        dropped."""
        with self._lock:
            if self.end_reason is not None:
                return
            self.end_reason = reason
        self.connection.close()
        self.port.channel_ended(self)

    def trim(self) -> None:
        """Free the memory that the connection has not used since the last call of this method."""
        try:
            self.connection.trim()
        except SendTimeout:
            self._flush_due = True
            self._executor.post(self.flush)

    def abandon(self) -> None:
        """Close this process's copies of the connection's file descriptors. This is called in a
        process that `os.fork` made from the worker's process, whose connection stays open."""
        self.end_reason = "this process was forked from the worker's"
        self.connection.abandon()
