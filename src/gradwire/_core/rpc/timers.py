"""The timer thread of a worker.

The thread fails calls whose deadline has passed, sends heartbeats to silent peers, and has the
executor run delayed callbacks. It sleeps until the first of these tasks is due. While the executor
has work, the timer thread also checks every two milliseconds whether the executor's leader, the
thread that serves requests, is stuck in a long request.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

from gradwire._core.rpc.deadlines import FOREVER
from gradwire._core.rpc.executor import Executor

logger = logging.getLogger("gradwire")

#: While there is work, the timer thread pauses for this many seconds between two checks. It checks
#: whether the executor's leader, the thread that reads and serves requests, is still busy with the
#: same request. If it is, another thread becomes the leader.
WATCH_SECONDS = 0.002
#: After this many checks without work for the executor, the timer thread stops these checks until
#: work begins again.
_WATCH_ROUNDS = 25

_NEVER = FOREVER


class Timers:
    """The timer thread of one worker. The text of the module lists its tasks."""

    def __init__(self, name: str, executor: Executor, housekeeping: Callable[[float], float]):
        self._executor = executor
        #: A function that fails late calls and sends heartbeats, and returns when to call it next.
        self._housekeeping = housekeeping
        #: The delayed callbacks: a heap of (time, serial number, callback).
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._lock = threading.RLock()
        #: Another thread releases this lock to wake the timer thread. (It is not an Event, because
        #: waiting for an Event holds the interpreter lock ten times as long as waiting for a lock.)
        self._wakeup = threading.Lock()
        self._wakeup.acquire()
        #: The time of the next housekeeping or delayed callback.
        self._next = _NEVER
        self._stopped = False
        self._thread = threading.Thread(
            target=self._run, name=f"gradwire-{name}-timers", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Wake the timer thread, so that it checks now what is due."""
        try:
            self._wakeup.release()
        except RuntimeError:
            pass  # The timer thread was woken already, which is enough.

    def wake_by(self, when: float) -> None:
        """Make sure that the timer thread does its tasks at the time `when` or before."""
        if when < self._next:
            with self._lock:
                self._next = min(when, self._next)
            self.wake()

    def call_later(self, delay: float, callback: Callable[[], None]) -> None:
        """Have the executor call `callback` after `delay` seconds. `callback` must be quick,
        because the requests of other workers wait until it returns.

        >>> timers.call_later(0.1, send_again)          # doctest: +SKIP
        """
        when = time.monotonic() + delay
        with self._lock:
            heapq.heappush(self._timers, (when, next(self._serial), callback))
        self.wake_by(when)

    def _run(self) -> None:
        quiet_rounds = 0
        while not self._stopped:
            now = time.monotonic()
            if now >= self._next:
                self._next = _NEVER
                try:
                    self.wake_by(self._housekeeping(now))
                    self._run_timers(now)
                except Exception:
                    logger.exception("gradwire: error in housekeeping")
                    self.wake_by(now + 1.0)
            quiet_rounds = 0 if self._executor.promote_follower() else quiet_rounds + 1
            timeout = WATCH_SECONDS
            if quiet_rounds >= _WATCH_ROUNDS:
                self._executor.unwatched = True
                # The leader may have begun work just before `unwatched` was set. Then it does not
                # wake this thread, so check once more.
                if self._executor.promote_follower():
                    quiet_rounds = 0
                else:
                    timeout = max(0.0, self._next - time.monotonic())
            if self._wakeup.acquire(timeout=min(timeout, 3600.0)):
                quiet_rounds = 0

    def _run_timers(self, now: float) -> None:
        with self._lock:
            while self._timers and self._timers[0][0] <= now:
                self._executor.post(heapq.heappop(self._timers)[2])
            following = self._timers[0][0] if self._timers else _NEVER
        self.wake_by(following)

    def stop(self) -> None:
        self._stopped = True
        self.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
