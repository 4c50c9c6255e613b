"""The threads of a worker.

One of them leads: it waits at the poller for something to read, reads it, and runs what was asked
for itself, because handing a request to another thread costs as much as the whole way over the
wire. A request that takes its time must not hold up the ones behind it, so the lead is handed over

* when the leader is about to wait for another worker (`step_aside`), or for a slow reader,
* when the watch finds it busy with one and the same thing (`relieve`).

A thread that has lost the lead finishes what it was doing and rests until it is called upon. How
many user functions run at a time is limited; a thread that waits for another worker does not
count, so calls that call back can nest as deep as they like, and one worker that takes no answers
does not stop the others.
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

from gradwire.transport.poller import Poller

logger = logging.getLogger("gradwire")

#: A thread that nobody has needed for so long ends.
_REST_SECONDS = 10.0


class _Member:
    """One thread of the crew."""

    __slots__ = ("call", "counted", "ident", "remainder")

    def __init__(self) -> None:
        self.ident = 0
        #: Released to make this thread, at rest, the leader.
        self.call = threading.Lock()
        self.call.acquire()
        #: Whether it runs a user function without being the leader.
        self.counted = False
        #: What the next leader takes up should this one lose the lead half way.
        self.remainder: Callable[[], None] | None = None


class Executor:
    """Runs what arrives. See the module's text for the rules."""

    def __init__(self, name: str, poller: Poller, limit: int):
        self._name = name
        self._poller = poller
        #: How many user functions may run at a time.
        self.limit = limit
        self._lock = threading.Lock()
        self._members: dict[int, _Member] = {}
        self._resting: list[_Member] = []
        self._threads: set[threading.Thread] = set()
        self._started = 0
        self._short_of_threads = False
        self._leader = 0
        self._busy = False
        self._step = self._step_seen = 0
        self._counted = 0
        self._backlog: deque[Callable[[], None]] = deque()
        #: The threads that wait for a worker to take what they send.
        self.sending: set[int] = set()
        self.stopped = False
        #: Called when there is work after a pause; see `Clock`.
        self.wake_watch: Callable[[], None] = lambda: None
        self.unwatched = True

    # -- from any thread

    def start(self) -> None:
        with self._lock:
            if not self._appoint():
                raise RuntimeError("no thread can be started to serve calls")

    def submit(self, work: Callable[[], None]) -> None:
        """Run a user function soon, on a thread of the crew."""
        self._poller.post(lambda: self.run(work))

    def post(self, callback: Callable[[], None]) -> None:
        """Have the leader call something short; there is none after the end, then call it here."""
        if self.stopped:
            callback()
        else:
            self._poller.post(callback)

    # -- from threads of the crew

    def leads(self) -> bool:
        """Whether the calling thread still has the lead."""
        return self._leader == get_ident()

    def leave_behind(self, remainder: Callable[[], None] | None) -> bool:
        """Say what the next leader must take up if this thread loses the lead from here on. False
        if it has lost the lead already: then nobody takes it up."""
        me = get_ident()
        member = self._members.get(me)
        if member is not None:
            member.remainder = remainder
        return self._leader == me or self.stopped

    def run(self, work: Callable[..., None], *args: Any) -> None:
        """Run a user function here and now, or when there is room for it. For the leader."""
        if self._counted >= self.limit:
            with self._lock:  # nobody may finish between the look and the note
                if self._counted >= self.limit:
                    self._backlog.append(partial(work, *args))
                    return
        self._step += 1
        work(*args)

    def hand_over(self) -> None:
        """Before a wait for a worker that is slow to take what is sent: as `step_aside`, and
        `take_up` comes afterwards."""
        member = self._members.get(get_ident())
        if member is None:
            return
        with self._lock:
            if self._leader == member.ident:
                self._release_lead(count=False)
            elif member.counted:
                self._uncount(member)
            else:
                return  # it is aside already
        self.sending.add(member.ident)

    def take_up(self) -> None:
        """Whatever was sent has been taken, or never will be."""
        me = get_ident()
        if me in self.sending:
            self.sending.discard(me)
            self.step_back()

    def step_aside(self) -> bool:
        """Before a wait for another worker: give up the lead, and do not count while waiting.
        Returns whether `step_back` must be called afterwards."""
        member = self._members.get(get_ident())
        if member is None:
            return False
        with self._lock:
            if self._leader == member.ident:
                self._release_lead(count=False)
            elif member.counted:
                self._uncount(member)
        return True

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around a wait."""
        stepped = self.step_aside()
        try:
            yield
        finally:
            if stepped:
                self.step_back()

    def step_back(self) -> None:
        with self._lock:
            member = self._members[get_ident()]
            if not member.counted:  # a callback that waited too has stepped back already
                member.counted = True
                self._counted += 1

    # -- from the watch

    def relieve(self) -> bool:
        """Give the lead to another thread if the leader has been busy with the same thing since
        the last call. Returns whether the crew did anything at all since then."""
        self._look_for_waiting()
        if self._busy and self._step == self._step_seen:
            with self._lock:
                if self._busy and self._step == self._step_seen and not self.stopped:
                    self._release_lead(count=True)
            return True
        active = self._step != self._step_seen
        self._step_seen = self._step
        return active

    def _look_for_waiting(self) -> None:
        """Threads may wait for futures where that is not seen from here, in
        `torch.futures.wait_all` for one. Those do not count either, should others need the room."""
        if not self._backlog or self._counted < self.limit:
            return
        frames = sys._current_frames()
        with self._lock:
            for member in self._members.values():
                frame = frames.get(member.ident)
                waits = frame is not None and frame.f_code.co_filename == torch.futures.__file__
                if member.counted and waits:
                    self._uncount(member)

    # -- the lead

    def _release_lead(self, *, count: bool) -> None:
        member = self._members[self._leader]
        if not self._appoint():
            return  # it keeps the lead; the watch tries again
        if count:
            member.counted = True
            self._counted += 1
        if member.remainder is not None:
            self._poller.post(member.remainder)

    def _appoint(self) -> bool:
        """Make a resting thread the leader, or a new one. False: there is none to be had."""
        if self.stopped:
            self._leader = 0
        elif self._resting:
            member = self._resting.pop()
            self._leader = member.ident
            member.call.release()
        else:
            self._started += 1
            thread = threading.Thread(
                target=self._live, name=f"gradwire-{self._name}-{self._started}", daemon=True
            )
            leader, self._leader = self._leader, 0
            self._threads.add(thread)
            try:
                thread.start()
            except RuntimeError:  # there are too many threads
                if not self._short_of_threads:
                    logger.warning("gradwire worker %s: no thread can be started", self._name)
                self._short_of_threads = True
                self._threads.discard(thread)
                self._leader = leader
                return False
            self._short_of_threads = False
        self._busy = False
        return True

    def _live(self) -> None:
        member = _Member()
        member.ident = get_ident()
        with self._lock:
            self._members[member.ident] = member
            self._leader = member.ident
        try:
            while self._lead(member) and self._rest(member):
                pass
        finally:
            with self._lock:
                self._members.pop(member.ident, None)
                self.sending.discard(member.ident)
                self._threads.discard(threading.current_thread())

    def _lead(self, member: _Member) -> bool:
        """Lead until the lead is lost. False when the crew is dismissed."""
        me = member.ident
        poller = self._poller
        while True:
            with self._lock:
                if self.stopped:
                    self._finish(member)
                    return False
                if self._leader != me:
                    self._finish(member)
                    return True
                self._busy = False
                member.remainder = None
                if member.counted:  # it stepped aside, and there was nobody to take the lead
                    self._uncount(member)
            callback = poller.next()
            if callback is None:
                continue
            self._step += 1
            self._busy = True
            if self.unwatched:
                self.unwatched = False
                self.wake_watch()
            try:
                callback()
            except BaseException:
                logger.exception("gradwire worker %s: error while serving", self._name)
            callback = None  # what it holds need not wait for the next one

    def _finish(self, member: _Member) -> None:
        if member.counted:
            self._uncount(member)

    def _uncount(self, member: _Member) -> None:
        member.counted = False
        self._counted -= 1
        if self._backlog:
            self._poller.post(self._run_backlog)

    def _run_backlog(self) -> None:
        self.leave_behind(self._run_backlog)
        while self._counted < self.limit and self.leads():
            try:
                work = self._backlog.popleft()
            except IndexError:
                return
            self.run(work)

    def _rest(self, member: _Member) -> bool:
        """Wait to be appointed. False when nobody needs this thread any more."""
        with self._lock:
            if self.stopped:
                return False
            self._resting.append(member)
        if member.call.acquire(timeout=_REST_SECONDS):
            return not self.stopped
        with self._lock:
            if member in self._resting:
                self._resting.remove(member)
                return False
        return member.call.acquire() and not self.stopped

    # -- the end

    def stop(self, deadline: float) -> list[str]:
        """Dismiss the crew; returns the names of threads still in a user function."""
        with self._lock:
            self.stopped = True
            for member in self._resting:
                member.call.release()
            self._resting.clear()
            threads = list(self._threads)
        self._poller.wake()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return [t.name for t in threads if t.is_alive() and t is not threading.current_thread()]
