"""What every transport offers, and nothing more.

A *frame* is a head (bytes) and buffers (tensors), see `wire.frames`. A *connection* moves frames to
one other worker, in order, in both directions. A *listener* yields connections that others open.

Reading is shared by two kinds of threads, so it is split in three: `receive` takes what is there
and never blocks; `wait` blocks a thread that wants to read for itself; `arm` asks the poller to
call back, once, when there is something to receive. One thread at a time reads a connection:
`begin_reading` says whether it may. Any thread may send.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from gradwire.transport.poller import Poller
from gradwire.wire.frames import Frame


class Address(NamedTuple):
    """Where a listener can be reached."""

    transport: str
    place: str


class Greeting(NamedTuple):
    """Who is at the other end, as proven in the handshake."""

    worker_id: int
    name: str
    #: Tells one life of a worker from the next under the same name.
    incarnation: str


class Connection(Protocol):
    """One end of a connection. `ConnectionClosed` is raised by all methods once it has ended."""

    peer: Greeting

    def send(self, frame: Frame, blocked: Callable[[], object] | None = None) -> None:
        """Send a frame whole, after those sent before it. The caller may change the tensors
        afterwards. `blocked` is called once if the other end is slow to take it."""

    def hold(self, frame: Frame) -> int:
        """Keep a small frame back to be sent with those that follow, at the latest by `flush`.
        How many are kept by now; 0 when this one is not fit for it and must be sent."""

    def flush(self, blocked: Callable[[], object] | None = None) -> None:
        """Send what is kept back."""

    def nudge(self, frame: Frame) -> bool:
        """Send a small frame unless that would block. False when another thread is sending."""

    def begin_reading(self) -> bool:
        """Become the thread that reads. False when another one does."""

    def end_reading(self) -> None:
        """Let others read."""

    def stop_reading(self) -> bool:
        """For a thread that was interrupted, and does not know whether it reads: let others read.
        True if it did, or may have: then what it has read is lost."""

    def receive(self) -> list[Frame]:
        """The frames that have arrived, perhaps none. It does not wait, or only for what is coming
        in just now, and for no more than a few milliseconds. For the reading thread."""

    def wait(self, timeout: float | None) -> bool:
        """Block until there may be something to receive, or the connection has ended. For the
        reading thread."""

    def attach(self, poller: Poller, callback: Callable[[], None]) -> None:
        """Choose who is called back, and notice from now on when the other end goes away."""

    def arm(self) -> None:
        """Call back once, from the poller, when there is something to receive."""

    def disarm(self) -> None:
        """Call back only when the other end goes away."""

    def trim(self) -> None:
        """Give back memory that has not been used since the last time."""

    def close(self) -> None:
        """End the connection at both ends. May be called from any thread, and again."""

    def abandon(self) -> None:
        """In a forked child: give the descriptors back, and leave the connection as it is."""


class Listener(Protocol):
    """Accepts connections until it is closed."""

    address: Address

    def trim(self) -> None:
        """Send away those who have connected and not said who they are."""

    def close(self) -> None: ...

    def abandon(self) -> None:
        """In a forked child: give the descriptors back."""


class Transport(Protocol):
    """A way to other workers."""

    @property
    def name(self) -> str: ...

    def listen(
        self, me: Greeting, poller: Poller, accepted: Callable[[Connection], None]
    ) -> Listener:
        """Accept connections; `accepted` is called by the poller for each, when it has proven
        that it belongs to the group."""

    def connect(self, place: str, me: Greeting, them: Greeting, timeout: float) -> Connection:
        """Open a connection to `them`. Raises OSError when nobody can be reached there and
        AuthenticationError when it is somebody else."""
