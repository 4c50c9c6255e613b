"""Every error gradwire raises, drawn as a tree.

    GradwireError
    ├── SetupError              joining a group: bad options, rendezvous, names
    │   └── AuthenticationError the peer does not know the group's token
    ├── NotInitializedError     there is no current worker
    ├── EncodingError           a value cannot be sent; the message names the argument
    ├── UnknownWorkerError      nobody of that name or id is in the group
    ├── ContextReleased         an autograd context has ended that was to be used
    └── CallError               a call did not give a result; names the worker and the call
        ├── CallTimeout         its deadline passed
        ├── WorkerLost          the worker or the way to it is gone
        ├── ShutDownError       this worker is shutting down
        └── RemoteError         the remote function raised something that cannot be rebuilt here

A function that raises on another worker gives the caller the *original* exception type; its
``__cause__`` is a `RemoteTraceback`, so the traceback printed here shows the frames there.

`CallError.may_have_run` says whether the function may have run before the failure. gradwire never
runs a user function twice, so a caller may retry freely when it is False.
"""

from __future__ import annotations


class GradwireError(RuntimeError):
    """Base of all errors that gradwire itself raises."""


class SetupError(GradwireError):
    """A worker could not be set up or could not join its group."""


class AuthenticationError(SetupError):
    """The two ends of a connection do not share the group's token."""


class NotInitializedError(GradwireError):
    """A function that needs the current worker was called without one."""


class ContextReleased(GradwireError):
    """An autograd context was released, and something was still to be done in it."""


class EncodingError(GradwireError, TypeError):
    """A value cannot be sent to another worker."""


class UnknownWorkerError(GradwireError):
    """No worker of that name or id is in the group."""


class CallError(GradwireError):
    """A call failed without a result from the function called."""

    def __init__(
        self, message: str, *, worker: str = "", call: str = "", may_have_run: bool = True
    ):
        super().__init__(message)
        self.worker = worker
        self.call = call
        self.may_have_run = may_have_run


class CallTimeout(CallError, TimeoutError):
    """The call's deadline passed before its answer came."""


class WorkerLost(CallError, ConnectionError):
    """The worker died, froze, left, or cannot be reached."""


class ShutDownError(CallError):
    """The call was still open when this worker shut down."""


class RemoteError(CallError):
    """The remote function raised an exception that cannot be rebuilt on this side."""


class RemoteTraceback(Exception):
    """The text of a traceback from another worker; the `__cause__` of what is raised here."""

    def __init__(self, text: str):
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return self.text


class ConnectionClosed(Exception):
    """A transport's connection ended. Internal: callers see `WorkerLost`."""
