"""Rendezvous: how the workers of a group find the key-value store that they share. The store
is one of torch's."""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import SplitResult, urlsplit

from gradwire._core.group.membership import StoreMembership
from gradwire.errors import SetupError

#: A worker checks repeatedly whether the store's host listens. The pause between two checks is
#: this fraction of the time waited so far.
_PAUSE_PART = 0.1
#: The pause between two checks whether the store's host listens is at least this long.
_MIN_PAUSE_SECONDS = 0.0005
#: A worker spends at most this long on checking whether the store's host listens. After that, torch
#: waits for the host.
_MAX_WAIT_SECONDS = 5.0


def meet(
    init_method: str, rank: int, size: int | None, timeout: float
) -> tuple[StoreMembership, int, int | None]:
    """Return the membership in the store at `init_method`, this worker's rank and the size of the
    group. The rank is -1 if it is not known yet. The size is None if the group is open."""
    store, rank, size = open_store(init_method, rank, size, timeout)
    return StoreMembership(store, size, timeout), rank, size


def open_store(
    init_method: str, rank: int, size: int | None, timeout: float
) -> tuple[Any, int, int | None]:
    """Return the store at `init_method`, this worker's rank and the size of the group."""
    # This import is slow, and workers that share a process do not need it.
    from torch.distributed.rendezvous import rendezvous

    if init_method.startswith("env://"):
        rank = rank if rank >= 0 else int(os.environ.get("RANK", "-1"))
        size = size or int(os.environ.get("WORLD_SIZE", "0")) or None
    if rank < 0 and (size is not None or not init_method.startswith("file://")):
        raise SetupError(
            f"rank parameter missing: the rendezvous at {init_method!r} needs the rank of each "
            "worker, from the argument rank or the variable RANK. Rank 0 hosts the store"
        )
    if size is not None and rank >= size:
        raise SetupError(f"rank {rank} is not below the world_size of {size}")
    url = urlsplit(init_method)
    has_host = url.scheme in ("env", "tcp")
    # For a store that a process hosts, torch is told the size -1, which means unknown. If torch
    # knew the size, rank 0 would wait in torch until all workers have connected. Torch checks this
    # only every 10 ms. Without that wait, the group is formed sooner.
    query = f"rank={max(rank, 0)}&world_size={-1 if has_host else size or -1}"
    full_url = f"{init_method}{'&' if '?' in init_method else '?'}{query}"
    deadline = time.monotonic() + timeout
    try:
        if has_host and rank > 0:
            _wait_for_host(url, min(timeout / 2, _MAX_WAIT_SECONDS))
        left = timedelta(seconds=deadline - time.monotonic())
        store, _, _ = next(rendezvous(full_url, timeout=left))
        if has_host:
            # This timeout applies to every later operation on the store.
            store.set_timeout(timedelta(seconds=timeout))
    except Exception as error:
        raise SetupError(
            f"the rendezvous at {init_method!r} failed: {error}. Every worker must be able to "
            "reach that place, and the worker of rank 0 must be running"
        ) from error
    return store, rank, size


def _wait_for_host(url: SplitResult, seconds: float) -> None:
    """If the store's host is this machine, wait until the store listens, for at most `seconds`.
    Torch could do this waiting, but it sleeps half a second or more between two attempts."""
    if sys.platform != "linux":
        return
    if url.scheme == "env":
        host, port = os.environ.get("MASTER_ADDR"), int(os.environ.get("MASTER_PORT") or 0)
    else:
        host, port = url.hostname, url.port or 0
    if not host or not 0 < port < 1 << 16:
        return  # This address is invalid, so torch will raise an error.
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
