"""The agent of a worker: sends its calls, serves those of others, keeps the connections.

It puts together the parts of this room. The hot path of a call runs through here: `call` (from the
user's thread) and `serve` (from the executor's leader); everything else is about what can go wrong.
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
from typing import Any, TypeVar

from torch import Tensor

from gradwire.agent.clock import Clock
from gradwire.agent.exceptions import decode_exception
from gradwire.agent.executor import Executor
from gradwire.agent.futures import Future
from gradwire.agent.insisting import Insistence
from gradwire.agent.interceptors import Interceptor
from gradwire.agent.link import Link
from gradwire.agent.opencall import OpenCall
from gradwire.agent.peers import Peer, Peers
from gradwire.agent.roster import Member, Roster
from gradwire.agent.service import Request, Service
from gradwire.agent.settling import complete_when_settled, wait_until_settled
from gradwire.config import UNSET_TIMEOUT, Options, seconds
from gradwire.errors import CallError, RemoteError, ShutDownError
from gradwire.ids import WorkerInfo
from gradwire.transport.base import Connection, Greeting, Transport
from gradwire.transport.poller import new_poller
from gradwire.wire.frames import Frame
from gradwire.wire.messages import Kind, Tags, carries_references, unpack
from gradwire.wire.values import Codec, Encoded

logger = logging.getLogger("gradwire")

_EXCEPTION = Kind.EXCEPTION

T = TypeVar("T")
Handler = Callable[[Request], None]

#: Those of this process.
_agents: weakref.WeakSet[Agent] = weakref.WeakSet()


def _abandon_all() -> None:
    for agent in list(_agents):
        agent.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)


class Agent:
    """See the module's text."""

    def __init__(
        self,
        info: WorkerInfo,
        options: Options,
        codec: Codec,
        roster: Roster,
        transports: Sequence[Transport],
        context: contextvars.Context,
    ):
        self.info = info
        self.options = options
        self.codec = codec
        self.roster = roster
        self.poller = new_poller()
        self.executor = Executor(info.name, self.poller, options.num_worker_threads)
        self.clock = Clock(info.name, self.executor, self._housekeeping)
        self.insistence = Insistence(
            lambda to, kind, value: self.request(to, kind, value, options.heartbeat_limit),
            self.clock,
        )
        self.peers = Peers(roster, transports, self._make_link, options.heartbeat_limit)
        #: Sees user calls pass; see `interceptors`.
        self.interceptors: list[Interceptor] = []
        #: Called when another worker is gone, with a farewell or without.
        self.on_gone: list[Callable[[WorkerInfo], None]] = []
        #: Each tells whose answers somebody here waits for, in whatever way.
        self.awaited: list[Callable[[], set[int]]] = []
        self._transports = transports
        #: Requests are served in copies of this context.
        self._context = context
        self._handlers: dict[int, tuple[Handler, bool]] = {}
        self._services: set[Service] = set()
        self._listeners: list[Any] = []
        #: (Reentrant, as all that are held while something is made: the garbage collector may run
        #: there, and functions of users that make calls.)
        self._lock = threading.RLock()
        #: Calls exchanged over connections that are no more; None when some may have been lost.
        self._past: tuple[int, int] | None = (0, 0)
        self._closing = False
        #: This process was forked from the one that the agent belongs to.
        self.abandoned = False
        self._next_trim = 0.0
        self.member: Member | None = None
        self.handle(Kind.HEARTBEAT, lambda request: request.answer(None))
        self.handle(Kind.FAREWELL, self._hear_farewell)
        _agents.add(self)

    # -- setting up

    def handle(self, kind: Kind, handler: Handler, *, runs_user_code: bool = False) -> None:
        """Have requests of a kind served by `handler`, which must answer them, now or later.
        Unless it runs user code it must be quick, for everything else waits meanwhile."""
        self._handlers[kind] = (handler, runs_user_code)

    def start(self) -> None:
        """Listen, and join the group."""
        me = Greeting(self.info.id, self.info.name, secrets.token_hex(16))
        self.peers.me = me
        for transport in self._transports:
            self._listeners.append(transport.listen(me, self.poller, self._accepted))
        addresses = tuple(listener.address for listener in self._listeners)
        member = Member(self.info, me.incarnation, addresses)
        self.roster.join(member)
        self.member = member
        # Calls that came in meanwhile are read only now, when this worker knows the others.
        self.executor.start()
        self.clock.start()
        self.clock.due(time.monotonic() + self.options.heartbeat_interval)

    # -- calling

    def call_sync(
        self, peer: Peer, kind: Kind, subject: Any, encoded: Encoded, timeout: float
    ) -> Any:
        """Make a call and wait for its result."""
        call = OpenCall(kind, subject, peer.info, timeout)
        tags: Tags = {}
        link = self._let_leave(call, peer, encoded, tags)
        try:
            if tags:
                self.do_ahead(tags)
            link.wait(call)
        except BaseException:  # an interrupt: nobody will wait for the answer
            call.give_up()
            raise
        value, unsettled = self._open_reply(call)
        if unsettled:
            wait_until_settled(call, unsettled, self.executor)
        return value

    def call_async(
        self,
        peer: Peer,
        kind: Kind,
        subject: Any,
        encoded: Encoded,
        timeout: float,
        tags: Tags | None = None,
    ) -> Future[Any]:
        """Make a call; its result, or whatever goes wrong from here on, comes in a future."""
        call = OpenCall(kind, subject, peer.info, timeout)
        future = call.future = Future(call, call)
        try:
            self._let_leave(call, peer, encoded, {} if tags is None else tags)
        except CallError as error:
            future.set_exception(error)
        return future

    def _let_leave(self, call: OpenCall, peer: Peer, encoded: Encoded, tags: Tags) -> Link:
        """Send a user call, tagged by the interceptors."""
        try:
            link = peer.link or self.peers.connect(peer, call.name, call.timeout)
            for interceptor in self.interceptors:
                interceptor.leaving(peer.info, call.subject, encoded.differentiable, tags)
            link.send(call, encoded, tags)
            return link
        except BaseException:
            encoded.tell_passengers(None)
            raise

    def do_ahead(self, tags: Tags) -> None:
        """A call or a result has left, and there is time."""
        for interceptor in self.interceptors:
            interceptor.waiting(tags)

    def timeout(self, given: float | timedelta) -> float:
        """A call's timeout in seconds: the one given, or that of the options."""
        return self.options.rpc_seconds if given == UNSET_TIMEOUT else seconds(given)

    def request(
        self, to: str | int | WorkerInfo, kind: Kind, value: Any, timeout: float | None = None
    ) -> Future[Any]:
        """Send a message of the rooms above, no user call; the answer comes in a future."""
        if timeout is None:
            timeout = self.options.rpc_seconds
        return self.post(to, kind, kind.name, self.codec.encode(value), timeout)

    def post(
        self,
        to: str | int | WorkerInfo,
        kind: Kind,
        subject: str,
        encoded: Encoded,
        timeout: float,
        tags: Tags | None = None,
    ) -> Future[Any]:
        """Send an encoded message of the rooms above; the answer comes in a future."""
        peer = self.peers.find(to)
        call = OpenCall(kind, subject, peer.info, timeout)
        future = call.future = Future(call, call)
        try:
            link = peer.link or self.peers.connect(peer, call.name, timeout)
            link.send(call, encoded, tags)
        except CallError as error:
            future.set_exception(error)
        return future

    def ask(
        self,
        to: str | int | WorkerInfo,
        kind: Kind,
        subject: str,
        encoded: Encoded,
        timeout: float,
        tags: Tags | None = None,
    ) -> OpenCall:
        """Send an encoded message of the rooms above, to wait for its answer in `hear`."""
        peer = self.peers.find(to)
        call = OpenCall(kind, subject, peer.info, timeout)
        link = peer.link or self.peers.connect(peer, call.name, timeout)
        link.send(call, encoded, tags)
        return call

    def hear(self, call: OpenCall) -> Any:
        """Wait for the answer to what was asked."""
        assert call.link is not None
        call.link.wait(call)
        return self._open_reply(call)[0]

    def insist(self, to: WorkerInfo, kind: Kind, value: Any) -> Future[Any]:
        """Send an idempotent message until it is answered, or its worker is surely gone."""
        return self.insistence.send(to, kind, value)

    def _open_reply(self, call: OpenCall) -> tuple[Any, Sequence[Any]]:
        """The value in the reply to a call, and what must be waited for before it is used."""
        if call.error is not None:
            raise call.error
        reply, link = call.reply, call.link
        assert reply is not None
        assert link is not None
        call.reply = None  # the memory will belong to the value's tensors
        kind, _, tags, payload = unpack(reply.head)
        if kind == _EXCEPTION:
            raise decode_exception(self.codec, payload, reply.buffers, link.to.name, call=call.name)
        try:
            return self.decode(payload, reply.buffers, link.to.id, tags)
        except Exception as error:
            by = link.to.name
            raise RemoteError(
                f"the result of {call.name} on worker {by!r} cannot be read here: {error!r}",
                worker=by,
                call=call.name,
            ) from error

    def decode(
        self,
        payload: bytes | memoryview,
        buffers: Sequence[Tensor],
        sender: int,
        tags: Tags | None,
        is_call: bool = False,
    ) -> tuple[Any, Sequence[Any]]:
        """A value that has arrived, and what must be waited for before it is used."""
        arrival = None
        if tags:
            try:
                for interceptor in self.interceptors:
                    arrival = interceptor.arriving(sender, tags) or arrival
            except Exception:
                # References in it must be dropped in good order.
                self.codec.decode(payload, buffers, None, is_call)
                raise
        return self.codec.decode(payload, buffers, arrival, is_call)

    def _complete(self, call: OpenCall) -> None:
        """Complete the future of an asynchronous call."""
        future = call.future
        assert future is not None
        try:
            value, unsettled = self._open_reply(call)
        except BaseException as error:
            # Where it was unpacked tells nothing, and would tie the error to this frame.
            future.complete(None, error.with_traceback(None))
            return
        if unsettled:
            complete_when_settled(future, value, call, unsettled, self.clock)
        else:
            future.complete(value, None)

    def _absorb(self, frame: Frame) -> None:
        """An answer nobody waits for any more: references in it must be dropped in good order."""
        if carries_references(frame.head):
            _, _, _, payload = unpack(frame.head)
            self.executor.submit(lambda: self._decode_and_drop(payload, frame))

    def _decode_and_drop(self, payload: memoryview, frame: Frame) -> None:
        try:
            self.codec.decode(payload, frame.buffers)
        except Exception:
            logger.debug("a late answer could not be decoded", exc_info=True)

    # -- serving

    def serve(self, request: Request) -> None:
        """Have a request answered. Called by the executor's leader."""
        try:
            handler, runs_user_code = self._handlers[request.kind]
        except KeyError:
            request.fail(NotImplementedError(f"this worker cannot serve kind {request.kind}"))
            return
        if runs_user_code:
            self.executor.run(self._run, handler, request)
        else:
            self._run(handler, request)

    def _run(self, handler: Handler, request: Request) -> None:
        try:
            self._context.copy().run(handler, request)
        except BaseException as error:
            request.fail(error)

    def run_in_context(self, action: Callable[[], T]) -> T:
        """Run something with this worker as the current one."""
        return self._context.copy().run(action)

    def _accepted(self, connection: Connection) -> None:
        caller = WorkerInfo(connection.peer.name, connection.peer.worker_id)
        with self._lock:
            closing = self._closing
            if not closing:
                service = Service(self, caller, connection, self._service_ended)
                self._services.add(service)
        if closing:
            connection.close()

    # -- connections

    def _make_link(self, peer: Peer, connection: Connection, call: str) -> Link:
        if self._closing:
            connection.close()
            raise ShutDownError(
                f"this worker is shutting down and cannot call {peer.info.name!r}",
                worker=peer.info.name,
                call=call,
                may_have_run=False,
            )
        return Link(
            peer.info,
            connection,
            self.poller,
            self.executor,
            self._complete,
            self._absorb,
            lambda link: self._link_ended(peer, link),
            self.clock.due,
        )

    def _link_ended(self, peer: Peer, link: Link) -> None:
        if peer.link is link:
            peer.link = None
        self._add_to_past(link.count_sent(), 0, certain=link.farewell)
        self._suspect(peer.info, link.farewell)

    def _service_ended(self, service: Service) -> None:
        with self._lock:
            self._services.discard(service)
        self._add_to_past(0, service.received, certain=service.farewell)
        self._suspect(service.caller, service.farewell)

    def _add_to_past(self, sent: int, received: int, *, certain: bool) -> None:
        with self._lock:
            if self._past is not None and certain:
                self._past = (self._past[0] + sent, self._past[1] + received)
            else:
                self._past = None

    def _suspect(self, info: WorkerInfo, farewell: bool) -> None:
        """A connection has ended. Find out whether its worker has, and tell those who care."""
        if self._closing:
            return
        if farewell:
            self.peers.forget(info)
            self._declare_gone(info)
        elif self.on_gone:
            self.executor.submit(lambda: self._probe(info))

    def _probe(self, info: WorkerInfo) -> None:
        try:
            peer = self.peers.find(info)
            if peer.link is None:
                self.peers.connect(peer, "a sign of life", 2.0)
        except Exception:
            self._declare_gone(info)

    def _declare_gone(self, info: WorkerInfo) -> None:
        for listener in self.on_gone:
            try:
                listener(info)
            except Exception:
                logger.exception("error while clearing up after worker %s", info.name)

    def _hear_farewell(self, request: Request) -> None:
        request.service.farewell = True

    # -- time

    def _housekeeping(self, now: float) -> float:
        """Called by the clock when something may be due."""
        due = now + self.options.heartbeat_interval
        awaited = {worker for workers in self.awaited for worker in workers()}
        for link in self.peers.links():
            due = min(due, link.expire(now))
            if not link.open_calls and not link.watched and link.to.id not in awaited:
                continue
            silence = now - link.last_sign
            # Counted from the question: this process may have been the one that was asleep.
            patience = self.options.heartbeat_limit - self.options.heartbeat_interval
            asked_at = link.asked_at
            if asked_at is not None and now - asked_at >= patience:
                link.end(
                    f"it has given no sign of life for {silence:.1f} s; it may be frozen, or its "
                    "machine may be gone"
                )
            elif silence >= self.options.heartbeat_interval:
                link.ask_for_sign()
                due = min(due, (link.asked_at or now) + patience)
        if now >= self._next_trim:
            self._next_trim = now + self.options.heartbeat_interval
            self._trim()
        return max(due, now + 0.001)

    def _trim(self) -> None:
        with self._lock:
            services = list(self._services)
        for listener in self._listeners:
            listener.trim()
        for link in self.peers.links():
            link.connection.trim()
        for service in services:
            service.trim()

    # -- leaving

    def open_calls(self) -> int:
        return sum(link.open_calls for link in self.peers.links())

    def served_calls(self) -> int:
        """Calls of others that are not answered yet."""
        with self._lock:
            services = list(self._services)
        return sum(len(service.requests) for service in services)

    def wait_until_quiet(self, deadline: float) -> bool:
        """Wait until no call from or to this worker is open.

        Looks now and then: workers that only serve spend their lives here, and being woken by every
        answer would take the interpreter from the threads that serve."""
        pause = 0.0005
        while self._is_busy():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(left, pause))
            pause = min(2 * pause, 0.02)
        return True

    def _is_busy(self) -> bool:
        return bool(self.served_calls() or self.open_calls())

    def traffic(self) -> tuple[int, int] | None:
        """(calls sent, calls received) so far; None when some were lost with a connection."""
        with self._lock:
            if self._past is None:
                return None
            sent, received = self._past
            received += sum(service.received for service in self._services)
        return sent + sum(link.count_sent() for link in self.peers.links()), received

    def abandon(self) -> None:
        """In a forked child: have nothing to do with what is the parent's. Its calls must not be
        answered here, and descriptors that stay open here would hide its death from others. (With
        no lock: threads may have held them that are not here.)"""
        self.abandoned = self._closing = self.executor.stopped = True
        for link in self.peers.abandon():
            link.connection.abandon()
        for service in list(self._services):
            service.abandon()
        for listener in self._listeners:
            listener.abandon()
        with contextlib.suppress(OSError):  # some systems have closed it themselves
            self.poller.close()

    def close(self, deadline: float) -> None:
        """Say farewell and end everything, whatever the others do."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            services = list(self._services)
        self.peers.closed = True
        self.insistence.stop()
        for listener in self._listeners:
            listener.close()
        links = self.peers.links()
        for link in links:
            link.say_farewell()
            link.end("this worker was shut down", leaving=True)
        for service in services:
            service.say_farewell()
            service.close()
        stuck = self.executor.stop(deadline)
        for link in {*links, *self.peers.links()}:  # made, or settled, while others were ended
            link.end("this worker was shut down", leaving=True)
            link.drain()
        self.clock.stop()
        self.insistence.give_up()
        if self.member is not None:
            self.roster.leave(self.member)
        if stuck:
            logger.warning(
                "worker %s has shut down while functions were still running on its threads %s",
                self.info.name,
                ", ".join(stuck),
            )
        else:
            self.poller.close()
