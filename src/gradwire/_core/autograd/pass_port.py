"""The interface through which a backward pass uses the worker that it runs on."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any, Protocol

from gradwire._core.autograd.boundary import Send
from gradwire._core.autograd.context import Context, FailureReason
from gradwire._core.autograd.copy_on_write import ParameterVersions
from gradwire._core.autograd.leaf_accumulation import LeafGroup
from gradwire._core.autograd.pass_messages import Packed, PassMessage
from gradwire._core.ids import WorkerInfo
from gradwire._core.rpc.futures import Future
from gradwire._core.rpc.open_call import OpenCall
from gradwire._core.rpc.server import Request


class PassPort(Protocol):
    """What a backward pass needs from the worker that it runs on. `DistEngine` implements this
    interface."""

    info: WorkerInfo
    versions: ParameterVersions
    #: One item for each thread that waits for gradients in the middle of a region's run. The item
    #: is the sent message (`Send`) with the tensors that the gradients belong to. Only tests read
    #: this list.
    gate_waits: list[Send]

    #: Functions that return groups of leaves whose gradients torch itself must accumulate into
    #: `.grad`, because hooks look at all leaves of a group (see `leaf_accumulation`).
    leaf_group_providers: list[Callable[[], Collection[LeafGroup]]]

    # -- messages

    def tell(
        self, worker: int, packed: Packed, seconds: float, recorded_in: Context | None
    ) -> Future[Any]:
        """Send a message of the pass to another worker. Return a future of the packed answer.

        `recorded_in`: None, or the context in which to record the message, so that the gradients in
        the message can be differentiated again.
        """

    def ask(
        self, worker: int, packed: Packed, seconds: float, recorded_in: Context | None
    ) -> OpenCall:
        """Send a message of the pass to another worker. Return an open call. The calling thread
        must call `hear` with it, to wait for the packed answer.

        `recorded_in`: None, or the context in which to record the message, so that the gradients in
        the message can be differentiated again.
        """

    @property
    def hear(self) -> Callable[[OpenCall], Any]:
        """A function that waits for the answer to a message, and returns the answer."""

    def answer(self, request: Request, message: PassMessage, recorded_in: Context | None) -> None:
        """Answer a message of the pass that another worker has sent.

        `recorded_in`: None, or the context in which to record the answer, so that the gradients in
        the answer can be differentiated again.
        """

    # -- outcomes

    def encode_failure(self, error: BaseException) -> FailureReason:
        """Encode the error with which a pass failed on this worker, for other workers to read."""

    def report_failure(
        self, context_id: int, pass_id: int, reason: FailureReason, workers: Collection[int]
    ) -> None:
        """Tell the given workers, and the worker that started the pass, why the pass has failed."""

    def learn_outcomes(self, context: Context) -> None:
        """For each pass whose part on this worker is finished, ask the worker that started the pass
        whether it has succeeded. If it has, make its gradients visible."""

    # -- the worker

    @property
    def blocking(self) -> Callable[[], AbstractContextManager[object]]:
        """A function that returns a context manager. It must enclose code that may block this
        thread. While that code runs, another thread serves the calls that arrive."""

    def run_elsewhere(self, work: Callable[[], None]) -> None:
        """Run a function soon, on another thread of this worker."""

    def worker_names(self) -> dict[int, str]:
        """Return the names of the workers in the group, by id."""
