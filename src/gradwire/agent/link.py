"""Our calls to one other worker, and their answers.

A thread that waits for an answer reads the connection itself if nobody else does: no other thread
has to be woken on the way. It hands on the answers of others that it comes across, and when it
leaves, the executor's leader takes over the reading if answers are still outstanding.

Who settles a call is decided by who takes it out of `_open`, atomically: the thread that read its
answer, the clock at its deadline, or whoever noticed that the connection is gone. A synchronous
call is settled by giving its thread the reply; the future of an asynchronous one is completed by
the executor's leader, or by the very thread that waits for it and read its answer.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from gradwire.agent.executor import Executor
from gradwire.agent.futures import Future
from gradwire.agent.opencall import FOREVER, OpenCall
from gradwire.errors import CallError, CallTimeout, ConnectionClosed, ShutDownError, WorkerLost
from gradwire.ids import WorkerInfo
from gradwire.transport.base import Connection
from gradwire.transport.poller import Poller
from gradwire.wire.frames import Frame
from gradwire.wire.messages import UNCOUNTED, Kind, Tags, pack, peek
from gradwire.wire.values import Encoded, Passenger

#: With this many calls open, more are sent a few at a time, and their answers are let gather
#: before they are read: a system call for each would take the interpreter from the threads that
#: make the calls.
_MANY = 16
_GATHER_SECONDS = 100e-6
_INTERRUPTED = "a thread that was reading it was interrupted"
#: Held while a call gets its gate: two threads must not make one each.
_making_gates = threading.RLock()


class Link:
    """One connection, used for calls from here to there."""

    def __init__(
        self,
        to: WorkerInfo,
        connection: Connection,
        poller: Poller,
        executor: Executor,
        complete: Callable[[OpenCall], None],
        absorb: Callable[[Frame], None],
        ended: Callable[[Link], None],
        due: Callable[[float], None],
    ):
        self.to = to
        self.connection = connection
        self._executor = executor
        self._hand_over = executor.hand_over
        self._complete = complete
        self._absorb = absorb
        self._ended = ended
        self._due = due
        self._ids = itertools.count(1)
        self._uncounted_ids = itertools.count(UNCOUNTED + 1)
        self._looks = 0
        self._open: dict[int, OpenCall] = {}
        #: Calls that were given up, and what they carry; their answers are still read, and dropped
        #: in good order.
        self._late: dict[int, Sequence[Passenger]] = {}
        self._answered: deque[OpenCall] = deque()
        self._to_call_back: deque[Future[Any]] = deque()
        self._armed = False
        self._flush_due = False
        #: The one-shot notice was used up, also that of the other end's going away.
        self._event_spent = False
        self._caller_reads = False
        self._end_lock = threading.Lock()
        #: Several threads may find a call late at once; one of them makes a note of it.
        self._failing = threading.Lock()
        #: Why the connection ended, once it has.
        self.end_reason: str | None = None
        #: Whether the other worker, or this one, said that it leaves.
        self.farewell = False
        self._leaving = False
        #: Ask for signs of life even when nothing is expected.
        self.watched = False
        self.last_sign = time.monotonic()
        #: When a sign of life was asked for that has not come yet.
        self.asked_at: float | None = None
        connection.attach(poller, self._on_readable)

    # -- calling

    def send(self, call: OpenCall, encoded: Encoded, tags: Tags | None = None) -> None:
        """Let a call leave. Raises WorkerLost if it cannot, and then it surely has not run."""
        id = call.id = next(self._uncounted_ids if call.kind in _UNCOUNTED_KINDS else self._ids)
        call.link = self
        passengers = call.passengers = encoded.passengers
        if not self._open:
            self.last_sign = time.monotonic()
        encoded.head = pack(call.kind, id, encoded.payload, tags, bool(passengers))
        try:
            self._open[id] = call
            self._due(call.deadline)
            if call.future is None or len(self._open) <= _MANY or not self._hold(encoded):
                self.connection.send(encoded, self._hand_over)
        except ConnectionClosed as closed:
            untouched = self._open.pop(call.id, None) is not None
            self.end(str(closed))
            if not untouched:  # its deadline, or whoever noticed first, has settled it
                encoded.tell_passengers(self.to)
                return
            raise WorkerLost(
                f"{call.name} could not be sent to worker {self.to.name!r}: {closed}. "
                "It has not run there",
                worker=self.to.name,
                call=call.name,
                may_have_run=False,
            ) from closed
        except BaseException as error:
            self._open.pop(call.id, None)
            if not isinstance(error, Exception):
                self.end("a thread that was sending on it was interrupted")
            raise
        finally:
            if self._executor.sending:
                self._executor.take_up()
        if passengers:
            encoded.tell_passengers(self.to)
        if self.end_reason is not None:
            self._fail_all(self.end_reason)  # it ended before this call was among the open ones
        if call.future is not None and not self._armed and not self._caller_reads:
            self._arm()

    def _hold(self, frame: Frame) -> bool:
        """One of many calls: it can wait for the next ones, and travel with them."""
        held = self.connection.hold(frame)
        if held >= _MANY:
            self.connection.flush(self._hand_over)
        elif held and not self._flush_due:
            self._flush_due = True
            self._executor.post(self._flush)
        return held > 0

    def _flush(self) -> None:
        self._flush_due = False  # first: whoever holds a frame back from now on asks again
        try:
            self.connection.flush(self._hand_over)
        except ConnectionClosed as closed:
            self.end(str(closed))
        except BaseException:
            self.end("a thread that was sending on it was interrupted")
            raise
        finally:
            if self._executor.sending:
                self._executor.take_up()

    def ask_for_sign(self) -> None:
        """Send a heartbeat. Whatever comes back is a sign of life."""
        if self.asked_at is None:
            self.asked_at = time.monotonic()  # before asking: the answer takes it back
        self._arm()
        try:
            if not self.connection.nudge(Frame(pack(Kind.HEARTBEAT, UNCOUNTED, b""))):
                # Something is being sent; that it gets on is seen to by the connection.
                self.asked_at, self.last_sign = None, time.monotonic()
        except ConnectionClosed as closed:
            self.end(str(closed))

    def say_farewell(self) -> None:
        try:
            self.connection.nudge(Frame(pack(Kind.FAREWELL, UNCOUNTED, b"")))
        except ConnectionClosed:
            pass

    @property
    def open_calls(self) -> int:
        return len(self._open) + len(self._answered)

    def count_sent(self) -> int:
        """How many calls have left here, for the other side to compare with what it got."""
        self._looks += 1
        return next(self._ids) - self._looks

    # -- waiting

    def wait(self, call: OpenCall) -> None:
        """Return when a call is settled; this thread reads its answer where that is possible."""
        if call.finished:
            return
        aside = self._executor.step_aside()
        try:
            if self._flush_due:
                self._flush()
            while not call.finished:
                if call.id in self._open and self.connection.begin_reading():
                    self._read_answer_of(call)
                else:
                    self._wait_at_gate(call)
        except BaseException:
            if call.is_own and call.future is not None and not call.future.done():
                self._answered.append(call)
            if self._answered:
                self._executor.post(self._complete_answered)
            if self.connection.stop_reading():
                self._caller_reads = False
                self.end(_INTERRUPTED)
            elif not self._caller_reads and (self._open or self._late):
                self._arm()  # others count on being read for
            raise
        finally:
            if aside:
                self._executor.step_back()

    def _read_answer_of(self, call: OpenCall) -> None:
        """Read until a call is settled by somebody, at best by its own answer. This thread has
        the right to read."""
        mine = False
        try:
            self._caller_reads = True
            if self._armed:
                self._armed = False
                self.connection.disarm()
            while not mine and call.id in self._open:
                left = call.deadline - time.monotonic()
                if self.connection.wait(None if left == FOREVER else left):
                    mine = self._receive(call)
                    if self._answered:  # others must not wait until this thread is done
                        self._executor.post(self._complete_answered)
                elif left <= 0:
                    self._expire(call)
        finally:
            try:
                self._caller_reads = False
                self.connection.end_reading()
                # Those who came meanwhile saw that somebody reads, and count on being read for.
                if self._open or self._late:
                    self._arm()
                elif self._event_spent:
                    self._rest()
            finally:  # whatever interrupts: nobody else would
                if call.is_own and not call.finished:
                    self._finish_own(call)

    def _finish_own(self, call: OpenCall) -> None:
        """Complete the future that this very thread waits for."""
        future = call.future
        try:
            self._finish(call)
        finally:
            if future is not None and future.has_callbacks:
                # Not here: who waits may hold what they need.
                self._call_back_later(future)

    def _call_back_later(self, future: Future[Any]) -> None:
        self._to_call_back.append(future)
        self._executor.post(self._call_back)

    def _call_back(self) -> None:
        """Run the callbacks of futures that were completed by those who waited for them."""
        while self._to_call_back:
            try:
                future = self._to_call_back.popleft()
            except IndexError:
                return  # another thread was faster
            future.run_callbacks()

    def _wait_at_gate(self, call: OpenCall) -> None:
        """Wait while another thread reads, or settles this call."""
        with _making_gates:
            if call.gate is None:
                call.gate = threading.Lock()
                call.gate.acquire()
        if call.finished:
            return
        # Once it is taken, whoever took it opens the gate, so no deadline is needed.
        taken = call.id not in self._open
        left = FOREVER if taken else call.deadline - time.monotonic()
        if call.gate.acquire(timeout=-1 if left == FOREVER else max(0.0, left)):
            call.open_gate()  # for others who wait for the same call
        else:
            self._expire(call)

    # -- receiving

    def _receive(self, mine: OpenCall | None) -> bool:
        """Take what has arrived; True when the answer to `mine` was there. For the reader."""
        found = False
        call: OpenCall | None = None
        try:
            frames = self.connection.receive()
            self.last_sign = time.monotonic()
            self.asked_at = None
            for frame in frames:
                kind, call_id = peek(frame.head)
                call = self._open.get(call_id)
                if call is None or self._open.pop(call_id, None) is None:
                    # It is too late for its deadline, or a sign of life.
                    call = None
                    self.farewell |= kind == Kind.FAREWELL
                    self._tell_answered(self._late.pop(call_id, ()))
                    self._absorb(frame)
                    continue
                if call.passengers:
                    self._tell_answered(call.passengers)
                call.reply = frame
                found |= call is mine
                self._hand_on(call, mine)
        except ConnectionClosed as closed:
            self.end(str(closed))
        except BaseException:  # an interrupt: answers are lost
            if call is not None and call.id not in self._open and call.error is None:
                # This one may be in nobody's hands.
                if call.reply is None:
                    self._open[call.id] = call
                elif not call.finished and call not in self._answered:
                    self._hand_on(call, mine)
            self.end(_INTERRUPTED)
            raise
        return found

    def _hand_on(self, call: OpenCall, mine: OpenCall | None) -> None:
        """Give the answer of a call to whoever waits for it, or see to it that its future is
        completed."""
        if call.future is None:
            call.finish()
        elif call is mine:
            call.is_own = True
        else:
            self._answered.append(call)

    def _tell_answered(self, passengers: Sequence[Passenger]) -> None:
        for passenger in passengers:
            passenger.answered(self.to)

    def _tell_lost(self, passengers: Sequence[Passenger]) -> None:
        for passenger in passengers:
            passenger.lost(self.to)

    def _on_readable(self) -> None:
        """The leader's turn to read."""
        self._armed = False
        self._event_spent = True
        if len(self._open) >= _MANY:
            time.sleep(_GATHER_SECONDS)
        if not self.connection.begin_reading():
            return  # whoever reads will arm, or ask for somebody to
        try:
            self._receive(None)
        finally:
            self.connection.end_reading()
        if self._executor.leads():
            self._complete_answered()
        else:
            self._executor.post(self._complete_answered)

    def _complete_answered(self) -> None:
        """Complete futures as long as this thread leads; the next leader goes on."""
        executor = self._executor
        if not executor.leave_behind(self._complete_answered):
            executor.post(self._complete_answered)
            return
        while self._answered:
            self._complete_next()
            if not executor.leads() and not executor.stopped:
                return
        executor.leave_behind(None)
        if self._caller_reads:
            return
        if not self._open and not self._late:
            self._rest()
        elif not self._armed:
            self._arm()

    def _rest(self) -> None:
        """Nothing is expected: only notice when the other end goes away."""
        self._event_spent = self._armed = False
        self.connection.disarm()
        if self._open or self._late:  # a call that left meanwhile counted on what was just undone
            self._arm()

    def _finish(self, call: OpenCall) -> None:
        """Complete the future of a call that was taken out of the open ones."""
        future = call.future
        try:
            self._complete(call)
        except BaseException:
            if future is not None and not future.done():  # an interrupt, in the middle of it
                future.complete(None, self._loss(call, "its answer was not read to the end"))
            raise
        finally:
            call.finish()

    def _arm(self) -> None:
        if self.end_reason is not None:
            return  # one that has ended is readable for ever
        self._armed = True
        self._event_spent = False
        self.connection.arm()

    # -- failing

    def expire(self, now: float) -> float:
        """Fail the calls whose deadline has passed; returns the next deadline."""
        calls = list(self._open.values())
        for call in calls:
            if call.deadline <= now:
                self._expire(call)
        return min((call.deadline for call in calls if call.deadline > now), default=FOREVER)

    def _expire(self, call: OpenCall) -> None:
        expired = self._fail(
            call,
            lambda: CallTimeout(
                f"{call.name} on worker {self.to.name!r}: RPC ran for more than set timeout "
                f"({call.timeout * 1000:.0f} ms) and will now be marked with an error. It may "
                "still be running there; give it a longer timeout, or see what that worker is busy "
                "with",
                worker=self.to.name,
                call=call.name,
            ),
            late=True,
        )
        if expired and not self._caller_reads:
            self._arm()

    def give_up(self, call: OpenCall) -> None:
        """Let the thread that waits for a call go on without its answer."""
        given_up = self._fail(
            call,
            lambda: CallError(
                f"{call.name} on worker {self.to.name!r} was given up; it may still be running",
                worker=self.to.name,
                call=call.name,
            ),
            late=True,
        )
        if given_up:
            self.ask_for_sign()  # the answer wakes the thread, should it be reading

    def end(self, reason: str, *, leaving: bool = False) -> None:
        """Close the connection and fail what waits for it. When this worker is `leaving`, its
        executor does not complete any more futures, so that is done here."""
        with self._end_lock:
            if self.end_reason is not None:
                return
            self.end_reason = reason
            self.farewell |= leaving
            self._leaving = leaving
        try:
            self.connection.close()
            self._ended(self)
        finally:
            self._fail_all(reason)
            if leaving:
                self.drain()

    def drain(self) -> None:
        """Complete what is settled, here and now: the executor does not any more."""
        while self._answered:
            self._complete_next()
        self._call_back()

    def _complete_next(self) -> None:
        """Complete a future whose call was settled, and run its callbacks."""
        try:
            call = self._answered.popleft()
        except IndexError:
            return  # another thread was faster
        future = call.future
        self._finish(call)
        if future is not None:
            future.run_callbacks()

    def _fail_all(self, reason: str) -> None:
        for call in list(self._open.values()):
            self._fail(call, lambda call=call: self._loss(call, reason))  # type: ignore[misc]
        while self._late:
            try:
                _, passengers = self._late.popitem()
            except KeyError:
                break  # another thread was faster
            self._tell_lost(passengers)

    def _loss(self, call: OpenCall, reason: str) -> CallError:
        if self._leaving:
            return ShutDownError(
                f"{call.name} on worker {self.to.name!r} was still running when this worker was "
                "shut down. It may have run",
                worker=self.to.name,
                call=call.name,
            )
        return WorkerLost(
            f"worker {self.to.name!r} was lost while {call.name} was running there: {reason}. "
            "The function may have run, in part or to its end",
            worker=self.to.name,
            call=call.name,
        )

    def _fail(
        self, call: OpenCall, make_error: Callable[[], CallError], *, late: bool = False
    ) -> bool:
        """Settle a call with an error, unless it is settled already. `late`: its answer may come
        all the same."""
        with self._failing:
            if call.id not in self._open:
                return False
            if late:
                self._late[call.id] = call.passengers  # first: its answer may come this very moment
            if self._open.pop(call.id, None) is None:
                self._late.pop(call.id, None)
                return False
        if not late:
            self._tell_lost(call.passengers)
        call.error = make_error()
        if call.future is None:
            call.finish()
        else:
            self._answered.append(call)
            self._executor.post(self._complete_answered)
        return True


_UNCOUNTED_KINDS = frozenset({Kind.BARRIER, Kind.FAREWELL})
