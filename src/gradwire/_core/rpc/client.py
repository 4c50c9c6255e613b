"""The calling side of a connection: our calls to one peer, and their answers.

A thread that waits for an answer reads the connection itself if no other thread reads it: then no
other thread has to be woken. If it reads the answers to other calls too, it hands them on. If
answers are still expected when the thread stops, the leader takes over: the thread of the executor
that waits for messages on all connections (see `executor`). The state machine in `reading_state`
decides which thread reads, and when the poller must notify the leader.

Several threads may try to finish a call: the thread that has read the answer, the timer thread at
the deadline, a thread that finds the connection broken. The thread that removes the call from the
dictionary `_open` finishes it; the removal is atomic, so only one thread succeeds. The thread of a
synchronous call is given the reply. The future of an asynchronous call is completed by the leader,
or by a thread that waits for the future and has read the answer itself.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from gradwire._core.ids import WorkerInfo
from gradwire._core.rpc.deadlines import FOREVER, timeout_text
from gradwire._core.rpc.executor import Executor
from gradwire._core.rpc.futures import Future
from gradwire._core.rpc.open_call import OpenCall
from gradwire._core.rpc.reading_state import TABLE, Action, Event, State
from gradwire._core.transport.base import AT_ONCE, Connection
from gradwire._core.transport.poller import Poller
from gradwire._core.wire.encoding import Attachment, Encoded
from gradwire._core.wire.frames import Frame
from gradwire._core.wire.messages import UNCOUNTED, Kind, Tags, pack, peek
from gradwire.errors import (
    CallError,
    CallTimeout,
    ConnectionClosed,
    SendTimeout,
    ShutDownError,
    WorkerLost,
)

#: When more calls than this are open, messages are gathered: several calls are sent with one system
#: call, and the leader (the thread that reads the answers) waits a moment, so that it can read
#: several answers with one system call. Otherwise the many system calls would slow down the threads
#: that make the calls.
_MANY_CALLS = 16
_GATHER_SECONDS = 100e-6
#: When the deadline of a call passes while a thread is still sending it, the timer thread looks at
#: the call again after this time.
_SENDING_SECONDS = 0.01
_INTERRUPTED_READING = "a thread that was reading it was interrupted"
_INTERRUPTED_SENDING = "a thread that was sending on it was interrupted"
_UNCOUNTED_KINDS = frozenset({Kind.BARRIER, Kind.ACTIVITY, Kind.FAREWELL})
#: Held while a call gets its latch (the lock that waiting threads block on), so that two threads
#: do not make two latches for one call.
_making_latches = threading.RLock()

_IDLE, _ARMED, _NOTIFIED = State.IDLE, State.ARMED, State.NOTIFIED
_ARM, _DISARM = Action.ARM, Action.DISARM
_ANSWER_EXPECTED, _NOTHING_EXPECTED = Event.ANSWER_EXPECTED, Event.NOTHING_EXPECTED
_CALLER_READS, _CONNECTION_ENDED = Event.CALLER_READS, Event.CONNECTION_ENDED


class ClientPort(Protocol):
    """The part of the worker that a `ClientChannel` uses."""

    @property
    def poller(self) -> Poller: ...

    @property
    def executor(self) -> Executor: ...

    def complete(self, call: OpenCall) -> None:
        """Complete the future of a call from its reply or its error."""

    def discard(self, frame: Frame) -> None:
        """Release the RRefs in an answer that came after its call had failed."""

    def wake_at(self, deadline: float) -> None:
        """Make sure that `ClientChannel.expire` is called at the deadline or before."""

    def channel_ended(self, channel: ClientChannel) -> None:
        """Tell the worker that the connection of this channel has ended."""


class Slot(Protocol):
    """The object that holds the channel to a peer while the connection lasts."""

    info: WorkerInfo
    channel: ClientChannel | None


class ClientChannel:
    """One connection, used for calls from this worker to a peer."""

    def __init__(self, slot: Slot, connection: Connection, port: ClientPort):
        self.peer = slot.info
        self.connection = connection
        self._slot = slot
        self._port = port
        self._executor = port.executor
        self._begin_blocked_send = port.executor.begin_blocked_send
        self._wake_at = port.wake_at
        self._call_ids = itertools.count(1)
        self._uncounted_ids = itertools.count(UNCOUNTED + 1)
        #: How many call ids the peer never sees: those of withdrawn calls, and those that the
        #: method `traffic` has taken to find out how far the counter is.
        self._skipped_ids = 0
        self._open: dict[int, OpenCall] = {}
        #: Call id -> attachments (objects in the call's message that must learn what happens to
        #: the message), for calls that have failed but may still be answered. Such an answer is
        #: read, and the RRefs in the answer are released.
        self._late: dict[int, Sequence[Attachment]] = {}
        #: Calls that have their answer or their error, and whose futures must still be completed.
        self._answered: deque[OpenCall] = deque()
        #: Completed futures whose callbacks must still be run.
        self._to_call_back: deque[Future[Any]] = deque()
        #: Whether something is held back (see `_hold`), and the executor's leader was asked to send
        #: it.
        self._flush_due = False
        #: Whether a thread of the executor sends what is held back. The peer may keep that thread
        #: waiting, so no second one joins it.
        self._flushing = False
        #: `_state` and `_caller_reads` decide which thread reads; `reading_state` has the rules.
        self._state = State.IDLE
        self._caller_reads = False
        #: Held while `_state` changes. (Reentrant: the garbage collector may run while the lock is
        #: held, and send messages.)
        self._moving = threading.RLock()
        #: Held while a thread fails a call, because several threads may try to fail the same call
        #: at its deadline. It also guards `_skipped_ids`.
        self._failing = threading.Lock()
        #: Why the connection ended; None while it lasts.
        self.end_reason: str | None = None
        #: Whether the connection was ended because this worker shut down.
        self._shut_down = False
        #: Whether one of the two workers has said goodbye.
        self.farewell = False
        #: Whether to send heartbeats to the peer even while no call is open.
        self.watched = False
        #: When a message from the peer was last read.
        self.last_heard = time.monotonic()
        #: When a heartbeat was sent, if the peer has sent no message since; else None.
        self.heartbeat_sent_at: float | None = None
        connection.attach(port.poller, self._on_readable)

    # -- the reading state

    def _move(self, event: Event) -> None:
        """Change the reading state as the table in `reading_state` says. If the table says so, arm
        the poller, so that it notifies the leader when an answer arrives, or disarm it."""
        with self._moving:
            state, action = TABLE[self._state][event]
            if action is _ARM:
                self.connection.arm()
                self._state = state
            else:
                self._state = state
                if action is _DISARM:
                    self.connection.disarm()

    def _expect_answer(self) -> None:
        """Make sure that a thread reads the expected answer. Before calling this method, store what
        the answer is expected for (an open call, a late call or a heartbeat), so that a thread that
        stops reading at this moment sees it."""
        if self._state is not _ARMED and not self._caller_reads:
            self._move(_ANSWER_EXPECTED)

    def _look(self) -> None:
        """Check whether an answer is expected, and report this to the state machine that decides
        which thread reads (see `reading_state`)."""
        if self._open or self._late or self.heartbeat_sent_at is not None:
            self._expect_answer()
        elif self._state is _NOTIFIED:
            self._move(_NOTHING_EXPECTED)

    # -- calling

    def send(
        self, call: OpenCall, encoded: Encoded, tags: Tags | None = None, wait: bool = True
    ) -> None:
        """Send a call. If this raises WorkerLost or CallTimeout, the called function has not run on
        the peer, and will not. If `wait` is False, do not wait while the peer takes no data: leave
        the call to the executor."""
        call_id = call.id = next(
            self._uncounted_ids if call.kind in _UNCOUNTED_KINDS else self._call_ids
        )
        call.channel = self
        attachments = call.attachments = encoded.attachments
        if not self._open:
            # The peer owed no answer until now, so its silence until now does not count.
            self.last_heard = time.monotonic()
        encoded.head = pack(call.kind, call_id, encoded.payload, tags, bool(attachments))
        deadline = call.deadline if wait else AT_ONCE
        try:
            self._open[call_id] = call
            self._wake_at(call.deadline)
            if (
                call.future is None
                or len(self._open) <= _MANY_CALLS
                or not self._hold(call, encoded, deadline)
            ):
                self.connection.send(encoded, self._begin_blocked_send, deadline)
        except SendTimeout as timeout:
            withdrawn = timeout.withdrawn and (wait or not self.connection.hold(encoded))
            self._flush_later()
            if withdrawn:
                unfinished = self._open.pop(call_id, None) is not None
                self._skip(call)
                if not unfinished:  # Another thread has failed the call already.
                    encoded.notify_attachments(None)
                    return
                raise self._timeout(call, True) from None
        except ConnectionClosed as closed:
            unfinished = self._open.pop(call_id, None) is not None
            self.end(str(closed))
            if not unfinished:  # Another thread has failed the call already.
                encoded.notify_attachments(self.peer)
                return
            raise WorkerLost(
                f"{call.name} could not be sent to worker {self.peer.name!r}: {closed}. "
                "It has not run there",
                worker=self.peer.name,
                call=call.name,
                may_have_run=False,
            ) from closed
        except BaseException as error:
            self._open.pop(call_id, None)
            if not isinstance(error, Exception):
                self.end(_INTERRUPTED_SENDING)
            raise
        finally:
            if self._executor.blocked_senders:
                self._executor.end_blocked_send()
        if attachments:
            encoded.notify_attachments(self.peer)
        call.sent = True
        if self.end_reason is not None:
            # Another thread has called `end`, perhaps before this call was added to `_open`. That
            # thread may have missed this call, so `_fail_all` fails the call here. But first, this
            # thread also calls `end`, which waits until the other thread has taken the channel out
            # of its slot. Otherwise the caller could try again and get the same ended channel.
            self.end(self.end_reason)
            self._fail_all(self.end_reason)
        if call.future is not None and self._state is not _ARMED and not self._caller_reads:
            # This does what `_expect_answer` does, and saves a function call.
            self._move(_ANSWER_EXPECTED)

    def _hold(self, call: OpenCall, frame: Frame, deadline: float) -> bool:
        """Hold a call back, to send it together with the next calls. Return False if the connection
        cannot hold the call back; then it must be sent now. Raise SendTimeout, as
        `Connection.send` does, if it must be sent now and is not sent by the deadline."""
        held = self.connection.hold(frame)
        if held >= _MANY_CALLS:
            try:
                self.connection.flush(self._begin_blocked_send, deadline)
            except SendTimeout:
                raise SendTimeout(withdrawn=self._withdraw(call)) from None
        elif held and not self._flush_due:
            self._flush_later()
        return held > 0

    def _withdraw(self, call: OpenCall) -> bool:
        """Take back a call that is held back. Return False if a part of it may have been sent."""
        return self.connection.withdraw(lambda frame: peek(frame.head)[1] == call.id)

    def _skip(self, call: OpenCall) -> None:
        """Leave a withdrawn call out of the number of calls sent, which `traffic` returns."""
        if call.id < UNCOUNTED:
            with self._failing:
                self._skipped_ids += 1

    def _flush_later(self) -> None:
        """Have the executor send what is held back."""
        if not self._flush_due:
            self._flush_due = True
            self._executor.post(self._flush_in_turn)

    def _flush_in_turn(self) -> None:
        # If another thread is flushing, it looks at `_flush_due` again afterwards.
        while self._flush_due and not self._flushing:
            self._flushing = True
            try:
                self.flush()
            finally:
                self._flushing = False

    def flush(self, deadline: float = FOREVER) -> None:
        """Send the calls that are held back. If that is not done by the deadline, leave the rest to
        the executor."""
        # The flag is reset before the calls are sent, so that a call that is held back from now on
        # asks for a new flush.
        self._flush_due = False
        try:
            self.connection.flush(self._begin_blocked_send, deadline)
        except SendTimeout:
            self._flush_later()
        except ConnectionClosed as closed:
            self.end(str(closed))
        except BaseException:
            self.end(_INTERRUPTED_SENDING)
            raise
        finally:
            if self._executor.blocked_senders:
                self._executor.end_blocked_send()

    def send_heartbeat(self) -> None:
        """Send a message that the peer must answer. Any message from the peer shows that it is
        alive."""
        if self.heartbeat_sent_at is None:
            # The time is stored before the heartbeat is sent, because the answer sets it back to
            # None.
            self.heartbeat_sent_at = time.monotonic()
        sent_at = self.heartbeat_sent_at
        self._expect_answer()
        try:
            if not self.connection.try_send(Frame(pack(Kind.HEARTBEAT, UNCOUNTED, b""))):
                # Other messages are still waiting to be sent on this connection, so the heartbeat
                # is not sent. If the peer takes data from these messages, it is alive.
                taken = self.connection.last_taken
                if sent_at is not None and taken > sent_at:
                    self.heartbeat_sent_at, self.last_heard = None, taken
                self._flush_later()
        except ConnectionClosed as closed:
            self.end(str(closed))

    def say_farewell(self) -> None:
        """Tell the peer that this worker leaves, unless sending would block."""
        try:
            self.connection.try_send(Frame(pack(Kind.FAREWELL, UNCOUNTED, b"")))
        except ConnectionClosed:
            pass

    @property
    def open_calls(self) -> int:
        return len(self._open) + len(self._answered)

    def traffic(self) -> tuple[int, int]:
        """Return (calls sent, calls received). The calling side of a connection receives none."""
        with self._failing:
            self._skipped_ids += 1
            return next(self._call_ids) - self._skipped_ids, 0

    # -- waiting

    def wait(self, call: OpenCall) -> None:
        """Return when a call is finished. This thread reads the answer if no other thread does."""
        if call.finished:
            return
        blocking = self._executor.begin_blocking()
        try:
            if self._flush_due:
                self.flush(call.deadline)
            while not call.finished:
                if call.id in self._open and self.connection.begin_reading():
                    self._read_answer_of(call)
                else:
                    self._wait_at_latch(call)
        except BaseException:
            if call.waiter_completes and call.future is not None and not call.future.done():
                self._answered.append(call)
            if self._answered:
                self._executor.post(self._complete_answered)
            if self.connection.stop_reading():
                self.end(_INTERRUPTED_READING)
            else:
                # The interrupt may have come before this thread, which has stopped reading, could
                # check whether answers are still expected. So check now.
                self._look()
            raise
        finally:
            if blocking:
                self._executor.end_blocking()

    def _read_answer_of(self, call: OpenCall) -> None:
        """Read the connection until the given call is finished, that is, until this thread or
        another one removes it from `_open`. This thread must hold the read token, the right to read
        the connection; this method gives the token back at its end."""
        answered = False
        try:
            self._caller_reads = True
            if self._state is _ARMED:
                self._move(_CALLER_READS)
            while not answered and call.id in self._open:
                left = call.deadline - time.monotonic()
                if self.connection.wait(None if left == FOREVER else left):
                    answered = self._receive(call)
                    # This thread goes on waiting for its own answer. So the leader completes the
                    # other calls.
                    if self._answered:
                        self._executor.post(self._complete_answered)
                elif left <= 0:
                    self._expire(call)
        finally:
            try:
                self._caller_reads = False
                self.connection.end_reading()
                # Otherwise `_look` would do nothing. Checking first saves a function call.
                if (
                    self._open
                    or self._state is not _IDLE
                    or self._late
                    or self.heartbeat_sent_at is not None
                ):
                    self._look()
            finally:
                # Even if this thread was interrupted, it must complete the future, because no other
                # thread would.
                if call.waiter_completes and not call.finished:
                    self._complete_waited_for(call)

    def _complete_waited_for(self, call: OpenCall) -> None:
        """Complete the future that the calling thread waits for."""
        future = call.future
        try:
            self._finish(call)
        finally:
            if future is not None and future.has_callbacks:
                # The leader runs the callbacks, because this thread may hold locks that they need.
                self._to_call_back.append(future)
                self._executor.post(self._call_back)

    def _call_back(self) -> None:
        """Run the callbacks of futures that were completed by the threads waiting for them."""
        while self._to_call_back:
            try:
                future = self._to_call_back.popleft()
            except IndexError:
                return  # Another thread has taken the last future.
            future.run_callbacks()

    def _wait_at_latch(self, call: OpenCall) -> None:
        """Wait while another thread reads the connection or finishes this call. The latch is a lock
        that is released when the call is finished."""
        with _making_latches:
            if call.latch is None:
                call.latch = threading.Lock()
                call.latch.acquire()
        if call.finished:
            return
        # If another thread has removed the call from `_open`, that thread finishes the call soon
        # and releases the latch. So this thread waits without a deadline.
        taken = call.id not in self._open
        left = FOREVER if taken else call.deadline - time.monotonic()
        if call.latch.acquire(timeout=-1 if left == FOREVER else max(0.0, left)):
            # Other threads may wait at the same latch. Releasing the latch again lets them go on.
            call.open_latch()
        else:
            self._expire(call)

    # -- receiving

    def _receive(self, awaited: OpenCall | None) -> bool:
        """Read the messages that have arrived. Return whether the answer to `awaited` was among
        them. The calling thread has the read token (the right to read the connection)."""
        answered = False
        call: OpenCall | None = None
        try:
            frames = self.connection.receive()
            self.last_heard = time.monotonic()
            self.heartbeat_sent_at = None
            for frame in frames:
                kind, call_id = peek(frame.head)
                call = self._open.get(call_id)
                if call is None or self._open.pop(call_id, None) is None:
                    # Either the call has failed already, or this message is not an answer to a
                    # call.
                    call = None
                    self.farewell |= kind == Kind.FAREWELL
                    self._tell_answered(self._late.pop(call_id, ()))
                    self._port.discard(frame)
                    continue
                if call.attachments:
                    self._tell_answered(call.attachments)
                call.reply = frame
                answered |= call is awaited
                self._hand_on(call, awaited)
        except ConnectionClosed as closed:
            self.end(str(closed))
        except BaseException:
            # This thread was interrupted, and may have lost answers. So it ends the connection,
            # which fails all open calls.
            if call is not None and call.id not in self._open and call.error is None:
                # This thread has removed the call from `_open`, so no other thread would finish the
                # call.
                if call.reply is None:
                    self._open[call.id] = call  # The call is put back, so that `end` fails it.
                elif not call.finished and call not in self._answered:
                    self._hand_on(call, awaited)
            self.end(_INTERRUPTED_READING)
            raise
        return answered

    def _hand_on(self, call: OpenCall, awaited: OpenCall | None) -> None:
        """Wake the thread of a synchronous call, which then takes the reply. For an asynchronous
        call, choose the thread that completes its future: the reading thread, if it waits for this
        call (`awaited`), else the leader."""
        if call.future is None:
            call.finish()
        elif call is awaited:
            call.waiter_completes = True
        else:
            self._answered.append(call)

    def _tell_answered(self, attachments: Sequence[Attachment]) -> None:
        for attachment in attachments:
            attachment.answered(self.peer)

    def _tell_lost(self, attachments: Sequence[Attachment]) -> None:
        for attachment in attachments:
            attachment.lost(self.peer)

    def _on_readable(self) -> None:
        """Read the answers that have arrived. The executor's leader calls this."""
        self._move(Event.NOTIFIED)
        if len(self._open) >= _MANY_CALLS:
            time.sleep(_GATHER_SECONDS)
        if not self.connection.begin_reading():
            # Another thread reads. When it stops, it checks whether answers are still expected.
            return
        try:
            self._receive(None)
        finally:
            self.connection.end_reading()
        if self._executor.is_leader():
            self._complete_answered()
        else:
            self._executor.post(self._complete_answered)

    def _complete_answered(self) -> None:
        """Complete the futures of answered calls, then look whether answers are still expected. If
        a callback takes so long that this thread loses the leadership of the executor, the next
        leader continues."""
        executor = self._executor
        if not executor.set_successor_work(self._complete_answered):
            executor.post(self._complete_answered)
            return
        while self._answered:
            self._complete_next()
            if not executor.is_leader() and not executor.stopped:
                return
        executor.set_successor_work(None)
        self._look()

    def _finish(self, call: OpenCall) -> None:
        """Complete the future of a call that was removed from `_open`."""
        future = call.future
        try:
            self._port.complete(call)
        except BaseException:
            # An interrupt (Ctrl-C) may have stopped `complete` before it completed the future. No
            # other thread would complete the future, so it gets an error here.
            if future is not None and not future.done():
                future.complete(None, self._loss(call, "its answer was not read to the end"))
            raise
        finally:
            call.finish()

    # -- failing

    def expire(self, now: float) -> float:
        """Fail the calls whose deadline is not later than `now`. Return the next deadline."""
        due = FOREVER
        for call in list(self._open.values()):
            if call.deadline > now:
                due = min(due, call.deadline)
            elif call.sent:
                self._expire(call)
            else:
                due = min(due, now + _SENDING_SECONDS)
        return due

    def _expire(self, call: OpenCall) -> None:
        if self._fail(call, self._timeout, late=True):
            self._expect_answer()

    def _timeout(self, call: OpenCall, withdrawn: bool) -> CallError:
        if withdrawn:
            outcome = (
                "The call was not sent, because that worker did not take earlier messages in time, "
                "so it has not run there. Find out whether that worker is frozen, or give the call "
                "a longer timeout"
            )
        else:
            outcome = (
                "It may still be running there; give it a longer timeout, or find out what that "
                "worker is busy with"
            )
        return CallTimeout(
            f"{call.name} on worker {self.peer.name!r}: {timeout_text(call.timeout)}. {outcome}",
            worker=self.peer.name,
            call=call.name,
            may_have_run=not withdrawn,
        )

    def give_up(self, call: OpenCall) -> None:
        """Fail a call whose answer is no longer needed, unless it is finished."""
        given_up = self._fail(
            call,
            lambda call, withdrawn: CallError(
                f"{call.name} on worker {self.peer.name!r} was given up; "
                + ("it has not run there" if withdrawn else "it may still be running"),
                worker=self.peer.name,
                call=call.name,
                may_have_run=not withdrawn,
            ),
            late=True,
        )
        if given_up:
            # The thread that waits for this call may be blocked in reading the connection. It
            # notices that the call has failed only when a message arrives. So send the peer a
            # heartbeat, which the peer answers with a message.
            self.send_heartbeat()

    def end(self, reason: str, *, shut_down: bool = False) -> None:
        """Close the connection and fail its open calls. `shut_down` says that this worker shuts
        down. Then this method also completes the futures, because the executor stops."""
        with self._moving:
            if self.end_reason is not None:
                return
            self.end_reason = reason
            self.farewell |= shut_down
            self._shut_down = shut_down
            if self._slot.channel is self:
                self._slot.channel = None
            self._move(_CONNECTION_ENDED)
        try:
            self.connection.close()
            self._port.channel_ended(self)
        finally:
            self._fail_all(reason)
            if shut_down:
                self.drain()

    def drain(self) -> None:
        """Complete the futures of all finished calls on this thread, and run their callbacks. This
        is for the shutdown, when the executor, which otherwise does this, stops."""
        while self._answered:
            self._complete_next()
        self._call_back()

    def trim(self) -> None:
        """Free the memory that the connection has not used since the last call of this method."""
        try:
            self.connection.trim()
        except SendTimeout:
            self._flush_later()

    def abandon(self) -> None:
        """Close this process's copies of the file descriptors, in a forked child. The connection of
        the parent stays open."""
        self.connection.abandon()

    def _complete_next(self) -> None:
        """Complete one future and run its callbacks."""
        try:
            call = self._answered.popleft()
        except IndexError:
            return  # Another thread has taken the last call.
        future = call.future
        self._finish(call)
        if future is not None:
            future.run_callbacks()

    def _fail_all(self, reason: str) -> None:
        for call in list(self._open.values()):
            self._fail(call, lambda call, _: self._loss(call, reason))
        while self._late:
            try:
                _, attachments = self._late.popitem()
            except KeyError:
                break  # Another thread has taken the last item of the dictionary.
            self._tell_lost(attachments)

    def _loss(self, call: OpenCall, reason: str) -> CallError:
        if self._shut_down:
            return ShutDownError(
                f"{call.name} on worker {self.peer.name!r} was still running when this worker was "
                "shut down. It may have run",
                worker=self.peer.name,
                call=call.name,
            )
        return WorkerLost(
            f"worker {self.peer.name!r} was lost while {call.name} was running there: {reason}. "
            "The function may have run, in part or to its end",
            worker=self.peer.name,
            call=call.name,
        )

    def _fail(
        self,
        call: OpenCall,
        make_error: Callable[[OpenCall, bool], CallError],
        *,
        late: bool = False,
    ) -> bool:
        """Finish a call with an error and return True. Return False and do nothing if another
        thread has removed the call from `_open`, because that thread finishes the call.

        `late` is True if the connection goes on after the failure. In that case the call is
        withdrawn if it is still held back; if it was sent, its answer may still come. The arguments
        of `make_error` are the call, and whether the call was withdrawn."""
        with self._failing:
            if call.id not in self._open:
                return False
            # Once the call is removed from `_open`, another thread may read its late answer. That
            # thread must find the call in `_late`, so the call is added to `_late` first.
            if late:
                self._late[call.id] = call.attachments
            if self._open.pop(call.id, None) is None:
                self._late.pop(call.id, None)
                return False
        withdrawn = late and self._withdraw(call)
        if withdrawn:
            self._skip(call)
            for attachment in self._late.pop(call.id, ()):
                attachment.sent(None)
        elif not late:
            self._tell_lost(call.attachments)
        call.error = make_error(call, withdrawn)
        if call.future is None:
            call.finish()
        else:
            self._answered.append(call)
            self._executor.post(self._complete_answered)
        return True
