"""Leaving together: nobody goes while another still needs them.

In a group of fixed size a graceful shutdown waits for everybody's work. Each worker, when it has no
open call, reports to the first one how many calls it has sent and received so far. The work is done
when all have reported, as many calls were received as sent, and the numbers are those of the round
before: a call that was still travelling would have changed them. Workers that are lost on the way
are left out, and then the numbers cannot be compared any more. Should a message have got lost on a
connection that still stands, the numbers never match; they are believed when they stand still.
"""

from __future__ import annotations

import logging
import threading
import time

from gradwire.agent.agent import Agent
from gradwire.agent.service import Request
from gradwire.errors import CallError
from gradwire.ids import WorkerInfo
from gradwire.wire.messages import Kind

logger = logging.getLogger("gradwire")

_Report = tuple[int, int] | None

#: Between reports when the numbers do not match, and how often they may be the same wrong ones.
_PAUSE_SECONDS = 0.05
_PATIENCE_ROUNDS = 20


class Farewell:
    """One worker's part in it; the worker with the lowest id also counts the reports."""

    def __init__(self, agent: Agent):
        self._agent = agent
        self._lock = threading.Lock()
        self._gone: set[int] = set()
        self._reports: dict[int, tuple[_Report, Request]] = {}
        self._previous: dict[int, _Report] | None = None
        self._rounds_unchanged = 0
        self._changed = threading.Condition(self._lock)
        agent.handle(Kind.BARRIER, self._take_report)
        agent.on_gone.append(self._leave_out)

    def wait_for_everybody(self, deadline: float) -> bool:
        """Return when all work in the group is done, or at the deadline."""
        agent = self._agent
        first = min(member.info.id for member in agent.roster.members())
        if agent.info.id == first:
            self._reach_out(deadline)
        pause: float | None = 0.0
        while pause is not None:
            time.sleep(pause)
            if not agent.wait_until_quiet(deadline):
                return False
            try:
                report = agent.request(
                    first, Kind.BARRIER, agent.traffic(), max(0.05, deadline - time.monotonic())
                )
                pause = report.wait()
            except CallError as error:
                if time.monotonic() >= deadline:
                    return False
                logger.info("shutdown goes on without worker %s: %s", first, error)
                break
        if agent.info.id == first:
            self._see_others_off(deadline)
        return True

    def _reach_out(self, deadline: float) -> None:
        """Connect to everybody and watch them, so that the loss of any is noticed."""
        for peer in self._agent.peers.all():
            left = max(0.05, deadline - time.monotonic())
            # It may have been frozen, and be back. This comes before its link is looked at: should
            # that end just now, it is left out again.
            with self._lock:
                self._gone.discard(peer.info.id)
            try:
                link = peer.link or self._agent.peers.connect(
                    peer, "shutting down together", min(left, 2.0)
                )
                link.last_sign = time.monotonic()
                link.watched = True
            except CallError:
                self._leave_out(peer.info)

    def _see_others_off(self, deadline: float) -> None:
        """Stay until the others have heard that they may go."""
        everybody = {m.info.id for m in self._agent.roster.members()} - {self._agent.info.id}
        with self._changed:
            self._changed.wait_for(
                lambda: everybody <= self._gone, max(0.0, min(deadline - time.monotonic(), 5.0))
            )

    def _take_report(self, request: Request) -> None:
        with self._lock:
            self._gone.discard(request.caller.id)
            self._reports[request.caller.id] = (request.decode(), request)
        self._conclude()

    def _leave_out(self, info: WorkerInfo) -> None:
        if not self._agent.roster.fixed:
            return  # nobody waits for anybody
        with self._changed:
            self._gone.add(info.id)
            self._changed.notify_all()
        self._conclude()

    def _conclude(self) -> None:
        """Answer all reports once everybody who can has sent one."""
        with self._lock:
            everybody = {member.info.id for member in self._agent.roster.members()}
            if not self._reports or everybody - self._gone - self._reports.keys():
                return
            answered = [request for _, request in self._reports.values()]
            reports = {id: report for id, (report, _) in self._reports.items()}
            self._reports = {}
            unchanged = reports == self._previous
            self._rounds_unchanged = self._rounds_unchanged + 1 if unchanged else 0
            self._previous = reports
            done = unchanged and (_balanced(reports) or self._rounds_unchanged > _PATIENCE_ROUNDS)
        pause = None if done else _PAUSE_SECONDS if self._rounds_unchanged > 1 else 0.0
        for request in answered:
            request.answer(pause)


def _balanced(reports: dict[int, _Report]) -> bool:
    known = [report for report in reports.values() if report is not None]
    if len(known) < len(reports):
        return True
    return sum(sent for sent, _ in known) == sum(received for _, received in known)
