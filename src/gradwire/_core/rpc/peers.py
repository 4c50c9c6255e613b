"""Peers: the workers of the group as this worker sees them, and the connections to them."""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar

from gradwire._core.group.membership import Member, Membership, is_valid_here, proves_end
from gradwire._core.ids import To, WorkerInfo
from gradwire._core.rpc.client import ClientChannel
from gradwire._core.rpc.deadlines import timeout_text
from gradwire._core.transport.base import Address, Connection, Greeting, Transport
from gradwire.errors import (
    AuthenticationError,
    CallTimeout,
    GradwireError,
    NotInitializedError,
    ShutDownError,
    UnknownWorkerError,
    WorkerLost,
)

logger = logging.getLogger("gradwire")

T = TypeVar("T")

#: The longest that one attempt to connect may take.
CONNECT_SECONDS = 10.0


class Peer:
    """A worker of the group, as this worker sees it. The first call to it opens the connection."""

    def __init__(self, member: Member):
        self.member = member
        self.info = member.info
        #: The channel for calls to this peer; None while there is no connection. Every call reads
        #: this without a lock.
        self.channel: ClientChannel | None = None
        self.connecting = threading.Lock()
        #: Whether the last attempt to connect has proven that the worker has ended.
        self.has_ended = False


class Finding(enum.Enum):
    """What an attempt to connect to a worker has shown."""

    RUNS = enum.auto()
    ENDED = enum.auto()
    UNKNOWN = enum.auto()


class _NoMembership:
    """Takes the place of the membership in a process that `os.fork` made from a worker's process.
    The new process belongs to no group, so nearly every method raises an error."""

    fixed = True

    def __init__(self, name: str):
        self._name = name

    def members(self) -> NoReturn:
        raise NotInitializedError(
            f"this process was forked from worker {self._name!r}, whose connections it cannot use: "
            "call gradwire.rpc.init_rpc(...) to make a worker of its own"
        )

    def by_name(self, _name: str) -> NoReturn:
        self.members()

    def by_id(self, _id: int) -> NoReturn:
        self.members()

    def choose_id(self, _name: str, _rank: int, _is_gone: object) -> NoReturn:
        self.members()

    def join(self, _member: Member) -> NoReturn:
        self.members()

    def leave(self, _member: Member) -> None:
        pass


class Peers:
    """The peers of one worker, found by name, id or WorkerInfo, and the connections to them."""

    def __init__(
        self,
        membership: Membership,
        transports: Sequence[Transport],
        me: Greeting,
        make_channel: Callable[[Peer, Connection, str], ClientChannel],
        heartbeat_limit: float,
    ):
        self._membership = membership
        self._transports = {transport.name: transport for transport in transports}
        self._me = me
        self._make_channel = make_channel
        self._connect_seconds = min(CONNECT_SECONDS, max(1.0, heartbeat_limit))
        self._lock = threading.RLock()
        self._by_name: dict[str, Peer] = {}
        self._by_id: dict[int, Peer] = {}
        self._closed = False

    def find(self, to: To) -> Peer:
        """Return the peer that `to` names. Raise UnknownWorkerError if there is none.

        >>> agent.peers.find("worker1").info             # doctest: +SKIP
        WorkerInfo(id=1, name=worker1)
        """
        if type(to) is str:
            peer = self._by_name.get(to)
        else:
            if type(to) is not int and isinstance(to, WorkerInfo):
                to = to.id
            peer = self._by_id.get(to)  # type: ignore[arg-type]
        return peer or self._look_up(to)

    def _look_up(self, to: str | int) -> Peer:
        peer = self._find_member(to)
        if peer is not None:
            return peer
        infos = [m.info for m in self._query(self._membership.members)]
        advice = ""
        if isinstance(to, str):
            known = [info.name for info in infos]
            names = ", ".join(known)
            for similar in get_close_matches(to, known, 1):
                advice = f". Did you mean {similar!r}?"
        else:
            names = ", ".join(f"{info.name} (id {info.id})" for info in infos)
        raise UnknownWorkerError(
            f"could not find destination worker {to!r}: the group has {names}{advice}"
        )

    def _find_member(self, to: str | int) -> Peer | None:
        by: Any = self._membership.by_name if isinstance(to, str) else self._membership.by_id
        member = self._query(by, to)
        return None if member is None else self._remember(member)

    def _query(self, query: Callable[..., T], *args: Any) -> T:
        """Call a method of the membership, the list of the workers of the group. The list may be in
        the rendezvous store. If the store does not answer, raise UnknownWorkerError."""
        try:
            return query(*args)
        except GradwireError:
            raise
        except Exception as error:
            raise UnknownWorkerError(
                "the rendezvous store does not answer, so the members of the group cannot be "
                "looked up. Has the worker of rank 0, which hosts the store, ended? Workers that "
                f"are connected can still call each other ({error})"
            ) from error

    def _remember(self, member: Member) -> Peer:
        with self._lock:
            peer = self._by_id.get(member.info.id)
            if peer is None or peer.member.incarnation != member.incarnation:
                peer = Peer(member)
                self._by_id[member.info.id] = peer
                self._by_name[member.info.name] = peer
            return peer

    def all(self) -> list[Peer]:
        """Return all workers of the group, this one included."""
        with self._lock:
            before = set(self._by_id.values())
        peers = [self._remember(member) for member in self._query(self._membership.members)]
        for peer in before.difference(peers):
            self.forget(peer.info)
        return peers

    def channels(self) -> list[ClientChannel]:
        """Return the channels to the peers that this worker is connected to."""
        with self._lock:
            return [
                channel for peer in self._by_id.values() if (channel := peer.channel) is not None
            ]

    def abandon(self) -> list[ClientChannel]:
        """Forget all peers. This is called in a process that `os.fork` made from a worker's
        process. Return the channels, so that the caller can close the new process's copies."""
        channels = [
            channel for peer in self._by_id.values() if (channel := peer.channel) is not None
        ]
        self._by_name, self._by_id = {}, {}
        self._membership = _NoMembership(self._me.name)
        return channels

    def close(self) -> None:
        """Refuse to connect from now on."""
        self._closed = True

    def connect(self, peer: Peer, call: str, timeout: float) -> ClientChannel:
        """Return the channel to a peer. If there is none, connect to the peer. Raise WorkerLost if
        connecting fails, or CallTimeout if the timeout of the call passes first."""
        limit = self._connect_seconds
        deadline = time.monotonic() + min(timeout or limit, limit)
        if not peer.connecting.acquire(timeout=max(0.0, deadline - time.monotonic())):
            reasons = ["another thread is still trying to connect"]
            raise self._unreachable(peer, call, reasons, deadline, timeout)
        try:
            if self._closed:
                raise ShutDownError(
                    f"this worker has shut down and cannot call worker {peer.info.name!r}",
                    worker=peer.info.name,
                    call=call,
                    may_have_run=False,
                )
            channel = peer.channel
            if channel is None:
                connection = self._open(peer, call, deadline, timeout)
                channel = self._make_channel(peer, connection, call)
                # An earlier attempt to connect may have failed and removed the peer from the two
                # dictionaries `_by_id` and `_by_name`. So the peer is added to them again.
                with self._lock:
                    self._by_id[peer.info.id] = self._by_name[peer.info.name] = peer
                    peer.channel = channel
                if channel.end_reason is not None:
                    # A channel that ends removes itself from `peer.channel`. This channel may have
                    # ended before it was stored there, so it is removed here.
                    peer.channel = None
            return channel
        finally:
            peer.connecting.release()

    def probe(self, info: WorkerInfo, timeout: float) -> Finding:
        """Try once to connect to a worker, to find out whether it still runs."""
        peer = None
        try:
            peer = self._by_id.get(info.id) or self._find_member(info.id)
            if peer is None:
                return Finding.ENDED  # The group has no such worker any more.
            channel = peer.channel
            if channel is None:
                self.connect(peer, "a heartbeat", timeout)
            else:
                # There is a connection, so the worker counts as running for now. If it does not
                # answer the heartbeat, the connection ends, and the worker is suspected again.
                channel.send_heartbeat()
            return Finding.RUNS
        except GradwireError:
            return Finding.ENDED if peer is not None and peer.has_ended else Finding.UNKNOWN

    def _open(self, peer: Peer, call: str, deadline: float, timeout: float) -> Connection:
        failures: list[tuple[Address, Exception]] = []
        for address in peer.member.addresses:
            transport = self._transports.get(address.transport)
            if transport is None:
                continue
            try:
                connection = transport.connect(
                    address.place,
                    self._me,
                    Greeting(peer.info.id, peer.info.name, peer.member.incarnation),
                    max(0.01, deadline - time.monotonic()),
                )
            except (OSError, AuthenticationError) as error:
                failures.append((address, error))
            else:
                peer.has_ended = False
                self._log_fallback(peer, address, failures)
                return connection
        peer.has_ended = proves_end(peer.member, failures)
        if peer.has_ended:
            self.forget(peer.info)
        reasons = [f"{address.transport}: {error}" for address, error in failures]
        reasons = reasons or ["the two workers have no transport in common"]
        raise self._unreachable(peer, call, reasons, deadline, timeout)

    def _log_fallback(
        self, peer: Peer, used: Address, failures: Sequence[tuple[Address, Exception]]
    ) -> None:
        """Log which transports have failed before the transport `used` has worked. Leave out those
        that cannot work, because they are local and the two workers are on different machines."""
        for address, error in failures:
            if is_valid_here(peer.member, address):
                logger.warning(
                    "worker %s is connected to worker %s over %s, because %s failed: %s. Calls "
                    "take longer until the connection ends",
                    self._me.name,
                    peer.info.name,
                    used.transport,
                    address.transport,
                    error,
                )

    def forget(self, info: WorkerInfo) -> None:
        """Forget a peer that is lost or has left. The next call to its name asks the membership
        again, because a new worker may have that name by then. In a fixed group, peers are not
        forgotten."""
        with self._lock:
            peer = self._by_id.get(info.id)
            if peer is not None and peer.channel is None and not self._membership.fixed:
                del self._by_id[info.id]
                if self._by_name.get(info.name) is peer:
                    del self._by_name[info.name]

    def _unreachable(
        self, peer: Peer, call: str, reasons: list[str], deadline: float, timeout: float
    ) -> WorkerLost | CallTimeout:
        reason = "; ".join(reasons)
        if 0 < timeout < self._connect_seconds and time.monotonic() >= deadline:
            return CallTimeout(
                f"{call} on worker {peer.info.name!r}: {timeout_text(timeout)}. The call was not "
                f"sent, because there was no connection yet ({reason}), so it has not run there. "
                "Give it a longer timeout",
                worker=peer.info.name,
                call=call,
                may_have_run=False,
            )
        return WorkerLost(
            f"worker {peer.info.name!r} cannot be reached for {call} ({reason}). The call has not "
            "run there. Has that worker ended or left?",
            worker=peer.info.name,
            call=call,
            may_have_run=False,
        )
