"""Rendezvous: how the workers of a group find the key-value store that they share. The store
is one of torch's.

Rank 0 hosts the store of `tcp://` and `env://`. Torch's store listens on all addresses of the
machine if it opens its own socket. So this module opens the socket, at the address of the group.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit

import torch

from gradwire._core.group.membership import StoreMembership, within
from gradwire._core.transport.tcp import is_loopback
from gradwire.errors import SetupError

#: A worker checks repeatedly whether the store's host listens. The pause between two checks is
#: this fraction of the time waited so far.
_PAUSE_PART = 0.1
#: The pause between two checks whether the store's host listens is at least this long.
_MIN_PAUSE_SECONDS = 0.0005
#: A worker spends at most this long on checking whether the store's host listens. After that, torch
#: waits for the host.
_MAX_WAIT_SECONDS = 5.0
#: A worker whose rank is wrong tries to tell the others, for at most this long.
_MAX_COMPLAINT_SECONDS = 5.0
#: Torch gives up soon after the deadline, unless a process has accepted its connection and does not
#: answer. So this module cuts the connection this long after the deadline.
_GRACE_SECONDS = 1.0
#: After torch has failed, a worker finds out whether anything listens at the address of the store.
_DIAGNOSIS_SECONDS = 1.0
#: This many workers can connect to the store at the same moment.
_BACKLOG = 2048


def meet(
    init_method: str, rank: int, size: int | None, timeout: float
) -> tuple[StoreMembership, int, int | None]:
    """Return the membership in the store at `init_method`, this worker's rank and the size of the
    group. The rank is -1 if it is not known yet. The size is None if the group is open."""
    deadline = time.monotonic() + timeout
    store, rank, size = open_store(init_method, rank, size, timeout)
    return StoreMembership(store, rank, size, timeout, deadline), rank, size


def open_store(
    init_method: str, rank: int, size: int | None, timeout: float
) -> tuple[Any, int, int | None]:
    """Return the store at `init_method`, this worker's rank and the size of the group."""
    if init_method.startswith("env://"):
        rank = rank if rank >= 0 else int(os.environ.get("RANK", "-1"))
        size = size or int(os.environ.get("WORLD_SIZE", "0")) or None
    if rank < 0 and (size is not None or not init_method.startswith("file://")):
        raise SetupError(
            f"rank parameter missing: the rendezvous at {init_method!r} needs the rank of each "
            "worker, from the argument rank or the variable RANK. Rank 0 hosts the store"
        )
    if size is not None and rank >= size:
        # The rank is wrong, but the error is not raised here. `StoreMembership` raises it after it
        # has written it to the store, so that the other workers get the error too.
        timeout = min(timeout, _MAX_COMPLAINT_SECONDS)
    try:
        cut = _connection_cutter(_address(urlsplit(init_method)))
        store = within(timeout + _GRACE_SECONDS, _open, init_method, rank, size, timeout, cut=cut)
    except Exception as error:
        if size is not None and rank >= size:
            raise SetupError(f"rank {rank} is not below the world_size of {size}") from error
        raise SetupError(
            f"the rendezvous at {init_method!r} failed: {_explain(init_method, error)}"
        ) from error
    return store, rank, size


def _open(init_method: str, rank: int, size: int | None, timeout: float) -> Any:
    """Open the store at `init_method`. `timeout` limits the opening and, for a store with a host,
    each later operation on the store too."""
    # This import is slow, and workers that share a process do not need it.
    from torch.distributed.rendezvous import rendezvous

    url = urlsplit(init_method)
    deadline = time.monotonic() + timeout
    place = _address(url)
    if place is not None and rank > 0:
        _wait_for_host(*place, min(timeout / 2, _MAX_WAIT_SECONDS))
    if url.scheme == "file" and os.name == "posix" and url.path:
        # Create the file here, readable by this user only. Torch would create a file that all users
        # can read.
        os.close(os.open(url.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    # In a program that torchrun started, torchrun itself hosts the store.
    in_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = None
    if place is not None and rank <= 0 and not in_torchrun:
        store = _host_store(*place, url.query, deadline)
    if store is None:
        # For a store that a process hosts, torch is told the size -1, which means unknown. If torch
        # knew the size, rank 0 would wait in torch until all workers have connected. Torch checks
        # this only every 10 ms. Without that wait, the group is formed sooner.
        query = f"rank={max(rank, 0)}&world_size={-1 if _has_host(url) else size or -1}"
        full_url = f"{init_method}{'&' if '?' in init_method else '?'}{query}"
        left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        store, _, _ = next(rendezvous(full_url, timeout=left))
    if _has_host(url):
        store.set_timeout(timedelta(seconds=timeout))
    return store


def _has_host(url: SplitResult) -> bool:
    return url.scheme in ("env", "tcp")


def _address(url: SplitResult) -> tuple[str, int] | None:
    """Return the host and port of the store. Return None if it has none, or if they are invalid.
    Torch then raises the error."""
    if url.scheme == "env":
        host, number = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
        port = int(number) if number.isdecimal() else -1
    elif url.scheme == "tcp":
        try:
            host, port = url.hostname, -1 if url.port is None else url.port
        except ValueError:
            return None
    else:
        return None
    return (host, port) if host and 0 <= port < 1 << 16 else None


# -- hosting a store


def _host_store(host: str, port: int, query: str, deadline: float) -> Any | None:
    """Return a store that listens at the address of the group only. Return None if this module
    cannot open a socket there. Then torch opens one, or says why it cannot."""
    listening = _listen(host, port)
    if listening is None:
        return None
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch has no stub of it

    port = listening.getsockname()[1]
    # Before 2.8, torch's default kind of store cannot use a socket that it is given.
    is_able = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)
    use_libuv = parse_qs(query).get("use_libuv", [os.environ.get("USE_LIBUV", "1")])[-1] == "1"
    return TCPStore(
        host,
        port,
        world_size=None,
        is_master=True,
        timeout=timedelta(seconds=max(0.001, deadline - time.monotonic())),
        wait_for_workers=False,
        # Other parts of the program, such as torch's process groups, may share the store.
        multi_tenant=True,
        master_listen_fd=listening.detach(),  # The store closes this socket.
        use_libuv=use_libuv and is_able,
    )


def _listen(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens at the address of the group. Return None if the address is in
    use, or if this function cannot tell on which address to listen. It cannot tell in three cases.
    The host may be a name with several addresses. It may stand for a loopback address here, and for
    another address on other machines. Or its address may belong to a device, such as a router, that
    forwards connections to this machine."""
    if os.name != "posix":
        return None
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    is_exact = host == "localhost" or _is_ip_address(host)
    if not is_exact and (len(found) > 1 or is_loopback(host)):
        return None
    # Prefer IPv6, because torch's clients try it first, and warn if nothing listens there.
    for family, kind, protocol, _, address in sorted(found, key=lambda f: f[0] != socket.AF_INET6):
        try:
            listening = socket.socket(family, kind, protocol)
        except OSError:
            continue  # This system has no IPv6.
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(_BACKLOG)
            return listening
        except OSError as error:
            listening.close()
            if error.errno == errno.EADDRINUSE:
                return None
    return None


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


# -- errors


def _connection_cutter(place: tuple[str, int] | None) -> Callable[[], None]:
    """Return a function that cuts the connections to `place` that were made after
    `_connection_cutter` was called. A process that is not a store may accept torch's connection and
    never answer. Then a thread of torch would wait without end if the connection were not cut."""
    before = _list_sockets()

    def cut() -> None:
        for descriptor in _list_sockets() - before:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                if place and connection.getpeername()[1] == place[1]:
                    connection.shutdown(socket.SHUT_RDWR)

    return cut


def _list_sockets() -> set[int]:
    sockets = set()
    with suppress(OSError):  # Some systems have no such folder.
        for descriptor in map(int, os.listdir("/dev/fd")):
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    sockets.add(descriptor)
    return sockets


def _explain(init_method: str, error: Exception) -> str:
    """Return why a store cannot be opened."""
    place = _address(urlsplit(init_method))
    if place is None:
        return f"{error}. Every worker must be able to reach that place"
    where = f"{place[0]}:{place[1]}"
    if "EADDRINUSE" in str(error):
        return (
            f"another process listens at {where} already: a program that has nothing to do with "
            "this group, or a second worker of rank 0. End it, or give the group another port"
        )
    try:
        socket.create_connection(place, _DIAGNOSIS_SECONDS).close()
    except ConnectionRefusedError:
        return (
            f"nobody listens at {where}. Is the worker of rank 0, which hosts the store, running "
            "there?"
        )
    except OSError as reason:
        return f"{where} cannot be reached: {reason}"
    if isinstance(error, TimeoutError):
        return (
            f"a process listens at {where} but does not answer. It is not the store of the group, "
            "which the worker of rank 0 hosts; or that worker is frozen"
        )
    return (
        f"the process that listens at {where} does not answer as a store of torch does. Is it the "
        f"worker of rank 0, or does another program have this port? ({error})"
    )


# -- waiting for the host of a store


def _wait_for_host(host: str, port: int, seconds: float) -> None:
    """If the store's host is this machine, wait until the store listens, for at most `seconds`.
    Torch could do this waiting, but it sleeps half a second or more between two attempts."""
    if sys.platform != "linux" or not port:
        return
    start = time.monotonic()
    # An unknown host name is not reported here, because torch will raise an error for it.
    with suppress(OSError):
        while not _may_be_up(host, port) and (waited := time.monotonic() - start) < seconds:
            time.sleep(max(waited * _PAUSE_PART, _MIN_PAUSE_SECONDS))


def _may_be_up(host: str, port: int) -> bool:
    """Return whether a process may be listening on the port. This is False only if the host is this
    machine and no process listens there.

    The check does not connect to the port, because torch's store would look up the host name of the
    client, which is slow. Instead, it binds a socket to the port. On Linux, with SO_REUSEADDR,
    binding succeeds as long as no process listens on the port.
    """
    is_here = False
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    ):
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
                is_here = True
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return True
    return not is_here
