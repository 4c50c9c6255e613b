"""Starts backward passes, takes part in those of others, and ends them; releases contexts.

What a pass does on a worker is in `passes`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gradwire.agent.agent import Agent
from gradwire.agent.exceptions import decode_exception, encode_exception
from gradwire.agent.futures import Future
from gradwire.agent.service import Request
from gradwire.errors import GradwireError, WorkerLost
from gradwire.gradients.context import Context, Contexts
from gradwire.gradients.graph import Root
from gradwire.gradients.passes import NO_CHILD, How, News, Pass
from gradwire.gradients.versions import Versions
from gradwire.ids import IdSource, WorkerInfo, creator
from gradwire.wire.messages import Kind, Tags
from gradwire.wire.values import Encoded

TAG = "autograd"

# (context id, id of the send or 0, id of the worker that sends, passes of the context that have
# succeeded, other contexts that were released)
Tag = tuple[int, int, int, "tuple[int, ...]", "list[int]"]

#: How long released contexts are collected before other workers are told in a message.
_CLEANUP_SECONDS = 0.2


class Engine:
    """Starts passes, takes part in those of others, and ends them."""

    def __init__(self, agent: Agent, contexts: Contexts, versions: Versions):
        self.agent = agent
        self.versions = versions
        self._contexts = contexts
        self._ids = IdSource(agent.info.id)
        self._lock = threading.Lock()
        #: Per worker, released contexts to tell it of: with the next call, and for certain.
        self.released_for: dict[int, list[int]] = {}
        self._unconfirmed: dict[int, list[int]] = {}
        self._cleanup_due = False
        agent.handle(Kind.BACKWARD_AUTOGRAD_REQ, self._serve, runs_user_code=True)
        agent.handle(Kind.BACKWARD_AUTOGRAD_OUTCOME, self._serve_outcome)
        agent.handle(Kind.CLEANUP_AUTOGRAD_CONTEXT_REQ, self._serve_cleanup)
        agent.on_gone.append(self._clear_up_after)

    def run(
        self, context: Context, roots: Sequence[Root], how: How, inputs: Sequence[Tensor] = ()
    ) -> list[tuple[Tensor, Tensor]]:
        """Run a pass from here. It returns when the gradients are where they belong; those of
        `inputs`, if the pass is for them, are the result."""
        started = Pass(self, context, self._ids.next(), how, None)
        with context.lock:
            context.passes[started.id] = started
        try:
            started.begin(roots, inputs)
        except BaseException as error:
            started.fail(error)
            raise
        started.drive()
        started.wait()
        return self.end(started, succeeded=True)

    # -- messages of passes

    def ask(self, asking: Pass, worker: int, news: News) -> News:
        """Tell a worker something, and wait for what it has to tell."""
        encoded, tags, left = self._message(asking, worker, news)
        answer: News = self.agent.ask(
            worker, Kind.BACKWARD_AUTOGRAD_REQ, "the backward pass", encoded, left, tags
        )
        return answer

    def tell(self, telling: Pass, worker: int, news: News) -> Future[News]:
        """Tell a worker something; what it has to tell comes in a future."""
        encoded, tags, left = self._message(telling, worker, news)
        return self.agent.post(
            worker, Kind.BACKWARD_AUTOGRAD_REQ, "the backward pass", encoded, left, tags
        )

    def answer(self, answering: Pass, request: Request, news: News) -> None:
        encoded = self.agent.codec.encode(news)
        request.answer_encoded(encoded, self._tags(answering, request.caller.id, encoded))

    def _message(self, about: Pass, worker: int, news: News) -> tuple[Encoded, Tags | None, float]:
        left = 0.0
        if about.how.seconds:
            left = max(0.001, about.deadline - time.monotonic())
        how = (*about.how[:-1], left)
        value = (about.context.id, about.id, how, news)
        encoded = self.agent.codec.encode(value)
        return encoded, self._tags(about, worker, encoded), left

    def _tags(self, about: Pass, worker: int, encoded: Encoded) -> Tags | None:
        """Gradients that have a history are a differentiable message like any other."""
        if not about.how.create_graph:
            return None
        tags: Tags = {}
        self.tag(tags, about.context, worker, "the backward pass", encoded.differentiable)
        return tags

    def tag(
        self, tags: Tags, context: Context, to: int, about: Any, tensors: Sequence[Tensor]
    ) -> None:
        """Record a message that leaves, and have it say so."""
        message = context.send(to, tensors, about)
        released = self.take_released(to)
        tags[TAG] = (context.id, message, self.agent.info.id, context.successes(), released)

    def _serve(self, request: Request) -> None:
        context_id, pass_id, how, news = request.decode()
        sender = request.caller.id
        try:
            context = self._contexts.get(context_id)
        except GradwireError:
            # Nothing that was sent in this context has arrived here.
            request.answer(([], [(id, None) for id in news[0]], NO_CHILD))
            return
        with context.lock:
            context.check_pass(pass_id)
            found = context.passes.get(pass_id)
            first = found is None
            if found is None:
                found = Pass(self, context, pass_id, How(*how), sender)
                context.passes[pass_id] = found
        if first:
            try:
                found.begin(())
            except BaseException as error:
                found.fail(error)
        found.take(sender, news)
        found.reply_to(request)
        if found.has_work():
            found.drive()

    # -- outcomes

    def end(self, ended: Pass, *, succeeded: bool) -> list[tuple[Tensor, Tensor]]:
        """A pass is over: make its gradients visible or drop them. A failure is told to all who
        know of the pass; of success they hear with the next call, or when they ask."""
        context = ended.context
        staged: list[tuple[Tensor, Tensor]] = []
        with context.lock:
            if context.passes.pop(ended.id, None) is None:
                return staged
            context.note_outcome(ended.id, succeeded)
            if succeeded:
                staged = ended.take_staged()
                if not ended.how.for_inputs:
                    context.add_gradients(staged)
        ended.is_over()
        if not succeeded:
            self._spread_failure(ended)
        return staged

    def _spread_failure(self, failed: Pass) -> None:
        assert failed.error is not None
        name = self.agent.info.name
        encoded = encode_exception(
            self.agent.codec, failed.error, f'the backward pass on worker "{name}" raised:'
        )
        value = (failed.context.id, failed.id, (encoded.payload, encoded.buffers))
        for worker in (failed.involved | {creator(failed.id)}) - {self.agent.info.id}:
            try:
                peer = self.agent.peers.find(worker)
                self.agent.insist(peer.info, Kind.BACKWARD_AUTOGRAD_OUTCOME, value)
            except GradwireError:
                pass  # it left: there is nobody to tell

    def _serve_outcome(self, request: Request) -> None:
        """Told that a pass has failed, or asked whether it has succeeded (no reason given)."""
        context_id, pass_id, reason = request.decode()
        try:
            context = self._contexts.get(context_id)
        except GradwireError:
            request.answer(False)
            return
        if reason is None:
            request.answer(context.has_succeeded(pass_id))
            return
        request.answer(None)
        with context.lock:
            found = context.passes.get(pass_id)
            if found is None:
                context.note_outcome(pass_id, False)
        if found is not None:
            payload, buffers = reason
            found.fail(decode_exception(self.agent.codec, payload, buffers, request.caller.name))

    def hear_of_success(self, context: Context, passes: Sequence[int]) -> None:
        """These passes have succeeded, as a worker knows that took part."""
        for id in passes:
            found = context.passes.get(id)
            if found is not None and found.finished:
                self.end(found, succeeded=True)
            elif found is None:
                context.note_outcome(id, True)

    def learn_outcomes(self, context: Context) -> None:
        """Find out about the passes whose part here is done, from the workers that began them."""
        with context.lock:
            open_passes = [p for p in context.passes.values() if p.finished]
        for found in open_passes:
            beginner = creator(found.id)
            if beginner == self.agent.info.id:
                continue  # it ends on another thread, right now
            value = (context.id, found.id, None)
            if self.agent.request(beginner, Kind.BACKWARD_AUTOGRAD_OUTCOME, value).wait():
                self.end(found, succeeded=True)

    # -- contexts

    def release(self, context_id: int, heard_from: int = -1) -> None:
        """Release a context here and wherever it is known. Others hear of it with the next call
        that goes to them anyway; and soon by a message of its own, for many contexts at once."""
        for worker in self._contexts.release(context_id):
            if worker in (heard_from, self.agent.info.id):
                continue
            with self._lock:
                self.released_for.setdefault(worker, []).append(context_id)
                self._unconfirmed.setdefault(worker, []).append(context_id)
                due, self._cleanup_due = not self._cleanup_due, True
            if due:
                self.agent.clock.later(_CLEANUP_SECONDS, self._send_cleanups)

    def take_released(self, worker: int) -> list[int]:
        """The released contexts a worker has not been told of yet."""
        if worker not in self.released_for:
            return []
        with self._lock:
            return self.released_for.pop(worker, [])

    def _send_cleanups(self) -> None:
        with self._lock:
            unconfirmed, self._unconfirmed = self._unconfirmed, {}
            self.released_for.clear()
            self._cleanup_due = False
        for worker, ids in unconfirmed.items():
            try:
                peer = self.agent.peers.find(worker)
                self.agent.insist(peer.info, Kind.CLEANUP_AUTOGRAD_CONTEXT_REQ, ids)
            except GradwireError:
                pass  # it left, and its contexts with it

    def _serve_cleanup(self, request: Request) -> None:
        for id in request.decode():
            self.release(id, request.caller.id)
        request.answer(None)

    def _clear_up_after(self, info: WorkerInfo) -> None:
        """A worker is gone: so are the contexts it made, and the passes it took part in."""
        for context in self._contexts.all():
            with context.lock:
                passes = [
                    found
                    for found in context.passes.values()
                    if info.id in context.known or info.id == creator(found.id)
                ]
            for found in passes:
                found.fail(
                    WorkerLost(
                        f"worker {info.name!r} was lost during the backward pass",
                        worker=info.name,
                        call="backward",
                    )
                )
        for id in self._contexts.created_by(info.id):
            self.release(id)
