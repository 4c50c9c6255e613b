"""Counting the calls of one worker.

The shutdown barrier compares how many calls were sent and received, and debug information shows
how many are open. Counters and timings for monitoring belong here too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from gradwire._core.rpc.peers import Peers
from gradwire._core.rpc.server import ServerChannel

#: `wait_until_idle` checks after this many seconds, then after twice as many, up to the maximum.
_FIRST_PAUSE_SECONDS = 0.0005
_MAX_PAUSE_SECONDS = 0.02


class Metrics:
    """Numbers about the calls of one worker. Each channel (one side of a connection) counts its own
    calls; this class adds the counts up."""

    def __init__(self, peers: Peers, server_channels: Callable[[], Iterable[ServerChannel]]):
        self._peers = peers
        self._server_channels = server_channels
        #: Guards `_closed_traffic`. (Reentrant: the garbage collector may run while the lock is
        #: held, and end a connection.)
        self._lock = threading.RLock()
        #: (calls sent, calls received) over connections that have ended. None: a connection ended
        #: without a goodbye, so calls may have been lost on the way.
        self._closed_traffic: tuple[int, int] | None = (0, 0)

    def open_calls(self) -> int:
        """Return how many calls of this worker wait for an answer."""
        return sum(channel.open_calls for channel in self._peers.channels())

    def served_calls(self) -> int:
        """Return how many calls of other workers are not answered yet."""
        return sum(len(channel.requests) for channel in self._server_channels())

    def traffic(self) -> tuple[int, int] | None:
        """Return (calls sent, calls received) since the start, or None if calls may have been
        lost."""
        with self._lock:
            if self._closed_traffic is None:
                return None
            sent, received = self._closed_traffic
        received += sum(channel.traffic()[1] for channel in self._server_channels())
        return sent + sum(channel.traffic()[0] for channel in self._peers.channels()), received

    def add_closed_connection(self, sent: int, received: int, *, said_goodbye: bool) -> None:
        """Add the calls of a connection that has ended to the totals. If the connection ended
        without a goodbye, calls may have been lost, and the totals become unknown."""
        with self._lock:
            if self._closed_traffic is not None and said_goodbye:
                before = self._closed_traffic
                self._closed_traffic = (before[0] + sent, before[1] + received)
            else:
                self._closed_traffic = None

    def wait_until_idle(self, deadline: float) -> bool:
        """Wait until no call from or to this worker is open. Return False at the deadline.

        This method checks again and again, instead of being notified. A worker that only serves
        calls waits here all the time. If every answer woke this thread, it would take the
        interpreter lock away from the threads that serve."""
        pause = _FIRST_PAUSE_SECONDS
        while self.served_calls() or self.open_calls():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(left, pause))
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)
        return True
