"""Connections between workers of one process: frames in queues, tensors copied once.

Two workers can connect if both were given the same `InProcessTransport` object. There is no
registry of listeners for the whole process.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from math import inf

from torch import Tensor

from gradwire._core.transport.base import Address, CallLater, Connection, Greeting
from gradwire._core.transport.poller import Poller
from gradwire._core.transport.read_token import ReadToken
from gradwire._core.transport.receive_buffers import fresh_bytes
from gradwire._core.wire.frames import Frame
from gradwire.errors import ConnectionClosed


class InProcessTransport:
    """Connects the workers that were given this transport object."""

    name = "in_process"

    def __init__(self) -> None:
        self._listeners: dict[str, InProcessListener] = {}
        self._next_place = itertools.count()

    def listen(
        self,
        me: Greeting,
        poller: Poller,
        accepted: Callable[[Connection], None],
        call_later: CallLater,  # noqa: ARG002
    ) -> InProcessListener:
        place = str(next(self._next_place))
        listener = InProcessListener(Address(self.name, place), me, poller, accepted, self)
        self._listeners[place] = listener
        return listener

    def connect(
        self,
        place: str,
        me: Greeting,
        them: Greeting,
        timeout: float,  # noqa: ARG002
    ) -> InProcessConnection:
        listener = self._listeners.get(place)
        if listener is None or listener.me.incarnation != them.incarnation:
            raise ConnectionRefusedError(
                f"worker {them.name!r} does not listen at place {place} of this process"
            )
        here, there = InProcessConnection(listener.me), InProcessConnection(me)
        here.other, there.other = there, here
        listener.poller.post(lambda: listener.accept(there))
        return here

    def remove(self, place: str) -> None:
        """Remove the listener at `place`, because it is being closed."""
        self._listeners.pop(place, None)


class InProcessListener:
    """Accepts the connections that other workers open to one worker."""

    def __init__(
        self,
        address: Address,
        me: Greeting,
        poller: Poller,
        accepted: Callable[[Connection], None],
        transport: InProcessTransport,
    ):
        self.address = address
        self.me = me
        self.poller = poller
        self._accepted = accepted
        self._transport = transport
        self._closed = False

    def accept(self, connection: InProcessConnection) -> None:
        """Accept a new connection. The poller calls this in the worker that listens."""
        if self._closed:
            connection.close()
        else:
            self._accepted(connection)

    def close(self) -> None:
        self._closed = True
        self._transport.remove(self.address.place)

    def abandon(self) -> None:
        self._closed = True


def _copy(buffer: Tensor) -> Tensor:
    """Return a copy of a buffer's elements as a flat tensor of bytes."""
    flat = fresh_bytes(buffer.numel() * buffer.element_size())
    if len(flat):
        flat.view(buffer.dtype).view(buffer.shape).copy_(buffer.detach())
    return flat


class InProcessConnection:
    """One end of a connection. The attribute `other` is the peer's end."""

    other: InProcessConnection
    #: Always 0, because a thread that sends never has to wait for the peer.
    last_taken = 0.0

    def __init__(self, peer: Greeting):
        self.peer = peer
        self._inbox: deque[Frame] = deque()
        read_token = ReadToken()
        self.begin_reading, self.end_reading = read_token.begin, read_token.end
        self.stop_reading = read_token.stop
        self._changed = threading.Condition(threading.Lock())
        self._armed = False
        self._closed = False
        self._closed_by_peer = False
        self._poller: Poller | None = None
        self._callback: Callable[[], None] | None = None

    def send(
        self,
        frame: Frame,
        blocked: Callable[[], object] | None = None,  # noqa: ARG002
        deadline: float = inf,  # noqa: ARG002
    ) -> None:
        if self._closed or self._closed_by_peer:
            raise ConnectionClosed("the connection is closed")
        self.other.deliver(Frame(frame.whole_head(), [_copy(buffer) for buffer in frame.buffers]))

    def hold(self, frame: Frame) -> int:  # noqa: ARG002
        # Keep no frame back. It would save nothing, because `send` only appends a frame to a queue.
        return 0

    def flush(self, blocked: Callable[[], object] | None = None, deadline: float = inf) -> None:
        pass

    def withdraw(self, is_wanted: Callable[[Frame], bool]) -> bool:  # noqa: ARG002
        return False

    def try_send(self, frame: Frame) -> bool:
        self.send(frame)
        return True

    def deliver(self, frame: Frame | None) -> None:
        """Receive a frame from the peer, or None if the peer has closed the connection. The peer's
        end of the connection calls this."""
        with self._changed:
            if frame is not None:
                self._inbox.append(frame)
            else:
                self._closed_by_peer = True
            self._changed.notify()
            must_call_back = self._armed or (frame is None and self._callback is not None)
            self._armed = False
        if must_call_back:
            self._call_back()

    def _call_back(self) -> None:
        if self._poller is not None and self._callback is not None:
            self._poller.post(self._callback)

    def receive(self) -> list[Frame]:
        with self._changed:
            frames = list(self._inbox)
            self._inbox.clear()
            if self._closed:
                raise ConnectionClosed("the connection is closed")
            if self._closed_by_peer and not frames:
                raise ConnectionClosed("the peer closed the connection")
        return frames

    def wait(self, timeout: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(self._is_readable, timeout)

    def _is_readable(self) -> bool:
        return bool(self._inbox) or self._closed or self._closed_by_peer

    def attach(self, poller: Poller, callback: Callable[[], None]) -> None:
        with self._changed:
            self._poller, self._callback = poller, callback
            closed_by_peer = self._closed_by_peer
        if closed_by_peer:
            self._call_back()

    def arm(self) -> None:
        with self._changed:
            ready = self._is_readable()
            self._armed = not ready
        if ready:
            self._call_back()

    def disarm(self) -> None:
        with self._changed:
            self._armed = False
            # If the peer has closed the connection, the poller must call back again, because the
            # last callback may have read frames without noticing that the connection is closed.
            must_call_back = self._closed_by_peer and not self._closed
        if must_call_back:
            self._call_back()

    def trim(self) -> None:
        pass

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self.other.deliver(None)

    def abandon(self) -> None:
        self._closed = True
