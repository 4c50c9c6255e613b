"""Interceptors: objects with which the layers above take part in user calls. This layer calls them
without knowing what they do.

The autograd layer has an interceptor that records calls. Profiling of remote calls and tracing
belong here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from gradwire._core.ids import WorkerInfo
from gradwire._core.rpc.server import Request
from gradwire._core.wire.encoding import OnReceive
from gradwire._core.wire.messages import Tags


class Interceptor:
    """Has one method for each step of a user call: sending, receiving, serving, answering it.

    A subclass may add a value to `tags` under a key of its own, and finds the value there on the
    other worker. `tensors` are the tensors in the arguments, or in the result, that require
    gradients; both workers see them in the same order.

        >>> class CountCalls(Interceptor):
        ...     count = 0
        ...     def leaving(self, to, what, tensors, tags):
        ...         self.count += 1
    """

    def leaving(
        self,
        to: WorkerInfo,
        what: Any,
        tensors: Sequence[Tensor],
        tags: Tags,
    ) -> None:
        """Called before a call of the function `what` is sent."""

    def arriving(self, sender: int, tags: Tags) -> OnReceive | None:  # noqa: ARG002
        """Called before a call or a result with tags is decoded. If this returns a function, that
        function is called with each tensor in the message, and returns the tensor to use
        instead."""
        return None

    def serving(self, request: Request) -> AbstractContextManager[object] | None:  # noqa: ARG002
        """Called before a function runs for another worker. If this returns a context manager, the
        function runs inside of it, with context variables of its own."""
        return None

    def answering(
        self,
        request: Request,
        tensors: Sequence[Tensor],
        tags: Tags,
    ) -> None:
        """Called before the result of a call is sent."""

    def waiting(self, tags: Tags) -> None:
        """Called after a call or a result with these tags was sent. This thread now has nothing to
        do until the other worker sends something, so it can do work that will be needed later."""
