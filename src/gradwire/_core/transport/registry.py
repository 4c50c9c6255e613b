"""Transports by name: how the option `transports` becomes transport objects.

To add a transport, add an entry to `_FACTORIES` or call `register`. The module of a transport is
imported only when the transport is made, because it may need a particular operating system.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gradwire._core.transport.base import Transport
from gradwire.errors import SetupError


@dataclass(frozen=True)
class TransportSettings:
    """The settings that a worker gives to each of its transports."""

    #: The group's secret.
    token: bytes = field(repr=False)
    #: The address to listen on, for transports that reach other machines.
    host: str = "127.0.0.1"
    #: The size in bytes of the largest frame that is accepted.
    max_bytes: int = 1 << 40
    #: A peer that takes no data for this many seconds is disconnected.
    stall_limit: float = 30.0
    #: Whether processes of other users may connect, for transports that can tell users apart.
    allow_other_users: bool = False


class TransportFactory(NamedTuple):
    """How to make a transport, and whether this system supports it."""

    make: Callable[[TransportSettings], Transport]
    is_available: bool = True
    #: Whether workers can connect only if they share one transport object. The option `transports`
    #: cannot name such a transport, because each worker would then make an object of its own.
    needs_one_object: bool = False


def _make_unix(settings: TransportSettings) -> Transport:
    from gradwire._core.transport.unix import UnixTransport

    return UnixTransport(
        settings.token,
        settings.max_bytes,
        settings.stall_limit,
        allow_other_users=settings.allow_other_users,
    )


def _make_tcp(settings: TransportSettings) -> Transport:
    from gradwire._core.transport.tcp import TcpTransport

    return TcpTransport(settings.token, settings.host, settings.max_bytes, settings.stall_limit)


def _make_in_process(_settings: TransportSettings) -> Transport:
    from gradwire._core.transport.in_process import InProcessTransport

    return InProcessTransport()


_FACTORIES: dict[str, TransportFactory] = {
    "unix": TransportFactory(_make_unix, is_available=sys.platform == "linux"),
    "tcp": TransportFactory(_make_tcp),
    "in_process": TransportFactory(_make_in_process, needs_one_object=True),
}


def register(name: str, factory: TransportFactory) -> None:
    """Add a transport under a new name."""
    if name in _FACTORIES:
        raise SetupError(f"there is already a transport called {name!r}")
    _FACTORIES[name] = factory


def known_names() -> tuple[str, ...]:
    """Return the names of all transports."""
    return tuple(_FACTORIES)


def make_transport(name: str, settings: TransportSettings) -> Transport:
    """Make the transport with this name."""
    factory = _factory(name, known_names())
    if not factory.is_available:
        raise SetupError(f"the transport {name!r} is not available on {sys.platform}")
    return factory.make(settings)


def check_names(names: Sequence[str]) -> None:
    """Raise SetupError unless the option `transports` may contain all these names."""
    usable = [name for name, factory in _FACTORIES.items() if not factory.needs_one_object]
    for name in names:
        if _factory(name, usable).needs_one_object:
            raise SetupError(
                f"the option transports cannot name {name!r}: its workers must all be given the "
                "same transport object. Pass that object to each Worker as transports=[...]. The "
                f"option can name {', '.join(usable)}"
            )


def make_transports(names: Sequence[str], settings: TransportSettings) -> list[Transport]:
    """Make the named transports that this system supports, in the given order."""
    check_names(names)
    available = [name for name in names if _FACTORIES[name].is_available]
    if not available:
        raise SetupError(
            f"none of the transports {', '.join(names)} is available on {sys.platform}. Add tcp to "
            "the option transports"
        )
    return [make_transport(name, settings) for name in available]


def _factory(name: str, known: Sequence[str]) -> TransportFactory:
    try:
        return _FACTORIES[name]
    except KeyError:
        raise SetupError(
            f"there is no transport called {name!r}; the known transports are {', '.join(known)}"
        ) from None
