"""Noticing that other workers are lost, or have left, and that they are back.

A worker is *lost* when it has died, is frozen or cannot be reached; it has *left* when it said
goodbye; it is *gone* when it is lost or has left.

- A peer that owes an answer and is silent for a heartbeat interval is sent a heartbeat, a message
  that it must answer. If no message from the peer arrives until the heartbeat limit, this worker
  ends the connection.
- When a connection ends without a goodbye, the peer is *suspected*. This worker tries to connect to
  it. If the attempt shows that the peer has ended (see `membership.proves_end`), the peer is lost.
  Any other failure proves nothing: one of the two workers may have no file descriptors left, or
  strangers may fill the backlog of the peer. Then this worker tries again, with growing pauses. If
  no attempt succeeds until the heartbeat limit, the peer is lost too.
- A lost worker may be heard from again, because it was only frozen, or the network was cut: a new
  connection to it or from it succeeds, or a call from it arrives over an old one. Then it is a full
  member again. What was dropped when it was lost stays dropped. The time from when a worker is
  first heard of until it is gone is a *stay*. What this worker keeps for another one belongs to a
  stay. So the end of a stay never drops what belongs to the next one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

from gradwire._core.ids import WorkerInfo
from gradwire._core.rpc.executor import Executor
from gradwire._core.rpc.peers import Finding, Peers
from gradwire._core.rpc.server import ServerChannel
from gradwire._core.rpc.timers import Timers
from gradwire.options import Options

logger = logging.getLogger("gradwire")

#: The longest that one attempt to connect to a suspected peer takes.
_PROBE_SECONDS = 2.0
#: The pause after the first failed attempt to connect to a suspected peer. The pause is short,
#: because a process that was killed refuses new connections very soon after its old ones have
#: ended, and the refusal shows that it is dead. Each further pause is twice as long, up to the
#: maximum.
_FIRST_PAUSE_SECONDS = 0.001
_MAX_PAUSE_SECONDS = 1.0


class Stay:
    """The time from when this worker first hears of another worker until that worker is gone."""

    __slots__ = ("ended",)

    def __init__(self) -> None:
        self.ended = False


class Suspicion:
    """The attempts to find out whether a worker still runs, after a connection has ended."""

    def __init__(self, info: WorkerInfo, deadline: float):
        self.info = info
        #: When the worker counts as lost.
        self.deadline = deadline
        self.pause = _FIRST_PAUSE_SECONDS
        #: How many attempts to connect have failed.
        self.attempts = 0
        #: How many connections have ended since the suspicion began.
        self.ends = 0


class Liveness:
    """Notices when peers of one worker are gone, and when they are back, as the text of the module
    describes."""

    def __init__(
        self,
        peers: Peers,
        executor: Executor,
        timers: Timers,
        server_channels: Callable[[], Iterable[ServerChannel]],
        options: Options,
    ):
        self._peers = peers
        self._executor = executor
        self._timers = timers
        self._server_channels = server_channels
        self._interval = options.heartbeat_interval
        self._limit = options.heartbeat_limit
        # `heartbeat_limit` is how long a peer may be silent before its connection is ended. The
        # heartbeat is sent after one `heartbeat_interval` of silence. The rest of the limit is the
        # time in which the peer must answer. That time begins when the heartbeat is sent, even if
        # the heartbeat is late because this process was frozen. So the peer always has the whole
        # time to answer.
        self._heartbeat_timeout = options.heartbeat_limit - options.heartbeat_interval
        #: Functions that are called with each worker that is lost or has left.
        self.on_gone: list[Callable[[WorkerInfo], None]] = []
        #: Functions of the layers above. Each returns the ids of the workers from which its layer
        #: expects a message that is not the answer to an open call. If such a worker is silent, it
        #: is sent heartbeats, like a worker that owes an answer.
        self.awaited: list[Callable[[], set[int]]] = []
        #: The present stay of each worker, by its id. For a worker that is gone, this is its last
        #: stay, which has ended.
        self._stays: dict[int, Stay] = {}
        #: The workers that are suspected, by id.
        self.suspected: dict[int, Suspicion] = {}
        #: Guards `_stays` and `suspected`. (Reentrant: the garbage collector may run while the lock
        #: is held, and end a connection.)
        self._lock = threading.RLock()

    # -- who is gone

    def stay_of(self, worker_id: int) -> Stay:
        """Return the present stay of a worker or, if the worker is gone, its last one."""
        stay = self._stays.get(worker_id)
        return self._stays.setdefault(worker_id, Stay()) if stay is None else stay

    def is_gone(self, worker_id: int) -> bool:
        """Return whether a worker is lost or has left, and was not heard from since."""
        stay = self._stays.get(worker_id)
        return stay is not None and stay.ended

    def heard_from(self, info: WorkerInfo) -> None:
        """Note that a worker was heard from: it neither counts as lost any more, nor is it
        suspected."""
        if info.id not in self.suspected and not self.is_gone(info.id):
            return
        with self._lock:
            self.suspected.pop(info.id, None)
            is_back = self.is_gone(info.id)
            if is_back:
                self._stays[info.id] = Stay()
        # A process that is about to join the group has a negative id. It is not a worker that came
        # back, so there is no warning about it.
        if is_back and info.id >= 0:
            logger.warning(
                "worker %s is back. It can be called, and can call, as before; the references that "
                "it held to values of this worker are void",
                info.name,
            )

    def declare_gone(self, info: WorkerInfo) -> None:
        """End the stay of a worker, and tell the listeners that it is gone."""
        with self._lock:
            self.suspected.pop(info.id, None)
            self.stay_of(info.id).ended = True
        self._tell_listeners(info)

    def _tell_listeners(self, info: WorkerInfo) -> None:
        for listener in list(self.on_gone):
            try:
                listener(info)
            except Exception:
                logger.exception("error while cleaning up after worker %s", info.name)

    # -- silence

    def check(self, now: float) -> float:
        """Fail calls whose deadline has passed, send heartbeats to silent peers, and end the
        connections to peers that did not answer a heartbeat in time. Return the time of the next
        check."""
        due = now + self._interval
        awaited = {worker for workers in self.awaited for worker in workers()}
        for channel in self._peers.channels():
            due = min(due, channel.expire(now))
            asked_at = channel.heartbeat_sent_at
            if not (
                asked_at is not None
                or channel.open_calls
                or channel.watched
                or channel.peer.id in awaited
            ):
                continue
            silence = now - channel.last_heard
            if asked_at is not None and now - asked_at >= self._heartbeat_timeout:
                channel.end(
                    f"no heartbeat for {silence:.1f} s; the worker may be frozen, or its machine "
                    "may be down"
                )
            elif silence >= self._interval:
                channel.send_heartbeat()
                due = min(due, (channel.heartbeat_sent_at or now) + self._heartbeat_timeout)
        return due

    # -- suspicion

    def connection_ended(
        self, info: WorkerInfo, *, said_goodbye: bool, asked_at: float | None = None
    ) -> None:
        """Find out whether a worker is gone, after a connection to or from it has ended. `asked_at`
        is the time of the heartbeat that the worker has not answered, if there is one."""
        if said_goodbye:
            self._peers.forget(info)
            self.declare_gone(info)
        elif self.is_gone(info.id):
            self._peers.forget(info)
        else:
            self.suspect(info, None if asked_at is None else asked_at - self._interval)

    def suspect(self, info: WorkerInfo, last_heard: float | None = None) -> None:
        """Find out whether a worker still runs. If that stays unknown, it counts as lost when
        `heartbeat_limit` has passed since `last_heard`, which is now if it is not given."""
        deadline = (time.monotonic() if last_heard is None else last_heard) + self._limit
        with self._lock:
            if self.is_gone(info.id):
                return
            suspicion = self.suspected.get(info.id)
            if suspicion is not None:
                suspicion.ends += 1
                suspicion.deadline = min(suspicion.deadline, deadline)
                return
            suspicion = self.suspected[info.id] = Suspicion(info, deadline)
        for channel in self._server_channels():
            if channel.peer.id == info.id:
                channel.report_next_call()
        self._executor.submit(partial(self._investigate, suspicion))

    def _investigate(self, suspicion: Suspicion) -> None:
        """Try once to connect to a suspected worker. Depending on the result, stop suspecting the
        worker, declare it lost, or plan another attempt."""
        info = suspicion.info
        if self.suspected.get(info.id) is not suspicion:
            return  # The worker was heard from, so it is not suspected any more.
        ends = suspicion.ends
        with self._executor.blocking():
            finding = self._peers.probe(info, _PROBE_SECONDS)
        if finding is Finding.RUNS:
            with self._lock:
                if self.suspected.get(info.id) is not suspicion:
                    return
                if suspicion.ends == ends:
                    del self.suspected[info.id]
                    return
                # A connection to the worker has ended during the attempt. The worker may have ended
                # too, so another attempt is needed.
        elif finding is Finding.ENDED or time.monotonic() >= suspicion.deadline:
            self._give_up(suspicion, finding)
            return
        suspicion.attempts += 1
        self._timers.call_later(
            suspicion.pause,
            lambda: self._executor.submit(partial(self._investigate, suspicion)),
        )
        suspicion.pause = min(2 * suspicion.pause, _MAX_PAUSE_SECONDS)

    def _give_up(self, suspicion: Suspicion, finding: Finding) -> None:
        """End the stay of a suspected worker, and tell the listeners that it is lost."""
        info = suspicion.info
        with self._lock:
            if self.suspected.get(info.id) is not suspicion:
                return  # The worker was heard from just now, so it is not lost.
            del self.suspected[info.id]
            self.stay_of(info.id).ended = True
        if finding is Finding.ENDED:
            logger.info("worker %s has ended without a goodbye", info.name)
        else:
            logger.warning(
                "worker %s counts as lost: nothing was heard from it for %g s. It may still be "
                "running; the references that it holds to values of this worker are void",
                info.name,
                self._limit,
            )
        self._tell_listeners(info)
