"""The functions of ``torch.distributed.rpc.api``.

Programs replace some of these functions with their own. So code that calls such a function looks up
its name in this module at each call.
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

from gradwire._core import current
from gradwire._core.ids import WorkerInfo
from gradwire.compat.rpc import agents
from gradwire.compat.rpc.agents import (
    TensorPipeAgent,
    _cleanup_python_rpc_handler,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _reset_current_rpc_agent,
    _set_and_start_rpc_agent,
    get_rpc_timeout,
)
from gradwire.compat.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from gradwire.compat.rpc.gathering import AllGatherStates, Gatherings
from gradwire.compat.rpc.internal import (
    PythonUDF,
    RPCExecMode,
    _build_rpc_profiling_key,
    _internal_rpc_pickler,
    _profiled,
)
from gradwire.compat.rpc.refused import (
    RemoteProfilerManager,
    _group_membership_management,
    _invoke_remote_builtin,
    _invoke_remote_python_udf,
    _invoke_remote_torchscript,
    _invoke_rpc,
    _invoke_rpc_builtin,
    _invoke_rpc_python_udf,
    _invoke_rpc_torchscript,
    _update_group_membership,
)
from gradwire.compat.rpc.rref import (
    RRef,
    _rref_typeof_on_owner,
    _rref_typeof_on_user,
    current_user_rrefs,
    user_rrefs,
)

__all__ = [
    "AllGatherStates",
    "RRef",
    "get_worker_info",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

#: In torch, `PyRRef` is a C++ class, and `RRef` derives from it. In gradwire, both names mean the
#: same class.
PyRRef = RRef
logger = logging.getLogger("gradwire")

Function = TypeVar("Function", bound=Callable[..., Any])
To = str | int | WorkerInfo

#: If False, a graceful shutdown raises an error when other workers still have references to values
#: of this worker.
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
    """Make `rpc_pickler` the default pickler within the with block. Calls do not use the default
    pickler, because they always use gradwire's own encoding."""
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
    """Return the name and id of a worker. Without an argument, return those of this worker."""
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
    with _profiled(RPCExecMode.SYNC, func, info):
        return current.runtime().calls.rpc_sync(
            info, func, tuple(args or ()), kwargs or {}, timeout
        )


@_require_initialized
def rpc_async(
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Run a function on a worker and return a future of its result."""
    _check_callable(func)
    info = _to_worker_info(to)
    with _profiled(RPCExecMode.ASYNC, func, info):
        future = current.runtime().calls.rpc_async(
            info, func, tuple(args or ()), kwargs or {}, timeout
        )
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
    with _profiled(RPCExecMode.REMOTE, func, info):
        return current.runtime().rrefs.remote(info, func, tuple(args or ()), kwargs or {}, timeout)


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """At the end of the with block, wait for all calls that the block has made with `rpc_async`."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        futures = _thread_local_var.future_list
        del _thread_local_var.future_list
        torch.futures.wait_all(futures)


# -- all workers together


def _gather_to_leader(gathering_id: str, name: str, value: Any, names: Collection[str]) -> None:
    _gatherings.add(gathering_id, name, value, set(names))


def _broadcast_to_followers(sequence_id: str, objects_map: dict[str, Any]) -> None:
    _gatherings.conclude(sequence_id, objects_map)


@_require_initialized
def _all_gather(
    obj: Any, worker_names: Collection[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Exchange values with the workers in `worker_names`, or with all workers if that is None.
    Each of these workers must call this function with its own `obj`. The result maps the name of
    each worker to its `obj`."""
    agent = _get_current_rpc_agent()
    names = set(worker_names or (info.name for info in agent.get_worker_infos()))
    me, leader = agent.get_worker_info().name, min(names)
    gathering_id = _gatherings.begin(names)
    # If the program gives no timeout, each remote call here has the default timeout. But the wait
    # for the values of the other workers needs a much longer limit, because other workers may call
    # `_all_gather` much later. So `wait_limit` is 0.0, which makes `_gatherings.wait` wait up to
    # `LONGEST_WAIT_SECONDS`.
    wait_limit = 0.0 if timeout == UNSET_RPC_TIMEOUT else timeout
    call_limit = get_rpc_timeout() if timeout == UNSET_RPC_TIMEOUT else timeout
    try:
        if me != leader:
            rpc_sync(leader, _gather_to_leader, (gathering_id, me, obj, names), timeout=call_limit)
            return _gatherings.wait(gathering_id, wait_limit)
        _gather_to_leader(gathering_id, me, obj, names)
        values = _gatherings.wait(gathering_id, wait_limit)
        message = gathering_id, values
        answers = [
            (name, rpc_async(name, _broadcast_to_followers, message, timeout=call_limit))
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
                f"{call_limit:.2f} seconds. The first exception is {errors[0][1]}"
            )
        return values
    finally:
        _gatherings.end(gathering_id)


@_require_initialized
def _barrier(worker_names: Collection[str]) -> None:
    """Wait until all workers in `worker_names` have called this function."""
    try:
        _all_gather(None, set(worker_names))
    except RuntimeError:
        logger.exception("not all workers reached the barrier")


@_require_initialized
def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Wait until all workers have called this function. Meanwhile this worker still serves
    calls."""
    _all_gather(None, timeout=timeout)


# -- shutdown


def _delete_all_user_and_unforked_owner_rrefs(
    timeout: timedelta = timedelta(seconds=100),
) -> None:
    """Delete all references of this worker to values of other workers, and wait until the owners of
    these values know that the references are deleted."""
    rrefs = current.runtime().rrefs
    deadline = time.monotonic() + timeout.total_seconds()

    def wait_until_zero(counter: str) -> None:
        while rrefs.debug_info()[counter] and time.monotonic() < deadline:
            time.sleep(0.005)

    # If this worker has sent a reference to another worker, the owner of the value may not know of
    # the other worker's reference yet. Until the owner knows, this worker must keep its own
    # reference. Otherwise the owner could release the value too early.
    wait_until_zero("num_pending_children")
    for rref in current_user_rrefs():
        user_rrefs.discard(rref)
        rref.drop()
    wait_until_zero("num_pending_messages")


@_require_initialized
def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """End this worker. A graceful shutdown first waits until the whole group has finished."""
    agent = _get_current_rpc_agent()
    try:
        if graceful and agent.is_static_group:
            _wait_all_workers(timeout)
            _delete_all_user_and_unforked_owner_rrefs()
        if graceful:
            agent.join(shutdown=True, timeout=timeout)
    finally:
        _finalize_shutdown()


def _finalize_shutdown() -> None:
    """End this worker without waiting for the group."""
    try:
        _destroy_rref_context(_ignore_rref_leak)
    finally:
        _gatherings.reset()
        _get_current_rpc_agent().shutdown()
        _reset_current_rpc_agent()


def _destroy_rref_context(ignore_rref_leak: bool) -> None:
    """Forget the references of this worker. Raise an error if other workers still have references
    to values of this worker, unless the program ignores such leaks."""
    user_rrefs.clear()
    if ignore_rref_leak:
        return
    leaks = _get_current_rpc_agent().runtime.count_leaks()
    if leaks:
        raise RuntimeError(
            f"Leaking RRef: other workers still hold references to {leaks} values of this one"
        )
