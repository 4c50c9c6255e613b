"""Calls, references and the end of a worker, as ``torch.distributed.rpc.api`` has them.

Programs replace some of the functions here by their own, so those are looked up when called.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch

from gradwire import current
from gradwire.compat.rpc import agents
from gradwire.compat.rpc.agents import (
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _reset_current_rpc_agent,
    _set_and_start_rpc_agent,
    get_rpc_timeout,
)
from gradwire.compat.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from gradwire.compat.rpc.gathering import AllGatherStates, Gatherings
from gradwire.compat.rpc.internal import RPCExecMode, _internal_rpc_pickler, _recorded
from gradwire.compat.rpc.rref import RRef, users, users_now
from gradwire.ids import WorkerInfo

__all__ = [
    "AllGatherStates",
    "RRef",
    "get_worker_info",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

logger = logging.getLogger("gradwire")

Function = TypeVar("Function", bound=Callable[..., Any])
To = str | int | WorkerInfo

#: Whether a graceful shutdown may leave references behind that others hold.
_ignore_rref_leak = True
_default_pickler: Any = _internal_rpc_pickler
_thread_local_var = threading.local()
_gatherings = Gatherings()


def _require_initialized(function: Function) -> Function:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not agents._is_current_rpc_agent_set():
            raise RuntimeError(
                "RPC has not been initialized. Call torch.distributed.rpc.init_rpc first."
            )
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Name another pickler for the block. Calls are encoded by gradwire's own in any case."""
    global _default_pickler
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


def _init_rpc_states(agent: Any) -> None:
    if not agents._is_current_rpc_agent_set():
        _set_and_start_rpc_agent(agent)


# -- calls


@_require_initialized
def get_worker_info(worker_name: str | int | None = None) -> WorkerInfo:
    """Who a worker is; without a name, the current one."""
    info: WorkerInfo = _get_current_rpc_agent().get_worker_info(worker_name)
    return info


def _to_worker_info(to: To) -> WorkerInfo:
    if isinstance(to, WorkerInfo):
        return to
    if isinstance(to, (str, int)):
        return get_worker_info(to)
    raise ValueError(f"Cannot get WorkerInfo from name {to}")


def _check_callable(function: Any) -> None:
    if not callable(function):
        raise TypeError(f"function should be callable. {function!r} is not")


@_require_initialized
def rpc_sync(
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Run a function on a worker and return its result."""
    _check_callable(func)
    info = _to_worker_info(to)
    with _recorded(RPCExecMode.SYNC, func, info):
        return current.worker().rpc_sync(info, func, args or (), kwargs, timeout)


@_require_initialized
def rpc_async(
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Run a function on a worker; its result comes in a future."""
    _check_callable(func)
    info = _to_worker_info(to)
    with _recorded(RPCExecMode.ASYNC, func, info):
        future = current.worker().rpc_async(info, func, args or (), kwargs, timeout)
    if hasattr(_thread_local_var, "future_list"):
        _thread_local_var.future_list.append(future)
    return future


@_require_initialized
def remote(
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Run a function on a worker, leave its result there and return a reference to it."""
    _check_callable(func)
    info = _to_worker_info(to)
    with _recorded(RPCExecMode.REMOTE, func, info):
        return current.worker().remote(info, func, args or (), kwargs, timeout)


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Wait at the end of the block for all calls begun in it with `rpc_async`."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        futures = _thread_local_var.future_list
        del _thread_local_var.future_list
        torch.futures.wait_all(futures)


# -- all workers together


def _gather_to_leader(id: str, name: str, value: Any, names: Collection[str]) -> None:
    _gatherings.add(id, name, value, set(names))


def _broadcast_to_followers(sequence_id: str, objects_map: dict[str, Any]) -> None:
    _gatherings.conclude(sequence_id, objects_map)


@_require_initialized
def _all_gather(
    obj: Any, worker_names: Collection[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Give every worker the values of all, by name."""
    agent = _get_current_rpc_agent()
    names = set(worker_names or (info.name for info in agent.get_worker_infos()))
    me, leader = agent.get_worker_info().name, min(names)
    id = _gatherings.begin(names)
    # Without a timeout of its own, each call has the usual one, but others may be long in coming.
    patience = 0.0 if timeout == UNSET_RPC_TIMEOUT else timeout
    per_call = get_rpc_timeout() if timeout == UNSET_RPC_TIMEOUT else timeout
    try:
        if me != leader:
            rpc_sync(leader, _gather_to_leader, (id, me, obj, names), timeout=per_call)
            return _gatherings.wait(id, patience)
        _gather_to_leader(id, me, obj, names)
        values = _gatherings.wait(id, patience)
        answers = [
            (name, rpc_async(name, _broadcast_to_followers, (id, values), timeout=per_call))
            for name in sorted(names - {me})
        ]
        errors = []
        for name, answer in answers:
            try:
                answer.wait()
            except Exception as error:
                errors.append((name, error))
        if errors:
            raise RuntimeError(
                f"Followers {[name for name, _ in errors]} timed out in _all_gather after "
                f"{per_call:.2f} seconds. The first exception is {errors[0][1]}"
            )
        return values
    finally:
        _gatherings.end(id)


@_require_initialized
def _barrier(worker_names: Collection[str]) -> None:
    """Wait until all these workers are here."""
    try:
        _all_gather(None, set(worker_names))
    except RuntimeError:
        logger.exception("not all workers came to the barrier")


@_require_initialized
def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Wait until all workers are here; what they have still to do for others is done meanwhile."""
    _all_gather(None, timeout=timeout)


# -- the end


def _delete_all_user_and_unforked_owner_rrefs(
    timeout: timedelta = timedelta(seconds=100),
) -> None:
    """Let go of every reference to values on other workers, and wait until their owners know."""
    refs = current.worker().refs
    deadline = time.monotonic() + timeout.total_seconds()

    def wait_for_none(what: str) -> None:
        while refs.debug_info()[what] and time.monotonic() < deadline:
            time.sleep(0.005)

    # The owner keeps a value for us until it knows of those we have sent our reference to.
    wait_for_none("num_pending_children")
    for rref in users_now():
        users.discard(rref)
        rref.let_go()
    wait_for_none("num_pending_messages")


@_require_initialized
def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """End this worker; gracefully means, when the work of the whole group is done."""
    agent = _get_current_rpc_agent()
    leaks = 0
    try:
        if graceful and agent.is_static_group:
            _wait_all_workers(timeout)
            _delete_all_user_and_unforked_owner_rrefs()
            agent.join(shutdown=True, timeout=timeout)
            leaks = agent.worker.leaks()
        elif graceful:
            agent.join(shutdown=True, timeout=timeout)
    finally:
        _gatherings.forget()
        users.clear()
        agent.shutdown()
        _reset_current_rpc_agent()
    if leaks and not _ignore_rref_leak:
        raise RuntimeError(
            f"Leaking RRef: other workers still hold references to {leaks} values of this one"
        )
