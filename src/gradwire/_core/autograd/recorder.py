"""Records the messages that workers exchange in an autograd context.

A call made in a context always carries the id of the context, because its result may require
gradients even if no argument does. A call or result with tensors that require gradients also
carries an id of its own, by which a backward pass refers to it.

A call outside of any context is not recorded. If its result has tensors that require gradients,
these tensors raise an error in a backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradwire._core.autograd.boundary import take_unrecorded
from gradwire._core.autograd.context import ContextContainer, current_id
from gradwire._core.autograd.context_release import ContextReleases
from gradwire._core.autograd.dist_engine import DistEngine
from gradwire._core.autograd.pass_messages import TAG, UNRECORDED_TAG, unpack_metadata
from gradwire._core.ids import WorkerInfo
from gradwire._core.rpc.interceptors import Interceptor
from gradwire._core.rpc.server import Request
from gradwire._core.wire.codec import call_name
from gradwire._core.wire.encoding import OnReceive
from gradwire._core.wire.messages import Tags
from gradwire.errors import EncodingError


class Recorder(Interceptor):
    """The interceptor that makes calls differentiable.

    `refuses_unrecorded`: tensors that require gradients, in the results of calls outside of any
    context, raise an error in a backward pass. Otherwise such a tensor is a leaf, as in torch.
    """

    def __init__(
        self,
        contexts: ContextContainer,
        engine: DistEngine,
        releases: ContextReleases,
        *,
        refuses_unrecorded: bool,
    ):
        self._contexts = contexts
        self._engine = engine
        self._releases = releases
        self._refuses_unrecorded = refuses_unrecorded
        engine.agent.codec.on_untracked_tensor(_refuse)

    def leaving(self, to: WorkerInfo, what: Any, tensors: Sequence[Tensor], tags: Tags) -> None:
        """Record a call that this worker is about to send in a context, and add metadata to it."""
        context_id = current_id.get()
        if context_id is not None:
            context = self._contexts.get_or_create(context_id)
            # The 1-tuple says that the message is a call of the function `what`. For a result, the
            # function that returned the result is given without a tuple. Error texts need this
            # difference.
            self._engine.record_send(tags, context, to.id, (what,), tensors)

    def arriving(self, sender: int, tags: Tags) -> OnReceive | None:
        """Record a call or result that has arrived. Handle the news in its metadata: contexts that
        were released, and backward passes that have succeeded."""
        packed = tags.get(TAG)
        if packed is None:
            function = tags.get(UNRECORDED_TAG)
            if function is None or not self._refuses_unrecorded:
                return None
            worker = self._engine.agent.peers.find(sender).info.name
            return partial(take_unrecorded, f"{function} on worker {worker!r}")
        metadata = unpack_metadata(packed)
        if metadata.released:
            self._releases.hear_of(metadata.released, sender)
        context = self._contexts.get_or_create(metadata.context_id)
        if metadata.successes:
            self._engine.hear_of_success(context, metadata.successes)
        return context.receive(metadata.message_id, sender)

    def serving(self, request: Request) -> AbstractContextManager[object] | None:
        """Make a called function run in the autograd context of its caller, and with gradients
        enabled or disabled as at the caller. Return a context manager for its run, if needed."""
        packed = request.tags.get(TAG) if request.tags else None
        recording = self._engine.versions.recording()
        if packed is None:
            current_id.set(None)
            return recording
        metadata = unpack_metadata(packed)
        current_id.set(metadata.context_id)
        return recording if metadata.grad_enabled else _no_grad(recording)

    def answering(self, request: Request, tensors: Sequence[Tensor], tags: Tags) -> None:
        """Record the result of a call that was made in a context, and add metadata to it. If the
        call was made outside of any context, and tensors in its result require gradients, only add
        the name of the called function."""
        packed = request.tags.get(TAG) if request.tags else None
        if packed is not None:
            context = self._contexts.get_or_create(unpack_metadata(packed).context_id)
            self._engine.record_send(tags, context, request.caller.id, request.subject, tensors)
        elif tensors:
            tags[UNRECORDED_TAG] = call_name(request.subject)

    def waiting(self, tags: Tags) -> None:
        """Plan the next backward pass as far as possible, if the message with these tags had
        tensors that require gradients. The message was just sent, and this thread has nothing else
        to do until another worker sends something."""
        packed = tags.get(TAG)
        if packed is not None:
            metadata = unpack_metadata(packed)
            if metadata.message_id:
                context = self._contexts.peek(metadata.context_id)
                if context is not None:
                    context.plan_ahead()


@contextmanager
def _no_grad(recording: AbstractContextManager[object] | None) -> Iterator[None]:
    """Return a context manager for the run of a function that was called under `torch.no_grad()`.
    It disables gradients, and also enters the context manager `recording`, unless that is None."""
    with torch.no_grad(), recording or nullcontext():
        yield


def _refuse(tensor: Tensor) -> None:
    """Raise an error if the current code runs in an autograd context. The codec calls this function
    for a tensor that requires gradients, but whose gradient gradwire cannot send back. Without the
    error the gradient would be lost."""
    if current_id.get() is not None:
        raise EncodingError(
            f"a {type(tensor).__name__} of layout {tensor.layout} that requires gradients cannot "
            "be differentiated through a call: send a plain tensor, or what tensor.detach() gives"
        )
