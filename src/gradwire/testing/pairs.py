"""Two connected ends of a transport, and what it takes to drive them without a worker."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gradwire.transport.base import Connection, Greeting, Transport
from gradwire.transport.poller import Poller
from gradwire.wire.frames import Frame

#: Far longer than anything here takes: reached only by a transport that hangs.
PATIENCE = 20.0

LISTENER = Greeting(0, "listener", "listener-life")
CALLER = Greeting(1, "caller", "caller-life")


@dataclass(frozen=True)
class Pair:
    """`caller` opened the connection, `listener` accepted it; both may use `poller`."""

    caller: Connection
    listener: Connection
    poller: Poller


class Background:
    """A function that runs in a thread of its own; leaving the block waits for it and raises
    what it raised."""

    def __init__(self, run: Callable[[], Any]):
        self._run = run
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="background", daemon=True)

    def _main(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._error = error

    def __enter__(self) -> Background:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._thread.join(PATIENCE)
        if kind is None:
            assert not self._thread.is_alive(), "a thread is still busy: something hangs"
            if self._error is not None:
                raise self._error


def drive(poller: Poller, done: Callable[[], object], what: str = "what was expected") -> None:
    """Run the poller's callbacks in this thread until `done`."""
    deadline = time.monotonic() + PATIENCE
    alarm = threading.Timer(PATIENCE, poller.wake)
    alarm.start()
    try:
        while not done():
            assert time.monotonic() < deadline, f"{what} has not happened within {PATIENCE:g} s"
            callback = poller.next()
            if callback is not None:
                callback()
    finally:
        alarm.cancel()
        alarm.join()


def settle(poller: Poller) -> None:
    """Run the callbacks that are due by now. Never blocks."""
    while True:
        poller.wake()
        callback = poller.next()
        if callback is None:
            return
        callback()


@contextlib.contextmanager
def open_pair(transport: Transport, make_poller: Callable[[], Poller]) -> Iterator[Pair]:
    """Two ends connected through the transport's own listener."""
    with contextlib.ExitStack() as stack:
        poller = make_poller()
        stack.callback(poller.close)
        accepted: list[Connection] = []
        listener = transport.listen(LISTENER, poller, accepted.append)
        stack.callback(listener.close)
        with Background(lambda: drive(poller, lambda: accepted, "the connection")):
            caller = transport.connect(listener.address.place, CALLER, LISTENER, PATIENCE)
            stack.callback(caller.close)
        stack.callback(accepted[0].close)
        yield Pair(caller, accepted[0], poller)


def take(connection: Connection, count: int) -> list[Frame]:
    """The next `count` frames, read the way a thread reads that waits for its own answer."""
    frames: list[Frame] = []
    assert connection.begin_reading(), "somebody else reads this connection"
    try:
        while len(frames) < count:
            arrived = connection.receive()
            frames += arrived
            if not arrived:
                assert connection.wait(PATIENCE), f"{len(frames)} of {count} frames arrived"
    finally:
        connection.end_reading()
    assert len(frames) == count, f"{len(frames)} frames arrived where {count} were sent"
    return frames


def open_descriptors() -> set[str]:
    """The open descriptors of this process with what they refer to; empty where nobody can tell."""
    place = "/proc/self/fd"
    found: set[str] = set()
    if os.path.isdir(place):
        for number in os.listdir(place):
            with contextlib.suppress(OSError):  # the one that lists the directory
                found.add(f"{number} -> {os.readlink(f'{place}/{number}')}")
    return found


def shared_memory() -> set[str]:
    """The segments that this process maps, by inode; empty where nobody can tell."""
    place = "/proc/self/maps"
    if not os.path.exists(place):
        return set()
    with open(place) as maps:
        return {line.split()[4] for line in maps if "memfd:gradwire" in line}
