"""The thread that watches the time for a worker.

It fails calls whose deadline has passed, asks silent peers for a sign of life, runs what was put
off, and keeps an eye on the executor while there is work. It sleeps until the earliest of these is
due; when nothing goes on, it sleeps for long.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

from gradwire.agent.executor import Executor

logger = logging.getLogger("gradwire")

#: A leader busy with one thing for this long is relieved.
WATCH_SECONDS = 0.002
#: The watch is kept up for so many rounds after the last activity.
_WATCH_ROUNDS = 25

_NEVER = float("inf")


class Clock:
    """See the module's text."""

    def __init__(self, name: str, executor: Executor, housekeeping: Callable[[float], float]):
        self._executor = executor
        #: Does what is due and returns when it wants to be called next.
        self._housekeeping = housekeeping
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._lock = threading.RLock()
        #: Free when the thread is to look again. (An event takes the interpreter ten times as long
        #: from the threads that work, every time it is waited for.)
        self._bell = threading.Lock()
        self._bell.acquire()
        self._next = _NEVER
        self._stopped = False
        self._thread = threading.Thread(
            target=self._run, name=f"gradwire-{name}-clock", daemon=True
        )
        executor.wake_watch = self._ring

    def start(self) -> None:
        self._thread.start()

    def due(self, when: float) -> None:
        """See to it that housekeeping happens at `when` or before."""
        if when < self._next:
            with self._lock:
                self._next = min(when, self._next)
            self._ring()

    def _ring(self) -> None:
        try:
            self._bell.release()
        except RuntimeError:
            pass  # it rings already

    def later(self, delay: float, callback: Callable[[], None]) -> None:
        """Have the executor's leader call something short after `delay` seconds."""
        when = time.monotonic() + delay
        with self._lock:
            heapq.heappush(self._timers, (when, next(self._serial), callback))
        self.due(when)

    def _run(self) -> None:
        quiet_rounds = 0
        while not self._stopped:
            now = time.monotonic()
            if now >= self._next:
                self._next = _NEVER
                try:
                    self.due(self._housekeeping(now))
                    self._run_timers(now)
                except Exception:
                    logger.exception("gradwire: error in housekeeping")
                    self.due(now + 1.0)
            quiet_rounds = 0 if self._executor.relieve() else quiet_rounds + 1
            if quiet_rounds < _WATCH_ROUNDS:
                timeout = WATCH_SECONDS
            else:
                self._executor.unwatched = True
                if self._executor.relieve():  # it began before it could see that nobody watches
                    quiet_rounds = 0
                    timeout = WATCH_SECONDS
                else:
                    timeout = max(0.0, self._next - time.monotonic())
            if self._bell.acquire(timeout=min(timeout, 3600.0)):
                quiet_rounds = 0

    def _run_timers(self, now: float) -> None:
        with self._lock:
            while self._timers and self._timers[0][0] <= now:
                self._executor.post(heapq.heappop(self._timers)[2])
            following = self._timers[0][0] if self._timers else _NEVER
        self.due(following)

    def stop(self) -> None:
        self._stopped = True
        self._ring()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
