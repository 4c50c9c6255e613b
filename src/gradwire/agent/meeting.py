"""Where the workers of a group meet: one of torch's key-value stores, at a place that all know."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from gradwire.agent.roster import StoreRoster
from gradwire.errors import SetupError

#: Who finds nobody at the meeting place looks again when a part of the time has passed that it has
#: waited so far: soon at first, then from time to time.
_PART = 0.1
_LOOK_SECONDS = (0.0005, 0.2)
#: A host that takes longer than that to answer at all is left to torch.
_PATIENCE_SECONDS = 1.0


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
    is_file = init_method.startswith("file://")
    if rank < 0 and (size is not None or not is_file):
        raise SetupError(
            f"rank parameter missing: a worker of a group that meets at {init_method!r} needs one, "
            "from the argument rank or the variable RANK. Rank 0 hosts the meeting place"
        )
    if size is not None and rank >= size:
        raise SetupError(f"rank {rank} is not below the world_size of {size}")
    # A host that is told the size waits for the others itself, and looks only every 10 ms.
    query = f"rank={max(rank, 0)}&world_size={size if size and is_file else -1}"
    url = f"{init_method}{'&' if '?' in init_method else '?'}{query}"
    deadline = time.monotonic() + timeout
    try:
        if rank > 0:
            _wait_for_host(init_method, deadline)
        left = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        store, _, _ = next(rendezvous(url, timeout=left))
    except Exception as error:
        raise SetupError(
            f"the group cannot meet at {init_method!r}: {error}. Every worker must be able to "
            "reach that place, and the worker of rank 0 must be running"
        ) from error
    return store, rank, size


def _wait_for_host(init_method: str, deadline: float) -> None:
    """Wait until somebody listens at a meeting place that has an address. (Torch would do so too,
    but who comes before the host sleeps for half a second or more each time.)"""
    place = urlsplit(init_method)
    if place.scheme == "env":
        host, port = os.environ.get("MASTER_ADDR"), int(os.environ.get("MASTER_PORT", "0"))
    else:
        host, port = place.hostname, place.port or 0
    if place.scheme not in ("env", "tcp") or not host or not port:
        return  # there is nothing to wait for, or torch says what is missing
    start = time.monotonic()
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((host, port), min(left, _PATIENCE_SECONDS)).close()
            return
        except ConnectionRefusedError:
            soonest, latest = _LOOK_SECONDS
            waited = time.monotonic() - start
            time.sleep(min(max(waited * _PART, soonest), latest))
        except OSError:
            return  # that is no answer: torch looks into it
    raise TimeoutError(f"nobody listened at {host}:{port} in time")
