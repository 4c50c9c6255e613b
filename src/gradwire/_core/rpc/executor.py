"""The threads that serve a worker: the Leader/Followers pattern.

(D. C. Schmidt, C. O'Ryan, M. Kircher, I. Pyarali: "Leader/Followers", PLoP 2000.) One thread, the
leader, waits at the poller until a connection can be read. The leader reads a request and runs the
function itself, because passing a request to another thread costs as much time as sending it to
another process.

In the original pattern the leader promotes a follower, which makes that thread the new leader,
before it handles each event. Here the leader keeps the leadership while it runs a function, since
most functions are short. The leader loses the leadership only

* when it is about to wait for another worker (`begin_blocking`), or for a receiver that is slow to
  read the messages sent to it (`begin_blocked_send`);
* when the timer thread finds the leader busy with the same request twice in a row
  (`promote_follower`).

A thread that has lost the leadership finishes its function, then becomes a follower and sleeps
until it is promoted. The number of user functions that run at a time is limited. A thread that
waits for another worker does not count, so calls that call back can nest to any depth, and a worker
that does not read the answers sent to it does not stop the other workers.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch

from gradwire._core.transport.poller import Poller

logger = logging.getLogger("gradwire")

#: A follower (a sleeping thread) ends if it has not become the leader after this many seconds.
_IDLE_SECONDS = 10.0


class _WorkerThread:
    """The state of one thread of the executor."""

    __slots__ = ("counted", "ident", "promotion", "remainder")

    def __init__(self) -> None:
        self.ident = 0
        #: While this thread is a follower, it sleeps until another thread releases this lock to
        #: make it the leader.
        self.promotion = threading.Lock()
        self.promotion.acquire()
        #: Whether this thread counts towards the limit of user functions that may run at a time. It
        #: does if it runs a user function, is not the leader, and does not wait for another worker.
        self.counted = False
        #: The function that the next leader must call if this thread loses the leadership before it
        #: has done all work of its present callback.
        self.remainder: Callable[[], None] | None = None


class Executor:
    """Runs the callbacks of the poller and the user functions of one worker, on its own threads.
    The text of the module has the rules."""

    def __init__(
        self, name: str, poller: Poller, limit: int, wake_watch: Callable[[], None] = lambda: None
    ):
        self._name = name
        self._poller = poller
        #: How many user functions may run at a time.
        self.limit = limit
        #: Makes the timer thread watch the leader again (see `unwatched`).
        self._wake_watch = wake_watch
        #: Whether the timer thread has stopped watching the leader. To watch means to check every
        #: two milliseconds whether the leader is stuck in one request. The timer thread stops this
        #: when there is no work for a while, and sets this flag. A leader that begins work and
        #: finds the flag set resets it and wakes the timer thread.
        self.unwatched = True
        self._lock = threading.Lock()
        self._worker_threads: dict[int, _WorkerThread] = {}
        self._followers: list[_WorkerThread] = []
        self._threads: set[threading.Thread] = set()
        self._started = 0
        self._short_of_threads = False
        #: The id of the leader (the thread that waits at the poller); 0 if there is none.
        self._leader = 0
        #: Whether the leader is running a callback.
        self._busy = False
        #: `_step` is the number of callbacks and functions begun so far. `_step_seen` is the value
        #: of `_step` when the timer thread last checked. If both are equal, nothing new was begun,
        #: so a busy leader is still running the same callback or function.
        self._step = self._step_seen = 0
        #: How many threads count towards `limit`: they run a user function, are not the leader, and
        #: do not wait for another worker.
        self._counted = 0
        #: User functions that are not started yet, because as many are running as `limit` allows.
        self._backlog: deque[Callable[[], None]] = deque()
        #: The ids of threads that wait for another worker to read a message they are sending.
        self.blocked_senders: set[int] = set()
        self.stopped = False

    # -- from any thread

    def start(self) -> None:
        """Start the first thread, as the leader."""
        with self._lock:
            if not self._promote():
                raise RuntimeError("no thread can be started to serve calls")

    def submit(self, work: Callable[[], None]) -> None:
        """Queue a user function. A thread of this executor will run it."""
        self._poller.post(lambda: self.run(work))

    def post(self, callback: Callable[[], None]) -> None:
        """Have the leader call `callback`, which must be quick. When the executor has stopped,
        there is no leader, and the calling thread calls `callback`."""
        if self.stopped:
            callback()
        else:
            self._poller.post(callback)

    # -- from threads of the executor

    def is_leader(self) -> bool:
        """Return whether the calling thread is the leader."""
        return self._leader == get_ident()

    def set_successor_work(self, remainder: Callable[[], None] | None) -> bool:
        """Set the function that the next leader must call if this thread loses the leadership. None
        means that no work is left. Return False if this thread has lost the leadership already.
        Then no other thread will call the function, and this thread must find another way to get
        the work done."""
        me = get_ident()
        thread = self._worker_threads.get(me)
        if thread is not None:
            thread.remainder = remainder
        return self._leader == me or self.stopped

    def run(self, work: Callable[..., None], *args: Any) -> None:
        """Run a user function at once, or append it to the backlog if the limit is reached. The
        leader calls this."""
        if self._counted >= self.limit:
            # The lock is held so that no function ends between the check below and the append. The
            # end of a function starts the functions in the backlog. If it came before the append,
            # it would miss this function.
            with self._lock:
                if self._counted >= self.limit:
                    self._backlog.append(partial(work, *args))
                    return
        self._step += 1
        work(*args)

    def begin_blocked_send(self) -> None:
        """Give up the leadership before a wait for a worker that is slow to read a message. While
        the thread waits, it does not count towards the limit of user functions. The thread must
        call `end_blocked_send` afterwards."""
        thread = self._worker_threads.get(get_ident())
        if thread is None:
            return
        with self._lock:
            if self._leader == thread.ident:
                self._give_up_leadership(count=False)
            elif thread.counted:
                self._uncount(thread)
            else:
                # The thread has called `begin_blocking` before, so it is neither leader nor
                # counted.
                return
        self.blocked_senders.add(thread.ident)

    def end_blocked_send(self) -> None:
        """If the calling thread has called `begin_blocked_send`, count it towards the limit of user
        functions again. Call this after a send, when the other worker has read the message or the
        connection has ended."""
        me = get_ident()
        if me in self.blocked_senders:
            self.blocked_senders.discard(me)
            self.end_blocking()

    def begin_blocking(self) -> bool:
        """Give up the leadership before a wait for another worker. While the thread waits, it does
        not count towards the limit of user functions. Return whether the thread must call
        `end_blocking` afterwards."""
        thread = self._worker_threads.get(get_ident())
        if thread is None:
            return False
        with self._lock:
            if self._leader == thread.ident:
                self._give_up_leadership(count=False)
            elif thread.counted:
                self._uncount(thread)
        return True

    def end_blocking(self) -> None:
        """Count the calling thread towards the limit of user functions again, after a wait."""
        with self._lock:
            thread = self._worker_threads[get_ident()]
            # If there was another wait inside this wait, the end of the inner wait has counted the
            # thread already.
            if not thread.counted:
                thread.counted = True
                self._counted += 1

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Return a context manager to put around a wait for another worker.

        >>> with executor.blocking():                    # doctest: +SKIP
        ...     event.wait()
        """
        must_end = self.begin_blocking()
        try:
            yield
        finally:
            if must_end:
                self.end_blocking()

    # -- from the timer thread

    def promote_follower(self) -> bool:
        """Make a follower the leader if the present leader has been busy with the same request
        since the last call of this method. Return whether the executor has done any work since that
        call."""
        self._uncount_blocked_in_torch()
        if self._busy and self._step == self._step_seen:
            with self._lock:
                if self._busy and self._step == self._step_seen and not self.stopped:
                    self._give_up_leadership(count=True)
            return True
        active = self._step != self._step_seen
        self._step_seen = self._step
        return active

    def _uncount_blocked_in_torch(self) -> None:
        """Find threads that wait inside torch, for example in `torch.futures.wait_all`, and stop
        counting them towards the limit of user functions. (Torch does not call `begin_blocking`.)
        The search is slow, so it is made only while functions wait because the limit is reached."""
        if not self._backlog or self._counted < self.limit:
            return
        frames = sys._current_frames()
        with self._lock:
            for thread in self._worker_threads.values():
                frame = frames.get(thread.ident)
                waits = frame is not None and frame.f_code.co_filename == torch.futures.__file__
                if thread.counted and waits:
                    self._uncount(thread)

    # -- leadership

    def _give_up_leadership(self, *, count: bool) -> None:
        """Make another thread the leader. `count` says whether the old leader counts towards the
        limit of user functions from now on. The calling thread must hold `_lock`."""
        thread = self._worker_threads[self._leader]
        if not self._promote():
            # No other thread can be started, so the leader stays. The timer thread will try again.
            return
        if count:
            thread.counted = True
            self._counted += 1
        if thread.remainder is not None:
            self._poller.post(thread.remainder)

    def _promote(self) -> bool:
        """Make a follower (a sleeping thread) the leader, or else a new thread. Return False if
        there is no follower and no thread can be started."""
        if self.stopped:
            self._leader = 0
        elif self._followers:
            thread = self._followers.pop()
            self._leader = thread.ident
            thread.promotion.release()
        else:
            self._started += 1
            new_thread = threading.Thread(
                target=self._live, name=f"gradwire-{self._name}-{self._started}", daemon=True
            )
            leader, self._leader = self._leader, 0
            self._threads.add(new_thread)
            try:
                new_thread.start()
            except RuntimeError:  # The system allows no more threads, so the old leader stays.
                if not self._short_of_threads:
                    logger.warning("gradwire worker %s: no thread can be started", self._name)
                self._short_of_threads = True
                self._threads.discard(new_thread)
                self._leader = leader
                return False
            self._short_of_threads = False
        self._busy = False
        return True

    def _live(self) -> None:
        """Run a thread of the executor: it is leader and follower in turn until it ends."""
        thread = _WorkerThread()
        thread.ident = get_ident()
        with self._lock:
            self._worker_threads[thread.ident] = thread
            self._leader = thread.ident
        try:
            while self._lead(thread) and self._follow(thread):
                pass
        finally:
            with self._lock:
                self._worker_threads.pop(thread.ident, None)
                self.blocked_senders.discard(thread.ident)
                self._threads.discard(threading.current_thread())

    def _lead(self, thread: _WorkerThread) -> bool:
        """Run the callbacks of the poller until this thread is no longer the leader. Return False
        when the executor has stopped."""
        me = thread.ident
        poller = self._poller
        while True:
            with self._lock:
                if self.stopped:
                    self._finish(thread)
                    return False
                if self._leader != me:
                    self._finish(thread)
                    return True
                self._busy = False
                thread.remainder = None
                # The leader does not count towards the limit of user functions. But if it stayed
                # the leader during a wait, because no other thread could be started, then
                # `end_blocking` has counted it. That is undone here.
                if thread.counted:
                    self._uncount(thread)
            callback = poller.next()
            if callback is None:
                continue
            self._step += 1
            self._busy = True
            if self.unwatched:
                self.unwatched = False
                self._wake_watch()
            try:
                callback()
            except BaseException:
                logger.exception("gradwire worker %s: error while serving", self._name)
            # The variable is cleared, because it would keep the callback and its values in memory
            # until the next callback.
            callback = None

    def _finish(self, thread: _WorkerThread) -> None:
        if thread.counted:
            self._uncount(thread)

    def _uncount(self, thread: _WorkerThread) -> None:
        thread.counted = False
        self._counted -= 1
        if self._backlog:
            self._poller.post(self._run_backlog)

    def _run_backlog(self) -> None:
        self.set_successor_work(self._run_backlog)
        while self._counted < self.limit and self.is_leader():
            try:
                work = self._backlog.popleft()
            except IndexError:
                return
            self.run(work)

    def _follow(self, thread: _WorkerThread) -> bool:
        """Sleep until this thread is made the leader. Return False when the thread must end."""
        with self._lock:
            if self.stopped:
                return False
            self._followers.append(thread)
        if thread.promotion.acquire(timeout=_IDLE_SECONDS):
            return not self.stopped
        with self._lock:
            if thread in self._followers:
                self._followers.remove(thread)
                return False
        # Just after the timeout, another thread took this thread from the followers to make it the
        # leader.
        return thread.promotion.acquire() and not self.stopped

    # -- the end

    def stop(self, deadline: float) -> list[str]:
        """End all threads. Return the names of the threads that still run a user function at the
        deadline."""
        with self._lock:
            self.stopped = True
            for follower in self._followers:
                follower.promotion.release()
            self._followers.clear()
            threads = list(self._threads)
        self._poller.wake()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return [t.name for t in threads if t.is_alive() and t is not threading.current_thread()]
