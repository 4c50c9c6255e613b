"""One worker's part in distributed backward passes: starting them, serving their messages, and
telling other workers how they ended.

`DistEngine` is also the name of the class in torch that has the same task. The work of one pass on
one worker is in `backward_pass`. A pass sends its messages through the `DistEngine` of its worker,
and uses only the methods that `PassPort` declares.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from gradwire._core.autograd.backward_pass import BackwardPass
from gradwire._core.autograd.boundary import Send
from gradwire._core.autograd.context import Context, ContextContainer, FailureReason
from gradwire._core.autograd.context_release import ContextReleases
from gradwire._core.autograd.copy_on_write import ParameterVersions
from gradwire._core.autograd.leaf_accumulation import LeafGroup
from gradwire._core.autograd.pass_messages import (
    TAG,
    Packed,
    PassMessage,
    PassOptions,
    PassRequest,
    pack_metadata,
    unpack_request,
)
from gradwire._core.autograd.pass_phase import PassPhase
from gradwire._core.autograd.path_discovery import (
    GraphSummarizer,
    GraphSummary,
    PathDiscovery,
    PathShares,
)
from gradwire._core.autograd.plan import Root
from gradwire._core.autograd.termination import NOT_A_CHILD
from gradwire._core.ids import IdSource, creator
from gradwire._core.rpc.agent import Agent
from gradwire._core.rpc.exceptions import decode_exception, encode_exception
from gradwire._core.rpc.futures import Future
from gradwire._core.rpc.open_call import OpenCall
from gradwire._core.rpc.server import Request
from gradwire._core.wire.encoding import Encoded
from gradwire._core.wire.messages import Kind, Tags
from gradwire.errors import GradwireError

_BACKWARD = Kind.BACKWARD_AUTOGRAD_REQ
_SUBJECT = "the backward pass"
_BEGUN = PassPhase.BEGUN
_is_grad_enabled = torch.is_grad_enabled
#: How long `backward` waits, after a failure, for other threads: first for the one that tells other
#: workers of the failure, then for those that still run code which may change `.grad`.
_UNDOING_SECONDS = 5.0


class DistEngine:
    """One worker's part in distributed backward passes: starts passes, joins those of other
    workers, and handles their messages. A pass uses the engine only through the
    few methods that the interface `PassPort` lists."""

    def __init__(
        self,
        agent: Agent,
        contexts: ContextContainer,
        versions: ParameterVersions,
        releases: ContextReleases,
    ):
        self.agent = agent
        self.info = agent.info
        self.versions = versions
        #: For each thread that waits in the middle of a region's run until another worker sends a
        #: gradient: the `Send` of that gradient. Only tests read this list.
        self.gate_waits: list[Send] = []
        self._contexts = contexts
        self._releases = releases
        self._pass_ids = IdSource(agent.info.id)
        #: Functions that return groups of leaves whose gradients torch itself must accumulate into
        #: `.grad`, because hooks look at all leaves of a group (see `leaf_accumulation`).
        self.leaf_group_providers: list[Callable[[], Collection[LeafGroup]]] = []
        #: A function that waits for the answer to a message, and returns the answer.
        self.hear: Callable[[OpenCall], Any] = agent.sender.wait_for_reply
        #: Returns a context manager for code that blocks this thread. While the block runs, another
        #: thread serves the calls that arrive.
        self.blocking: Callable[[], AbstractContextManager[object]] = agent.executor.blocking
        agent.handle(_BACKWARD, self._serve, runs_user_code=True)
        agent.handle(Kind.AUTOGRAD_PATHS_REQ, self._serve_summary, runs_user_code=True)
        agent.handle(Kind.BACKWARD_AUTOGRAD_OUTCOME, self._serve_outcome)
        agent.liveness.awaited.append(self._awaited)

    def register_leaf_groups(self, provider: Callable[[], Collection[LeafGroup]]) -> None:
        """Make torch itself accumulate the gradients of certain leaves into `.grad`, so that its
        hooks run (see `leaf_accumulation`). Every pass calls `provider` to get these leaves, in
        groups that must be accumulated together."""
        self.leaf_group_providers.append(provider)

    def run(
        self,
        context: Context,
        roots: Sequence[Root],
        options: PassOptions,
        inputs: Sequence[Tensor] = (),
    ) -> list[tuple[Tensor, Tensor]]:
        """Start a backward pass, and wait until it has succeeded on all workers. Return pairs of a
        tensor and its gradient, for leaves of this worker or, if the pass is for `grad`, for
        `inputs`."""
        started = BackwardPass(self, context, self._pass_ids.next(), options, None)
        try:
            with context.lock:
                context.check_pass(started.id)
                context.passes[started.id] = started
            shares = self._discover_paths(started, roots, inputs) if options.for_inputs else None
            started.begin(roots, inputs, shares)
            started.drive()
            started.wait()
            return started.succeed()
        except BaseException as error:
            started.fail(error)
            started.wait_until_told(time.monotonic() + _UNDOING_SECONDS)
            if started.changes_grad:
                started.wait_until_undone(time.monotonic() + _UNDOING_SECONDS)
            raise

    # -- path discovery

    def _discover_paths(
        self, planned: BackwardPass, roots: Sequence[Root], inputs: Sequence[Tensor]
    ) -> PathShares:
        """Find the sent and received tensors on the paths from `roots` to `inputs`, on every
        worker. The other workers on these paths are asked for summaries of their graphs."""
        sends, recvs = planned.context.messages()
        summarizer = GraphSummarizer(recvs, inputs)
        outputs = [summarizer.target_of(root.tensor.grad_fn) for root in roots]
        discovery = PathDiscovery(self.info.id, summarizer.summarize(sends), outputs)
        while missing := sorted(discovery.missing()):
            summaries = self._request_summaries(planned, missing)
            for worker, summary in zip(missing, summaries, strict=True):
                discovery.add_summary(worker, summary)
        return discovery.shares()

    def _request_summaries(
        self, planned: BackwardPass, workers: Sequence[int]
    ) -> list[GraphSummary]:
        encoded = self.agent.codec.encode(planned.context.id)
        kind, left = Kind.AUTOGRAD_PATHS_REQ, planned.seconds_left()
        calls: list[OpenCall] = []
        try:
            for worker in workers:
                calls.append(self.agent.sender.send_request(worker, kind, _SUBJECT, encoded, left))
            return [planned.hear(call) for call in calls]
        except BaseException:
            for call in calls:
                call.give_up()
            # If the pass has failed, its requests for summaries were ended too. In that case, raise
            # the error that made the pass fail, not the error of an ended request.
            if planned.error is not None:
                raise planned.error from planned.error.__cause__
            raise

    def _serve_summary(self, request: Request) -> None:
        """Answer a request for a summary of this worker's autograd graph in a context: which sent
        tensors depend on which received tensors."""
        sends, recvs = self._contexts.get(request.decode()).messages()
        request.answer(GraphSummarizer(recvs).summarize(sends))

    # -- what passes need of their worker (see `PassPort`)

    def tell(
        self, worker: int, packed: Packed, seconds: float, recorded_in: Context | None
    ) -> Future[Any]:
        """Send a message of a pass to another worker. Return a future of the answer. For the
        arguments, see `PassPort.tell`."""
        encoded = self.agent.codec.encode_with_tensors(*packed)
        tags = None if recorded_in is None else self._tags(recorded_in, worker, encoded)
        return self.agent.sender.request_encoded(
            worker, _BACKWARD, _SUBJECT, encoded, seconds, tags
        )

    def ask(
        self, worker: int, packed: Packed, seconds: float, recorded_in: Context | None
    ) -> OpenCall:
        """Send a message of a pass to another worker. Return an open call, with which the calling
        thread must wait for the answer. For the arguments, see `PassPort.ask`."""
        encoded = self.agent.codec.encode_with_tensors(*packed)
        tags = None if recorded_in is None else self._tags(recorded_in, worker, encoded)
        return self.agent.sender.send_request(worker, _BACKWARD, _SUBJECT, encoded, seconds, tags)

    def answer(self, request: Request, message: PassMessage, recorded_in: Context | None) -> None:
        """Answer a message of a pass that another worker has sent; see `PassPort.answer`."""
        encoded = self.agent.codec.encode_with_tensors(message[:-1], message.gradients)
        tags = None if recorded_in is None else self._tags(recorded_in, request.caller.id, encoded)
        request.answer_encoded(encoded, tags)

    def _tags(self, context: Context, worker: int, encoded: Encoded) -> Tags:
        """Record a message with gradients in a context, in the same way as a call, so that the
        gradients can be differentiated again. Return the tags to send with the message."""
        tags: Tags = {}
        self.record_send(tags, context, worker, _SUBJECT, encoded.differentiable)
        return tags

    def encode_failure(self, error: BaseException) -> FailureReason:
        """Encode the error with which a pass failed on this worker, for other workers to read."""
        encoded = encode_exception(self.agent.codec, error, "the backward pass", self.info)
        return encoded.whole_payload(), encoded.buffers

    def report_failure(
        self, context_id: int, pass_id: int, reason: FailureReason, workers: Collection[int]
    ) -> None:
        """Tell the given workers, and the worker that started the pass, why the pass has failed."""
        value = (context_id, pass_id, reason)
        for worker in {*workers, creator(pass_id)} - {self.info.id}:
            try:
                peer = self.agent.peers.find(worker)
                self.agent.sender.send_until_answered(
                    peer.info, Kind.BACKWARD_AUTOGRAD_OUTCOME, value
                )
            except GradwireError:
                pass  # The other worker has left the group, so it needs no notice.

    def run_elsewhere(self, work: Callable[[], None]) -> None:
        """Run a function soon, on another thread of this worker."""
        self.agent.executor.submit(lambda: self.agent.run_in_context(work))

    def worker_names(self) -> dict[int, str]:
        """Return the names of the workers in the group, by id."""
        return {peer.info.id: peer.info.name for peer in self.agent.peers.all()}

    # -- messages

    def record_send(
        self, tags: Tags, context: Context, to: int, about: Any, tensors: Sequence[Tensor]
    ) -> None:
        """Record in `context` a message to the worker `to`, and add the message's metadata to
        `tags`. `tensors`: the tensors of the message that require gradients. `about`: names the
        function for error texts. If the message is a result, it is the function that returned the
        result. If the message is a call, it is a tuple that holds the called function."""
        message_id = context.send(to, tensors, about)
        released = self._releases.notices.pop(to, ())
        successes = context.successes_for(to)
        tags[TAG] = pack_metadata(context.id, message_id, _is_grad_enabled(), successes, released)

    def _serve(self, request: Request) -> None:
        """Handle a message of a backward pass, and answer it."""
        asked = unpack_request(*request.decode())
        context = self._contexts.find(asked.context_id)
        # If this worker does not have the context, it has received no message that was sent in the
        # context. So it has no gradients to send back.
        if context is None:
            self._answer_without_part(request, asked.message)
            return
        found = context.passes.get(asked.pass_id)
        # Most messages belong to a pass that has begun on this worker, and need no more checks.
        if type(found) is not BackwardPass or found.phase is not _BEGUN or asked.failures:
            found = self._take_part(request.caller.id, asked, context)
        if found is None:  # The pass has already succeeded, and this message is late.
            self._answer_without_part(request, asked.message)
            return
        found.receive(request.caller.id, asked.message)
        found.reply_to(request)
        found.drive()

    def _take_part(self, sender: int, asked: PassRequest, context: Context) -> BackwardPass | None:
        """Return this worker's part of a pass that the worker `sender` has told of. Begin it if
        necessary. Return None if the pass has already succeeded. Raise an error if it has failed,
        or if this worker cannot take part in it."""
        # Earlier failed passes must restore `.grad` on this worker before this pass changes it.
        for failed_id in asked.failures:
            failed = context.passes.get(failed_id)
            if failed is not None:
                failed.fail(GradwireError("the backward pass was given up"))
        pass_id, share = asked.pass_id, asked.share
        with context.lock:
            reason = context.check_pass(pass_id)
            # The pass has failed, so the answer is the reason of the failure.
            if reason is not None:
                payload, buffers = reason
                raise decode_exception(self.agent.codec, payload, buffers, self.info.name)
            found = context.passes.get(pass_id)
            if found is None and not context.is_over(pass_id):
                parent = creator(pass_id) if asked.options.for_inputs else sender
                found = BackwardPass(self, context, pass_id, asked.options, parent)
                context.passes[pass_id] = found
            assert found is None or isinstance(found, BackwardPass)
            must_begin = found is not None and found.claim_begin(share)
        if must_begin and found is not None:
            try:
                found.begin(shares=None if share is None else {self.info.id: share})
            except BaseException as error:
                found.fail(error)
        return found

    def _answer_without_part(self, request: Request, message: PassMessage) -> None:
        """Answer a message of a pass in which this worker has no part. The answer says that the
        other worker's messages to this one get no gradients."""
        answers = [(send_id, None) for send_id in message.open_sends]
        self.answer(request, PassMessage((), (), answers, NOT_A_CHILD, (), ()), None)

    # -- outcomes

    def _serve_outcome(self, request: Request) -> None:
        """Handle a message about the outcome of a pass. A message with a reason says that the pass
        has failed, so fail the pass on this worker. A message without a reason is a question:
        answer whether the pass has succeeded."""
        context_id, pass_id, reason = request.decode()
        try:
            context = self._contexts.get(context_id)
        except GradwireError:
            request.answer(False)
            return
        if reason is None:
            # `has_succeeded` may wait until the pass ends, so another thread must serve calls
            # meanwhile.
            with self.agent.executor.blocking():
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

    def hear_of_success(self, context: Context, pass_ids: Sequence[int]) -> None:
        """Handle the news, from the metadata of a message, that some passes have succeeded."""
        for pass_id in pass_ids:
            found = context.passes.get(pass_id)
            if found is not None and found.finished:
                self._succeed(context, pass_id)
            elif found is None:
                with context.lock:
                    context.note_outcome(pass_id, None)

    def learn_outcomes(self, context: Context) -> None:
        """For each pass whose part on this worker is finished, ask the worker that started the pass
        whether it has succeeded. If it has, make its gradients visible."""
        with context.lock:
            finished = [pass_id for pass_id, found in context.passes.items() if found.finished]
        for pass_id in finished:
            starter = creator(pass_id)
            if starter == self.info.id:
                # A thread of this worker started the pass and is about to end it. So this worker
                # need not ask.
                continue
            value = (context.id, pass_id, None)
            if self.agent.sender.request(starter, Kind.BACKWARD_AUTOGRAD_OUTCOME, value).wait():
                self._succeed(context, pass_id)

    def _succeed(self, context: Context, pass_id: int) -> None:
        """Make the gradients of a pass visible here, now that it has succeeded on all workers."""
        with context.lock:
            found = context.passes.get(pass_id)
            if found is not None:
                found.succeed()

    def _awaited(self) -> set[int]:
        """Return the workers that the unfinished backward passes on this worker wait for."""
        passes = [
            found for context in self._contexts.all() for found in list(context.passes.values())
        ]
        return {worker for found in passes for worker in found.awaited()}
