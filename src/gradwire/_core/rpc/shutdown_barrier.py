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
"""

from __future__ import annotations

import logging
import threading
import time

from gradwire._core.ids import WorkerInfo
from gradwire._core.rpc.agent import Agent
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


class ShutdownBarrier:
    """One worker's part in the barrier. The worker with the lowest id compares all reports."""

    def __init__(self, agent: Agent):
        self._agent = agent
        self._lock = threading.Lock()
        #: Worker id -> its report in this round, and the request that brought the report.
        self._reports: dict[int, tuple[_Report, Request]] = {}
        self._previous: dict[int, _Report] | None = None
        self._equal_rounds = 0
        self._changed = threading.Condition(self._lock)
        agent.handle(Kind.BARRIER, self._serve_report)
        agent.on_gone.append(self._note_gone)

    def wait(self, deadline: float) -> bool:
        """Wait until all work in the group is done. Return False at the deadline."""
        agent = self._agent
        first = min((m.info for m in agent.membership.members()), key=lambda info: info.id)
        if agent.info == first:
            self._connect_to_all(deadline)
        pause: float | None = 0.0
        # `pause` is the answer to the last report. It is None when all work is done.
        while pause is not None:
            time.sleep(pause)
            if not agent.metrics.wait_until_idle(deadline):
                return False
            began = time.monotonic()
            try:
                left = max(0.05, deadline - began)
                pause = agent.sender.request(
                    first, Kind.BARRIER, agent.metrics.traffic(), left
                ).wait()
            except CallError as error:
                if time.monotonic() >= deadline:
                    return False
                if agent.liveness.is_gone(first.id) or isinstance(error, ShutDownError):
                    logger.info("shutdown continues without worker %s: %s", first.name, error)
                    break
                # Only the connection may have failed. If the first worker has not left and is not
                # lost, it still needs the report.
                agent.liveness.suspect(first, began)
                pause = _PAUSE_SECONDS
        if agent.info == first:
            self._wait_for_others_to_end(deadline)
        return True

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
        others = {m.info.id for m in self._agent.membership.members()} - {self._agent.info.id}
        with self._changed:
            self._changed.wait_for(
                lambda: all(map(self._agent.liveness.is_gone, others)),
                max(0.0, min(deadline - time.monotonic(), _LAST_SECONDS)),
            )

    def _serve_report(self, request: Request) -> None:
        with self._lock:
            self._reports[request.caller.id] = (request.decode(), request)
        self._conclude()

    def _note_gone(self, _info: WorkerInfo) -> None:
        if not self._agent.membership.fixed:
            return  # An open group has no shutdown barrier that could wait for the worker.
        with self._changed:
            self._changed.notify_all()
        self._conclude()

    def _conclude(self) -> None:
        """Answer the reports of a round when every worker that is not lost has sent one. The answer
        is None if all work is done, else the pause in seconds before the next report."""
        with self._lock:
            if not self._reports:
                return
            members = {member.info.id for member in self._agent.membership.members()}
            if not all(map(self._agent.liveness.is_gone, members - self._reports.keys())):
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
