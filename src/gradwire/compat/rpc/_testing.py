"""The backend that fails and dawdles on purpose, as torch's tests ask for it by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradwire.compat.rpc.agents import TensorPipeAgent
from gradwire.compat.rpc.backend_registry import TorchWorker, make_agent, register_backend
from gradwire.compat.rpc.options import TensorPipeRpcBackendOptions
from gradwire.testing.faults import Fault, FaultyTransport
from gradwire.transport.base import Transport
from gradwire.wire.messages import Kind

#: Kinds that torch has and gradwire does not: builtin operators are functions like others.
_SAME = {
    "SCRIPT_CALL": "PYTHON_CALL",
    "SCRIPT_REMOTE_CALL": "PYTHON_REMOTE_CALL",
    "SCRIPT_RREF_FETCH_CALL": "PYTHON_RREF_FETCH_CALL",
}


class FaultyTensorPipeRpcBackendOptions(TensorPipeRpcBackendOptions):
    """Which kinds of messages cannot be sent, the first few times, and which are late."""

    def __init__(
        self,
        *,
        messages_to_fail: Sequence[str] = (),
        messages_to_delay: Mapping[str, float] | None = None,
        num_fail_sends: int = 0,
        **others: Any,
    ):
        super().__init__(**others)
        self.messages_to_fail = list(messages_to_fail)
        self.messages_to_delay = dict(messages_to_delay or {})
        self.num_fail_sends = num_fail_sends

    def faults(self) -> list[Fault]:
        failing = {_kind(name) for name in self.messages_to_fail}
        delays = {_kind(name): seconds for name, seconds in self.messages_to_delay.items()}
        return [Fault("refuse", kind=kind, times=self.num_fail_sends) for kind in failing] + [
            Fault("delay", kind=kind, seconds=seconds) for kind, seconds in delays.items()
        ]


def _kind(name: str) -> Kind:
    return Kind[_SAME.get(name, name)]


class FaultyWorker(TorchWorker):
    """A worker whose transports have the faults of its options."""

    def _make_transports(self, token: str, host: str | None) -> list[Transport]:
        faults = self.as_agent._get_backend_options().faults()
        return [
            FaultyTransport(transport, faults)
            for transport in super()._make_transports(token, host)
        ]


class FaultyTensorPipeAgent(TensorPipeAgent):
    """Only a name: a `FaultyWorker` is seen as a TensorPipeAgent."""


def _make_faulty_agent(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any
) -> TensorPipeAgent:
    if not isinstance(rpc_backend_options, FaultyTensorPipeRpcBackendOptions):
        raise TypeError(
            "`rpc_backend_options` must be a `FaultyTensorPipeRpcBackendOptions`, not "
            f"{rpc_backend_options!r}"
        )
    return make_agent(FaultyWorker, store, name, rank, world_size, rpc_backend_options)


def is_available() -> bool:
    return True


register_backend("FAULTY_TENSORPIPE", FaultyTensorPipeRpcBackendOptions, _make_faulty_agent)
