"""The backend that torch's tests use to make messages fail or arrive late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradwire._core.transport.base import Transport
from gradwire._core.wire.messages import Kind
from gradwire.compat.rpc.agents import TensorPipeAgent
from gradwire.compat.rpc.backend_registry import TorchRuntime, make_agent, register_backend
from gradwire.compat.rpc.options import TensorPipeRpcBackendOptions
from gradwire.testing.faults import Fault, FaultyTransport

#: Maps torch's message kinds for builtin operators to the kinds that gradwire uses for them, which
#: are those of ordinary functions.
_GRADWIRE_KIND = {
    "SCRIPT_CALL": "PYTHON_CALL",
    "SCRIPT_REMOTE_CALL": "PYTHON_REMOTE_CALL",
    "SCRIPT_RREF_FETCH_CALL": "PYTHON_RREF_FETCH_CALL",
}


class FaultyTensorPipeRpcBackendOptions(TensorPipeRpcBackendOptions):
    """Options that make messages fail or arrive late. The first `num_fail_sends` messages of each
    kind in `messages_to_fail` cannot be sent. Messages of the kinds in `messages_to_delay` arrive
    late."""

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
        """Return the faults that these options describe. A `FaultyTransport` takes such a list."""
        failing = {_kind(name) for name in self.messages_to_fail}
        delays = {_kind(name): seconds for name, seconds in self.messages_to_delay.items()}
        return [Fault("refuse", kind=kind, times=self.num_fail_sends) for kind in failing] + [
            Fault("delay", kind=kind, seconds=seconds) for kind, seconds in delays.items()
        ]


def _kind(name: str) -> Kind:
    return Kind[_GRADWIRE_KIND.get(name, name)]


class FaultyRuntime(TorchRuntime):
    """A worker whose transports have the faults listed in its options."""

    def _wrap_transport(self, transport: Transport) -> Transport:
        return FaultyTransport(transport, self.as_agent._get_backend_options().faults())


class FaultyTensorPipeAgent(TensorPipeAgent):
    """This class exists only because programs import its name. The agent of a `FaultyRuntime` is a
    plain `TensorPipeAgent`."""


def _make_faulty_agent(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any
) -> TensorPipeAgent:
    if not isinstance(rpc_backend_options, FaultyTensorPipeRpcBackendOptions):
        raise TypeError(
            "`rpc_backend_options` must be a `FaultyTensorPipeRpcBackendOptions`, not "
            f"{rpc_backend_options!r}"
        )
    return make_agent(FaultyRuntime, store, name, rank, world_size, rpc_backend_options)


def is_available() -> bool:
    return True


register_backend("FAULTY_TENSORPIPE", FaultyTensorPipeRpcBackendOptions, _make_faulty_agent)
