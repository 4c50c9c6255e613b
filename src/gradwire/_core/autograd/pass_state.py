"""The bookkeeping of one backward pass on one worker. It uses no threads and sends no messages.

A *send* is a message with differentiable tensors that this worker sent in the forward pass, a
*recv* such a message that it received. A *recv node* is the autograd node of a received tensor. A
*region* is a connected part of the local autograd graph, which runs in one go (see `plan`).

A `PassState` belongs to a `BackwardPass`, which holds its lock when it calls the `PassState`. The
`PassState` knows which regions must run, which sends wait for gradients, which recvs have no
complete gradients yet, and what to tell other workers. It has two helpers: a `TerminationDetector`
says when the pass is done, and a `Forecast` says which tensors will get gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from gradwire._core.autograd.boundary import (
    NOTHING,
    OPEN,
    PASSED_ON,
    Gradient,
    ReceivedTensor,
    Send,
)
from gradwire._core.autograd.forecast import Forecast, OwnMessage, SendAnswer
from gradwire._core.autograd.pass_messages import (
    PackedAnswer,
    PassMessage,
    PassOptions,
    SendForecast,
    ShortcutOffer,
    make_message,
    pack_gradients,
    unpack_gradients,
)
from gradwire._core.autograd.plan import Plan, Region, Reply, Root
from gradwire._core.autograd.reachability import Reachability
from gradwire._core.autograd.termination import TerminationDetector

#: A leaf, and a gradient for that leaf.
LeafGradient = tuple[Tensor, Tensor]


class PassState:
    """What a backward pass must do on one worker, and how much of that is done."""

    def __init__(
        self, worker_id: int, parent: int | None, options: PassOptions, *, into_grad: bool = False
    ):
        """`parent`: the worker to notify when this worker's part is done (see `termination`).
        `into_grad`: whether torch adds the gradients to `.grad` while it runs the regions (the
        parts of the graph). If so, torch must run all regions. Otherwise the pass does not run
        regions that only pass a gradient on."""
        self.worker_id = worker_id
        self.termination = TerminationDetector(parent)
        self._options = options
        self._into_grad = into_grad
        self.planned = False
        #: How many things are still to be done: regions to run, received messages to answer with
        #: gradients, and sent messages that wait for gradients. The count begins with 1, for the
        #: planning, so that the pass cannot end before it is planned.
        self._outstanding = 1
        #: By id of a sent message: the gradients that have arrived for its tensors.
        self.answers: dict[int, list[Gradient] | None] = {}
        #: The regions (parts of the graph) that can run now.
        self.ready: list[Region] = []
        #: By worker: the packed answers to send to that worker, and the gradients that are sent
        #: separately with them.
        self._outbox: dict[int, tuple[list[PackedAnswer], list[Tensor]]] = {}
        #: What this worker must tell itself. The list stays empty unless this worker has called
        #: itself in the forward pass, or uses a shortcut.
        self.to_myself: list[OwnMessage] = []
        #: The attribute stays None in most passes, because they need no forecasts.
        self._forecast: Forecast | None = None
        #: The gradients of leaves that were computed on this worker. They become visible when the
        #: pass succeeds.
        self.found: list[LeafGradient] = []
        #: The gradients of leaves that other workers sent. They share no storage with other tensors
        #: of this worker. They become visible when the pass succeeds.
        self.received: list[LeafGradient] = []
        #: The gradients of leaves that torch has accumulated. Torch has added the new gradients to
        #: the context's earlier ones, so these sums replace the earlier ones when the pass
        #: succeeds.
        self.accumulated: Sequence[LeafGradient] = ()
        #: Whether torch must still accumulate gradients into `.grad` when all other work is done
        #: (see `leaf_accumulation`).
        self._must_accumulate = False
        #: Whether torch is accumulating gradients into `.grad` now.
        self._accumulating = False

    # -- planning

    def set_plan(
        self,
        plan: Plan,
        known: set[int],
        wanted: Sequence[Tensor] = (),
        *,
        must_accumulate: bool = False,
    ) -> None:
        """Begin to carry out a plan. `known`: the workers to tell of the pass. `wanted`: the
        tensors of this worker for which `grad` must return gradients. `must_accumulate`: torch must
        accumulate the gradients of some leaves itself (see `leaf_accumulation`)."""
        self.plan = plan
        self.sends, self.replies = plan.sends, plan.replies
        self._wanted = {id(tensor) for tensor in wanted} if wanted else ()
        self._must_accumulate = must_accumulate
        for message_id in plan.empty:
            self._add_answer(self.replies.pop(message_id).sender, message_id, None)
        self._outstanding = len(plan.regions) + len(self.replies) + len(self.sends)
        for recv, position in plan.unreached:
            self.settle(recv.id, position, None)
        if self.worker_id in known:
            self._answer_unknown(self.worker_id, self._open_sends_to(self.worker_id))
            known.remove(self.worker_id)
        self.termination.untold = known
        for region in plan.regions:
            if region.has_gradient:
                self._queue_if_ready(region)
        self.planned = True
        self._conclude()

    def _queue_if_ready(self, region: Region) -> None:
        """Queue a region (part of the graph) if it can run. It can if all messages with its
        sent tensors are answered. It also can if one gradient has arrived, and this worker knows
        which received tensors of the region will get gradients."""
        if region.queued:
            return
        if region.out:
            if not region.has_gradient or not region.recv_nodes:
                return
            if not self._examine(region).is_known:
                if not region.asking:
                    forecast = self.forecast
                    forecast.ask_about(region)
                    self._settle_unreachable(forecast)
                return
        region.queued = True
        if not region.out and (
            region.bypassed or (not self._into_grad and region.is_passthrough())
        ):
            self._pass_on(region)
        else:
            self.ready.append(region)

    def _pass_on(self, region: Region) -> None:
        """Handle a region (a part of the graph) that consists of one received tensor, which was
        sent on unchanged. Send the gradient of the tensor back unchanged, without running torch's
        engine."""
        source, position, _ = region.entries[0]
        gradient: Gradient
        if type(source) is Root:
            gradient = source.gradient
        else:
            answer = self.answers[source.id]
            gradient = answer[position] if answer and position < len(answer) else None
            # The gradient is not needed any more, so free its memory.
            self.answers[source.id] = None
        recv, received_position = region.recv_nodes[0]
        # With a shortcut, the worker that sent this tensor has used the gradient already. So the
        # gradient is not sent.
        if gradient is PASSED_ON:
            del self.replies[recv.id]
            self._outstanding -= 1
        else:
            self.settle(recv.id, received_position, gradient)
        self._outstanding -= 1

    def _shortcuts_for(self, worker: int) -> list[tuple[int, ...]]:
        """Return packed shortcut offers for another worker: one for each tensor that this worker
        received from the other worker and returned to it unchanged. The other worker can then use
        the gradient of such a tensor itself."""
        if self._into_grad or self._options.create_graph:
            return []
        shortcuts = []
        for region in self.plan.regions:
            if region.out != 1 or not region.is_passthrough():
                continue
            source, position, _ = region.entries[0]
            recv, _ = region.recv_nodes[0]
            assert type(source) is Send
            reply = self.replies.get(recv.id)
            if reply and len(reply.gradients) == 1 and source.to == recv.sender == worker:
                region.bypassed = True
                shortcuts.append(tuple(ShortcutOffer(source.id, position, recv.id)))
        return shortcuts

    def _open_sends_to(self, worker: int) -> list[int]:
        """Return the ids of the messages to a worker whose tensors still wait for gradients."""
        found = []
        for send_id, send in self.sends.items():
            if send.to == worker and send_id not in self.answers:
                found.append(send_id)
        return found

    # -- running

    def next_region(self, gated: bool) -> Region | None:
        """Take the next region (part of the graph) to run from the queue. `gated`: whether to
        return also a region that must wait for gradients in the middle of its run."""
        if self.to_myself:
            self.take_own_messages()
        ready = self.ready
        for number, region in enumerate(ready):
            if not region.out:
                return ready.pop(number)
        return ready.pop(0) if gated and ready else None

    def take_run(
        self, region: Region, recv_nodes: Sequence[ReceivedTensor], found: Sequence[Tensor | None]
    ) -> None:
        """Store the result of running a region (part of the graph). `found` has the gradients of
        the region's leaves, and then those of the received tensors `recv_nodes`, unless these were
        delivered during the run. A tensor that the run has not reached has no gradient."""
        gradients = iter(found)
        for leaf in region.leaves:
            gradient = next(gradients, None)
            if gradient is not None and self._is_wanted(leaf):
                self.found.append((leaf, gradient))
        for recv, position in recv_nodes:
            brought: Gradient = next(gradients, NOTHING)
            if brought is NOTHING:
                brought = None
            elif brought is None:
                # The run found no gradient for this received tensor, but it may have reached the
                # node of the tensor. If so, the worker that sent the tensor must still run the
                # nodes that computed it. The value `NOTHING`, sent in the place of a gradient,
                # tells that worker to do this.
                reach = self._examine(region)
                brought = NOTHING if reach.includes(recv.recv_nodes[position]) else None
            self.settle(recv.id, position, brought)
        for source in region.sources:
            # A sent message may have no answer yet, although the region has run. In that case only
            # leaves that the message carried can still get gradients. These leaves are not part of
            # the region, so the run did not wait for their gradients.
            if source.id in self.answers:
                # The gradients are not needed any more, so free their memory.
                self.answers[source.id] = None
        self._outstanding -= 1
        self._conclude()

    def open_recv_nodes(self, region: Region) -> Sequence[ReceivedTensor]:
        """Return the received tensors of a region (part of the graph) of which this worker does not
        know the gradients yet."""
        found = []
        for recv, position in region.recv_nodes:
            reply = self.replies.get(recv.id)
            if reply is not None and reply.gradients[position] is OPEN:
                found.append((recv, position))
        return found

    # -- receiving

    def receive(self, sender: int, message: PassMessage, answers_first: bool) -> None:
        """Handle a message of the pass from the worker `sender`. `answers_first`: the message is
        the sender's answer to this worker's first message to it."""
        open_sends, shortcuts, answers, relation, questions, forecasts, gradients = message
        self.termination.hear_from(sender, relation, answers_first)
        if open_sends:
            self._answer_unknown(sender, open_sends)
        for packed_offer in shortcuts:
            offer = ShortcutOffer(*packed_offer)
            reply = self.replies.get(offer.returned_in)
            # `reply` collects the gradients for the message that returned the tensor. If this
            # worker planned the pass before it had decoded the whole message, `reply` has places
            # only for the tensors that were decoded by then. An offer for another tensor is
            # ignored.
            if reply and offer.sent_in in self.sends and offer.position < len(reply.gradients):
                reply.shortcut = offer.position, offer.sent_in
        beside = iter(gradients)
        for send_id, packed in answers:
            self._take_answer(send_id, unpack_gradients(packed, beside), self.received)
        for send_id, positions in forecasts:
            self._take_forecast(send_id, positions)
        for send_id in questions:
            self._take_question(send_id)
        self._conclude()

    def take_own_messages(self) -> bool:
        """Handle the messages of this worker to itself. Return whether there were any."""
        if not self.to_myself:
            return False
        while self.to_myself:
            message = self.to_myself.pop()
            if type(message) is SendAnswer:
                self._take_answer(message.send_id, message.gradients, self.found)
            elif type(message) is SendForecast:
                self._take_forecast(message.send_id, message.positions)
            else:
                assert type(message) is int
                self._take_question(message)
        self._conclude()
        return True

    def _take_answer(
        self, send_id: int, gradients: list[Gradient] | None, leaf_gradients: list[LeafGradient]
    ) -> None:
        """Store the gradients for the tensors of a sent message. If such a tensor is a leaf, its
        gradient needs no run of torch's engine, and is added to `leaf_gradients`."""
        send = self.sends.get(send_id)
        if send is None or send_id in self.answers:
            return
        self.answers[send_id] = gradients
        self._outstanding -= 1
        given = gradients or []
        direct_leaves = self.plan.direct_leaves.get(send_id, ())
        for position in direct_leaves:
            gradient = given[position] if position < len(given) else None
            if gradient is None:
                continue
            # The tensor is a leaf, so no run of torch's engine needs its gradient. Remove the
            # gradient from the answer.
            given[position] = None
            leaf = send.proxies[position]
            if gradient is not NOTHING and self._is_wanted(leaf):
                leaf_gradients.append((leaf, gradient))
        region = self.plan.region_of(send_id)
        if region is None:
            return
        region.out -= 1
        if region.queued:
            # The region does not have to be queued again. If its run needs this answer, the run
            # waits for it and reads it from `self.answers`.
            return
        count = len([gradient for gradient in given if gradient is not None])
        region.has_gradient |= count > 0
        reach = region.reach
        is_known = (
            count + len(direct_leaves) == len(send.proxies) if reach is None else reach.is_known
        )
        if region.recv_nodes and not is_known:
            forecast = self.forecast
            forecast.note_answer(region, send, gradients)
            self._settle_unreachable(forecast)
        self._queue_if_ready(region)

    # -- answering

    def _answer_unknown(self, sender: int, sends: Sequence[int]) -> None:
        """Find out which of the messages `sends` never arrived on this worker, and queue an answer
        for each of them: the tensors of the message have no gradients. `sends` are ids of messages
        of the forward pass. The worker `sender` sent them to this worker, and waits for their
        gradients."""
        for send_id in sends:
            if send_id not in self.plan.recvs:
                self._add_answer(sender, send_id, None)

    def _add_answer(self, worker: int, send_id: int, gradients: list[Gradient] | None) -> None:
        if worker == self.worker_id:
            self.to_myself.append(SendAnswer(send_id, gradients))
            return
        if worker not in self._outbox:
            self._outbox[worker] = [], []
        answers, beside = self._outbox[worker]
        answers.append((send_id, pack_gradients(gradients, beside)))

    def settle(self, message_id: int, position: int, gradient: Gradient) -> None:
        """Record the gradient of a received tensor, or that it has none. When this is known for all
        tensors that arrived in the same message, queue the answer to its sender."""
        reply = self.replies.get(message_id)
        if reply is None or reply.gradients[position] is not OPEN:
            return
        if gradient is not None:
            reply.has_gradient = True
            if (
                gradient is not NOTHING
                and gradient.requires_grad
                and not self._options.create_graph
            ):
                gradient = gradient.detach()
        reply.gradients[position] = gradient
        reply.open -= 1
        if not reply.open:
            del self.replies[message_id]
            self._outstanding -= 1
            if reply.shortcut is not None:
                self._use_shortcut(reply, *reply.shortcut)
            gradients = reply.gradients if reply.has_gradient else None
            self._add_answer(reply.sender, message_id, gradients)

    def _use_shortcut(self, reply: Reply, position: int, send_id: int) -> None:
        """Use a gradient on this worker instead of sending it to another worker.

        This worker sent a tensor in the message `send_id`. The other worker returned the tensor
        unchanged, in the message that `reply` answers, at `position`. So the gradient of the
        returned tensor is also the gradient of the tensor in `send_id`.
        """
        gradient = reply.gradients[position]
        if gradient is not None:
            reply.gradients[position] = PASSED_ON
            self.to_myself.append(SendAnswer(send_id, [gradient]))

    def _is_wanted(self, leaf: Tensor) -> bool:
        return not self._options.for_inputs or id(leaf) in self._wanted

    # -- forecasts

    @property
    def forecast(self) -> Forecast:
        if self._forecast is None:
            self._forecast = Forecast(self.worker_id, self.plan, self.answers, self.to_myself)
        return self._forecast

    def _examine(self, region: Region) -> Reachability:
        """Return which nodes of a region (part of the graph) gradients will reach, as far as this
        worker knows."""
        if region.reach is not None:
            return region.reach
        forecast = self.forecast
        reach = forecast.examine(region)
        self._settle_unreachable(forecast)
        return reach

    def _settle_unreachable(self, forecast: Forecast) -> None:
        """Record that received tensors have no gradient, if the forecast has newly found that no
        gradient can reach them."""
        for region, (recv, position) in forecast.take_unreachable():
            self.settle(recv.id, position, None)
            if region.asking:
                forecast.tell_if_known(recv.id)

    def _take_forecast(self, send_id: int, positions: Collection[int]) -> None:
        """Handle a forecast from another worker: the tensors at these positions of a message that
        this worker sent will get gradients, and the other tensors will not."""
        forecast = self.forecast
        region = forecast.note_forecast(send_id, positions)
        if region is not None:
            self._settle_unreachable(forecast)
            self._queue_if_ready(region)

    def _take_question(self, message_id: int) -> None:
        """Handle a question from the sender of a received message: which of its tensors will get
        gradients?"""
        forecast = self.forecast
        forecast.note_question(message_id)
        self._settle_unreachable(forecast)
        forecast.tell_if_known(message_id)

    # -- accumulating

    def begin_accumulation(self) -> bool:
        """Return whether the caller must let torch accumulate gradients now. That is the case at
        most once in a pass, when all gradients are known and no other worker waits for this one."""
        if not self._can_accumulate() or self._outbox or self.termination.untold:
            return False
        self._must_accumulate = False
        self._accumulating = True
        return True

    def _can_accumulate(self) -> bool:
        return self._must_accumulate and not self._outstanding and not self.to_myself

    def take_gradients_of(self, leaf_ids: Collection[int]) -> list[LeafGradient]:
        """Remove the gradients of some leaves, given by their id(), and return them."""
        taken = [pair for pair in self.found + self.received if id(pair[0]) in leaf_ids]
        self.found = [pair for pair in self.found if id(pair[0]) not in leaf_ids]
        self.received = [pair for pair in self.received if id(pair[0]) not in leaf_ids]
        return taken

    def end_accumulation(self, gradients: Sequence[LeafGradient]) -> None:
        """Store the gradients that torch has accumulated."""
        self.accumulated = gradients
        self._accumulating = False
        self._conclude()

    # -- telling others

    def next_messages(self) -> list[tuple[int, bool, PassMessage]]:
        """Return the messages to send now. Each tuple has the worker that the message goes to,
        whether it is the first message to that worker, and the message."""
        termination = self.termination
        workers = {*termination.untold, *self._outbox}
        if self._forecast is not None:
            workers |= self._forecast.workers_to_tell()
        if termination.parent is not None and termination.owes_parent():
            workers.add(termination.parent)
        messages = []
        for worker in workers:
            first = termination.expect_answer(worker)
            messages.append((worker, first, self.message_for(worker)))
        return messages

    def message_for(self, worker: int) -> PassMessage:
        """Return a message with everything that another worker must be told now. The next call does
        not repeat it."""
        open_sends: Sequence[int] = ()
        shortcuts: Sequence[tuple[int, ...]] = ()
        if self.termination.tell(worker):
            open_sends, shortcuts = self._open_sends_to(worker), self._shortcuts_for(worker)
        # If all other workers now know of the pass, this worker may be finished.
        self._conclude()
        relation = self.termination.relation_to(worker)
        answers, gradients = self._outbox.pop(worker, ((), ()))
        if self._forecast is None:
            return make_message((open_sends, shortcuts, answers, relation, (), (), gradients))
        questions, forecasts = self._forecast.message_for(worker)
        return make_message(
            (open_sends, shortcuts, answers, relation, questions, forecasts, gradients)
        )

    def _conclude(self) -> None:
        """Tell the termination detector if this worker has no work of its own left. The other
        methods call this method after every change of the state."""
        if not self._outstanding and not (
            self.to_myself or self._must_accumulate or self._accumulating
        ):
            self.termination.conclude()

    def has_work(self) -> bool:
        """Return whether this worker can run, send or accumulate anything now."""
        return bool(
            self.ready
            or self._outbox
            or self.termination.untold
            or self.to_myself
            or (self._forecast is not None and self._forecast.workers_to_tell())
            or self._can_accumulate()
            or self.termination.owes_parent()
        )

    def awaited(self) -> set[int]:
        """Return the workers that this worker's part of the pass waits for."""
        if not self.planned:
            # This worker has not planned its part of the pass yet. If it has a parent, it may
            # need another message of the parent first, so it waits for the parent. If it has no
            # parent, it started the pass itself: it is about to plan, and waits for no worker.
            parent = self.termination.parent
            return set() if parent is None else {parent}
        owing = {send.to for send_id, send in self.sends.items() if send_id not in self.answers}
        return owing | self.termination.waits_for
