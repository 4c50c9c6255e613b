"""The options of a worker."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from threading import TIMEOUT_MAX
from typing import Any

from gradwire._core.token import check_token, token_from_environment, token_from_file
from gradwire.errors import SetupError

DEFAULT_TIMEOUT = 60.0
#: The default of `timeout` parameters. It means: use the option `rpc_timeout`.
UNSET_TIMEOUT = -1.0
#: The environment variable that gives the address to listen on if the options do not.
HOST_VARIABLE = "GRADWIRE_HOST"
#: The environment variable that gives the level of gradwire's log.
LOG_LEVEL_VARIABLE = "GRADWIRE_LOG_LEVEL"
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

DEFAULT_TRANSPORTS = ("unix", "tcp")


def seconds(timeout: float | timedelta) -> float:
    """Return a timeout in seconds, where 0 means no timeout.

    >>> seconds(timedelta(minutes=2))
    120.0
    """
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    # The condition is not written `value < 0`, because NaN would then pass as a valid timeout.
    if not value >= 0:
        raise SetupError(f"a timeout must be a number and not negative; it is {value}")
    # Python cannot wait longer than TIMEOUT_MAX. So a longer timeout becomes 0: no timeout.
    return value if value <= TIMEOUT_MAX else 0.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a worker.

    The first seven fields are the options of torch's ``TensorPipeRpcBackendOptions``. The first
    three of them mean the same as in torch. The other four are accepted but not used.

        >>> Options(rpc_timeout=5).rpc_timeout
        5.0
    """

    #: How many user functions may run at a time on this worker. A function that waits for another
    #: worker does not count.
    num_worker_threads: int = 16
    #: A call without a timeout of its own fails after this many seconds; 0 means no timeout.
    rpc_timeout: float | timedelta = DEFAULT_TIMEOUT
    #: The rendezvous of the group: "env://", "tcp://host:port" or "file:///path".
    init_method: str = "env://"
    #: This option is accepted but not used, because tensors on accelerators cannot be sent yet.
    device_maps: Mapping[str, Mapping[Any, Any]] | None = None
    devices: Sequence[Any] | None = None
    _transports: Sequence[str] | None = None
    _channels: Sequence[str] | None = None

    #: The secret of the group: at least 16 characters. If neither this option nor `token_file` is
    #: given, the token is the value of $GRADWIRE_TOKEN, or is in the file $GRADWIRE_TOKEN_FILE. If
    #: these are not set, the workers share a random token through the rendezvous; then they must be
    #: on one machine.
    token: str | None = field(default=None, repr=False)
    #: The path of a file that contains the token. The permissions of the file must allow nobody but
    #: the owner of the file to read it.
    token_file: str | os.PathLike[str] | None = None
    #: The address to listen on, to which other workers connect. None means the value of
    #: $GRADWIRE_HOST or, if that is not set, the loopback address.
    host: str | None = None
    #: Whether processes of other users may connect over the transport unix, if they know the token.
    #: The transport tcp does not look at users.
    allow_other_users: bool = False
    #: The names of the transports, best first. A worker uses the first one that reaches the other
    #: worker.
    transports: Sequence[str] = DEFAULT_TRANSPORTS
    #: Whether lambdas and local functions can be sent. They are then sent by value, with
    #: cloudpickle.
    closures: bool = False
    #: Seconds to wait for the other workers when joining the group.
    init_timeout: float = 120.0
    #: If a worker owes an answer and has sent nothing for this many seconds, it is sent a
    #: heartbeat, a message that it must answer.
    heartbeat_interval: float = 5.0
    #: If a worker owes an answer and has sent nothing for this many seconds, it counts as lost, and
    #: the calls to it fail. This may happen up to one `heartbeat_interval` later.
    heartbeat_limit: float = 30.0
    #: A worker refuses to receive messages that are larger than this.
    max_message_bytes: int = 1 << 40

    def __post_init__(self) -> None:
        object.__setattr__(self, "rpc_timeout", seconds(self.rpc_timeout))
        if self.num_worker_threads < 1:
            raise SetupError(
                f"num_worker_threads must be at least 1; it is {self.num_worker_threads}"
            )
        if not 0 < self.heartbeat_interval <= self.heartbeat_limit:
            raise SetupError(
                "heartbeat_interval must be positive and no longer than heartbeat_limit; they are "
                f"{self.heartbeat_interval} and {self.heartbeat_limit}"
            )
        if not self.init_timeout >= 0:
            raise SetupError(
                f"init_timeout must be a number and not negative; it is {self.init_timeout}"
            )
        if self.token is not None:
            check_token(self.token, "the option token")
            if self.token_file is not None:
                raise SetupError("give one of the options token and token_file, not both")
        # Do not check here whether the named transports exist: `Runtime` does that.
        if isinstance(self.transports, str) or not self.transports:
            raise SetupError(
                f"transports must be a list of names such as {list(DEFAULT_TRANSPORTS)}; it is "
                f"{self.transports!r}"
            )

    @classmethod
    def of(cls, options: Any) -> Options:
        """Return `options` as an Options object. torch's own options are converted; None gives the
        defaults.

        >>> Options.of(None).num_worker_threads
        16
        """
        if options is None:
            return cls()
        if isinstance(options, cls):
            return options
        known = [f.name for f in fields(cls)]
        values = {name: getattr(options, name) for name in known if hasattr(options, name)}
        try:
            if not values:
                raise TypeError("it has none of the options as attributes")
            return cls(**values)
        except TypeError as error:
            raise SetupError(
                "options must be gradwire.Options or torch's own, not of type "
                f"{type(options).__name__}: {error}"
            ) from None

    @property
    def rpc_seconds(self) -> float:
        """`rpc_timeout` as a number of seconds."""
        return self.rpc_timeout  # type: ignore[return-value]  # see __post_init__

    def resolved_token(self) -> str | None:
        """Return the group's token, from the options or the environment. Return None if neither
        gives one."""
        if self.token is not None:
            return self.token
        if self.token_file is not None:
            return token_from_file(self.token_file, "the option token_file")
        return token_from_environment()

    def resolved_host(self) -> str | None:
        """Return the address to listen on, from the options or the environment."""
        return self.host or os.environ.get(HOST_VARIABLE) or None
