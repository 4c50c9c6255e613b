"""The shutdown barrier: no worker ends while another one still needs it.

A graceful shutdown of a group of fixed size waits until all calls of the group are done. That is
termination detection by counting messages until two rounds are equal, as in the four-counter method
of F. Mattern ("Algorithms for distributed termination detection", Distributed Computing 2, 1987).
In each round, every worker that has no open call reports to the worker with the lowest id how many
calls it has sent and received since the start. All work is done when as many calls were received as
sent, and the numbers equal the numbers of the round before: a call that was still on its way would
have changed them.

Unlike Mattern's method, this one tolerates failures. Workers that are lost are left out. Their
calls are missing in the sums, so the sums are not compared, and two equal rounds suffice. If a
message was lost on a connection that still exists, the sums differ for ever; then many equal rounds
suffice.

A worker that waits is told from time to time which workers have not reported. It logs their names,
and asks them whether they still work. If none of them has done anything for long, it gives up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from typing import NamedTuple

from gradwire._core.ids import WorkerInfo
from gradwire._core.rpc.agent import Agent
from gradwire._core.rpc.deadlines import FOREVER
from gradwire._core.rpc.server import Request
from gradwire._core.wire.messages import Kind
from gradwire.errors import CallError, ShutDownError

logger = logging.getLogger("gradwire")

#: (calls sent, calls received) by one worker. None: calls may have been lost with a connection.
_Report = tuple[int, int] | None

#: The seconds between two rounds when the numbers no longer change, but the number of calls sent is
#: not the number of calls received.
_PAUSE_SECONDS = 0.05
#: After this many rounds with equal numbers, all work counts as done, even if the numbers of calls
#: sent and received still differ.
_MAX_EQUAL_ROUNDS = 20
#: At the end, the worker with the lowest id waits at most this many seconds until the other workers
#: have left.
_LAST_SECONDS = 5.0
#: The worker with the lowest id answers a report after at most this many seconds, to tell which
#: reports are missing.
_NOTICE_SECONDS = 5.0
#: A worker logs for whom it waits after this many seconds, then after twice as many, up to the
#: maximum.
_FIRST_LOOK_SECONDS = 5.0
_MAX_LOOK_SECONDS = 60.0
#: A worker has this long to answer whether it still works.
_ANSWER_SECONDS = 2.0
#: A process that uses at least this share of a processor core works. gradwire itself uses far less.
_BUSY_SHARE = 0.01


class ShutdownBarrier:
    """One worker's part in the barrier. The worker with the lowest id compares all reports."""

    def __init__(self, agent: Agent):
        self._agent = agent
        self._lock = threading.Lock()
        #: Worker id -> its report in this round, and the request that brought the report.
        self._reports: dict[int, tuple[_Report, Request]] = {}
        self._previous: dict[int, _Report] | None = None
        self._equal_rounds = 0
        #: Whether a timer runs that will call `_give_notice`.
        self._notice_is_due = False
        #: The names of the workers that this worker was last told to wait for.
        self.waits_for: list[str] = []
        self._changed = threading.Condition(self._lock)
        agent.handle(Kind.BARRIER, self._serve_report)
        agent.handle(Kind.ACTIVITY, lambda request: request.answer(_activity_of(agent)))
        agent.on_gone.append(self._note_gone)

    def wait(self, deadline: float, idle_limit: float = FOREVER) -> bool:
        """Wait until all work in the group is done. Return False at the deadline, or if the workers
        that are not done have not done anything for `idle_limit` seconds."""
        agent = self._agent
        first = min((m.info for m in agent.membership.members()), key=lambda info: info.id)
        if agent.info == first:
            self._connect_to_all(deadline)
        watch = _Watch(agent, idle_limit)
        # `answer` is the answer to the last report: the seconds until the next report, a list of
        # the workers whose reports are missing, or None when all work is done.
        answer: float | list[int] | None = 0.0
        while answer is not None:
            if isinstance(answer, list):
                self.waits_for = self._names(answer)
                if watch.ends(answer):
                    return False
            else:
                time.sleep(answer)
            while not agent.metrics.wait_until_idle(min(deadline, watch.next_look)):
                self.waits_for = [agent.info.name]
                if time.monotonic() >= deadline or watch.ends([agent.info.id]):
                    return False
            began = time.monotonic()
            try:
                left = max(0.05, deadline - began)
                report = agent.sender.request(first, Kind.BARRIER, agent.metrics.traffic(), left)
                # If Ctrl-C interrupts the wait, no code looks at the future `report` any more. Then
                # its error must not be logged.
                report.expect_failure()
                answer = report.wait()
            except CallError as error:
                if time.monotonic() >= deadline:
                    return False
                if agent.liveness.is_gone(first.id) or isinstance(error, ShutDownError):
                    logger.info("shutdown continues without worker %s: %s", first.name, error)
                    break
                # The worker `first`, which compares the reports, may still run: perhaps only the
                # connection to it has failed. If it runs, it needs the report, so send it again.
                agent.liveness.suspect(first, began)
                answer = _PAUSE_SECONDS
        if agent.info == first:
            self._wait_for_others_to_end(deadline)
        return True

    def _names(self, worker_ids: Iterable[int]) -> list[str]:
        return [self._agent.peers.find(worker_id).info.name for worker_id in worker_ids]

    def _connect_to_all(self, deadline: float) -> None:
        """Connect to all workers and send them heartbeats, to notice if one of them is lost."""
        for peer in self._agent.peers.all():
            # If the peer was frozen and runs again, the new connection shows that it is back.
            began = time.monotonic()
            left = max(0.05, deadline - began)
            try:
                channel = peer.channel or self._agent.peers.connect(
                    peer, "the shutdown barrier", min(left, 2.0)
                )
                channel.last_heard = time.monotonic()
                channel.watched = True
            except CallError:
                self._agent.liveness.suspect(peer.info, began)

    def _wait_for_others_to_end(self, deadline: float) -> None:
        """Wait until the other workers have left. Before that, one of them may still wait for this
        worker's answer to its last report."""
        others = self._member_ids() - {self._agent.info.id}
        with self._changed:
            self._changed.wait_for(
                lambda: all(map(self._agent.liveness.is_gone, others)),
                max(0.0, min(deadline - time.monotonic(), _LAST_SECONDS)),
            )

    def _serve_report(self, request: Request) -> None:
        with self._lock:
            self._reports[request.caller.id] = (request.decode(), request)
            needs_timer, self._notice_is_due = not self._notice_is_due, True
        if needs_timer:
            self._agent.timers.call_later(_NOTICE_SECONDS, self._give_notice)
        self._conclude()

    def _give_notice(self) -> None:
        """Answer the reports of the workers that wait: tell them which reports are missing."""
        with self._lock:
            self._notice_is_due = False
            missing = sorted(self._missing())
            waiting = [request for _, request in self._reports.values()]
            self._reports = {}
        for request in waiting:
            request.answer(missing)

    def _member_ids(self) -> set[int]:
        return {member.info.id for member in self._agent.membership.members()}

    def _missing(self) -> list[int]:
        """Return the ids of the workers that are not gone and have not reported in this round."""
        is_gone = self._agent.liveness.is_gone
        return [i for i in self._member_ids() - self._reports.keys() if not is_gone(i)]

    def _note_gone(self, _info: WorkerInfo) -> None:
        if not self._agent.membership.fixed:
            return  # An open group has no shutdown barrier, so nothing waits for the worker.
        with self._changed:
            self._changed.notify_all()
        self._conclude()

    def _conclude(self) -> None:
        """Answer the reports of a round when every worker that is not lost has sent one. The answer
        is None if all work is done, else the pause in seconds before the next report."""
        with self._lock:
            if not self._reports or self._missing():
                return
            answered = [request for _, request in self._reports.values()]
            reports = {worker: report for worker, (report, _) in self._reports.items()}
            self._reports = {}
            equal = reports == self._previous
            self._equal_rounds = self._equal_rounds + 1 if equal else 0
            self._previous = reports
            done = equal and (_balanced(reports) or self._equal_rounds > _MAX_EQUAL_ROUNDS)
        pause = None if done else _PAUSE_SECONDS if self._equal_rounds > 1 else 0.0
        for request in answered:
            request.answer(pause)


def _balanced(reports: dict[int, _Report]) -> bool:
    """Return whether as many calls were received as sent. If a worker does not know its numbers,
    the sums cannot be compared; then return True, so that this check does not block the
    shutdown."""
    known = [report for report in reports.values() if report is not None]
    if len(known) < len(reports):
        return True
    return sum(sent for sent, _ in known) == sum(received for _, received in known)


class _Activity(NamedTuple):
    """What one worker has done so far. If it changes, the worker still works."""

    #: The numbers of calls that the worker has sent and received.
    traffic: tuple[int, int] | None
    #: How many calls of this worker wait for an answer.
    open_calls: int
    #: The processor time that the process has used, in seconds.
    processor_seconds: float


def _activity_of(agent: Agent) -> tuple[object, ...]:
    metrics = agent.metrics
    return tuple(_Activity(metrics.traffic(), metrics.open_calls(), time.process_time()))


class _Watch:
    """Watches the workers for which a shutdown waits: logs who they are, and notices when they have
    stopped working."""

    def __init__(self, agent: Agent, idle_limit: float):
        self._agent = agent
        self._idle_limit = idle_limit
        self._start = self._last_look = self._active_at = time.monotonic()
        self._pause = _FIRST_LOOK_SECONDS
        self._known: dict[int, _Activity] = {}
        self.next_look = self._start + self._pause

    def ends(self, workers: list[int]) -> bool:
        """Return whether a shutdown should stop waiting for `workers`, because they have done
        nothing for `idle_limit` seconds. Before the time `next_look`, return False at once: the
        workers are not asked so often."""
        now = time.monotonic()
        if now < self.next_look:
            return False
        if self._look(workers, now - self._last_look):
            self._active_at = now
        self._pause = min(2 * self._pause, _MAX_LOOK_SECONDS)
        self._last_look, self.next_look = now, now + self._pause
        idle = now - self._active_at
        logger.warning(
            "worker %s has waited for %.0f s in shutdown(), for %s to call shutdown() or to finish "
            "calls%s",
            self._agent.info.name,
            now - self._start,
            ", ".join(self._agent.peers.find(worker).info.name for worker in workers) or "no one",
            f"; nothing has happened there for {idle:.0f} s" if idle else "",
        )
        return idle >= self._idle_limit

    def _look(self, workers: list[int], seconds: float) -> bool:
        """Ask `workers` what they have done so far. Return whether at least one of them has worked
        since it was last asked, `seconds` ago."""
        send = self._agent.sender.request
        asked = {worker: send(worker, Kind.ACTIVITY, None, _ANSWER_SECONDS) for worker in workers}
        works = False
        for worker, future in asked.items():
            try:
                after = _Activity(*future.wait())
            except CallError:
                continue  # The worker is lost or frozen. The barrier will leave it out.
            before = self._known.get(worker)
            self._known[worker] = after
            works |= (
                before is None
                or after.open_calls > 0
                or after.traffic != before.traffic
                or after.processor_seconds - before.processor_seconds >= _BUSY_SHARE * seconds
            )
        return works
