"""Records what crosses between workers while a context is current.

A call made inside a context carries its id, always, since the answer may need gradients even if
the arguments do not; and the id of a send when some of its tensors require gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from gradwire.agent.interceptors import Interceptor
from gradwire.agent.service import Request
from gradwire.errors import EncodingError
from gradwire.gradients.context import Contexts, current_id
from gradwire.gradients.engine import TAG, Engine, Tag
from gradwire.ids import WorkerInfo
from gradwire.wire.messages import Tags
from gradwire.wire.values import Arrival


class Recorder(Interceptor):
    """The interceptor that makes calls differentiable."""

    def __init__(self, contexts: Contexts, engine: Engine):
        self._contexts = contexts
        self._engine = engine
        engine.agent.codec.unrecorded = _refuse

    def leaving(self, to: WorkerInfo, what: Any, tensors: Sequence[Tensor], tags: Tags) -> None:
        id = current_id.get()
        if id is not None:
            context = self._contexts.get_or_create(id)
            # What runs elsewhere is told by a tuple from what has run here.
            self._engine.tag(tags, context, to.id, (what,), tensors)

    def arriving(self, sender: int, tags: Tags) -> Arrival | None:
        tag: Tag | None = tags.get(TAG)
        if tag is None:
            return None
        id, message, _, successes, released = tag
        if released:
            self._engine.hear_of_releases(released, sender)
        context = self._contexts.get_or_create(id)
        if successes:
            self._engine.hear_of_success(context, successes)
        return context.receive(message, sender)

    def serving(self, request: Request) -> AbstractContextManager[object] | None:
        tag: Tag | None = request.tags.get(TAG) if request.tags else None
        recording = self._engine.versions.recording()
        if tag is None:
            current_id.set(None)
            return recording
        id, _, grad_enabled, *_ = tag
        current_id.set(id)
        return recording if grad_enabled else _no_grad(recording)

    def answering(self, request: Request, tensors: Sequence[Tensor], tags: Tags) -> None:
        tag = request.tags and request.tags.get(TAG)
        if tag:
            context = self._contexts.get_or_create(tag[0])
            self._engine.tag(tags, context, request.caller.id, request.subject, tensors)

    def waiting(self, tags: Tags) -> None:
        tag: Tag | None = tags.get(TAG)
        if tag is not None and tag[1]:
            context = self._contexts.peek(tag[0])
            if context is not None:
                context.plan_ahead()


@contextmanager
def _no_grad(recording: AbstractContextManager[object] | None) -> Iterator[None]:
    """A function that is called under `no_grad` records no more than it would over there."""
    with torch.no_grad(), recording or nullcontext():
        yield


def _refuse(tensor: Tensor) -> None:
    """A tensor is sent whose gradients would be lost."""
    if current_id.get() is not None:
        raise EncodingError(
            f"a {type(tensor).__name__} of layout {tensor.layout} that requires gradients cannot "
            "be differentiated through a call: send a plain tensor, or what tensor.detach() gives"
        )
