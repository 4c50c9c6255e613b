"""Membership: the workers of a group, and their addresses.

Each worker writes its entry to a key-value store (see `rendezvous`) and reads the entries of the
others. The workers of one process can share a `LocalMembership` instead.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

from gradwire._core.group.made_up_token import (
    MadeUpTokenFile,
    check_store_file,
    make_up_token,
    read_made_up_token,
)
from gradwire._core.ids import WorkerInfo
from gradwire._core.transport.base import Address, Greeting, Transport
from gradwire._core.transport.tcp import is_loopback
from gradwire.errors import AuthenticationError, GradwireError, SetupError

#: A worker that has no id yet gives this id in its greeting, the first message on a connection.
_NO_ID = -1
#: When a member leaves an open group, this value replaces the member's entry in the store.
_LEFT = "left"
#: A worker that joins an open group again gets a new id. These new ids are counted down from this
#: number. Ranks are counted up from 0, so a new id is not the rank of another worker.
_HIGHEST_ID = (1 << 15) - 1
#: To check whether a member has ended, a worker tries to connect to it for at most this long.
_PROBE_SECONDS = 2.0
#: The pause after the first of these attempts. Each further pause is twice as long.
_FIRST_PAUSE_SECONDS = 0.001
#: In an open group, a query to the store fails if the store does not answer within this time.
_STORE_SECONDS = 5.0
#: A worker that joins gives up a query to the store this long after the deadline. Usually torch
#: itself raises an error at the deadline, with a better error text than the worker could give. But
#: torch raises none if the process that hosts the store is frozen.
_GRACE_SECONDS = 1.0
#: When joining fails, the worker of rank 0 waits at most this long for the other workers to fail.
_LINGER_SECONDS = 2.0
#: The pause between two checks whether the other workers have failed.
_LINGER_PAUSE_SECONDS = 0.01
#: After its connection was cut, a query to the store ends within this time.
_CUT_SECONDS = 2.0

_SEE_HOST = "See the output of the process that hosts it, which is mostly that of rank 0"

T = TypeVar("T")


@cache
def this_machine() -> str:
    """Return a name for this machine and its network namespace. Two processes with the same name
    can connect to each other's loopback addresses."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return platform.node()


@dataclass(frozen=True, slots=True)
class Member:
    """A worker's entry in the membership, which is the list of the workers of its group."""

    info: WorkerInfo
    #: A random text that is new at each start of a worker. It distinguishes the worker from an
    #: earlier one with the same name and id.
    incarnation: str
    addresses: tuple[Address, ...]
    #: The machine of the worker. The worker's local addresses, such as Unix sockets and loopback,
    #: are valid only on this machine.
    machine: str = field(default_factory=this_machine)

    def to_json(self) -> str:
        info = self.info
        return json.dumps([info.name, info.id, self.incarnation, self.addresses, self.machine])

    @classmethod
    def from_json(cls, text: str | bytes) -> Member:
        name, worker_id, incarnation, addresses, machine = json.loads(text)
        places = tuple(Address(*address) for address in addresses)
        return cls(WorkerInfo(name, worker_id), incarnation, places, machine)


def proves_end(member: Member, failures: Sequence[tuple[Address, Exception]]) -> bool:
    """Return whether failed attempts to connect to the addresses of a member prove that it has
    ended.

    A worker listens at all its addresses until it ends. So it has ended if each address refuses the
    connection. An address refuses the connection if nothing listens there, or if another worker of
    the group listens there and has proven this in the handshake. Any other error proves nothing. It
    may come from a full backlog, from a process without free file descriptors, from a stranger at
    the address, or from the network. If an address is valid only on the member's own machine, such
    as a loopback address, it is ignored on other machines."""
    errors = [error for address, error in failures if is_valid_here(member, address)]
    return bool(errors) and all(isinstance(error, ConnectionRefusedError) for error in errors)


def is_valid_here(member: Member, address: Address) -> bool:
    """Return whether an address of a member means the same place on this machine as it does on the
    member's machine."""
    is_local = address.transport != "tcp" or is_loopback(address.place.split("|")[0])
    return not is_local or member.machine == this_machine()


def _refusal(why: str) -> SetupError:
    return SetupError(f"the group cannot be formed: {why}")


def _check_refusal(text: str) -> None:
    """Raise SetupError if the value of a key in the store says why the group cannot be formed."""
    if text.startswith('{"refused": '):
        with contextlib.suppress(ValueError):
            raise _refusal(json.loads(text)["refused"])


def is_gone(member: Member, transports: Sequence[Transport]) -> bool:
    """Return True if a member has certainly ended. Return False if it runs, or may still run."""
    by_name = {transport.name: transport for transport in transports}
    them = Greeting(member.info.id, member.info.name, member.incarnation)
    # A worker that tries to connect greets the member with an id that no worker has. So when the
    # connection ends, the member does not conclude that a worker is lost.
    me = Greeting(_NO_ID, "newcomer", "")
    deadline = time.monotonic() + _PROBE_SECONDS
    pause = _FIRST_PAUSE_SECONDS
    while True:
        failures: list[tuple[Address, Exception]] = []
        for address in member.addresses:
            left = max(0.01, deadline - time.monotonic())
            if address.transport in by_name and is_valid_here(member, address):
                try:
                    by_name[address.transport].connect(address.place, me, them, left).close()
                    return False
                except (OSError, AuthenticationError) as error:
                    failures.append((address, error))
        if not failures or proves_end(member, failures):
            return bool(failures)
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause *= 2


class Membership(Protocol):
    """The list of the workers of a group."""

    #: Whether the group has a fixed size. Only then can its members wait for each other.
    fixed: bool

    def choose_id(self, name: str, rank: int, is_gone: Callable[[Member], bool]) -> int:
        """Return the id for a new worker. This is the worker's rank, unless the worker has no rank
        or, in an open group, an earlier member with that id has left.

        An open group never gives an id twice, because RRefs and contexts of the earlier member may
        still exist. A member may have ended without leaving, which `is_gone` tells. If that member
        has the name or the rank of the new worker, its entry is removed, so that the new worker can
        join."""

    def join(self, member: Member) -> None:
        """Add this worker. In a group of fixed size, return when all workers have joined. Raise
        SetupError if another worker has the same name or id."""

    def leave(self, member: Member) -> None:
        """Remove this worker. If another worker with the same name or id has joined since, keep the
        entry of that worker."""

    def by_name(self, name: str) -> Member | None:
        """Return the member with this name, or None if there is none."""

    def by_id(self, worker_id: int) -> Member | None:
        """Return the member with this id, or None if there is none."""

    def members(self) -> list[Member]:
        """Return all members, sorted by id."""


class LocalMembership:
    """The membership of a group whose workers are all in one process. If no size is given, the
    group is open, so workers may join and leave at any time."""

    def __init__(self, size: int | None = None):
        self.fixed = size is not None
        self._members: dict[int, Member] = {}
        #: The ids of members that have left. A worker whose rank is one of them gets a new id.
        self._former: set[int] = set()
        self._more_ids = itertools.count(_HIGHEST_ID, -1)
        self._lock = threading.Lock()

    def choose_id(
        self,
        name: str,  # noqa: ARG002  # not needed: in one process, no member ends without leaving
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

    def by_id(self, worker_id: int) -> Member | None:
        return self._members.get(worker_id)

    def members(self) -> list[Member]:
        return sorted(self._members.values(), key=lambda m: m.info.id)


class StoreMembership:
    """The membership of a group, kept in a c10d store (one of torch's key-value stores).

    Two keys belong to the whole store:

    - `kind`: "open" for an open group. For fixed groups: the size that the first worker gave, and
      the rank of that worker;
    - `arrivals`: a counter of the workers of fixed groups that have used this store.

    The other keys have a prefix for the group:
    - `token`: the secret of the group if no worker was given one, or the name of the file that has
      it (see `made_up_token`);
    - `token-maker`: a counter, used by an open group with a `file://` store. The worker that counts
      first makes up the token;
    - `member/<id>` and `name/<name>`: the entry of a member, with a proof that a worker that knows
      the token has written it there. After the member has left, their values are `_LEFT` and the
      empty string;
    - `here/<key>`: written after `<key>`, for those that wait for it (see `_put_if_missing`);
    - `ids` and `more-ids`: counters that give ids to workers without a rank, and to workers that
      join again;
    - `failed`: a counter of the workers of a fixed group that could not join;
    - `joined`: a counter of the workers that have joined an open group;
    - `joined/<number>`: the id of the worker that joined as number 1, 2 and so on. These keys serve
      to list the members.

    The workers of a group of fixed size may use the same store again after a shutdown. The next
    `size` workers that connect to the store then form a new group.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int | None,
        timeout: float,
        deadline: float | None = None,
    ):
        self.fixed = size is not None
        self._store = store
        self._size = size
        #: How many seconds joining may take in all. `_deadline` is the time when they are over.
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout if deadline is None else deadline
        self._known: dict[int, Member] = {}
        #: Workers are numbered as they join. These are the numbers of the members that have left.
        self._left: set[int] = set()
        #: The token of the group, from `agree_on_token`. The proofs of the entries need it.
        self._token: bytes | None = None
        self._token_file: MadeUpTokenFile | None = None
        #: The number of this group. Fixed groups may use the same store one after the other; they
        #: are numbered from 0.
        self._group = 0
        self._prefix = "gradwire/0"
        #: When joining fails, the worker of rank 0 waits until this many workers have failed. If
        #: the value is None, it waits for all workers that have arrived.
        self._expected_failures: int | None = None
        self._join_step(rank, self._arrive, rank)

    def _arrive(self, rank: int) -> None:
        """Find out which of the fixed groups that use this store, one after the other, this worker
        belongs to. Raise SetupError if the worker's rank and size contradict what the other workers
        gave."""
        kind = "open" if self._size is None else f"{self._size} {rank}"
        agreed = self._replace("gradwire/kind", "", kind)
        if (kind == "open") != (agreed == "open"):
            raise SetupError(
                "RPC group mixes statically and dynamically initialized members which is not "
                "supported. Give all workers a world_size, or none"
            )
        if self._size is None:
            return
        size, first = map(int, agreed.split())
        why = None
        if self._size != size:
            why = (
                f"the workers do not agree on the world_size: it is {size} for the worker of rank "
                f"{first} and {self._size} for the worker of rank {rank}"
            )
        elif rank >= size:
            why = f"rank {rank} is not below the world_size of {size}"
        # A worker that is refused does not count as one that has arrived.
        arrived = int(self._store.add("gradwire/arrivals", 1 if why is None else 0))
        self._group = max(arrived - 1, 0) // size
        self._prefix = f"gradwire/{self._group}"
        if why is not None:
            self._expected_failures = size
            self._refuse(size, why)

    def _refuse(self, size: int, why: str) -> NoReturn:
        """Make joining fail on this worker, and on all workers of the fixed group that wait for
        other workers or are still to come. A group that is complete is not disturbed."""
        # If the store has ended, no refusal can be written there.
        with contextlib.suppress(RuntimeError):
            for key in ("token", *(f"member/{worker_id}" for worker_id in range(size))):
                self._put_if_missing(key, json.dumps({"refused": why}))
        raise _refusal(why)

    def _join_step(self, rank: int, query: Callable[..., T], *args: Any) -> T:
        """Return the result of a query that is a step of joining. If the query fails, the worker of
        rank 0 waits until the other workers have failed too. They read the reason of the failure
        from the store, and the store usually ends with the worker of rank 0."""
        try:
            return self._before_deadline(query, *args)
        except SetupError:
            if self._token_file is not None:
                self._token_file.close()
            if self.fixed:
                # If the store has ended, the other workers cannot read the reason there, so this
                # worker does not wait for them.
                with contextlib.suppress(TimeoutError, RuntimeError):
                    within(_LINGER_SECONDS + _GRACE_SECONDS, self._let_others_fail, rank)
            raise

    def _let_others_fail(self, rank: int) -> None:
        failed = self._count("failed")
        end = time.monotonic() + _LINGER_SECONDS
        while rank == 0 and failed < self._count_expected() and time.monotonic() < end:
            time.sleep(_LINGER_PAUSE_SECONDS)
            failed = self._count("failed", 0)

    def _count_expected(self) -> int:
        if self._expected_failures is not None:
            return self._expected_failures
        size = self._size or 0
        arrived = int(self._store.add("gradwire/arrivals", 0))
        return min(arrived - self._group * size, size)

    def agree_on_token(self, token: str | None, rank: int) -> str:
        """Return the token of the group. If none is given, one worker creates a random token."""
        if token is None:
            token = self._join_step(rank, self._make_or_read_token, rank)
        self._token = token.encode()
        return token

    def _make_or_read_token(self, rank: int) -> str:
        # The attribute `path` names the file of a FileStore. Other kinds of stores lack it.
        file: str | None = getattr(self._store, "path", None)
        if file is not None:
            check_store_file(file)
        if file is not None and not self.fixed:
            is_maker = self._count("token-maker") == 1
        else:
            # The worker of rank 0 creates the token. In an open group, it also hosts the store. So
            # the file with the token exists as long as the store does.
            is_maker = rank == 0
        text = None
        if is_maker:
            token = make_up_token()
            if file is None:
                self._token_file = MadeUpTokenFile(token)
            entry = self._token_file.name if self._token_file else token
            text = self._put_if_missing("token", entry)
            if text == entry:
                return token
        if text is None:
            text = self._get_put("token", "the worker that creates the group's token")
        _check_refusal(text)
        return text if file is not None else read_made_up_token(text)

    def choose_id(self, name: str, rank: int, is_gone: Callable[[Member], bool]) -> int:
        if self.fixed:
            return rank
        return self._before_deadline(self._choose_id, name, rank, is_gone)

    def _choose_id(self, name: str, rank: int, is_gone: Callable[[Member], bool]) -> int:
        for holder in {self.by_name(name), self.by_id(rank)}:
            if holder is not None and is_gone(holder):
                # The member with this name or id ended without leaving, so remove its entry.
                self.leave(holder)
        if rank >= 0 and self._look(f"member/{rank}") != _LEFT:
            return rank
        taken = True
        while taken:  # The next id is tried if any member has or had this one.
            count = self._count("ids") if rank < 0 else self._count("more-ids")
            worker_id = count - 1 if rank < 0 else _HIGHEST_ID + 1 - count
            taken = bool(self._look(f"member/{worker_id}"))
        if not 0 <= worker_id <= _HIGHEST_ID:
            raise SetupError("this group has used up all worker ids: start a new group")
        return worker_id

    def join(self, member: Member) -> None:
        try:
            self._join_step(member.info.id, self._join, member)
        except BaseException:
            # The worker's name may have been written to the store before the error. In an open
            # group, `leave` removes the name.
            self.leave(member)
            raise
        finally:
            if self.fixed and self._token_file is not None:
                self._token_file.close()  # Only joining needs the token file.

    def _join(self, member: Member) -> None:
        info = member.info
        self._claim(f"name/{info.name}", f"worker name {info.name!r}", member)
        self._claim(f"member/{info.id}", f"worker id {info.id}", member)
        if self._size is None:
            self._set(f"joined/{self._count('joined')}", str(info.id))
            return
        for worker_id in range(self._size):
            place = f"member/{worker_id}"
            text = self._get_put(place, f"the worker of rank {worker_id}")
            self._known[worker_id] = self._open(place, text)

    def _claim(self, place: str, what: str, member: Member) -> None:
        """Write a member's entry to the key `place`. Raise SetupError if another worker's entry is
        there already. `what` describes the key in the error message."""
        entry = self._seal(place, member)
        current = self._put_if_missing(place, entry)
        if current == entry:
            return
        if current == _LEFT:
            raise SetupError(f"another worker gave up {what} at this moment: try again")
        try:
            holder = self._open(place, current)
            why = f"{what} is not unique: {holder.info} and {member.info} both want it"
        except AuthenticationError as error:
            if self._size is None:
                raise
            why = str(error)
        if self._size is not None:
            # Replace the entry of this id by a refusal. Then the entry is valid neither for the
            # worker that has the id nor for the workers that wait for the entry. If the store has
            # ended, no refusal can be written.
            with contextlib.suppress(RuntimeError):
                self._set(f"member/{member.info.id}", json.dumps({"refused": why}))
            self._refuse(self._size, why)
        raise SetupError(
            f"{why}, and {holder.info.name!r} may still be running. If that worker is frozen, or "
            "its machine is lost, give this one another"
        )

    def _seal(self, place: str, member: Member) -> str:
        """Return the entry of a member for the key `place`: a proof that its writer knows the
        token, and the member as JSON."""
        text = member.to_json()
        return f"{self._prove(place, text)} {text}"

    def _open(self, place: str, entry: str) -> Member:
        """Return the member whose entry is at the key `place`. Raise AuthenticationError if the
        entry was not written by a worker that knows the token, or was written to another key."""
        _check_refusal(entry)
        proof, _, text = entry.partition(" ")
        if not hmac.compare_digest(proof.encode(), self._prove(place, text).encode()):
            kind, _, key = place.partition("/")
            whose = f"the worker named {key!r}" if kind == "name" else f"worker id {key}"
            if kind != "name" and self.fixed:
                whose = f"rank {key}"
            raise AuthenticationError(
                f"the entry of {whose} in the rendezvous store was not written by a worker that "
                "knows this group's token: a worker with another token or another program wrote "
                "it. Give all workers the same token, and keep strangers away from the store"
            )
        return Member.from_json(text)

    def _prove(self, place: str, text: str) -> str:
        """Return the HMAC of an entry. It covers the key too, so an entry is not valid at the key
        of another member or of another group. Its first part differs from all HMACs of the
        handshake."""
        if self._token is None:
            raise SetupError("agree_on_token must come before all use of the members' entries")
        parts = (b"gradwire member entry", f"{self._prefix}/{place}".encode(), text.encode())
        return hmac.digest(self._token, b"\0".join(parts), "sha256").hex()

    def leave(self, member: Member) -> None:
        if self._token_file is not None:
            self._token_file.close()
        if not self.fixed:
            # The process that hosts the store may have ended. Then there is no entry to remove.
            with contextlib.suppress(Exception):
                within(_STORE_SECONDS, self._remove, member)

    def _remove(self, member: Member) -> None:
        for place, left in (
            (f"name/{member.info.name}", ""),
            (f"member/{member.info.id}", _LEFT),
        ):
            self._replace(f"{self._prefix}/{place}", self._seal(place, member), left)

    def by_name(self, name: str) -> Member | None:
        if self.fixed:
            return next((m for m in self._known.values() if m.info.name == name), None)
        place = f"name/{name}"
        text = within(_STORE_SECONDS, self._look, place)
        return self._open(place, text) if text else None

    def by_id(self, worker_id: int) -> Member | None:
        if self.fixed:
            return self._known.get(worker_id)
        return within(_STORE_SECONDS, self._fetch, worker_id)

    def members(self) -> list[Member]:
        if not self.fixed:
            within(_STORE_SECONDS, self._fetch_all)
        return sorted(self._known.values(), key=lambda m: m.info.id)

    def _fetch_all(self) -> None:
        for number in set(range(1, self._count("joined", 0) + 1)) - self._left:
            worker_id = self._look(f"joined/{number}")
            if worker_id and self._fetch(int(worker_id)) is None:
                # The member has left, and no other worker gets its id. So this number is never
                # looked up again.
                self._left.add(number)

    def _fetch(self, worker_id: int) -> Member | None:
        """Read the member with this id from the store. Return None if the group has no such member,
        or if it has left."""
        place = f"member/{worker_id}"
        text = self._look(place)
        if not text or text == _LEFT:
            self._known.pop(worker_id, None)
            return None
        member = self._open(place, text)
        self._known[worker_id] = member
        return member

    def _look(self, key: str) -> str | None:
        """Return the value of a key, or None if the store does not have the key."""
        key = f"{self._prefix}/{key}"
        value: str | None = (
            self._store.get(key).decode(errors="replace") if self._store.check([key]) else None
        )
        return value

    def _count(self, key: str, by: int = 1) -> int:
        """Add `by` to a counter in the store, and return the new value."""
        return int(self._store.add(f"{self._prefix}/{key}", by))

    def _put_if_missing(self, key: str, value: str) -> str:
        """Set a key if it is missing, and return the value that the key has then. If workers may
        wait for the key, also set the key `here/<key>`, for which they wait instead. This is needed
        because one kind of torch's stores does not wake waiting workers when `compare_set` sets a
        key."""
        current = self._replace(f"{self._prefix}/{key}", "", value)
        if self.fixed or key == "token":
            self._set(f"here/{key}", "")
        return current

    def _get_put(self, key: str, writer: str) -> str:
        """Wait until a worker has set a key with `_put_if_missing`, and return the value. `writer`
        describes that worker in the error message."""
        left = max(0.001, self._deadline - time.monotonic())
        try:
            self._store.wait([f"{self._prefix}/here/{key}"], timedelta(seconds=left))
            value: str = self._store.get(f"{self._prefix}/{key}").decode(errors="replace")
            return value
        except Exception as error:
            if time.monotonic() < self._deadline:
                raise SetupError(
                    f"the rendezvous store ended while this worker waited for {writer}: {error}. "
                    + _SEE_HOST
                ) from error
            hint = "Is it running, with the same init_method and world_size?"
            if self._group:
                hint += (
                    f" A group of {self._size} has formed through this store before. If it still "
                    "runs, this worker is one too many: two workers have the same rank"
                )
            raise SetupError(
                f"{writer} has not joined the group within {self._timeout:g} s: {error}. {hint}"
            ) from error

    def _before_deadline(self, query: Callable[..., T], *args: Any) -> T:
        """Return the result of a query that is a part of joining. Raise SetupError if the store
        does not answer before the deadline for joining, or ends."""
        left = max(0.0, self._deadline - time.monotonic())
        try:
            return within(left + _GRACE_SECONDS, query, *args)
        except TimeoutError as error:
            raise SetupError(
                f"the rendezvous store has not answered within {self._timeout:g} s: the process "
                "that hosts it, which is mostly that of rank 0, is frozen or cannot be reached"
            ) from error
        except RuntimeError as error:
            if isinstance(error, GradwireError):
                raise
            raise SetupError(
                f"the rendezvous store ended while this worker joined: {error}. {_SEE_HOST}"
            ) from error

    def _set(self, key: str, value: str) -> None:
        self._store.set(f"{self._prefix}/{key}", value)

    def _replace(self, key: str, expected: str, value: str) -> str:
        """Set a key to `value` if its present value is `expected`. If `expected` is "", set the key
        if it is missing. Return the value that the key has afterwards."""
        current = self._store.compare_set(key, expected, value)
        return current if isinstance(current, str) else str(current.decode(errors="replace"))


def within(
    seconds: float, query: Callable[..., T], *args: Any, cut: Callable[[], None] | None = None
) -> T:
    """Return the result of a query to the store, or raise TimeoutError after `seconds`. A separate
    thread runs the query, because torch waits forever if the process that hosts the store does not
    answer. Before the TimeoutError is raised, `cut` is called. It must make the query fail, so that
    the thread ends."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(query(*args))
        except BaseException as error:
            answer.set_exception(error)

    thread = threading.Thread(target=run, name="gradwire-store", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        if cut is not None:
            cut()
            thread.join(_CUT_SECONDS)
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answer.result()
