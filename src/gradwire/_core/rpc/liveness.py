"""Noticing that other workers are lost, or have left.

A worker is *lost* when it has died, is frozen or cannot be reached; it has *left* when it said
goodbye; it is *gone* when it is lost or has left.

- A peer that owes an answer and is silent for a heartbeat interval is sent a heartbeat, a message
  that it must answer. If no message from the peer arrives until the heartbeat limit, this worker
  ends the connection.
- When a connection ends without a goodbye, the peer is *suspected*: one attempt to connect shows
  whether the peer still runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from gradwire._core.ids import WorkerInfo
from gradwire._core.rpc.executor import Executor
from gradwire._core.rpc.peers import Peers
from gradwire.options import Options

logger = logging.getLogger("gradwire")

_PROBE_SECONDS = 2.0


class Liveness:
    """Notices when peers of one worker are gone, as the text of the module describes."""

    def __init__(self, peers: Peers, executor: Executor, options: Options):
        self._peers = peers
        self._executor = executor
        self._interval = options.heartbeat_interval
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

    def check(self, now: float) -> float:
        """Fail calls whose deadline has passed, send heartbeats to silent peers, and end the
        connections to peers that did not answer a heartbeat in time. Return the time of the next
        check."""
        due = now + self._interval
        awaited = {worker for workers in self.awaited for worker in workers()}
        for channel in self._peers.channels():
            due = min(due, channel.expire(now))
            if not channel.open_calls and not channel.watched and channel.peer.id not in awaited:
                continue
            silence = now - channel.last_heard
            asked_at = channel.heartbeat_sent_at
            if asked_at is not None and now - asked_at >= self._heartbeat_timeout:
                channel.end(
                    f"no heartbeat for {silence:.1f} s; the worker may be frozen, or its machine "
                    "may be down"
                )
            elif silence >= self._interval:
                channel.send_heartbeat()
                due = min(due, (channel.heartbeat_sent_at or now) + self._heartbeat_timeout)
        return due

    def connection_ended(self, info: WorkerInfo, *, said_goodbye: bool) -> None:
        """Find out whether a worker is gone, after a connection to or from it has ended."""
        if said_goodbye:
            self._peers.forget(info)
            self._declare_gone(info)
        elif self.on_gone:
            self._executor.submit(lambda: self._probe(info))

    def _probe(self, info: WorkerInfo) -> None:
        try:
            peer = self._peers.find(info)
            if peer.channel is None:
                self._peers.connect(peer, "a heartbeat", _PROBE_SECONDS)
        except Exception:
            self._declare_gone(info)

    def _declare_gone(self, info: WorkerInfo) -> None:
        for listener in self.on_gone:
            try:
                listener(info)
            except Exception:
                logger.exception("error while cleaning up after worker %s", info.name)
