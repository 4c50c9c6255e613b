"""The other workers, and the connections to them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from gradwire.agent.link import Link
from gradwire.agent.roster import Member, Roster
from gradwire.errors import (
    AuthenticationError,
    CallTimeout,
    GradwireError,
    NotInitializedError,
    ShutDownError,
    UnknownWorkerError,
    WorkerLost,
)
from gradwire.ids import WorkerInfo
from gradwire.transport.base import Connection, Greeting, Transport

T = TypeVar("T")

#: How long one attempt to connect may take, at most.
CONNECT_SECONDS = 10.0


class Peer:
    """One other worker (or this one), connected when it is first called."""

    def __init__(self, member: Member):
        self.member = member
        self.info = member.info
        #: Read without the lock on the way of every call.
        self.link: Link | None = None
        self.connecting = threading.Lock()


class _Abandoned:
    """The group of a forked child: it has none."""

    fixed = True

    def __init__(self, name: str):
        self._name = name

    def members(self) -> NoReturn:
        raise NotInitializedError(
            f"this process was forked from worker {self._name!r}, whose connections it cannot use: "
            "call gradwire.rpc.init_rpc(...) here to have a worker of its own"
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
    """Finds workers by name, id or info, and connects to them."""

    def __init__(
        self,
        roster: Roster,
        transports: Sequence[Transport],
        make_link: Callable[[Peer, Connection, str], Link],
        patience: float,
    ):
        self._roster = roster
        self._transports = {transport.name: transport for transport in transports}
        self._make_link = make_link
        self._patience = min(CONNECT_SECONDS, max(1.0, patience))
        self._lock = threading.RLock()
        self._by_name: dict[str, Peer] = {}
        self._by_id: dict[int, Peer] = {}
        self.me = Greeting(-1, "", "")
        self.closed = False

    def find(self, to: str | int | WorkerInfo) -> Peer:
        """The worker meant by `to`. Raises UnknownWorkerError."""
        if type(to) is str:
            peer = self._by_name.get(to)
        else:
            if type(to) is not int and isinstance(to, WorkerInfo):
                to = to.id
            peer = self._by_id.get(to)  # type: ignore[arg-type]
        return peer or self._look_up(to)

    def _look_up(self, to: str | int) -> Peer:
        find: Any = self._roster.by_name if isinstance(to, str) else self._roster.by_id
        member = self._ask(find, to)
        if member is not None:
            return self._remember(member)
        infos = [m.info for m in self._ask(self._roster.members)]
        if isinstance(to, str):
            names = ", ".join(info.name for info in infos)
        else:
            names = ", ".join(f"{info.name} (id {info.id})" for info in infos)
        raise UnknownWorkerError(f"could not find destination worker {to!r}: the group has {names}")

    def _ask(self, question: Callable[..., T], *args: Any) -> T:
        """What the roster says, which may have to ask the meeting place."""
        try:
            return question(*args)
        except GradwireError:
            raise
        except Exception as error:
            raise UnknownWorkerError(
                "the meeting place cannot be asked who is in the group: has the worker of rank 0 "
                f"ended, which hosts it? Workers that know each other go on ({error})"
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
        """Everybody in the group, this worker included."""
        with self._lock:
            before = set(self._by_id.values())
        found = [self._remember(member) for member in self._ask(self._roster.members)]
        for peer in before.difference(found):
            self.forget(peer.info)
        return found

    def links(self) -> list[Link]:
        with self._lock:
            return [link for peer in self._by_id.values() if (link := peer.link) is not None]

    def abandon(self) -> list[Link]:
        """In a forked child: know nobody any more; returns the links that there were."""
        links = [link for peer in self._by_id.values() if (link := peer.link) is not None]
        self._by_name, self._by_id = {}, {}
        self._roster = _Abandoned(self.me.name)
        return links

    def connect(self, peer: Peer, call: str, timeout: float) -> Link:
        """The link to a peer, connecting first if need be. Raises WorkerLost; or CallTimeout, if it
        is the call's own timeout that leaves no time for it."""
        deadline = time.monotonic() + min(timeout or self._patience, self._patience)
        if not peer.connecting.acquire(timeout=max(0.0, deadline - time.monotonic())):
            busy = ["another thread is still trying to connect"]
            raise self._unreachable(peer, call, busy, deadline, timeout)
        try:
            if self.closed:
                raise ShutDownError(
                    f"this worker has shut down and cannot call worker {peer.info.name!r} any more",
                    worker=peer.info.name,
                    call=call,
                    may_have_run=False,
                )
            link = peer.link
            if link is None:
                connection = self._open(peer, call, deadline, timeout)
                link = self._make_link(peer, connection, call)
                with self._lock:  # it may have been forgotten when another attempt failed
                    self._by_id[peer.info.id] = self._by_name[peer.info.name] = peer
                    peer.link = link
                if link.end_reason is not None:
                    peer.link = None  # it ended before anybody could see that it was there
            return link
        finally:
            peer.connecting.release()

    def _open(self, peer: Peer, call: str, deadline: float, timeout: float) -> Connection:
        reasons, gone = [], True
        for address in peer.member.addresses:
            transport = self._transports.get(address.transport)
            if transport is None:
                continue
            try:
                return transport.connect(
                    address.place,
                    self.me,
                    Greeting(peer.info.id, peer.info.name, peer.member.incarnation),
                    max(0.01, deadline - time.monotonic()),
                )
            except (OSError, AuthenticationError) as error:
                reasons.append(f"{address.transport}: {error}")
                gone = gone and isinstance(error, (ConnectionRefusedError, AuthenticationError))
        if gone:
            self.forget(peer.info)
        reasons = reasons or ["no transport in common"]
        raise self._unreachable(peer, call, reasons, deadline, timeout)

    def forget(self, info: WorkerInfo) -> None:
        """Of one that is gone. In an open group it is looked up again next time: it may have come
        back as another."""
        with self._lock:
            peer = self._by_id.get(info.id)
            if peer is not None and peer.link is None and not self._roster.fixed:
                del self._by_id[info.id]
                if self._by_name.get(info.name) is peer:
                    del self._by_name[info.name]

    def _unreachable(
        self, peer: Peer, call: str, reasons: list[str], deadline: float, timeout: float
    ) -> WorkerLost | CallTimeout:
        why = "; ".join(reasons)
        if 0 < timeout < self._patience and time.monotonic() >= deadline:
            return CallTimeout(
                f"{call} on worker {peer.info.name!r}: RPC ran for more than set timeout "
                f"({timeout * 1000:.0f} ms) and will now be marked with an error. There was no "
                f"connection by then ({why}), so it has not run there; give it a longer timeout",
                worker=peer.info.name,
                call=call,
                may_have_run=False,
            )
        return WorkerLost(
            f"worker {peer.info.name!r} cannot be reached for {call} ({why}). It has not run "
            "there. Has that worker ended, or left?",
            worker=peer.info.name,
            call=call,
            may_have_run=False,
        )
