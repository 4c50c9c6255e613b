"""A transport with faults: it loses messages, delivers them late or twice, or breaks the
connection.

`FaultyTransport` wraps another transport. Each `Fault` has an action and selects the messages that
the action is applied to. Random choices depend only on a seed, so that a failure can be repeated.

>>> from gradwire.testing import cluster, transports_named
>>> late = Fault("delay", kind=Kind.PYTHON_RET, seconds=0.01, times=1)
>>> network = FaultyTransport(transports_named("in_process")[0], [late], seed=1)
>>> with cluster(2, transports=[network]) as (a, b):
...     a.rpc_sync("worker1", max, args=(1, 2))
2
>>> [(action, kind.name) for action, kind, _, _ in network.done]
[('delay', 'PYTHON_RET')]
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from math import inf
from typing import Literal

from gradwire._core.transport.base import CallLater, Connection, Greeting, Listener, Transport
from gradwire._core.transport.poller import Poller
from gradwire._core.wire.frames import Frame
from gradwire._core.wire.messages import Kind, peek
from gradwire.errors import ConnectionClosed, SendTimeout, WorkerLost

Action = Literal["drop", "delay", "duplicate", "cut", "refuse"]


@dataclass(frozen=True)
class Fault:
    """One fault: an action, and the messages that it applies to.

    | action | what happens to the message |
    |---|---|
    | drop | it gets lost |
    | delay | it arrives `seconds` later |
    | duplicate | it arrives twice |
    | cut | the connection is closed, and the message is lost |
    | refuse | sending it fails with `WorkerLost` |

    The answer to a call is a message too, of the kind PYTHON_RET or EXCEPTION.

    >>> Fault("drop", kind=Kind.PYTHON_CALL, sender="worker0", times=1).action
    'drop'
    """

    action: Action = "drop"
    _: KW_ONLY
    #: Which kind of messages the fault applies to. None means every kind.
    kind: Kind | None = None
    #: The worker whose messages the fault applies to, by name. None means any sender.
    sender: str | None = None
    #: The fault applies only to messages to the worker with this name. None means any receiver.
    receiver: str | None = None
    #: If True, the fault applies to the answers to the selected messages, not to the messages
    #: themselves.
    answers: bool = False
    #: The probability that the fault happens to a message that it applies to.
    chance: float = 1.0
    #: How many messages to spare. The fault does not happen to the first `skip` messages that it
    #: would otherwise happen to.
    skip: int = 0
    #: How many messages the fault happens to. None means that there is no limit.
    times: int | None = None
    #: By how many seconds the action "delay" delays a message.
    seconds: float = 0.05


_LOST = Fault("drop")


class FaultyTransport:
    """Wraps another transport, and makes faults happen to the messages that it carries. All workers
    of a cluster may use the same `FaultyTransport`.

    >>> network = FaultyTransport(transport, [Fault("drop", chance=0.1)], seed=3)  # doctest: +SKIP
    """

    def __init__(self, inner: Transport, faults: Iterable[Fault], seed: int = 0):
        self._inner = inner
        self._faults = list(faults)
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        #: The names of the workers that the network does not reach.
        self._unreachable: set[str] = set()
        #: How many more messages each fault may happen to, in the order of `_faults`. None means
        #: that there is no limit.
        self._times_left = [fault.times for fault in self._faults]
        #: How many more messages each fault spares before it happens to one, in the order of
        #: `_faults`.
        self._skips_left = [fault.skip for fault in self._faults]
        #: Maps (caller, callee, call id) to the kind of a message that is not answered yet.
        self._open_requests: dict[tuple[str, str, int], int] = {}
        #: The faults that have happened, in order: (action, kind, sender, receiver).
        self.done: list[tuple[Action, Kind, str, str]] = []
        #: How many messages of each kind were sent. Answers are not counted here.
        self.messages: Counter[Kind] = Counter()
        #: How many answers were sent, by the kind of the message that they answer.
        self.answers: Counter[Kind] = Counter()

    @property
    def name(self) -> str:
        return self._inner.name

    def listen(
        self,
        me: Greeting,
        poller: Poller,
        accepted: Callable[[Connection], None],
        call_later: CallLater,
    ) -> Listener:
        return self._inner.listen(
            me,
            poller,
            lambda connection: accepted(FaultyConnection(connection, self, me)),
            call_later,
        )

    def connect(self, place: str, me: Greeting, them: Greeting, timeout: float) -> Connection:
        if not self._unreachable.isdisjoint((me.name, them.name)):
            raise TimeoutError(f"a fault of the test keeps {me.name!r} and {them.name!r} apart")
        return FaultyConnection(self._inner.connect(place, me, them, timeout), self, me)

    def add(self, fault: Fault) -> None:
        """Add a fault, which applies to messages that are sent from now on."""
        with self._lock:
            self._faults.append(fault)
            self._times_left.append(fault.times)
            self._skips_left.append(fault.skip)

    def clear(self) -> None:
        """Remove all faults."""
        with self._lock:
            self._faults, self._times_left, self._skips_left = [], [], []

    @contextmanager
    def unreachable(self, worker: str) -> Iterator[None]:
        """Cut the network to a worker until the end of the block. Messages from and to it get lost,
        and attempts to connect fail. Open connections stay open, as over TCP."""
        self._unreachable.add(worker)
        try:
            yield
        finally:
            self._unreachable.discard(worker)

    def choose(self, frame: Frame, sender: str, receiver: str) -> Fault | None:
        """Count a frame (a message) that `sender` is about to send. Return the fault that happens
        to the frame, or None if no fault happens to it."""
        if not self._unreachable.isdisjoint((sender, receiver)):
            return _LOST
        kind, call_id = peek(frame.head)
        with self._lock:
            answered = None
            if kind in (Kind.PYTHON_RET, Kind.EXCEPTION):
                answered = self._open_requests.pop((receiver, sender, call_id), None)
                if answered is not None:
                    self.answers[Kind(answered)] += 1
            else:
                self._open_requests[sender, receiver, call_id] = kind
                self.messages[Kind(kind)] += 1
            for index, fault in enumerate(self._faults):
                concerned = answered if fault.answers else kind
                if concerned is None or fault.kind not in (None, concerned):
                    continue
                if self._times_left[index] == 0:
                    continue
                if fault.sender not in (None, sender) or fault.receiver not in (None, receiver):
                    continue
                if fault.chance < 1.0 and self._random.random() >= fault.chance:
                    continue
                if self._skips_left[index]:
                    self._skips_left[index] -= 1
                    continue
                times_left = self._times_left[index]
                if times_left is not None:
                    self._times_left[index] = times_left - 1
                self.done.append((fault.action, Kind(kind), sender, receiver))
                return fault
        return None


class FaultyConnection:
    """A connection that makes the faults of its transport happen to the messages that it sends."""

    def __init__(self, inner: Connection, transport: FaultyTransport, me: Greeting):
        self._inner = inner
        self._transport = transport
        self._me = me.name
        self.peer = inner.peer
        # Faults happen to messages only when they are sent. So methods that do not send are taken
        # unchanged from the wrapped connection.
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
        self.withdraw = inner.withdraw
        self._timers: set[threading.Timer] = set()
        self._timers_lock = threading.Lock()

    @property
    def last_taken(self) -> float:
        return self._inner.last_taken

    def send(
        self, frame: Frame, blocked: Callable[[], object] | None = None, deadline: float = inf
    ) -> None:
        fault = self._transport.choose(frame, self._me, self.peer.name)
        if fault is None:
            self._inner.send(frame, blocked, deadline)
        elif fault.action == "duplicate":
            self._inner.send(frame, blocked, deadline)
            try:
                self._inner.send(frame, blocked, deadline)
            except SendTimeout:
                # The second copy may have been withdrawn, but the first one has been sent. So
                # the error must not say that the peer never gets the message.
                raise SendTimeout(withdrawn=False) from None
        elif fault.action == "delay":
            self._send_later(frame, fault.seconds)
        elif fault.action == "cut":
            self.close()
        elif fault.action == "refuse":
            kind, _ = peek(frame.head)
            raise WorkerLost(
                f"a fault of the test refused to send {Kind(kind).name} from {self._me!r} to "
                f"{self.peer.name!r}",
                worker=self.peer.name,
                may_have_run=False,
            )

    def close(self) -> None:
        self._inner.close()
        with self._timers_lock:
            timers = list(self._timers)
        for timer in timers:
            timer.cancel()
            timer.join()

    def hold(self, frame: Frame) -> int:  # noqa: ARG002
        # Keep no frame (message) back. Frames that are kept back are sent together with others, but
        # a fault must be able to happen to a single frame.
        return 0

    def flush(self, blocked: Callable[[], object] | None = None, deadline: float = inf) -> None:
        self._inner.flush(blocked, deadline)

    def try_send(self, frame: Frame) -> bool:
        fault = self._transport.choose(frame, self._me, self.peer.name)
        if fault is None:
            return self._inner.try_send(frame)
        if fault.action == "cut":
            self.close()
        elif fault.action == "duplicate":
            self._inner.try_send(frame)
            self._inner.try_send(frame)
        elif fault.action == "delay":
            self._send_later(frame, fault.seconds)
        return True

    def _send_later(self, frame: Frame, seconds: float) -> None:
        # Copy the frame (the message), because the sender may change its tensors once `send` has
        # returned.
        copy = Frame(frame.whole_head(), [buffer.detach().clone() for buffer in frame.buffers])
        timer = threading.Timer(seconds, self._send_quietly, (copy,))
        timer.daemon = True
        # Hold the lock until the timer has started. `close` joins every timer in `_timers`, and a
        # timer that has not started cannot be joined.
        with self._timers_lock:
            self._timers.add(timer)
            timer.start()

    def _send_quietly(self, frame: Frame) -> None:
        try:
            self._inner.send(frame)
        except ConnectionClosed:
            pass
        finally:
            self._timers.discard(threading.current_thread())
