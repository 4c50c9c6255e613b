"""A call that was sent and is not answered yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from gradwire._core.ids import WorkerInfo
from gradwire._core.rpc.deadlines import FOREVER
from gradwire._core.rpc.futures import Future
from gradwire._core.wire.codec import call_name
from gradwire._core.wire.encoding import Attachment
from gradwire._core.wire.frames import Frame
from gradwire.errors import CallError


class CallChannel(Protocol):
    """The part of a `ClientChannel`, the calling side of a connection, that an open call uses."""

    #: The worker that is called.
    peer: WorkerInfo

    def wait(self, call: OpenCall) -> None:
        """Return when the call is finished."""

    def give_up(self, call: OpenCall) -> None:
        """Finish the call with an error, unless it is finished already."""


class OpenCall:
    """A call that was sent. It is open until its answer has arrived or the call has failed."""

    __slots__ = (
        "attachments",
        "channel",
        "deadline",
        "error",
        "finished",
        "future",
        "id",
        "kind",
        "latch",
        "reply",
        "sent",
        "subject",
        "timeout",
        "to",
        "waiter_completes",
    )

    def __init__(self, kind: int, subject: Any, to: WorkerInfo, timeout: float):
        self.kind = kind
        self.to = to
        #: The function that is called, or a text that names the message. It is used in error texts.
        self.subject = subject
        #: The timeout in seconds; 0 means no timeout.
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout if timeout else FOREVER
        self.id = 0
        #: Whether the thread that sends this call is done with it: the call was sent, or is held
        #: back. Until then, that thread fails the call at its deadline, because only that thread
        #: knows whether a part of the call has been sent.
        self.sent = False
        #: The objects in the message that must learn whether it was sent, answered or lost.
        self.attachments: Sequence[Attachment] = ()
        #: The future of the result. It is None for a synchronous call, because the thread that made
        #: such a call decodes the reply itself.
        self.future: Future[Any] | None = None
        #: Whether the thread that waits for the future has read the answer itself. If so, that
        #: thread completes the future; otherwise the executor's leader does.
        self.waiter_completes = False
        self.channel: CallChannel | None = None
        self.reply: Frame | None = None
        self.error: CallError | None = None
        #: Whether the call has its reply or its error. The future of an asynchronous call is
        #: completed before this is set, or later if the result contains unconfirmed RRefs.
        self.finished = False
        #: A lock that is held until the call is finished. Threads wait at it while another thread
        #: reads the connection.
        self.latch: threading.Lock | None = None

    @property
    def name(self) -> str:
        return call_name(self.subject)

    def __str__(self) -> str:
        return f"{self.name} on worker {self.to.name!r}"

    def age(self) -> float | None:
        """Return how many seconds ago the call was made, or None if it has no timeout, because the
        time is not stored then."""
        return time.monotonic() - self.deadline + self.timeout if self.timeout else None

    def finish(self) -> None:
        """Mark the call as finished and let the threads that wait for it go on."""
        self.finished = True
        self.attachments = ()
        # The call drops its future: the future refers to the call, and the two references would
        # make a cycle.
        self.future = None
        if self.latch is not None:
            self.open_latch()

    def give_up(self) -> None:
        """Stop waiting for the answer, because nobody needs it. Unless the call is finished
        already, it finishes with an error."""
        if self.channel is not None:
            self.channel.give_up(self)

    def open_latch(self) -> None:
        """Release the latch, so that the threads that wait at it continue."""
        latch = self.latch
        if latch is not None:
            try:
                latch.release()
            except RuntimeError:
                pass  # Another thread has released the latch already, which is enough.

    def wait(self, _future: Future[Any]) -> None:
        """Wait until this call is finished. Its future calls this (see `futures.Waitable`)."""
        assert self.channel is not None
        self.channel.wait(self)
