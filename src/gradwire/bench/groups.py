"""Groups of processes that live for one measurement, for what cannot be measured twice in the same
processes: how long they take to meet, what they keep in memory.

They are forked, so that thirty of them need not import torch thirty times.
"""

from __future__ import annotations

import os
import secrets
import signal
import traceback
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from gradwire.launch import die_with_parent, environment, free_port

#: Waits until all processes of a group are there.
Meet = Callable[[], None]
#: What a process says: that it waits for the others, that it is done, that it has failed.
_HERE, _DONE, _FAILED = range(3)


def in_group(size: int, work: Callable[[int, Meet], Any]) -> list[Any]:
    """What `work(rank, meet)` returns in each of `size` processes, forked from this one; they are
    gone afterwards, without farewell. Call it in a process that has no other threads.

    >>> in_group(2, lambda rank, meet: 10 * rank)
    [0, 10]
    """
    token = secrets.token_hex(32)
    members: list[tuple[int, Connection]] = []
    with free_port() as port:
        try:
            for rank in range(size):
                place = environment(rank, size, port, token)
                members.append(_fork(work, rank, place))
            return _answers([line for _, line in members])
        finally:
            # All are stopped before any is ended, or the others would complain of that.
            for how in (signal.SIGSTOP, signal.SIGKILL):
                for process, _ in members:
                    os.kill(process, how)  # not waited for yet, so the number is still theirs
            for process, line in members:
                os.waitpid(process, 0)
                line.close()


def joined(package: str, rank: int, size: int) -> Any:
    """The RPC module of a library, with this process a worker of the group."""
    rpc = import_module(f"{package}.rpc")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    return rpc


def _fork(
    work: Callable[[int, Meet], Any], rank: int, place: dict[str, str]
) -> tuple[int, Connection]:
    line, theirs = Pipe()
    process = os.fork()
    if process:
        theirs.close()
        return process, line

    def meet() -> None:
        theirs.send((_HERE, None))
        theirs.recv()

    try:
        die_with_parent()
        os.environ.update(place)
        theirs.send((_DONE, work(rank, meet)))
        theirs.poll(None)  # others may still need this process; whoever waits for answers ends it
    except BaseException:
        theirs.send((_FAILED, traceback.format_exc()))
    finally:
        os._exit(0)


def _answers(lines: list[Connection]) -> list[Any]:
    here: set[Connection] = set()
    found: dict[Connection, Any] = {}
    while len(found) < len(lines):
        for line in wait([line for line in lines if line not in found]):
            assert isinstance(line, Connection)
            try:
                news, value = line.recv()
            except EOFError:
                raise RuntimeError("a process of the group died") from None
            if news == _FAILED:
                raise RuntimeError(f"in a process of the group:\n{value}")
            if news == _DONE:
                found[line] = value
            else:
                here.add(line)
        if len(here) == len(lines):
            for line in here:
                line.send(None)
            here.clear()
    return [found[line] for line in lines]
