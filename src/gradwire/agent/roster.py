"""Who is in the group, and where they can be reached.

The workers of a group meet at one of torch's key-value stores (`meeting`): each leaves its entry
there and finds those of the others. The workers of one process can share a `LocalRoster` instead.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import platform
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

from gradwire.errors import AuthenticationError, SetupError
from gradwire.ids import WorkerInfo
from gradwire.transport.base import Address, Greeting, Transport
from gradwire.transport.tcp import is_loopback

_NOBODY = -1
#: In the place of a member that has left an open group.
_LEFT = "left"
#: Ids for those who come back are counted down from here: ranks are counted up from 0.
_HIGHEST_ID = (1 << 15) - 1
#: How long a worker may take to show that it is still there.
_PROBE_SECONDS = 2.0
#: How long the meeting place may take to say who is in an open group.
_STORE_SECONDS = 5.0

T = TypeVar("T")


@cache
def this_machine() -> str:
    """Of two processes with the same, each can reach what listens on the other's loopback."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return platform.node()


@dataclass(frozen=True, slots=True)
class Member:
    """One life of a worker."""

    info: WorkerInfo
    incarnation: str
    addresses: tuple[Address, ...]
    #: Who is on the same finds the same at addresses that mean nothing elsewhere.
    machine: str = field(default_factory=this_machine)

    def to_json(self) -> str:
        info = self.info
        return json.dumps([info.name, info.id, self.incarnation, self.addresses, self.machine])

    @classmethod
    def from_json(cls, text: str | bytes) -> Member:
        found = json.loads(text)
        if isinstance(found, dict):
            raise SetupError(f"the group cannot meet: {found['refused']}")
        name, id, incarnation, addresses, machine = found
        places = tuple(Address(*address) for address in addresses)
        return cls(WorkerInfo(name, id), incarnation, places, machine)


def is_gone(member: Member, transports: Sequence[Transport]) -> bool:
    """Whether nobody listens any more where a member did. One that does not answer, or cannot be
    reached from here, may still be there."""
    them = Greeting(member.info.id, member.info.name, member.incarnation)
    me = Greeting(
        _NOBODY, "newcomer", ""
    )  # who is soon lost again: nothing must be concluded from that
    refusals = 0
    for address in member.addresses:
        if _is_local(address) and member.machine != this_machine():
            continue
        for transport in transports:
            if transport.name == address.transport:
                try:
                    transport.connect(address.place, me, them, _PROBE_SECONDS).close()
                    return False
                except (OSError, AuthenticationError) as error:
                    if getattr(error, "errno", None) != errno.ECONNREFUSED:
                        return False
                    refusals += 1
    return refusals > 0


def _is_local(address: Address) -> bool:
    return address.transport != "tcp" or is_loopback(address.place.split("|")[0])


class Roster(Protocol):
    """The list of a group's members."""

    #: Whether the group has a fixed size, so that its members can wait for one another.
    fixed: bool

    def choose_id(self, name: str, rank: int, is_gone: Callable[[Member], bool]) -> int:
        """The id that a new worker should join with: its rank, if it has one.

        In an open group nobody gets an id that another has had, though, for what that one has made
        may still be around under its id: one that comes back gets a new id. `is_gone` tells whether
        a member has ended without leaving; its name and its rank can be taken up again."""

    def join(self, member: Member) -> None:
        """Add this worker; in a group of fixed size, return when everybody is there. Raises
        SetupError when another has its name or its id."""

    def leave(self, member: Member) -> None:
        """Remove this worker, and nobody who has its name or its id by now."""

    def by_name(self, name: str) -> Member | None: ...

    def by_id(self, id: int) -> Member | None: ...

    def members(self) -> list[Member]: ...


class LocalRoster:
    """For workers of one process. The size is fixed when it is given."""

    def __init__(self, size: int | None = None):
        self.fixed = size is not None
        self._members: dict[int, Member] = {}
        #: Ids of those who have left.
        self._former: set[int] = set()
        self._more_ids = itertools.count(_HIGHEST_ID, -1)
        self._lock = threading.Lock()

    def choose_id(
        self,
        name: str,  # noqa: ARG002  # who leaves takes the name along, and in one process all leave
        rank: int,
        is_gone: Callable[[Member], bool],  # noqa: ARG002
    ) -> int:
        return next(self._more_ids) if rank in self._former else rank

    def join(self, member: Member) -> None:
        with self._lock:
            for other in self._members.values():
                if other.info.name == member.info.name or other.info.id == member.info.id:
                    raise SetupError(
                        f"{member.info} is not unique: {other.info} is in the group already"
                    )
            self._members[member.info.id] = member

    def leave(self, member: Member) -> None:
        with self._lock:
            if not self.fixed and self._members.get(member.info.id) == member:
                del self._members[member.info.id]
                self._former.add(member.info.id)

    def by_name(self, name: str) -> Member | None:
        return next((m for m in self.members() if m.info.name == name), None)

    def by_id(self, id: int) -> Member | None:
        return self._members.get(id)

    def members(self) -> list[Member]:
        return sorted(self._members.values(), key=lambda m: m.info.id)


class StoreRoster:
    """For workers that meet at a c10d store.

    Keys: `kind` (fixed or open), `token`, `member/<id>` and `name/<name>` (the member's entry; when
    it has left, a word that says so and nothing), `ids` and `more-ids` (counters of ids given to
    workers without a rank, and to those who come back), `joined` (a counter, so that members of an
    open group can be listed). The members of a fixed group may meet at the same store again after
    they have parted: every `size` arrivals make a new group.
    """

    def __init__(self, store: Any, size: int | None, timeout: float):
        self.fixed = size is not None
        self._store = store
        self._size = size
        self._timeout = timeout
        self._known: dict[int, Member] = {}
        #: Numbers of those who have joined and left.
        self._past: set[int] = set()
        self._check_kind()
        round = 0 if size is None else (int(store.add("gradwire/arrivals", 1)) - 1) // size
        self._prefix = f"gradwire/{round}"

    def agree_on_token(self, token: str | None, rank: int) -> str:
        """The group's token: the one given, else one that the first to come makes up."""
        if token is not None:
            return token
        if self.fixed:
            if rank == 0:
                self._set("token", secrets.token_hex(32))
        elif self._count("token-maker") == 1:
            self._set("token", secrets.token_hex(32))
        return self._get("token", "the worker that makes the group's token").decode()

    def choose_id(self, name: str, rank: int, is_gone: Callable[[Member], bool]) -> int:
        if self.fixed:
            return rank
        for holder in {self.by_name(name), self.by_id(rank)}:
            if holder is not None and is_gone(holder):
                self.leave(holder)  # which it could not do itself
        if rank >= 0 and self._look(f"member/{rank}") != _LEFT:
            return rank
        taken = True
        while taken:  # by somebody who has it as a rank, or has had it
            id = self._count("ids") - 1 if rank < 0 else _HIGHEST_ID + 1 - self._count("more-ids")
            taken = bool(self._look(f"member/{id}"))
        if not 0 <= id <= _HIGHEST_ID:
            raise SetupError("this group has had more workers than there are ids: begin a new one")
        return id

    def join(self, member: Member) -> None:
        info = member.info
        try:
            self._claim(f"name/{info.name}", f"worker name {info.name!r}", member)
            self._claim(f"member/{info.id}", f"worker id {info.id}", member)
            self._set(f"joined/{self._count('joined')}", str(info.id))
        except BaseException:
            self.leave(member)  # it may have got its name, and not its id
            raise
        if self._size is None:
            return
        for id in range(self._size):
            text = self._get(f"member/{id}", f"the worker of rank {id}")
            self._known[id] = Member.from_json(text)

    def _claim(self, place: str, what: str, member: Member) -> None:
        """Put a member's entry where nobody else's is."""
        entry = member.to_json()
        found = self._replace(f"{self._prefix}/{place}", "", entry)
        if found == entry:
            return
        if found == _LEFT:
            raise SetupError(f"{what} was given up by another worker this very moment: try again")
        why = f"{what} is not unique: another worker of the group has it"
        if self.fixed:  # the others need not wait for this one
            self._set(f"member/{member.info.id}", json.dumps({"refused": why}))
            raise SetupError(why)
        raise SetupError(
            f"{why}, and may still be running. If that one is frozen, or its machine is lost, give "
            "this one another"
        )

    def _check_kind(self) -> None:
        kind = "fixed" if self.fixed else "open"
        if self._replace("gradwire/kind", "", kind) not in ("", kind):
            raise SetupError(
                "RPC group mixes statically and dynamically initialized members which is not "
                "supported. Give all workers a world_size, or none"
            )

    def leave(self, member: Member) -> None:
        if not self.fixed:
            with contextlib.suppress(Exception):  # the store went away before us
                _in_time(self._strike_off, member)

    def _strike_off(self, member: Member) -> None:
        entry = member.to_json()
        self._replace(f"{self._prefix}/name/{member.info.name}", entry, "")
        self._replace(f"{self._prefix}/member/{member.info.id}", entry, _LEFT)

    def by_name(self, name: str) -> Member | None:
        if self.fixed:
            return next((m for m in self._known.values() if m.info.name == name), None)
        text = _in_time(self._look, f"name/{name}")
        return Member.from_json(text) if text else None

    def by_id(self, id: int) -> Member | None:
        return self._known.get(id) if self.fixed else _in_time(self._fetch, id)

    def members(self) -> list[Member]:
        if not self.fixed:
            _in_time(self._fetch_all)
        return sorted(self._known.values(), key=lambda m: m.info.id)

    def _fetch_all(self) -> None:
        for number in set(range(1, self._count("joined", 0) + 1)) - self._past:
            id = self._look(f"joined/{number}")
            if id and self._fetch(int(id)) is None:
                self._past.add(number)  # for good: nobody comes back with the same id

    def _fetch(self, id: int) -> Member | None:
        """Look an id up anew: in an open group it may have left."""
        text = self._look(f"member/{id}")
        if not text or text == _LEFT:
            self._known.pop(id, None)
            return None
        member = Member.from_json(text)
        self._known[id] = member
        return member

    def _look(self, key: str) -> str | None:
        """A value that may be missing, without waiting for it."""
        key = f"{self._prefix}/{key}"
        found: str | None = self._store.get(key).decode() if self._store.check([key]) else None
        return found

    def _count(self, key: str, by: int = 1) -> int:
        """The value of a counter, which goes on by that much."""
        return int(self._store.add(f"{self._prefix}/{key}", by))

    def _get(self, key: str, whom: str) -> bytes:
        """A value that must come, waiting for it."""
        key = f"{self._prefix}/{key}"
        try:
            self._store.wait([key], timedelta(seconds=self._timeout))
            value: bytes = self._store.get(key)
            return value
        except Exception as error:
            raise SetupError(
                f"waited {self._timeout:g} s in vain for {whom} to join the group: {error}. Is it "
                "running, with the same init_method and world_size?"
            ) from error

    def _set(self, key: str, value: str) -> None:
        self._store.set(f"{self._prefix}/{key}", value)

    def _replace(self, key: str, expected: str, value: str) -> str:
        """Set a value unless it is not the one expected ("": there is none); what it is now."""
        found = self._store.compare_set(key, expected, value)
        return found if isinstance(found, str) else str(found.decode())


def _in_time(question: Callable[..., T], *args: Any) -> T:
    """The answer of the meeting place, for which torch waits without end if its host is frozen."""
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(question(*args))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=ask, name="gradwire-store", daemon=True).start()
    try:
        return answer.result(_STORE_SECONDS)
    except NotInTime as error:
        raise TimeoutError(f"no answer within {_STORE_SECONDS:g} s") from error
