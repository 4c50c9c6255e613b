"""The current agent: the object that represents a worker in torch's private interface.

Normally the current agent is a view of a gradwire worker. If a program uses a backend of its own,
the current agent is the object that this backend has made. That object may be of any type.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from gradwire._core import current
from gradwire._core.ids import WorkerInfo
from gradwire._core.runtime import Runtime
from gradwire.compat.rpc.gathering import LONGEST_WAIT_SECONDS
from gradwire.errors import NotInitializedError
from gradwire.options import UNSET_TIMEOUT, seconds

#: The current agent if it belongs to a backend that the program registered itself, else None.
_foreign_agent: Any = None
_gil_profiling = False


class RpcAgent:
    """The base class of agents."""


class TensorPipeAgent(RpcAgent):
    """A view of a gradwire worker with the name and the methods of torch's agent."""

    def __init__(self, runtime: Runtime, options: Any = None, store: Any = None):
        self.runtime = runtime
        self._options = options
        #: The store through which the workers of the group have found each other.
        self.store = store

    @property
    def is_static_group(self) -> bool:
        return self.runtime.agent.membership.fixed

    def get_worker_info(self, worker: str | int | WorkerInfo | None = None) -> WorkerInfo:
        if worker is None:
            return self.runtime.info
        return self.runtime.agent.peers.find(worker).info

    def get_worker_infos(self) -> list[WorkerInfo]:
        return self.runtime.worker_infos()

    def get_debug_info(self) -> dict[str, str]:
        agent = self.runtime.agent
        limit = agent.options.num_worker_threads
        serving = agent.metrics.served_calls()
        numbers = {
            "agent.num_idle_threads": max(0, limit - serving),
            "agent.thread_pool_size": limit,
            "agent.client_active_calls": agent.metrics.open_calls(),
            "agent.server_active_calls": serving,
            "agent.server_active_async_calls": 0,
        }
        if _gil_profiling:
            numbers["agent.gil_average_wait_time_us"] = round(_gil_wait_seconds() * 1e6)
        return {key: str(number) for key, number in numbers.items()}

    def get_metrics(self) -> dict[str, str]:
        return self.get_debug_info()

    def _get_backend_options(self) -> Any:
        return self._options

    def _get_device_map(self, _to: WorkerInfo) -> dict[Any, Any]:
        return {}

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:  # noqa: ARG002
        """Wait until the whole group has finished its work."""
        self.runtime.wait_for_group(timeout or LONGEST_WAIT_SECONDS)

    def sync(self) -> None:
        """Do nothing. In torch, this method waits until all messages are sent. gradwire sends at
        once."""

    def shutdown(self) -> None:
        self.runtime.shutdown(graceful=False)


def _gil_wait_seconds() -> float:
    """Release the interpreter lock (GIL), and return how many seconds this thread waits to get it
    back."""
    start = time.perf_counter()
    time.sleep(0)
    return time.perf_counter() - start


def enable_gil_profiling(flag: bool) -> None:
    global _gil_profiling
    _gil_profiling = flag


def _get_current_rpc_agent() -> Any:
    if _foreign_agent is not None:
        return _foreign_agent
    try:
        return current.runtime().as_agent
    except NotInitializedError as error:
        raise RuntimeError(
            "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling "
            "`rpc.init_rpc`)?"
        ) from error


def _is_current_rpc_agent_set() -> bool:
    try:
        _get_current_rpc_agent()
    except RuntimeError:
        return False
    return True


def _set_and_start_rpc_agent(agent: Any) -> None:
    global _foreign_agent
    if isinstance(agent, TensorPipeAgent):
        current.set_process_default(agent.runtime)
    else:
        _foreign_agent = agent


def _reset_current_rpc_agent() -> None:
    global _foreign_agent
    _foreign_agent = None
    current.set_process_default(None)


def _cleanup_python_rpc_handler() -> None:
    """Do nothing. In torch, this function releases the Python functions that torch's C++ code
    calls."""


def get_rpc_timeout() -> float:
    """Return the timeout in seconds of calls for which the program gives no timeout."""
    return float(_get_current_rpc_agent().runtime.agent.timeout(UNSET_TIMEOUT))


def _set_rpc_timeout(timeout: float) -> None:
    agent = _get_current_rpc_agent().runtime.agent
    agent.options = dataclasses.replace(agent.options, rpc_timeout=seconds(timeout))
