"""Where the workers of a group meet: one of torch's key-value stores, at a place that all know."""

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

from gradwire.agent.roster import StoreRoster
from gradwire.errors import SetupError

#: Who finds nobody at the meeting place looks again when a part of the time has passed that it has
#: waited so far, and at least this; after so many seconds it leaves that to torch.
_PART = 0.1
_LOOK_SECONDS = 0.0005
_PATIENCE_SECONDS = 5.0


def meet(
    init_method: str, rank: int, size: int | None, timeout: float
) -> tuple[StoreRoster, int, int | None]:
    """Go to the place named by `init_method`; returns the roster there, this worker's rank (-1:
    not yet known) and the size of the group (None: open)."""
    store, rank, size = open_store(init_method, rank, size, timeout)
    return StoreRoster(store, size, timeout), rank, size


def open_store(
    init_method: str, rank: int, size: int | None, timeout: float
) -> tuple[Any, int, int | None]:
    """The store at the place named by `init_method`, this worker's rank and the group's size."""
    # Imported here: it takes a while, and workers of one process do without.
    from torch.distributed.rendezvous import rendezvous

    if init_method.startswith("env://"):
        rank = rank if rank >= 0 else int(os.environ.get("RANK", "-1"))
        size = size or int(os.environ.get("WORLD_SIZE", "0")) or None
    if rank < 0 and (size is not None or not init_method.startswith("file://")):
        raise SetupError(
            f"rank parameter missing: a worker of a group that meets at {init_method!r} needs one, "
            "from the argument rank or the variable RANK. Rank 0 hosts the meeting place"
        )
    if size is not None and rank >= size:
        raise SetupError(f"rank {rank} is not below the world_size of {size}")
    place = urlsplit(init_method)
    has_address = place.scheme in ("env", "tcp")
    # A host that is told the size waits for the others itself, and looks only every 10 ms.
    query = f"rank={max(rank, 0)}&world_size={-1 if has_address else size or -1}"
    url = f"{init_method}{'&' if '?' in init_method else '?'}{query}"
    deadline = time.monotonic() + timeout
    try:
        if has_address and rank > 0:
            _wait_for_host(place, min(timeout / 2, _PATIENCE_SECONDS))
        left = timedelta(seconds=deadline - time.monotonic())
        store, _, _ = next(rendezvous(url, timeout=left))
        if has_address:
            store.set_timeout(timedelta(seconds=timeout))  # for what is asked of it from now on
    except Exception as error:
        raise SetupError(
            f"the group cannot meet at {init_method!r}: {error}. Every worker must be able to "
            "reach that place, and the worker of rank 0 must be running"
        ) from error
    return store, rank, size


def _wait_for_host(place: SplitResult, seconds: float) -> None:
    """Wait until somebody listens at a meeting place on this machine, for so long at most. Torch
    would do that too, but who comes before the host sleeps for half a second or more each time."""
    if sys.platform != "linux":
        return
    if place.scheme == "env":
        host, port = os.environ.get("MASTER_ADDR"), int(os.environ.get("MASTER_PORT") or 0)
    else:
        host, port = place.hostname, place.port or 0
    if not host or not 0 < port < 1 << 16:
        return  # torch says what is wrong
    start = time.monotonic()
    with suppress(OSError):  # the host has no address here: torch looks into that
        while not _may_be_up(host, port) and (waited := time.monotonic() - start) < seconds:
            time.sleep(max(waited * _PART, _LOOK_SECONDS))


def _may_be_up(host: str, port: int) -> bool:
    """False if that is on this machine, and nobody listens there. The host is not asked, for
    torch's looks up the name of everybody who connects: on Linux one can bind a port that another
    has bound, until that one listens."""
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
