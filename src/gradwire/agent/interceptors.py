"""What rooms above may do around user calls, without this room knowing what it is for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from gradwire.agent.service import Request
from gradwire.ids import WorkerInfo
from gradwire.wire.messages import Tags


class Interceptor:
    """Sees every user call leave, be served, be answered and come back.

    A subclass attaches what it needs to `tags`, under a name of its own, and finds it on the other
    side. The tensors are those of the arguments or of the result, in the same order on both sides.
    """

    def leaving(self, to: WorkerInfo, tensors: Sequence[Tensor], tags: Tags) -> None:
        """A call is about to leave."""

    def serving(
        self,
        request: Request,  # noqa: ARG002
        tensors: Sequence[Tensor],  # noqa: ARG002
    ) -> AbstractContextManager[object]:
        """A call has arrived; the function runs inside what this returns."""
        return nullcontext()

    def answering(self, request: Request, tensors: Sequence[Tensor], tags: Tags) -> None:
        """The result is about to leave."""

    def answered(self, by: WorkerInfo, tensors: Sequence[Tensor], tags: Tags) -> None:
        """A result that was tagged has arrived; nobody has seen it yet."""
