"""The current agent, as programs written for torch see it: a view of gradwire's worker.

A program may register a backend of its own, whose agent can be anything; then that is the current
agent.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from gradwire import current
from gradwire.config import UNSET_TIMEOUT, seconds
from gradwire.errors import NotInitializedError
from gradwire.ids import WorkerInfo
from gradwire.worker import Worker

_foreign: Any = None
_gil_profiling = False


class RpcAgent:
    """What an agent is an instance of."""


class TensorPipeAgent(RpcAgent):
    """The worker of this process under the name of torch's agent."""

    def __init__(self, worker: Worker, options: Any = None):
        self.worker = worker
        self._options = options

    @property
    def is_static_group(self) -> bool:
        return self.worker.agent.roster.fixed

    def get_worker_info(self, worker: str | int | WorkerInfo | None = None) -> WorkerInfo:
        if worker is None:
            return self.worker.info
        return self.worker.agent.peers.find(worker).info

    def get_worker_infos(self) -> list[WorkerInfo]:
        return self.worker.worker_infos()

    def get_debug_info(self) -> dict[str, str]:
        agent = self.worker.agent
        limit = agent.options.num_worker_threads
        serving = agent.served_calls()
        numbers = {
            "agent.num_idle_threads": max(0, limit - serving),
            "agent.thread_pool_size": limit,
            "agent.client_active_calls": agent.open_calls(),
            "agent.server_active_calls": serving,
            "agent.server_active_async_calls": 0,
        }
        if _gil_profiling:
            numbers["agent.gil_average_wait_time_us"] = round(_interpreter_wait() * 1e6)
        return {key: str(number) for key, number in numbers.items()}

    def get_metrics(self) -> dict[str, str]:
        return self.get_debug_info()

    def _get_backend_options(self) -> Any:
        return self._options

    def _get_device_map(self, _to: WorkerInfo) -> dict[Any, Any]:
        return {}

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:  # noqa: ARG002
        """Wait until the work of the whole group is done."""
        self.worker.wait_for_everybody(timeout)

    def sync(self) -> None:
        """Nothing is kept back that would have to be sent."""

    def shutdown(self) -> None:
        self.worker.shutdown(graceful=False)


def _interpreter_wait() -> float:
    """How long a thread that gave up the interpreter waits to get it back, in seconds."""
    began = time.perf_counter()
    time.sleep(0)
    return time.perf_counter() - began


def enable_gil_profiling(flag: bool) -> None:
    global _gil_profiling
    _gil_profiling = flag


def _get_current_rpc_agent() -> Any:
    if _foreign is not None:
        return _foreign
    try:
        return current.worker().as_agent
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
    global _foreign
    if isinstance(agent, TensorPipeAgent):
        current.set_process_default(agent.worker)
    else:
        _foreign = agent


def _reset_current_rpc_agent() -> None:
    global _foreign
    _foreign = None
    current.set_process_default(None)


def get_rpc_timeout() -> float:
    """The timeout of calls without one of their own, in seconds."""
    return float(_get_current_rpc_agent().worker.agent.timeout(UNSET_TIMEOUT))


def _set_rpc_timeout(timeout: float) -> None:
    agent = _get_current_rpc_agent().worker.agent
    agent.options = dataclasses.replace(agent.options, rpc_timeout=seconds(timeout))
