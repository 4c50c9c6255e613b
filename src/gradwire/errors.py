"""The errors that gradwire raises.

    GradwireError
    ├── SetupError              a worker cannot start or join: options, rendezvous, names
    │   └── AuthenticationError the peer does not know the group's token
    ├── NotInitializedError     there is no current worker
    ├── EncodingError           a value cannot be sent; the message names the argument or result
    ├── UnknownWorkerError      the group has no worker of that name or id
    ├── ContextReleased         an autograd context was used after its release
    └── CallError               a call has no result; names the worker and the call
        ├── CallTimeout         the deadline of the call passed
        ├── WorkerLost          the worker died, froze, left or cannot be reached
        ├── ShutDownError       this worker is shutting down
        └── RemoteError         the function raised an exception that cannot be rebuilt here

When a function raises on another worker, the caller gets an exception of the *same* type. Its
``__cause__`` is a `RemoteTraceback`, so that the printed traceback shows the remote frames too. A
note at its end names the call and the worker.

`CallError.may_have_run` tells whether the function may have run. gradwire never runs a function
twice for one call. When `may_have_run` is False, it is safe to call again:

    >>> try:                                                              # doctest: +SKIP
    ...     rpc.rpc_sync("server", update, args=(gradients,))
    ... except CallError as error:
    ...     if error.may_have_run:
    ...         raise
    ...     rpc.rpc_sync("backup", update, args=(gradients,))
"""

from __future__ import annotations


class GradwireError(RuntimeError):
    """The base class of the errors that gradwire itself raises."""


class SetupError(GradwireError):
    """A worker cannot start or cannot join its group. Or it waited at shutdown for the other
    workers, but they were not done before the timeout."""


class AuthenticationError(SetupError):
    """The process at the other end of a connection is refused: it does not know the group's token,
    or it belongs to another user. Or an entry in the rendezvous store is refused: its writer does
    not know the token."""


class NotInitializedError(GradwireError):
    """A function that needs a current worker was called, and there is none."""


class ContextReleased(GradwireError):
    """An autograd context was used after its release."""


class EncodingError(GradwireError, TypeError):
    """A value cannot be sent to another worker."""


class UnknownWorkerError(GradwireError):
    """The group has no worker with the name or id that was given."""


class CallError(GradwireError):
    """A call failed: the caller gets neither the function's result nor the exception it raised.

    `worker` is the name of the worker that was called, and `call` is the name of the function.
    `may_have_run` tells whether the function may have run on that worker.
    """

    def __init__(
        self, message: str, *, worker: str = "", call: str = "", may_have_run: bool = True
    ):
        super().__init__(message)
        self.worker = worker
        self.call = call
        self.may_have_run = may_have_run


class CallTimeout(CallError, TimeoutError):
    """The deadline of the call passed before its answer arrived."""


class WorkerLost(CallError, ConnectionError):
    """The called worker died, froze, left its group, or cannot be reached."""


class ShutDownError(CallError):
    """This worker, the caller, is shutting down, so the call was not sent or got no answer."""


class RemoteError(CallError):
    """The called function raised an exception that cannot be rebuilt on the calling worker."""


class RemoteTraceback(Exception):
    """The traceback from another worker, as text. It is the `__cause__` of the exception that the
    caller gets."""

    def __init__(self, text: str):
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return self.text


class ConnectionClosed(Exception):
    """A connection has ended. Only gradwire itself sees this error: calls raise `WorkerLost`."""


class SendTimeout(Exception):
    """A deadline passed before a connection had sent a frame. Only gradwire itself sees this error:
    calls raise `CallTimeout`.

    `withdrawn` tells whether the frame was withdrawn, because no part of it had been sent. If it is
    False, a part has been sent, and the connection keeps the rest to send it later.
    """

    def __init__(self, *, withdrawn: bool):
        super().__init__("the deadline passed before the frame was sent")
        self.withdrawn = withdrawn
