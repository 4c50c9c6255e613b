"""The interface of a transport: what the layers above may rely on.

A *frame* is a head (bytes) and buffers (tensors), see `wire.frames`. A *connection* moves frames to
and from one peer; in each direction they arrive in the order in which they were sent. A *listener*
accepts connections that peers open.

Two kinds of threads read connections: callers that wait for the answer to their call, and the
worker's leader, the thread that waits in the poller for the messages of all connections. `receive`
returns the frames that have arrived and does not block. `wait` blocks until there may be more
frames; callers use it. `arm` asks the poller to call back once when there is something to receive;
the leader uses it. Only one thread at a time, the *reader*, reads a connection: the thread for
which `begin_reading` returned True, until it calls `end_reading`. Any thread may send.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple, Protocol

from gradwire._core.transport.poller import Poller
from gradwire._core.wire.frames import Frame

#: The type of a function `call_later(seconds, callback)`. It arranges that `callback` is called
#: after that time.
CallLater = Callable[[float, Callable[[], None]], None]
#: A deadline that has passed: send what can be sent without waiting.
AT_ONCE = -inf


class Address(NamedTuple):
    """Where a listener can be reached: the name of a transport, and a place in the format of that
    transport, for example host and port."""

    transport: str
    place: str


class Greeting(NamedTuple):
    """The identity of a worker, as proven in the handshake."""

    worker_id: int
    name: str
    #: A random text, new each time a worker starts. It distinguishes a worker from an earlier one
    #: with the same name.
    incarnation: str


class Connection(Protocol):
    """One end of a connection. All methods raise `ConnectionClosed` once the connection has
    ended."""

    peer: Greeting

    @property
    def last_taken(self) -> float:
        """The last time at which the peer took data after it had made a sending thread wait. It is
        a time of `time.monotonic`, or 0 if no thread has waited yet."""

    def send(
        self, frame: Frame, blocked: Callable[[], object] | None = None, deadline: float = inf
    ) -> None:
        """Send a whole frame, after all frames sent earlier. When this method returns or raises an
        error, the caller may change the frame's tensors. If the peer is slow to take the frame,
        call `blocked` once.

        Do not wait longer than until `deadline`, a time of `time.monotonic`. If the frame is not
        sent by then, raise SendTimeout. If no part of the frame has been sent, it is withdrawn: the
        peer never gets it. A frame that has been sent in part cannot be withdrawn. The rest of it
        is kept back, as by `hold`, and the caller must see to it that `flush` is called."""

    def hold(self, frame: Frame) -> int:
        """Keep a small frame back until a later frame is sent or `flush` is called. Return how many
        frames are kept back now, or 0 if this frame must be sent with `send` instead."""

    def flush(self, blocked: Callable[[], object] | None = None, deadline: float = inf) -> None:
        """Send what is kept back. Raise SendTimeout if that is not done by the deadline; what is
        left stays kept back."""

    def withdraw(self, is_wanted: Callable[[Frame], bool]) -> bool:
        """Remove the frame for which `is_wanted` returns True from the frames that are kept back.
        Return False if there is no such frame, or a part of it has been sent."""

    def try_send(self, frame: Frame) -> bool:
        """Send a small frame, or drop it if sending would block. Return False if the frame was not
        sent because other frames must be sent first: another thread is sending, or frames are kept
        back. Return True if it was sent, and also if it was dropped because the peer takes no
        data."""

    def begin_reading(self) -> bool:
        """Make this thread the reader. Return False if another thread is reading."""

    def end_reading(self) -> None:
        """End this thread's role as the reader, so that another thread can take it."""

    def stop_reading(self) -> bool:
        """End this thread's role as the reader after an interrupt, when the thread may not know
        whether it is the reader. Return True if the thread was the reader, or may have been. In
        that case frames that the thread has received may be lost."""

    def receive(self) -> list[Frame]:
        """Return the frames that have arrived; there may be none. Do not wait, except for a few
        milliseconds while the rest of a large frame is arriving. Only the reader calls this."""

    def wait(self, timeout: float | None) -> bool:
        """Block until there may be something to receive or the connection has ended. Return False
        after `timeout` seconds; None waits for ever. Only the reader calls this."""

    def attach(self, poller: Poller, callback: Callable[[], None]) -> None:
        """Set the poller that `arm` uses and the callback that the poller calls. From now on the
        poller also calls back when the peer closes the connection."""

    def arm(self) -> None:
        """Have the poller call back once, as soon as there is something to receive."""

    def disarm(self) -> None:
        """Have the poller call back only when the peer closes the connection."""

    def trim(self) -> None:
        """Free the memory that was not used since the last call of `trim`. If it is shared memory,
        the peer is told to free it too, with a message. Do not wait until the peer takes this
        message. Raise SendTimeout if a part of it, or a frame before it, is kept back. The caller
        must then see to it that `flush` is called."""

    def close(self) -> None:
        """End the connection at both ends. Any thread may call this, and more than once."""

    def abandon(self) -> None:
        """Close the file descriptors that a forked child process has inherited. The connection of
        the parent process stays open."""


class Listener(Protocol):
    """Accepts connections until it is closed."""

    address: Address

    def close(self) -> None: ...

    def abandon(self) -> None:
        """Close the file descriptors that a forked child process has inherited. The parent process
        goes on listening."""


class Transport(Protocol):
    """Makes listeners, and connections to listeners of the same kind."""

    @property
    def name(self) -> str: ...

    def listen(
        self,
        me: Greeting,
        poller: Poller,
        accepted: Callable[[Connection], None],
        call_later: CallLater,
    ) -> Listener:
        """Start to accept connections. The poller calls `accepted` with each connection whose
        client has proven that it belongs to the group. The listener uses `call_later` to
        disconnect clients that take too long."""

    def connect(self, place: str, me: Greeting, them: Greeting, timeout: float) -> Connection:
        """Open a connection to the worker `them`, within `timeout` seconds in all. Raise
        ConnectionRefusedError only if that worker certainly does not listen at `place`: either no
        process listens there, or the process that listens has proven that it is another worker of
        the group. Raise AuthenticationError if the process that answers has not proven that it is
        a worker of the group. Raise another OSError for any other failure."""
