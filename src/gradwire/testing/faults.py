"""A transport that misbehaves on purpose.

`FaultyTransport` wraps another one. Each `Fault` says what happens to which frames: by the kind of
message, by the worker that sends or receives, always or with a chance, a limited number of times.
Chances are taken from a seed, so a failure found once can be found again.

    >>> faults = [Fault("drop", kind=Kind.RREF_USER_DELETE, times=2)]
    >>> with cluster(2, transports=[FaultyTransport(MemoryNetwork(), faults, seed=1)]):
    ...     ...  # doctest: +SKIP
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from gradwire.errors import ConnectionClosed, WorkerLost
from gradwire.transport.base import Connection, Greeting, Listener, Transport
from gradwire.transport.poller import Poller
from gradwire.wire.frames import Frame
from gradwire.wire.messages import Kind, peek

Action = Literal["drop", "delay", "duplicate", "cut", "refuse"]


@dataclass(frozen=True, kw_only=True)
class _Where:
    kind: Kind | None = None
    sender: str | None = None
    receiver: str | None = None
    answers: bool = False
    chance: float = 1.0
    skip: int = 0
    times: int | None = None
    seconds: float = 0.05


@dataclass(frozen=True)
class Fault(_Where):
    """What happens to frames: they get lost (drop), arrive `seconds` late (delay), arrive twice
    (duplicate), take the whole connection with them (cut), or cannot be sent at all (refuse).

    `kind` None means any message; an answer has the kind PYTHON_RET or EXCEPTION. With `answers` it
    is the answers to messages of that kind instead. `sender` and `receiver` are names of workers,
    None means any. The first `skip` frames it could befall are spared.
    """

    action: Action = "drop"


class FaultyTransport:
    """Another transport, with faults. One object may serve all workers of a cluster."""

    def __init__(self, inner: Transport, faults: Iterable[Fault], seed: int = 0):
        self._inner = inner
        self._faults = list(faults)
        self._dice = random.Random(seed)
        self._lock = threading.Lock()
        self._left = [fault.times for fault in self._faults]
        self._spared = [fault.skip for fault in self._faults]
        #: What was asked: by (asking, asked, id of the call).
        self._asked: dict[tuple[str, str, int], int] = {}
        #: What was done so far, in order: (action, kind, sender, receiver).
        self.done: list[tuple[Action, Kind, str, str]] = []
        #: How many messages of each kind were sent, and how many answers to each.
        self.messages: Counter[Kind] = Counter()
        self.answers: Counter[Kind] = Counter()

    @property
    def name(self) -> str:
        return self._inner.name

    def listen(
        self, me: Greeting, poller: Poller, accepted: Callable[[Connection], None]
    ) -> Listener:
        return self._inner.listen(
            me, poller, lambda connection: accepted(FaultyConnection(connection, self, me))
        )

    def connect(self, place: str, me: Greeting, them: Greeting, timeout: float) -> Connection:
        return FaultyConnection(self._inner.connect(place, me, them, timeout), self, me)

    def add(self, fault: Fault) -> None:
        """Have one more fault, from now on."""
        with self._lock:
            self._faults.append(fault)
            self._left.append(fault.times)
            self._spared.append(fault.skip)

    def clear(self) -> None:
        """Have no faults any more."""
        with self._lock:
            self._faults, self._left, self._spared = [], [], []

    def choose(self, frame: Frame, sender: str, receiver: str) -> Fault | None:
        """The fault that befalls a frame, if any."""
        kind, call = peek(frame.head)
        with self._lock:
            asked = None
            if kind in (Kind.PYTHON_RET, Kind.EXCEPTION):
                asked = self._asked.pop((receiver, sender, call), None)
                if asked is not None:
                    self.answers[Kind(asked)] += 1
            else:
                self._asked[sender, receiver, call] = kind
                self.messages[Kind(kind)] += 1
            for index, fault in enumerate(self._faults):
                about = asked if fault.answers else kind
                if about is None or fault.kind not in (None, about) or self._left[index] == 0:
                    continue
                if fault.sender not in (None, sender) or fault.receiver not in (None, receiver):
                    continue
                if fault.chance < 1.0 and self._dice.random() >= fault.chance:
                    continue
                if self._spared[index]:
                    self._spared[index] -= 1
                    continue
                left = self._left[index]
                if left is not None:
                    self._left[index] = left - 1
                self.done.append((fault.action, Kind(kind), sender, receiver))
                return fault
        return None


class FaultyConnection:
    """A connection whose frames meet the faults of its transport when they are sent."""

    def __init__(self, inner: Connection, transport: FaultyTransport, me: Greeting):
        self._inner = inner
        self._transport = transport
        self._me = me.name
        self.peer = inner.peer
        # Reading is not touched.
        self.begin_reading = inner.begin_reading
        self.end_reading = inner.end_reading
        self.stop_reading = inner.stop_reading
        self.abandon = inner.abandon
        self.receive = inner.receive
        self.wait = inner.wait
        self.attach = inner.attach
        self.arm = inner.arm
        self.disarm = inner.disarm
        self.trim = inner.trim
        self._timers: set[threading.Timer] = set()
        self._timing = threading.Lock()

    def send(self, frame: Frame, blocked: Callable[[], object] | None = None) -> None:
        fault = self._transport.choose(frame, self._me, self.peer.name)
        if fault is None:
            self._inner.send(frame, blocked)
        elif fault.action == "duplicate":
            self._inner.send(frame, blocked)
            self._inner.send(frame, blocked)
        elif fault.action == "delay":
            self._send_later(frame, fault.seconds)
        elif fault.action == "cut":
            self.close()
        elif fault.action == "refuse":
            kind, _ = peek(frame.head)
            raise WorkerLost(
                f"a fault was asked for: {Kind(kind).name} is not sent to {self.peer.name!r}",
                worker=self.peer.name,
                may_have_run=False,
            )

    def close(self) -> None:
        self._inner.close()
        with self._timing:
            timers = list(self._timers)
        for timer in timers:
            timer.cancel()
            timer.join()

    def hold(self, frame: Frame) -> int:  # noqa: ARG002
        return 0  # every frame meets its fate by itself

    def flush(self, blocked: Callable[[], object] | None = None) -> None:
        self._inner.flush(blocked)

    def nudge(self, frame: Frame) -> bool:
        fault = self._transport.choose(frame, self._me, self.peer.name)
        if fault is None:
            return self._inner.nudge(frame)
        if fault.action == "cut":
            self.close()
        elif fault.action == "duplicate":
            self._inner.nudge(frame)
            self._inner.nudge(frame)
        elif fault.action == "delay":
            self._send_later(frame, fault.seconds)
        return True

    def _send_later(self, frame: Frame, seconds: float) -> None:
        # The sender may change its tensors as soon as `send` returns.
        copy = Frame(frame.whole_head(), [buffer.detach().clone() for buffer in frame.buffers])
        timer = threading.Timer(seconds, self._send_quietly, (copy,))
        timer.daemon = True
        with self._timing:  # nobody can join one that has not started
            self._timers.add(timer)
            timer.start()

    def _send_quietly(self, frame: Frame) -> None:
        try:
            self._inner.send(frame)
        except ConnectionClosed:
            pass
        finally:
            self._timers.discard(threading.current_thread())
