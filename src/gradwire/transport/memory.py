"""Between workers of one process: frames through queues, tensors copied once.

A `MemoryNetwork` is a world of its own: workers reach each other through it when they were given
the same one. There is no process-wide registry.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable

from torch import Tensor

from gradwire.errors import ConnectionClosed
from gradwire.transport.base import Address, Connection, Greeting
from gradwire.transport.buffers import fresh_bytes
from gradwire.transport.poller import Poller
from gradwire.transport.reading import Reading
from gradwire.wire.frames import Frame


class MemoryNetwork:
    """Where the workers of one process meet; a transport."""

    name = "memory"

    def __init__(self) -> None:
        self._listeners: dict[str, MemoryListener] = {}
        self._places = itertools.count()

    def listen(
        self, me: Greeting, poller: Poller, accepted: Callable[[Connection], None]
    ) -> MemoryListener:
        place = str(next(self._places))
        listener = MemoryListener(Address(self.name, place), me, poller, accepted, self)
        self._listeners[place] = listener
        return listener

    def connect(
        self,
        place: str,
        me: Greeting,
        them: Greeting,
        timeout: float,  # noqa: ARG002
    ) -> MemoryConnection:
        listener = self._listeners.get(place)
        if listener is None or listener.me.incarnation != them.incarnation:
            raise ConnectionRefusedError(f"no worker listens at place {place} of this process")
        here, there = MemoryConnection(listener.me), MemoryConnection(me)
        here.other, there.other = there, here
        listener.poller.post(lambda: listener.accept(there))
        return here

    def forget(self, place: str) -> None:
        self._listeners.pop(place, None)


class MemoryListener:
    def __init__(
        self,
        address: Address,
        me: Greeting,
        poller: Poller,
        accepted: Callable[[Connection], None],
        network: MemoryNetwork,
    ):
        self.address = address
        self.me = me
        self.poller = poller
        self._accepted = accepted
        self._network = network
        self._closed = False

    def accept(self, connection: MemoryConnection) -> None:
        if self._closed:
            connection.close()
        else:
            self._accepted(connection)

    def trim(self) -> None:
        pass

    def close(self) -> None:
        self._closed = True
        self._network.forget(self.address.place)

    def abandon(self) -> None:
        self._closed = True


def _copy(buffer: Tensor) -> Tensor:
    """The buffer as the flat bytes a receiver expects, in memory of its own."""
    flat = fresh_bytes(buffer.numel() * buffer.element_size())
    if len(flat):
        flat.view(buffer.dtype).view(buffer.shape).copy_(buffer.detach())
    return flat


class MemoryConnection:
    """One end; the other one is `other`."""

    other: MemoryConnection

    def __init__(self, peer: Greeting):
        self.peer = peer
        self._inbox: deque[Frame] = deque()
        reading = Reading()
        self.begin_reading, self.end_reading = reading.begin, reading.end
        self.stop_reading = reading.stop
        self._arrived = threading.Condition(threading.Lock())
        self._armed = False
        self._closed = False
        self._ended = False  # by the other end
        self._poller: Poller | None = None
        self._callback: Callable[[], None] | None = None

    def send(self, frame: Frame, blocked: Callable[[], object] | None = None) -> None:  # noqa: ARG002
        if self._closed or self._ended:
            raise ConnectionClosed("the connection is closed")
        self.other.deliver(Frame(frame.whole_head(), [_copy(buffer) for buffer in frame.buffers]))

    def hold(self, frame: Frame) -> int:  # noqa: ARG002
        return 0  # sending is no more than putting it into a queue

    def flush(self, blocked: Callable[[], object] | None = None) -> None:
        pass

    def nudge(self, frame: Frame) -> bool:
        self.send(frame)
        return True

    def deliver(self, frame: Frame | None) -> None:
        """Take a frame from the other end; None says that it has closed."""
        with self._arrived:
            if frame is not None:
                self._inbox.append(frame)
            else:
                self._ended = True
            self._arrived.notify()
            notice = self._armed or (frame is None and self._callback is not None)
            self._armed = False
        if notice:
            self._call_back()

    def _call_back(self) -> None:
        if self._poller is not None and self._callback is not None:
            self._poller.post(self._callback)

    def receive(self) -> list[Frame]:
        with self._arrived:
            frames = list(self._inbox)
            self._inbox.clear()
            if self._closed:
                raise ConnectionClosed("the connection is closed")
            if self._ended and not frames:
                raise ConnectionClosed("the peer closed the connection")
        return frames

    def wait(self, timeout: float | None) -> bool:
        with self._arrived:
            return self._arrived.wait_for(self._is_readable, timeout)

    def _is_readable(self) -> bool:
        return bool(self._inbox) or self._closed or self._ended

    def attach(self, poller: Poller, callback: Callable[[], None]) -> None:
        with self._arrived:
            self._poller, self._callback = poller, callback
            ended = self._ended
        if ended:
            self._call_back()

    def arm(self) -> None:
        with self._arrived:
            ready = self._is_readable()
            self._armed = not ready
        if ready:
            self._call_back()

    def disarm(self) -> None:
        with self._arrived:
            self._armed = False
            unnoticed = self._ended and not self._closed
        if unnoticed:  # the notice of the end was used up by what came before it
            self._call_back()

    def trim(self) -> None:
        pass

    def close(self) -> None:
        with self._arrived:
            if self._closed:
                return
            self._closed = True
            self._arrived.notify_all()
        self.other.deliver(None)

    def abandon(self) -> None:
        self._closed = True
