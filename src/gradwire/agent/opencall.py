"""A call that has left, from the side of those who wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gradwire.agent.futures import Future
from gradwire.errors import CallError
from gradwire.ids import WorkerInfo
from gradwire.wire.frames import Frame
from gradwire.wire.values import Passenger, call_name

if TYPE_CHECKING:
    from gradwire.agent.link import Link

FOREVER = float("inf")


class OpenCall:
    """A call that has left and waits for its answer."""

    __slots__ = (
        "deadline",
        "error",
        "finished",
        "future",
        "gate",
        "id",
        "is_own",
        "kind",
        "link",
        "passengers",
        "reply",
        "subject",
        "timeout",
        "to",
    )

    def __init__(self, kind: int, subject: Any, to: WorkerInfo, timeout: float):
        self.kind = kind
        self.to = to
        #: What is called: a function, or a few words. Made into text only for errors.
        self.subject = subject
        #: In seconds; 0 means that the call may take for ever.
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout if timeout else FOREVER
        self.id = 0
        #: What it carries that must know when it is answered.
        self.passengers: Sequence[Passenger] = ()
        #: None for a synchronous call: its thread takes the reply as it is.
        self.future: Future[Any] | None = None
        #: The thread that waits for the future has read the answer, and completes it itself.
        self.is_own = False
        self.link: Link | None = None
        self.reply: Frame | None = None
        self.error: CallError | None = None
        #: The reply or the error is here, and the future, if there is one, has it.
        self.finished = False
        #: What threads wait at while another one reads; opened when the call is settled.
        self.gate: threading.Lock | None = None

    @property
    def name(self) -> str:
        return self.subject if isinstance(self.subject, str) else call_name(self.subject)

    def __str__(self) -> str:
        return f"{self.name} on worker {self.to.name!r}"

    def finish(self) -> None:
        """Let those who wait for it go on."""
        self.finished = True
        self.passengers = ()
        self.future = None  # it knows this call: do not leave a cycle behind
        if self.gate is not None:
            self.open_gate()

    def give_up(self) -> None:
        """Let the thread that waits for it, if it is not settled yet, go on without its answer."""
        if self.link is not None:
            self.link.give_up(self)

    def open_gate(self) -> None:
        gate = self.gate
        if gate is not None:
            try:
                gate.release()
            except RuntimeError:
                pass  # open already

    def wait(self, _future: Future[Any]) -> None:
        """Wait for the future of this call (see `futures.Waiting`)."""
        assert self.link is not None
        self.link.wait(self)
