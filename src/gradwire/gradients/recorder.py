"""Records what crosses between workers while a context is current.

A call made inside a context carries its id, always, since the answer may need gradients even if
the arguments do not; and the id of a send when some of its tensors require gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from gradwire.agent.interceptors import Interceptor
from gradwire.agent.service import Request
from gradwire.gradients.context import Context, Contexts, current_id
from gradwire.gradients.engine import Engine
from gradwire.ids import IdSource, WorkerInfo

TAG = "autograd"

# (context id, id of the send or 0, id of the worker that sends, passes of the context that have
# succeeded, other contexts that were released)
Tag = tuple[int, int, int, "tuple[int, ...]", "list[int]"]


class Recorder(Interceptor):
    """The interceptor that makes calls differentiable."""

    def __init__(self, me: WorkerInfo, contexts: Contexts, engine: Engine):
        self._me = me.id
        self._contexts = contexts
        self._engine = engine
        self._ids = IdSource(me.id)
        self._ids.next()  # 0 means: nothing to differentiate

    def leaving(self, to: WorkerInfo, tensors: Sequence[Tensor], tags: dict[str, Any]) -> None:
        id = current_id.get()
        if id is not None:
            self._send(self._contexts.get_or_create(id), to.id, tensors, tags)

    def serving(
        self, request: Request, tensors: Sequence[Tensor]
    ) -> AbstractContextManager[object]:
        tag = _tag(request.tags)
        if not tag:
            return _inside(None)
        context = self._receive(tag, tensors)
        request.state = {TAG: context}
        return _inside(context.id)

    def answering(self, request: Request, tensors: Sequence[Tensor], tags: dict[str, Any]) -> None:
        tag = _tag(request.tags)
        if tag:
            context = self._contexts.get_or_create(tag[0])
            self._send(context, request.caller.id, tensors, tags)

    def answered(self, by: WorkerInfo, tensors: Sequence[Tensor], tags: dict[str, Any]) -> None:  # noqa: ARG002
        tag = _tag(tags)
        if tag:
            self._receive(tag, tensors)

    def _send(
        self, context: Context, to: int, tensors: Sequence[Tensor], tags: dict[str, Any]
    ) -> None:
        differentiable = [tensor for tensor in tensors if tensor.requires_grad]
        message = 0
        if differentiable:
            message = self._ids.next()
            context.record_send(message, to, differentiable)
        else:
            context.known.add(to)
        released = self._engine.take_released(to)
        tags[TAG] = (context.id, message, self._me, context.successes(), released)

    def _receive(self, tag: Tag, tensors: Sequence[Tensor]) -> Context:
        id, message, sender, successes, released = tag
        for gone in released:
            self._engine.release(gone)
        context = self._contexts.get_or_create(id)
        if successes:
            self._engine.hear_of_success(context, successes)
        if message:
            differentiable = [tensor for tensor in tensors if tensor.requires_grad]
            context.record_recv(message, sender, differentiable)
        else:
            context.known.add(sender)
        return context


@contextmanager
def _inside(id: int | None) -> Iterator[None]:
    token = current_id.set(id)
    try:
        yield
    finally:
        current_id.reset(token)


def _tag(tags: dict[str, Any] | None) -> Tag | None:
    return tags.get(TAG) if tags else None
