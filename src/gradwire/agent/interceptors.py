"""What rooms above may do around user calls, without this room knowing what it is for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from gradwire.agent.service import Request
from gradwire.ids import WorkerInfo
from gradwire.wire.messages import Tags
from gradwire.wire.values import Arrival


class Interceptor:
    """Sees every user call leave, arrive, be served and be answered.

    A subclass attaches what it needs to `tags`, under a name of its own, and finds it on the other
    side. The tensors are those of the arguments or of the result that require gradients; they are
    met in the same order on both sides.
    """

    def leaving(
        self,
        to: WorkerInfo,
        what: Any,
        tensors: Sequence[Tensor],
        tags: Tags,
    ) -> None:
        """A call of `what` is about to leave."""

    def arriving(self, sender: int, tags: Tags) -> Arrival | None:  # noqa: ARG002
        """A call or a result with tags has arrived from a worker and is about to be decoded."""
        return None

    def serving(self, request: Request) -> AbstractContextManager[object] | None:  # noqa: ARG002
        """A function is about to run, in a context (of context variables) of its own; inside of
        what this returns."""
        return None

    def answering(
        self,
        request: Request,
        tensors: Sequence[Tensor],
        tags: Tags,
    ) -> None:
        """The result of a call is about to leave."""

    def waiting(self, tags: Tags) -> None:
        """A call or a result has left, with these tags, and nothing has arrived since: there is
        time to do something ahead."""
