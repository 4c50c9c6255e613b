"""The calls of one other worker to us, and our answers."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradwire.agent.exceptions import encode_exception
from gradwire.errors import ConnectionClosed
from gradwire.ids import WorkerInfo
from gradwire.transport.base import Connection
from gradwire.wire.frames import Frame
from gradwire.wire.messages import UNCOUNTED, Kind, Tags, kind_name, pack, unpack
from gradwire.wire.values import Encoded

if TYPE_CHECKING:
    from gradwire.agent.agent import Agent

logger = logging.getLogger("gradwire")

#: How long answers are kept back for others while short functions are served. (A long function
#: delays those before it until the watch relieves the leader: a few milliseconds.)
_TOGETHER_SECONDS = 200e-6
_PYTHON_RET = Kind.PYTHON_RET
#: So many calls of a peer are remembered, to know one that comes twice.
_REMEMBERED_CALLS = 1024


class Request:
    """A call from another worker, to be answered exactly once, now or later."""

    __slots__ = ("buffers", "caller", "id", "kind", "payload", "service", "subject", "tags")

    def __init__(
        self,
        service: Service,
        kind: int,
        id: int,
        tags: Tags | None,
        payload: bytes | memoryview,
        buffers: Sequence[Tensor],
    ):
        self.service = service
        self.caller = service.caller
        self.kind = kind
        self.id = id
        self.tags = tags
        self.payload = payload
        self.buffers = buffers
        #: What is called: a function, once that is known.
        self.subject: Any = ""

    def decode(self) -> Any:
        """The value that came with the request, for messages that carry nothing to wait for."""
        return self.service.agent.decode(
            self.payload, self.buffers, self.caller.id, self.tags, True
        )[0]

    def answer(self, value: Any) -> None:
        """Send back a value; if it cannot be sent, an error that says so."""
        try:
            encoded = self.service.agent.codec.encode(value)
        except Exception as error:
            self.fail(error)
        else:
            self.answer_encoded(encoded, None)

    def answer_encoded(self, encoded: Encoded, tags: Tags | None) -> None:
        self.service.send(self, _PYTHON_RET, encoded, tags)

    def fail(self, error: BaseException, what: str = "") -> None:
        """Send back an exception."""
        agent = self.service.agent
        subject = what or kind_name(self.kind)
        where = f'{subject} on worker "{agent.info.name}" (id {agent.info.id}) raised:'
        self.service.send(self, Kind.EXCEPTION, encode_exception(agent.codec, error, where), None)


class Service:
    """One connection, used for calls from there to here."""

    def __init__(
        self,
        agent: Agent,
        caller: WorkerInfo,
        connection: Connection,
        ended: Callable[[Service], None],
    ):
        self.agent = agent
        self.caller = caller
        self.incarnation = connection.peer.incarnation
        self._connection = connection
        self._ended = ended
        self._inbox: deque[Frame] = deque()
        self._closed = False
        self.requests: dict[int, Request] = {}
        #: Threads that wait for the caller to take answers; and whether there are too many of them
        #: to serve more of its calls.
        self._stuck: set[int] = set()
        self._paused = False
        self._last_sent = 0.0
        #: Whether answers are held back.
        self._holds = False
        #: The calls that came last, and how many came before.
        self._recent: dict[int, object] = {}
        self._forgotten = 0
        self._forgetting = threading.RLock()  # the garbage collector may end a service
        #: The caller has said that it leaves; its silence from now on is no loss.
        self.farewell = False
        connection.attach(agent.poller, self._on_readable)
        connection.arm()

    def _on_readable(self) -> None:
        """Read, and serve what was read, as long as this thread leads. The next leader goes on
        where it stops."""
        if not self._connection.begin_reading():
            return  # whoever reads will go on, or ask for somebody to
        try:
            self._inbox.extend(self._connection.receive())
        except ConnectionClosed:
            self.close()
        finally:
            self._connection.end_reading()
        self._serve_inbox()

    def _serve_inbox(self) -> None:
        executor = self.agent.executor
        if not executor.leave_behind(self._serve_inbox):
            executor.post(self._serve_inbox)
            return
        self._flush()  # what the leader before held back
        while self._inbox:
            if self._stuck and self._is_to_pause():
                executor.leave_behind(None)
                return
            try:
                frame = self._inbox.popleft()
            except IndexError:
                break
            self._serve(frame)
            if not executor.leads():
                return
        executor.leave_behind(None)
        if self._closed:
            return  # one that has ended is readable for ever
        self._flush()
        self.agent.poller.expect_more()
        self._connection.arm()

    def _flush(self) -> None:
        if not self._holds:
            return
        self._holds = False  # first: whoever holds one back from now on sees to it
        try:
            self._connection.flush(self._wait_for_caller)
        except ConnectionClosed:
            self.close()
        finally:
            if self._stuck:
                self._go_on()

    def _wait_for_caller(self) -> None:
        """It is slow to take an answer. Others are served meanwhile."""
        self._stuck.add(threading.get_ident())
        self.agent.executor.hand_over()

    def _go_on(self) -> None:
        """An answer was taken, or never will be."""
        self._stuck.discard(threading.get_ident())
        self.agent.executor.take_up()
        if self._paused:
            self._paused = False
            self.agent.executor.post(self._serve_inbox)

    def _is_to_pause(self) -> bool:
        """Whether answers to this caller take so many threads that no more of its calls are served,
        nor read, until it has taken one."""
        self._paused = True  # first: who goes on from now on sees it
        self._paused = len(self._stuck) >= self.agent.executor.limit
        return self._paused

    def _serve(self, frame: Frame) -> None:
        try:
            kind, call_id, tags, payload = unpack(frame.head)
        except Exception:
            logger.exception("worker %s sent something that is no message", self.caller.name)
            self.close()
            return
        request = Request(self, kind, call_id, tags, payload, frame.buffers)
        if call_id < UNCOUNTED:
            # Two threads serve at the same time for a moment when the lead changes hands.
            note = object()
            if self._recent.setdefault(call_id, note) is not note:
                return  # a duplicate: no function runs twice
            if len(self._recent) >= 2 * _REMEMBERED_CALLS:
                self._forget_the_oldest()
            self.requests[call_id] = request
        try:
            self.agent.serve(request)
        except Exception:
            logger.exception("worker %s: error while serving", self.agent.info.name)

    @property
    def is_idle(self) -> bool:
        """Whether nothing has arrived that is still to be served."""
        return not self._inbox

    @property
    def received(self) -> int:
        """How many calls have arrived."""
        with self._forgetting:
            return self._forgotten + len(self._recent)

    def _forget_the_oldest(self) -> None:
        with self._forgetting:
            for call_id in list(self._recent)[:-_REMEMBERED_CALLS]:
                del self._recent[call_id]
                self._forgotten += 1

    def send(self, request: Request, kind: Kind, encoded: Encoded, tags: Tags | None) -> None:
        references = bool(encoded.passengers)
        encoded.head = pack(kind, request.id, encoded.payload, tags, references)
        try:
            if not self._inbox or not self._send_with_others(encoded):
                self._last_sent = time.perf_counter()
                self._connection.send(encoded, self._wait_for_caller)
            if references:
                encoded.tell_passengers(self.caller)
        except ConnectionClosed:
            encoded.tell_passengers(None)
            self.close()  # the caller is gone and has been told so on its own side
        finally:
            if self._stuck:
                self._go_on()
            self.requests.pop(request.id, None)

    def _send_with_others(self, frame: Frame) -> bool:
        """While the leader has more to serve, its answers travel together; none waits for long."""
        if time.perf_counter() - self._last_sent > _TOGETHER_SECONDS:
            return False
        executor = self.agent.executor
        if not executor.leads() or not self._connection.hold(frame):
            return False
        self._holds = True
        if not executor.leads():
            self._flush()  # the next leader may have passed by already
        return True

    def say_farewell(self) -> None:
        try:
            self._connection.nudge(Frame(pack(Kind.FAREWELL, UNCOUNTED, b"")))
        except ConnectionClosed:
            pass

    def trim(self) -> None:
        self._connection.trim()

    def abandon(self) -> None:
        self._closed = True
        self._connection.abandon()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._connection.close()
        self._ended(self)
