"""Groups of processes that live for one measurement.

Some things cannot be measured twice in the same processes: how long workers take to start up, and
how much memory they keep. The processes are forked, so that thirty of them need not import torch
thirty times.
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

#: A function that waits until every process of the group has called it.
Barrier = Callable[[], None]
#: The reports of a process: it waits at the barrier, it is done, or it has failed.
_WAITING, _DONE, _FAILED = range(3)


def run_in_group(size: int, work: Callable[[int, Barrier], Any]) -> list[Any]:
    """Fork `size` processes, run `work(rank, barrier)` in each, and return the results.

    Call this function in a process with only one thread, because a forked process does not have
    the other threads of its parent. The forked processes are killed at the end, so `work` need not
    shut anything down.

    >>> run_in_group(2, lambda rank, barrier: 10 * rank)
    [0, 10]
    """
    token = secrets.token_hex(32)
    members: list[tuple[int, Connection]] = []
    with free_port() as port:
        try:
            for rank in range(size):
                variables = environment(rank, size, port, token)
                members.append(_fork(work, rank, variables))
            return _collect_results([connection for _, connection in members])
        finally:
            # Suspend all processes before killing any. Otherwise, the processes that still run
            # would report that a worker was lost.
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid, _ in members:
                    # The process may have died, but the system keeps its pid until `waitpid`. So
                    # the signal cannot hit another process.
                    os.kill(pid, number)
            for pid, connection in members:
                os.waitpid(pid, 0)
                connection.close()


def join_group(package: str, rank: int, size: int) -> Any:
    """Make this process a worker of its group. Return the RPC module of `package`, which is
    "gradwire" or "torch.distributed"."""
    rpc = import_module(f"{package}.rpc")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    return rpc


def _fork(
    work: Callable[[int, Barrier], Any], rank: int, variables: dict[str, str]
) -> tuple[int, Connection]:
    connection, theirs = Pipe()
    pid = os.fork()
    if pid:
        theirs.close()
        return pid, connection

    def barrier() -> None:
        theirs.send((_WAITING, None))
        theirs.recv()

    try:
        die_with_parent()
        os.environ.update(variables)
        theirs.send((_DONE, work(rank, barrier)))
        # Other workers may still call this one, so stay alive until the parent kills this process.
        theirs.poll(None)
    except BaseException:
        theirs.send((_FAILED, traceback.format_exc()))
    finally:
        os._exit(0)


def _collect_results(connections: list[Connection]) -> list[Any]:
    waiting: set[Connection] = set()
    results: dict[Connection, Any] = {}
    while len(results) < len(connections):
        for connection in wait(
            [connection for connection in connections if connection not in results]
        ):
            assert isinstance(connection, Connection)
            try:
                status, value = connection.recv()
            except EOFError:
                raise RuntimeError("a process of the group died") from None
            if status == _FAILED:
                raise RuntimeError(f"in a process of the group:\n{value}")
            if status == _DONE:
                results[connection] = value
            else:
                waiting.add(connection)
        if len(waiting) == len(connections):
            for connection in waiting:
                connection.send(None)
            waiting.clear()
    return [results[connection] for connection in connections]
