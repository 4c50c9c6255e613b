"""`Agent`: the calls and connections of one worker.

The agent puts the parts together, and the layers above use the parts:

- `sending.Sender` sends calls and messages, and opens the replies;
- `dispatch.Dispatcher` passes the requests of other workers to the handlers;
- `liveness.Liveness` notices workers that are gone, and workers that are back;
- `metrics.Metrics` counts calls;
- `executor.Executor` has the threads that serve requests, `timers.Timers` the thread that watches
  deadlines;
- `peers.Peers` finds the other workers and connects to them.

The agent itself keeps the list of connections, closes them at the end, and gives them up in a
forked child.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from gradwire._core.group.membership import Member, Membership
from gradwire._core.ids import WorkerInfo
from gradwire._core.rpc.client import ClientChannel
from gradwire._core.rpc.decoding import Decoder
from gradwire._core.rpc.dispatch import Dispatcher, Handler
from gradwire._core.rpc.executor import Executor
from gradwire._core.rpc.interceptors import Interceptor
from gradwire._core.rpc.liveness import Liveness
from gradwire._core.rpc.metrics import Metrics
from gradwire._core.rpc.peers import Peer, Peers
from gradwire._core.rpc.sending import Sender
from gradwire._core.rpc.server import Request, ServerChannel
from gradwire._core.rpc.timers import Timers
from gradwire._core.transport.base import Connection, Greeting, Listener, Transport
from gradwire._core.transport.poller import new_poller
from gradwire._core.wire.codec import Codec
from gradwire._core.wire.messages import Kind
from gradwire.errors import ShutDownError
from gradwire.options import UNSET_TIMEOUT, Options, seconds

logger = logging.getLogger("gradwire")

T = TypeVar("T")

#: All agents of this process. A forked child gives them up, because they belong to its parent.
_agents: weakref.WeakSet[Agent] = weakref.WeakSet()


def _abandon_all() -> None:
    for agent in list(_agents):
        agent.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)


class Agent:
    """The calls and connections of one worker. The text of the module lists the parts."""

    def __init__(
        self,
        info: WorkerInfo,
        options: Options,
        codec: Codec,
        membership: Membership,
        transports: Sequence[Transport],
        context: contextvars.Context,
    ):
        self.info = info
        self.options = options
        self.codec = codec
        self.membership = membership
        self._transports = transports
        self._greeting = Greeting(info.id, info.name, secrets.token_hex(16))
        self._server_channels: set[ServerChannel] = set()
        self._listeners: list[Listener] = []
        #: Guards the set of server channels. (Reentrant: the garbage collector may run while the
        #: lock is held, and end a connection.)
        self._lock = threading.RLock()
        self._closing = False
        #: Whether this process is a forked child. The agent then belongs to the parent process.
        self.abandoned = False
        self._next_trim = 0.0
        #: This worker's entry in the membership, once it has joined.
        self.member: Member | None = None

        self.poller = new_poller()
        self.executor = Executor(
            info.name, self.poller, options.num_worker_threads, self._wake_timers
        )
        self.timers = Timers(info.name, self.executor, self._housekeeping)
        self.peers = Peers(
            membership, transports, self._greeting, self._make_channel, options.heartbeat_limit
        )
        #: Objects of the layers above, which see every user call; see the module `interceptors`.
        self.interceptors: list[Interceptor] = []
        decoder = Decoder(codec, self.interceptors)
        self.sender = Sender(
            codec,
            decoder,
            self.peers,
            self.interceptors,
            self.executor,
            self.timers,
            self.timeout,
            options.heartbeat_limit,
        )
        self.dispatcher = Dispatcher(self.executor, context)
        self.liveness = Liveness(
            self.peers, self.executor, self.timers, self._list_server_channels, options
        )
        self.metrics = Metrics(self.peers, self._list_server_channels)

        # The channels call these methods of other objects through the agent. Storing them as
        # attributes saves one function call each time. (The agent must not have more than 30
        # attributes, because Python would then access all of them more slowly.)
        self.decode = decoder.decode
        self.serve = self.dispatcher.serve
        self.complete = self.sender.complete
        self.discard = self.sender.discard
        self.wake_at = self.timers.wake_by

        self.handle(Kind.HEARTBEAT, lambda request: request.answer(None))
        self.handle(Kind.FAREWELL, self._serve_goodbye)
        _agents.add(self)

    # -- setting up

    def handle(self, kind: int, handler: Handler, *, runs_user_code: bool = False) -> None:
        """Register the function that answers a kind of request; see `Dispatcher.handle`."""
        self.dispatcher.handle(kind, handler, runs_user_code=runs_user_code)

    def run_in_context(self, action: Callable[[], T]) -> T:
        """Run `action` in a context where this worker is the current worker, and return the
        result."""
        return self.dispatcher.run_in_context(action)

    @property
    def on_gone(self) -> list[Callable[[WorkerInfo], None]]:
        """A list of functions that are called with each worker that is lost or has left. Append a
        function to it to register one."""
        return self.liveness.on_gone

    def start(self) -> None:
        """Listen for connections, and join the group."""
        for transport in self._transports:
            self._listeners.append(
                transport.listen(
                    self._greeting, self.poller, self._accepted, self.timers.call_later
                )
            )
        addresses = tuple(listener.address for listener in self._listeners)
        member = Member(self.info, self._greeting.incarnation, addresses)
        self.membership.join(member)
        self.member = member
        # The threads that read requests start only now, because before it joined, this worker did
        # not know the other members of the group. Requests that arrived earlier have waited.
        self.executor.start()
        self.timers.start()
        self.timers.wake_by(time.monotonic() + self.options.heartbeat_interval)

    def timeout(self, given: float | timedelta) -> float:
        """Return the timeout of a call in seconds: `given`, or `rpc_timeout` if `given` is
        unset."""
        return self.options.rpc_seconds if given == UNSET_TIMEOUT else seconds(given)

    # -- connections

    def _make_channel(self, peer: Peer, connection: Connection, call: str) -> ClientChannel:
        if self._closing:
            connection.close()
            raise ShutDownError(
                f"this worker is shutting down and cannot call {peer.info.name!r}",
                worker=peer.info.name,
                call=call,
                may_have_run=False,
            )
        self.heard_from(peer.info)
        return ClientChannel(peer, connection, self)

    def _accepted(self, connection: Connection) -> None:
        caller = WorkerInfo(connection.peer.name, connection.peer.worker_id)
        self.heard_from(caller)
        with self._lock:
            closing = self._closing
            if not closing:
                self._server_channels.add(ServerChannel(caller, connection, self))
        if closing:
            connection.close()

    def heard_from(self, info: WorkerInfo) -> None:
        """Note that another worker runs."""
        self.liveness.heard_from(info)

    def channel_ended(self, channel: ClientChannel | ServerChannel) -> None:
        """Note how many calls were made over a connection that has ended, and find out whether the
        peer is gone. The channel of the connection calls this method."""
        asked_at = None
        if isinstance(channel, ServerChannel):
            with self._lock:
                self._server_channels.discard(channel)
        else:
            asked_at = channel.heartbeat_sent_at
        self.metrics.add_closed_connection(*channel.traffic(), said_goodbye=channel.farewell)
        if not self._closing:
            self.liveness.connection_ended(
                channel.peer, said_goodbye=channel.farewell, asked_at=asked_at
            )

    def _serve_goodbye(self, request: Request) -> None:
        request.channel.farewell = True

    def _list_server_channels(self) -> list[ServerChannel]:
        with self._lock:
            return list(self._server_channels)

    # -- time

    def _housekeeping(self, now: float) -> float:
        """Find out which peers are lost, fail late calls, and free unused memory from time to time.
        Return the time of the next call of this method."""
        due = self.liveness.check(now)
        if now >= self._next_trim:
            self._next_trim = now + self.options.heartbeat_interval
            self._trim()
        return max(due, now + 0.001)

    def _wake_timers(self) -> None:
        self.timers.wake()

    def _trim(self) -> None:
        """Free the memory that the connections have not used since the last call of this method."""
        for client_channel in self.peers.channels():
            client_channel.trim()
        for server_channel in self._list_server_channels():
            server_channel.trim()

    # -- the end

    def abandon(self) -> None:
        """Give up the parent's connections in a forked child. The child must not answer the
        parent's calls. If the child kept the connections open, the parent's peers would not notice
        the death of the parent."""
        # No lock is taken here. A thread of the parent may have held the lock at the fork. The
        # child does not have that thread, so the lock would never be released.
        self.abandoned = self._closing = self.executor.stopped = True
        for client_channel in self.peers.abandon():
            client_channel.abandon()
        for server_channel in list(self._server_channels):
            server_channel.abandon()
        for listener in self._listeners:
            listener.abandon()
        # On some systems, a forked process does not inherit the poller.
        with contextlib.suppress(OSError):
            self.poller.close()

    def close(self, deadline: float) -> list[str]:
        """Say goodbye to the peers, end all connections and threads, and leave the group. If
        functions are still running, wait for them, but not longer than until `deadline`. Return the
        names of the threads that run functions even then. Do not wait for other workers."""
        with self._lock:
            if self._closing:
                return []
            self._closing = True
            server_channels = list(self._server_channels)
        self.peers.close()
        self.sender.retries.stop()
        for listener in self._listeners:
            listener.close()
        client_channels = self.peers.channels()
        for client_channel in client_channels:
            client_channel.say_farewell()
            client_channel.end("this worker was shut down", shut_down=True)
        for server_channel in server_channels:
            server_channel.say_farewell()
            server_channel.end("this worker was shut down")
        running = self.executor.stop(deadline)
        # Before the threads stopped, one of them may have opened a new connection, or received an
        # answer without completing the future of its call. So end the connections once more and
        # complete all futures.
        for client_channel in {*client_channels, *self.peers.channels()}:
            client_channel.end("this worker was shut down", shut_down=True)
            client_channel.drain()
        self.timers.stop()
        self.sender.retries.give_up()
        if self.member is not None:
            self.membership.leave(self.member)
        if not running:
            self.poller.close()
        return running
