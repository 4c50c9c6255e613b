"""Open two connected ends of a transport, and send and receive messages without a worker.

>>> from gradwire._core.transport.in_process import InProcessTransport
>>> from gradwire._core.transport.poller import new_poller
>>> with open_pair(InProcessTransport(), new_poller) as pair:
...     pair.client.send(Frame(b"hello"))
...     take(pair.listener, 1)[0].head
b'hello'
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gradwire._core.transport.base import Connection, Greeting, Transport
from gradwire._core.transport.poller import Poller
from gradwire._core.wire.frames import Frame

#: The time limit in seconds for every step. Only a transport that hangs reaches this limit.
TIMEOUT = 20.0

LISTENER = Greeting(0, "listener", "listener-incarnation")
CLIENT = Greeting(1, "client", "client-incarnation")


def never(seconds: float, callback: Callable[[], None]) -> None:
    """Do nothing. A listener gets this function to schedule callbacks that disconnect slow clients.
    The callbacks never run, so no client is disconnected, however slow it is.

    >>> never(10.0, print)
    """


@dataclass(frozen=True)
class Pair:
    """The two ends of a connection: `client` has opened the connection, and `listener` has accepted
    it. A check may attach either end to `poller`, which then calls a function when messages
    arrive."""

    client: Connection
    listener: Connection
    poller: Poller


class Background:
    """Runs a function in a thread of its own during a block. The end of the block waits for the
    function, and raises the exception that the function raised.

    >>> with Background(lambda: print("in the background")):
    ...     pass
    in the background
    """

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
        self._thread.join(TIMEOUT)
        if kind is None:
            assert not self._thread.is_alive(), f"the background thread hangs for {TIMEOUT:g} s"
            if self._error is not None:
                raise self._error


def drive(poller: Poller, done: Callable[[], object], what: str = "the expected event") -> None:
    """Run the callbacks of a poller in this thread until `done()` is true. If that takes too long,
    raise an error that names the expected event as `what`.

    >>> drive(poller, lambda: accepted, "the connection")   # doctest: +SKIP
    """
    deadline = time.monotonic() + TIMEOUT
    alarm = threading.Timer(TIMEOUT, poller.wake)
    alarm.start()
    try:
        while not done():
            assert time.monotonic() < deadline, f"{what} did not happen within {TIMEOUT:g} s"
            callback = poller.next()
            if callback is not None:
                callback()
    finally:
        alarm.cancel()
        alarm.join()


def run_due_callbacks(poller: Poller) -> None:
    """Run the callbacks for the events that a poller has already seen. Do not wait for more events.

    >>> run_due_callbacks(poller)                           # doctest: +SKIP
    """
    while True:
        poller.wake()
        callback = poller.next()
        if callback is None:
            return
        callback()


@contextlib.contextmanager
def open_pair(transport: Transport, make_poller: Callable[[], Poller]) -> Iterator[Pair]:
    """Connect two ends through the transport's own listener, and close them after the block.

    >>> with open_pair(transport, new_poller) as pair:      # doctest: +SKIP
    ...     pair.client.send(Frame(b"hello"))
    """
    with contextlib.ExitStack() as stack:
        poller = make_poller()
        stack.callback(poller.close)
        accepted: list[Connection] = []
        listener = transport.listen(LISTENER, poller, accepted.append, never)
        stack.callback(listener.close)
        with Background(lambda: drive(poller, lambda: accepted, "the connection")):
            client = transport.connect(listener.address.place, CLIENT, LISTENER, TIMEOUT)
            stack.callback(client.close)
        stack.callback(accepted[0].close)
        yield Pair(client, accepted[0], poller)


def take(connection: Connection, count: int) -> list[Frame]:
    """Receive the next `count` frames (messages). The calling thread reads the connection itself,
    as a worker's thread does when it waits for the answer to its own call.

    >>> [frame] = take(pair.listener, 1)                    # doctest: +SKIP
    """
    frames: list[Frame] = []
    assert connection.begin_reading(), "another thread reads this connection"
    try:
        while len(frames) < count:
            received = connection.receive()
            frames += received
            if not received:
                assert connection.wait(TIMEOUT), f"only {len(frames)} of {count} frames arrived"
    finally:
        connection.end_reading()
    assert len(frames) == count, f"{len(frames)} frames arrived where {count} were sent"
    return frames


def open_descriptors() -> set[str]:
    """Return the open file descriptors of this process, each with the name of its file. Return an
    empty set on systems without /proc.

    >>> before = open_descriptors()
    >>> with open(os.devnull) as file:
    ...     assert len(open_descriptors() - before) <= 1
    """
    folder = "/proc/self/fd"
    descriptors: set[str] = set()
    if os.path.isdir(folder):
        for number in os.listdir(folder):
            # `listdir` opens a descriptor to read the folder, and lists this descriptor too. It is
            # closed by now, so `readlink` raises an error for it.
            with contextlib.suppress(OSError):
                descriptors.add(f"{number} -> {os.readlink(f'{folder}/{number}')}")
    return descriptors


def shared_memory() -> set[str]:
    """Return the inodes of the shared memory segments that this process maps. Return an empty set
    on systems without /proc.

    >>> len(shared_memory()) >= 0
    True
    """
    path = "/proc/self/maps"
    if not os.path.exists(path):
        return set()
    with open(path) as maps:
        return {line.split()[4] for line in maps if "memfd:gradwire" in line}
