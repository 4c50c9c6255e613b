"""Starts backward passes, takes part in those of others, and ends them; releases contexts.

What a pass does on a worker is in `passes`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.agent.agent import Agent
from gradwire.agent.exceptions import decode_exception, encode_exception
from gradwire.agent.futures import Future
from gradwire.agent.opencall import OpenCall
from gradwire.agent.service import Request
from gradwire.errors import GradwireError, WorkerLost
from gradwire.gradients.accumulation import Group
from gradwire.gradients.context import Context, Contexts, Reason
from gradwire.gradients.family import NO_CHILD
from gradwire.gradients.graph import Root
from gradwire.gradients.ledger import How
from gradwire.gradients.news import News, Said
from gradwire.gradients.passes import Pass
from gradwire.gradients.survey import Chart, Charting, Shares, Survey
from gradwire.gradients.versions import Versions
from gradwire.ids import IdSource, WorkerInfo, creator
from gradwire.wire.messages import Kind, Tags
from gradwire.wire.values import Encoded

TAG = "autograd"

# (context id, id of the send or 0, whether gradients are enabled there, passes of the context that
# have succeeded since the last time, other contexts that were released)
Tag = tuple[int, int, bool, "Sequence[int]", "Sequence[int]"]

_BACKWARD = Kind.BACKWARD_AUTOGRAD_REQ
_is_grad_enabled = torch.is_grad_enabled
#: How long released contexts are collected before other workers are told in a message.
_CLEANUP_SECONDS = 0.2
#: How long `backward` waits, after a failure, for functions that still run and may change `.grad`.
_UNDOING_SECONDS = 5.0


class Engine:
    """Starts passes, takes part in those of others, and ends them."""

    def __init__(self, agent: Agent, contexts: Contexts, versions: Versions):
        self.agent = agent
        self.versions = versions
        self._contexts = contexts
        self._ids = IdSource(agent.info.id)
        #: (The garbage collector may release a context wherever something is made.)
        self._lock = threading.RLock()
        #: Per worker, released contexts to tell it of: with the next call (whoever sends that takes
        #: them, with no lock, and one may be missed), and for certain.
        self.released_for: dict[int, list[int]] = {}
        self._unconfirmed: dict[int, list[int]] = {}
        self._cleanup_due = False
        #: Workers that were lost, or have left.
        self._lost: set[int] = set()
        #: The groups of leaves that torch has to accumulate; who knows of any puts them here.
        self.groups: Callable[[], Collection[Group]] = tuple
        agent.handle(_BACKWARD, self._serve, runs_user_code=True)
        agent.handle(Kind.AUTOGRAD_CHART_REQ, self._serve_chart, runs_user_code=True)
        agent.handle(Kind.BACKWARD_AUTOGRAD_OUTCOME, self._serve_outcome)
        agent.handle(Kind.CLEANUP_AUTOGRAD_CONTEXT_REQ, self._serve_cleanup)
        agent.handle(Kind.JOIN_AUTOGRAD_CONTEXT_REQ, self._serve_join)
        agent.on_gone.append(self._clear_up_after)
        contexts.heard_of = self._hear_of
        agent.awaited.append(self._awaited)

    def run(
        self, context: Context, roots: Sequence[Root], how: How, inputs: Sequence[Tensor] = ()
    ) -> list[tuple[Tensor, Tensor]]:
        """Run a pass from here. It returns when the gradients are where they belong; those of
        `inputs`, if the pass is for them, are the result."""
        started = Pass(self, context, self._ids.next(), how, None)
        try:
            with context.lock:
                context.check_pass(started.id)
                context.passes[started.id] = started
            shares = self._survey(started, roots, inputs) if how.for_inputs else None
            started.begin(roots, inputs, shares)
            started.drive()
            started.wait()
            return self.succeed(started)
        except BaseException as error:
            started.fail(error)
            started.wait_until_told(time.monotonic() + _UNDOING_SECONDS)
            if started.changes_grad:
                started.wait_until_undone(time.monotonic() + _UNDOING_SECONDS)
            raise

    # -- surveys

    def _survey(self, planned: Pass, roots: Sequence[Root], inputs: Sequence[Tensor]) -> Shares:
        """Find what is on the way from roots to inputs, with the charts of the workers there."""
        sends, recvs = planned.context.messages()
        charting = Charting(recvs, inputs)
        outputs = [charting.place_of(root.tensor.grad_fn) for root in roots]
        survey = Survey(self.agent.info.id, charting.draw(sends), outputs)
        while missing := sorted(survey.missing()):
            for worker, chart in zip(missing, self._ask_for_charts(planned, missing), strict=True):
                survey.take(worker, chart)
        return survey.shares()

    def _ask_for_charts(self, planned: Pass, workers: Sequence[int]) -> list[Chart]:
        encoded = self.agent.codec.encode(planned.context.id)
        kind, left = Kind.AUTOGRAD_CHART_REQ, planned.seconds_left()
        asked: list[OpenCall] = []
        try:
            for worker in workers:
                asked.append(self.agent.ask(worker, kind, "the backward pass", encoded, left))
            return [planned.hear(call) for call in asked]
        except BaseException:
            for call in asked:
                call.give_up()
            if planned.error is not None:  # why the answers are not waited for any more
                raise planned.error from None
            raise

    def _serve_chart(self, request: Request) -> None:
        sends, recvs = self._contexts.get(request.decode()).messages()
        request.answer(Charting(recvs).draw(sends))

    # -- messages of passes

    def ask(self, asking: Pass, worker: int, news: News) -> OpenCall:
        """Tell a worker something; what it has to tell is to be heard."""
        encoded, tags, left = self._message(asking, worker, news)
        return self.agent.ask(worker, _BACKWARD, "the backward pass", encoded, left, tags)

    def tell(self, telling: Pass, worker: int, news: News) -> Future[Any]:
        """Tell a worker something; what it has to tell comes in a future."""
        encoded, tags, left = self._message(telling, worker, news)
        return self.agent.post(worker, _BACKWARD, "the backward pass", encoded, left, tags)

    def answer(self, answering: Pass, request: Request, news: News) -> None:
        encoded = self.agent.codec.encode_plain(*news)
        has_history = answering.how.create_graph
        tags = self._tags(answering, request.caller.id, encoded) if has_history else None
        request.answer_encoded(encoded, tags)

    def _message(self, about: Pass, worker: int, news: News) -> tuple[Encoded, Tags | None, float]:
        left = about.seconds_left()
        how = (*about.how[:-1], left)
        failed = about.context.failures() if about.context.into_grad else ()
        share = about.share_for(worker) if about.how.for_inputs else None
        said, gradients = news
        value = (about.context.id, about.id, how, said, failed, share)
        encoded = self.agent.codec.encode_plain(value, gradients)
        tags = self._tags(about, worker, encoded) if about.how.create_graph else None
        return encoded, tags, left

    def _tags(self, about: Pass, worker: int, encoded: Encoded) -> Tags:
        """Gradients that have a history are a differentiable message like any other."""
        tags: Tags = {}
        self.tag(tags, about.context, worker, "the backward pass", encoded.differentiable)
        return tags

    def tag(
        self, tags: Tags, context: Context, to: int, about: Any, tensors: Sequence[Tensor]
    ) -> None:
        """Record a message that leaves, and have it say so."""
        message = context.send(to, tensors, about)
        released = self.released_for.pop(to, ())
        tags[TAG] = (context.id, message, _is_grad_enabled(), context.successes_for(to), released)

    def _serve(self, request: Request) -> None:
        (context_id, pass_id, how_given, said, failed, share), gradients = request.decode()
        sender = request.caller.id
        context = self._contexts.find(context_id)
        if context is None:  # nothing that was sent in this context has arrived here
            request.answer(_no_part(said))
            return
        for id in failed:  # what they did to `.grad` is undone before this one changes it
            given_up = context.passes.get(id)
            if given_up is not None:
                given_up.fail(GradwireError("the backward pass was given up"))
        with context.lock:
            reason = context.check_pass(pass_id)
            if reason is not None:  # the root of it, not that it has failed, is what matters
                payload, buffers = reason
                raise decode_exception(self.agent.codec, payload, buffers, self.agent.info.name)
            found = context.passes.get(pass_id)
            if found is None and not context.is_over(pass_id):
                how = How(*how_given)
                parent = creator(pass_id) if how.for_inputs else sender
                found = context.passes[pass_id] = Pass(self, context, pass_id, how, parent)
            first = found is not None and found.is_first(share)
        if found is None:  # this was asked or told when nobody there knew yet that it is over
            request.answer(_no_part(said))
            return
        if first:
            try:
                found.begin(shares=None if share is None else {self.agent.info.id: share})
            except BaseException as error:
                found.fail(error)
        found.take(sender, (said, gradients))
        found.reply_to(request)
        found.drive()

    # -- outcomes

    def succeed(self, done: Pass) -> list[tuple[Tensor, Tensor]]:
        """A pass has succeeded everywhere: make its gradients visible. Others who took part hear of
        it with the next call, or when they ask. Raises if it has failed after all."""
        context = done.context
        with context.lock:
            if context.passes.get(done.id) is not done and done.error is None:
                raise GradwireError(f"autograd context {context.id} was released")
            found, received = done.commit()
            del context.passes[done.id]
            if context.writers:
                context.writers.discard(done)
            context.note_outcome(done.id, None)
            if not done.how.for_inputs:
                context.add_gradients(found, received)
                if done.accumulated:
                    context.set_gradients(done.accumulated)
        done.is_over()
        return found + received

    def fail(self, failed: Pass, error: BaseException) -> None:
        """A pass has failed: tell all who know of it."""
        context = failed.context
        me = self.agent.info
        where = f'the backward pass on worker "{me.name}" (id {me.id}) raised:'
        encoded = encode_exception(self.agent.codec, error, where)
        reason: Reason = (encoded.whole_payload(), encoded.buffers)
        with context.lock:
            if context.passes.pop(failed.id, None) is None:
                return
            context.note_outcome(failed.id, reason)
        failed.is_over()
        value = (context.id, failed.id, reason)
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
            with self.agent.executor.aside():  # it may just be ending
                succeeded = context.has_succeeded(pass_id)
            request.answer(succeeded)
            return
        request.answer(None)
        with context.lock:
            found = context.passes.get(pass_id)
            if found is None:
                context.note_outcome(pass_id, reason)
        if found is not None:
            payload, buffers = reason
            found.fail(decode_exception(self.agent.codec, payload, buffers, request.caller.name))

    def hear_of_success(self, context: Context, passes: Sequence[int]) -> None:
        """These passes have succeeded, as a worker knows that took part."""
        for id in passes:
            found = context.passes.get(id)
            if found is not None and found.finished:
                self._learn(found)
            elif found is None:
                with context.lock:
                    context.note_outcome(id, None)

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
                self._learn(found)

    def _learn(self, succeeded: Pass) -> None:
        """A pass whose part here is done has succeeded."""
        with succeeded.context.lock:
            if succeeded.context.passes.get(succeeded.id) is succeeded:
                self.succeed(succeeded)

    # -- contexts

    def release(self, context_id: int, heard_from: int = -1) -> None:
        """Release a context here and wherever it is known. Others hear of it with the next call
        that goes to them anyway; and soon by a message of its own, for many contexts at once."""
        others = self._contexts.release(context_id) - {heard_from, self.agent.info.id}
        if not others:
            return
        with self._lock:
            for worker in others:
                self.released_for.setdefault(worker, []).append(context_id)
                self._unconfirmed.setdefault(worker, []).append(context_id)
            due, self._cleanup_due = not self._cleanup_due, True
        if due:
            self.agent.clock.later(_CLEANUP_SECONDS, self._send_cleanups)

    def hear_of_releases(self, context_ids: Sequence[int], sender: int) -> None:
        """Contexts were released, as a call says that is about to be served: that comes first."""

        def release() -> None:
            for context_id in context_ids:
                self.release(context_id, sender)

        executor = self.agent.executor
        if executor.leads():
            executor.post(release)
        else:
            release()

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
            if not self._contexts.is_released(id):  # mostly it came with a call before
                self.release(id, request.caller.id)
        request.answer(None)

    def _serve_join(self, request: Request) -> None:
        """A worker has part in a context, and nobody left to hear of its end from but us. The
        answer says whether there still is such a context."""
        context = self._contexts.find(request.decode())
        if context is not None:
            context.known.add(request.caller.id)
        request.answer(context is not None and not context.released)

    def _join(self, context: Context) -> None:
        """Hear of the end of a context from its creator, now that whoever told us of it is gone."""

        def joined(answer: Future[bool]) -> None:
            if answer.exception() is not None or not answer.value():
                self.release(context.id)

        try:
            peer = self.agent.peers.find(creator(context.id))
        except Exception:  # it left, or whoever knows where it is has
            self.release(context.id)
        else:
            asked = self.agent.insist(peer.info, Kind.JOIN_AUTOGRAD_CONTEXT_REQ, context.id)
            asked.add_done_callback(joined)

    def _hear_of(self, context: Context) -> None:
        """Of a context that is new here. If its creator was lost, it came with a call that has
        waited, or through a worker that does not know yet; there will be no word of its end."""
        if self._lost and creator(context.id) in self._lost:
            self.agent.executor.submit(lambda: self._join(context))

    def _awaited(self) -> set[int]:
        """The workers that have something to do in a pass before it can go on here."""
        passes = [
            found for context in self._contexts.all() for found in list(context.passes.values())
        ]
        return {worker for found in passes for worker in found.awaited()}

    def _clear_up_after(self, info: WorkerInfo) -> None:
        """A worker is gone: so are the contexts it made, and the passes it took part in."""
        self._lost.add(info.id)
        for context in self._contexts.all():
            with context.lock:
                if info.id in context.known:
                    context.lost = info.name
                # What is done here may be done everywhere, and only its beginner knows.
                passes = [
                    found
                    for found in context.passes.values()
                    if info.id == creator(found.id)
                    or (info.id in context.known | found.involved and not found.finished)
                ]
            for found in passes:
                found.fail(
                    WorkerLost(
                        f"worker {info.name!r} was lost during the backward pass",
                        worker=info.name,
                        call="backward",
                    )
                )
            made_by = creator(context.id)
            if made_by == info.id:
                self.release(context.id)
            elif context.lost == info.name and made_by not in context.known | {self.agent.info.id}:
                self._join(context)


def _no_part(said: Said) -> News:
    """The answer of a worker that has no part in a pass."""
    return ([], [], [(id, None) for id in said[0]], NO_CHILD, [], []), ()
