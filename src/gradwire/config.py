"""The options of a worker: one frozen dataclass, valid by construction."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from threading import TIMEOUT_MAX
from typing import Any

from gradwire.errors import SetupError

DEFAULT_TIMEOUT = 60.0
#: Stands for "the timeout of the options" in signatures.
UNSET_TIMEOUT = -1.0
#: Where a worker looks for its token and its address when the options do not say.
TOKEN_VARIABLE = "GRADWIRE_TOKEN"
HOST_VARIABLE = "GRADWIRE_HOST"

TRANSPORTS = ("unix", "tcp")


def seconds(timeout: float | timedelta) -> float:
    """A timeout in seconds, however it was given; 0 means for ever."""
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not value >= 0:  # which NaN is not either
        raise SetupError(f"a timeout must be a number and not negative, it is {value}")
    return value if value <= TIMEOUT_MAX else 0.0  # nothing can be waited for longer


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a worker behaves. The first fields are those of torch's ``TensorPipeRpcBackendOptions``:
    three mean the same, the others are accepted and not used.

        >>> Options(rpc_timeout=5).rpc_timeout
        5.0
    """

    #: User functions that may run at the same time on this worker. One that waits for
    #: another worker does not count.
    num_worker_threads: int = 16
    #: Seconds until a call without a timeout of its own fails; 0 means never.
    rpc_timeout: float | timedelta = DEFAULT_TIMEOUT
    #: Where the group meets: "env://", "tcp://host:port" or "file:///path".
    init_method: str = "env://"
    #: Accepted, not used: tensors on accelerators cannot be sent yet.
    device_maps: Mapping[str, Mapping[Any, Any]] | None = None
    devices: Sequence[Any] | None = None
    _transports: Sequence[str] | None = None
    _channels: Sequence[str] | None = None

    #: The group's secret. None: $GRADWIRE_TOKEN, else one is made up and shared through the
    #: rendezvous, for workers on this machine alone.
    token: str | None = None
    #: The address to listen on and to be called at. None: $GRADWIRE_HOST, else loopback.
    host: str | None = None
    #: The ways to other workers, best first; each is tried before it is relied on.
    transports: Sequence[str] = TRANSPORTS
    #: Send lambdas and local functions by value, with cloudpickle.
    closures: bool = False
    #: Seconds to wait for the rest of the group to appear.
    init_timeout: float = 120.0
    #: Seconds of silence after which a peer that owes an answer is asked for a sign of life,
    heartbeat_interval: float = 5.0
    #: and after which it is given up: at the latest an interval later, which is how often all of
    #: them are looked at.
    heartbeat_limit: float = 30.0
    #: No message larger than this is accepted.
    max_message_bytes: int = 1 << 40

    def __post_init__(self) -> None:
        object.__setattr__(self, "rpc_timeout", seconds(self.rpc_timeout))
        if self.num_worker_threads < 1:
            raise SetupError(
                f"num_worker_threads must be at least 1, it is {self.num_worker_threads}"
            )
        if not 0 < self.heartbeat_interval <= self.heartbeat_limit:
            raise SetupError(
                "heartbeat_interval must be positive and no longer than heartbeat_limit, they are "
                f"{self.heartbeat_interval} and {self.heartbeat_limit}"
            )
        if not self.init_timeout >= 0:
            raise SetupError(
                f"init_timeout must be a number and not negative, it is {self.init_timeout}"
            )
        unknown = [name for name in self.transports if name not in TRANSPORTS]
        if unknown or not self.transports:
            raise SetupError(f"transports must be among {TRANSPORTS}, not {self.transports!r}")

    @classmethod
    def of(cls, options: Any) -> Options:
        """These options, or their like: torch's own option objects are understood too."""
        if options is None:
            return cls()
        if isinstance(options, cls):
            return options
        known = {f.name for f in fields(cls)}
        try:
            return cls(**{name: getattr(options, name) for name in known if hasattr(options, name)})
        except TypeError as error:
            raise SetupError(f"these are not options for a worker: {options!r}") from error

    @property
    def rpc_seconds(self) -> float:
        return self.rpc_timeout  # type: ignore[return-value]  # see __post_init__

    def resolved_token(self) -> str | None:
        return self.token or os.environ.get(TOKEN_VARIABLE) or None

    def resolved_host(self) -> str | None:
        return self.host or os.environ.get(HOST_VARIABLE) or None
