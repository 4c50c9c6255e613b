"""Backward passes.

The rules, for one pass on one worker:

1. Every recv answers its send exactly once: with gradients, or with none.
2. Everybody is told. The worker where `backward` is called tells those it knows in the context,
   they tell theirs; whoever told a worker first is its parent. A worker whose own part is done, and
   that of all its children, says so to its parent.
3. A region (see `graph`) runs through torch's own engine when all its sources are answered; or, if
   it holds anchors, as soon as one source has a gradient. Then the sources still out are *gates*:
   the run waits at them, last of all and the newest first, so that every wait is for something that
   happened later in the forward pass, and no circle of waits can close.
4. Sources known to have no gradient are left out. An anchor that is reached only from such sources
   has no gradient, whether or not its region has run.

Messages are requests and are answered at once: after what can be done without waiting was done,
before any gate is waited at. What the worker has for the sender by then rides on the answer, so a
thread that asks in turn for one gradient after the other finds each in the answer to its message.

No gradient is visible before the pass has ended everywhere; if anything goes wrong anywhere, it is
given up everywhere and leaves nothing behind.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.autograd.graph import _engine_run_backward as run_backward

from gradwire.agent.exceptions import add_note
from gradwire.agent.futures import Future
from gradwire.agent.link import OpenCall
from gradwire.agent.service import Request
from gradwire.errors import CallTimeout, GradwireError
from gradwire.gradients.context import Context
from gradwire.gradients.functions import Gradients, Recv, Send, make_gate, running
from gradwire.gradients.graph import Region, Root, make_plan, nodes_of, reached_by
from gradwire.wire.values import call_name

if TYPE_CHECKING:
    from gradwire.gradients.engine import Engine

# (id of a send, the gradients of its tensors or None)
Answer = tuple[int, "list[Tensor | None] | None"]
# What one worker tells another: its sends that have no answer yet (said once), answers, and how
# the teller stands to the one who is told.
News = tuple["list[int]", "list[Answer]", int]

FOREVER = float("inf")
#: How a worker stands to another in a pass.
NO_CHILD, CHILD, CHILD_DONE = range(3)


class How(NamedTuple):
    """What kind of a pass it is; everybody who takes part must know."""

    retain_graph: bool = False
    create_graph: bool = False
    #: Gradients are wanted for given tensors where the pass was started, and for no leaves.
    for_inputs: bool = False
    #: How long it may take from now on; 0: for ever.
    seconds: float = 0.0


class _RegionState:
    """How far a region has got."""

    __slots__ = ("dead", "has_gradient", "out", "queued", "reached", "region")

    def __init__(self, region: Region):
        self.region = region
        #: The sends among its sources that are not answered yet.
        self.out = sum(isinstance(source, Send) for source in region.sources)
        self.has_gradient = self.out < len(region.sources)
        self.queued = False
        #: The starts without a gradient, as bits, and per anchor those that reach it.
        self.dead = 0
        self.reached: list[int] | None = None

    def may_run(self) -> bool:
        return not self.out or (self.has_gradient and bool(self.region.anchors))


_OPEN: Any = object()  # in place of a gradient that is not known yet


class _Reply:
    """The answer of a recv, while its gradients come in."""

    __slots__ = ("gradients", "open", "recv")

    def __init__(self, recv: Recv):
        self.recv = recv
        self.gradients: list[Tensor | None] = [_OPEN] * len(recv.anchors)
        self.open = len(recv.anchors)


class Pass:
    """One backward pass on one worker."""

    def __init__(self, engine: Engine, context: Context, id: int, how: How, parent: int | None):
        self.id = id
        self.context = context
        self.how = how
        #: The worker this one heard of the pass from; None where it was started.
        self.parent = parent
        self.deadline = time.monotonic() + how.seconds if how.seconds else FOREVER
        self._engine = engine
        self._me = engine.agent.info.id
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._planned = False
        #: By send: the region it is a source of, and the answer once it is there.
        self._state_of: dict[int, _RegionState] = {}
        self._answers: dict[int, list[Tensor | None] | None] = {}
        self._ready: list[_RegionState] = []
        self._unfinished = 0
        self._recv_ids: set[int] = set()
        self._replies: dict[int, _Reply] = {}
        self._unanswered_to: dict[int, list[int]] = {}
        #: What others must hear: that there is a pass, and answers.
        self._untold: set[int] = set()
        self._outbox: dict[int, list[Answer]] = {}
        self._to_myself: deque[Answer] = deque()
        #: Everybody who knows of the pass, as far as this worker knows.
        self.involved: set[int] = set()
        #: Workers that were told of the pass and have not answered yet.
        self._unsure: set[int] = set()
        self._children: set[int] = set()
        self._done_children: set[int] = set()
        self._parent_knows = False
        self.error: BaseException | None = None
        #: This worker's part is done, and so are those of its children.
        self.finished = False
        self._staged: list[tuple[Tensor, Tensor]] = []
        self._committed = False
        #: Messages whose answers threads wait for.
        self._asked: set[OpenCall] = set()
        #: Regions that are being run; and what `.grad` was before, with a copy of it.
        self._running = 0
        self._before: list[tuple[Tensor, Tensor | None, Tensor | None]] = []

    # -- planning

    def begin(self, roots: Sequence[Root], inputs: Sequence[Tensor] = ()) -> None:
        """Find out what there is to do here."""
        context = self.context
        if context.into_grad:
            self._wait_for_others_to_undo()
        with context.lock:
            sends = list(context.sends.values())
            recvs = list(context.recvs.values())
            known = set(context.known)
        plan = make_plan([*roots, *sends], recvs, inputs if self.how.for_inputs else None)
        with self._lock:
            for region in plan.regions:
                state = _RegionState(region)
                for source in region.sources:
                    if isinstance(source, Send):
                        self._state_of[source.id] = state
                        self._unanswered_to.setdefault(source.to, []).append(source.id)
                self._consider(state)
            self._unfinished = len(plan.regions)
            self._recv_ids = {recv.id for recv in recvs}
            self._replies = {recv.id: _Reply(recv) for recv in recvs}
            for recv in recvs:
                if not recv.anchors:
                    self._settle(recv.id, 0, None)
            for recv, position in plan.unreached:
                self._settle(recv.id, position, None)
            self._untold = known - {self._me}
            if self.parent is not None:
                self.involved.add(self.parent)
            if self._me in self._unanswered_to:
                self._answer_unknown(self._me, self._unanswered_to[self._me])
            self._take_answers(())
            self._planned = True
            self._changed.notify_all()

    def _consider(self, state: _RegionState) -> None:
        if not state.queued and state.may_run():
            state.queued = True
            self._ready.append(state)

    # -- answers

    def take(self, sender: int, news: News, *, was_told: bool = False) -> None:
        """Take in what another worker has to tell. `was_told`: it answers our first message."""
        sends, answers, standing = news
        with self._changed:
            # Another thread may have heard of the pass first and be planning it still.
            self._changed.wait_for(lambda: self._planned or self.error)
            self.involved.add(sender)
            if was_told:
                self._unsure.discard(sender)
            if standing == CHILD_DONE:
                self._children.discard(sender)
                self._done_children.add(sender)
            elif standing == CHILD and sender not in self._done_children:
                self._children.add(sender)
            if sends:
                self._answer_unknown(sender, sends)
            self._take_answers(answers)

    def _answer_unknown(self, sender: int, sends: Sequence[int]) -> None:
        """Sends that never got here have no gradients."""
        unknown = [id for id in sends if id not in self._recv_ids]
        if unknown:
            self._post(sender, [(id, None) for id in unknown])

    def _post(self, to: int, answers: list[Answer]) -> None:
        if to == self._me:
            self._to_myself.extend(answers)
        else:
            self._outbox.setdefault(to, []).extend(answers)

    def _take_answers(self, answers: Sequence[Answer]) -> None:
        for id, gradients in answers:
            self._take_answer(id, gradients)
        while self._to_myself:
            self._take_answer(*self._to_myself.popleft())
        self._changed.notify_all()

    def _take_answer(self, id: int, gradients: list[Tensor | None] | None) -> None:
        state = self._state_of.get(id)
        if state is None or id in self._answers:
            return
        self._answers[id] = gradients
        state.out -= 1
        if gradients is None or any(gradient is None for gradient in gradients):
            self._lose_starts(state, id, gradients or ())
        if gradients is not None:
            state.has_gradient = True
        self._consider(state)

    def _lose_starts(self, state: _RegionState, id: int, gradients: Gradients) -> None:
        """Some tensors of a send have no gradient. Neither have the anchors that are reached from
        nowhere else."""
        region = state.region
        if not region.anchors:
            return
        for position, bit in enumerate(region.starts(id)):
            if position >= len(gradients) or gradients[position] is None:
                state.dead |= 1 << bit
        if state.reached is None:
            state.reached = reached_by(region)
        for (recv, position), reached in zip(region.anchors, state.reached, strict=True):
            if not reached & ~state.dead:
                self._settle(recv.id, position, None)

    def _settle(self, message: int, position: int, gradient: Tensor | None) -> None:
        """The gradient of one received tensor is known; with the last one the recv answers."""
        reply = self._replies.get(message)
        if reply is None:
            return
        if reply.gradients:
            if reply.gradients[position] is not _OPEN:
                return
            reply.gradients[position] = gradient
            reply.open -= 1
        if not reply.open:
            del self._replies[message]
            given = reply.gradients if any(g is not None for g in reply.gradients) else None
            self._post(reply.recv.sender, [(message, given)])

    # -- running

    def drive(self) -> None:
        """Do all that can be done now, on this thread, and let others know."""
        while True:
            self._run_ready(gated=True)
            if not self._exchange():
                return

    def _run_ready(self, *, gated: bool) -> None:
        """Run the regions that can; those that have to wait at gates only if asked to."""
        while True:
            with self._lock:
                self._take_answers(())
                if self.error is not None:
                    return
                state = next((s for s in self._ready if not s.out), None)
                if state is None and gated and self._ready:
                    state = self._ready[0]
                if state is None:
                    return
                self._ready.remove(state)
                self._running += 1
            failure: BaseException | None = None
            try:
                self._run(state)
            except BaseException as error:
                failure = self._explain(error, state.region)
            with self._changed:
                self._running -= 1
                self._undo_if_failed()
            if failure is not None:
                self.fail(failure)

    def _run(self, state: _RegionState) -> None:
        region, how = state.region, self.how
        into_grad = self.context.into_grad and not how.for_inputs
        outputs: list[Tensor | GradientEdge] = []
        seeds: list[Tensor | None] = []
        gates: list[Send] = []
        with self._lock:
            for source in region.sources:
                if isinstance(source, Root):
                    outputs.append(source.tensor)
                    seeds.append(source.gradient)
                elif source.id not in self._answers:
                    gates.append(source)
                else:
                    answer = self._answers[source.id] or ()
                    for position, gradient in enumerate(answer):
                        if gradient is not None:
                            outputs.append(source.target(position))
                            seeds.append(gradient)
            anchors = [
                recv.let_accumulate(position) if into_grad else recv.anchors[position]
                for recv, position in region.anchors
                if (reply := self._replies.get(recv.id)) and reply.gradients[position] is _OPEN
            ]
        if gates:
            tokens = _make_gates(gates, region)
            outputs += tokens
            seeds += [torch.ones_like(token) for token in tokens]
        leaves = region.leaves if self.parent is None or not how.for_inputs else []
        if into_grad:
            self._remember_grads(leaves)
        found: Gradients = ()
        if outputs and (leaves or anchors):
            outer = running.gate, running.deliver
            running.gate, running.deliver = self._gate, self._deliver
            try:
                found = run_backward(
                    tuple(outputs),
                    tuple(seeds),
                    how.retain_graph,
                    how.create_graph,
                    (*leaves, *anchors),
                    allow_unreachable=True,
                    accumulate_grad=into_grad,
                )
            finally:
                running.gate, running.deliver = outer
                if into_grad:
                    for anchor in anchors:
                        anchor.grad = None
        with self._lock:
            if not into_grad:
                for leaf, gradient in zip(leaves, found, strict=False):
                    if gradient is not None:
                        self._staged.append((leaf, gradient))
            for recv, position in region.anchors:
                self._settle(recv.id, position, None)
            for source in region.sources:
                if isinstance(source, Send):
                    self._answers[source.id] = None  # used up
            self._unfinished -= 1

    def _deliver(self, message: int, position: int, gradient: Tensor | None) -> None:
        """Backward has reached a tensor that was received."""
        if gradient is not None and gradient.requires_grad and not self.how.create_graph:
            gradient = gradient.detach()
        with self._lock:
            self._settle(message, position, gradient)

    def _gate(self, send: Send) -> Gradients:
        """The gradients of what was sent; waits for them."""
        while send.id not in self._answers and self.error is None:
            if not self._exchange():
                if self._ready:  # this thread is in the middle of a region, and cannot run others
                    self._drive_elsewhere()
                self._wait_until(lambda: send.id in self._answers)
        if self.error is not None:
            raise GradwireError("the backward pass was given up") from self.error
        # Torch has no sparse gradients of an alias, which is what the gate leads to.
        answer = [
            gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
            for gradient in self._answers[send.id] or ()
        ]
        return answer + [None] * (len(send.ends) - len(answer))

    def _drive_elsewhere(self) -> None:
        agent = self._engine.agent
        agent.executor.submit(lambda: agent.run_in_context(self.drive))

    def _remember_grads(self, leaves: Sequence[Tensor]) -> None:
        """So that `.grad` can be put back should the pass fail."""
        with self._lock:
            for leaf in leaves:
                before = leaf.grad
                self._before.append((leaf, before, None if before is None else before.clone()))

    def _undo_if_failed(self) -> None:
        """Put back what `.grad` was, the very tensor with its values, once nothing here can change
        it any more."""
        if self._running or self.error is None:
            return
        before, self._before = self._before, []
        for leaf, gradient, values in reversed(before):
            if gradient is not None and values is not None:
                gradient.detach().copy_(values)
            leaf.grad = gradient
        self._changed.notify_all()

    def wait_until_undone(self, deadline: float) -> None:
        """Wait for the runs of a pass that has failed; they may change `.grad` still."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._running or self.error is None,
                None if deadline == FOREVER else max(0.0, deadline - time.monotonic()),
            )

    def _wait_for_others_to_undo(self) -> None:
        context = self.context
        with context.lock:
            others = list(context.writers)
            context.writers.add(self)
        for other in others:
            other.wait_until_undone(self.deadline)
            if other.error is not None:
                context.writers.discard(other)

    def _explain(self, error: BaseException, region: Region) -> BaseException:
        """Say where in the forward pass an error comes from: in a function that was called here, or
        before others were called."""
        about = [source.about for source in region.sources if isinstance(source, Send)]
        ran_here = [call for call in about if not isinstance(call, tuple)]
        places = [_place(call) for call in ran_here or [call for (call,) in about]]
        if places:
            name = self._engine.agent.info.name
            what = "" if ran_here else "what was sent to "
            where = ", ".join(list(dict.fromkeys(places))[:3])
            add_note(error, f"in the backward pass on worker {name!r}, of {what}{where}")
        return error

    # -- telling others

    def _exchange(self) -> bool:
        """Send what others must know. True when there may be more to do here afterwards."""
        with self._lock:
            if self.error is not None:
                return False
            if self._to_myself:
                self._take_answers(())
                return True
            self._conclude()
            workers = self._untold | self._outbox.keys()
            if self.finished and self.parent is not None and not self._parent_knows:
                workers.add(self.parent)
            told = [(worker, worker in self._untold, self._news_for(worker)) for worker in workers]
            self._unsure.update(worker for worker, first, _ in told if first)
        if not told:
            return False
        # Reading the last answer oneself is faster than being woken by who reads it.
        last = None if self.finished else told.pop()
        try:
            for worker, first, news in told:
                future = self._engine.tell(self, worker, news)
                future.at_once(partial(self._hear_later, worker, first))
            if last is None:
                return False
            worker, first, news = last
            answer = self._engine.ask(self, worker, news)
        except BaseException as error:
            self.fail(error)
            return False
        self.take(worker, answer, was_told=first)
        return True

    def _hear_later(self, worker: int, was_told: bool, future: Future[Any]) -> None:
        error = future.exception()
        if error is not None:
            self.fail(error)
        else:
            self.take(worker, future.value(), was_told=was_told)
            self._drive_elsewhere()  # this thread may be in the middle of something

    def reply_to(self, request: Request) -> None:
        """Answer a message, with what there is for its sender once all is done that can be done
        without waiting."""
        self._run_ready(gated=False)
        with self._lock:
            error = self.error
            if error is None:
                self._conclude()
                news = self._news_for(request.caller.id)
        if error is not None:
            request.fail(error, "the backward pass")
        else:
            self._engine.answer(self, request, news)

    def _news_for(self, worker: int) -> News:
        sends: list[int] = []
        self.involved.add(worker)
        if worker in self._untold:
            self._untold.discard(worker)
            sends = [i for i in self._unanswered_to.get(worker, ()) if i not in self._answers]
        standing = NO_CHILD
        if worker == self.parent:
            self._parent_knows = self.finished
            standing = CHILD_DONE if self.finished else CHILD
        return sends, self._outbox.pop(worker, []), standing

    def _conclude(self) -> None:
        """See whether this worker's part has come to its end."""
        if not (
            self._unfinished
            or self._replies
            or self._to_myself
            or self._unsure
            or self._children
            or len(self._answers) < len(self._state_of)
            or self._untold - {self.parent}
        ):
            self.finished = True
            self._changed.notify_all()

    # -- the end

    def wait(self) -> None:
        """On the worker that started the pass: return when it is done everywhere."""
        self._wait_until(lambda: self.finished)
        if self.error is not None:
            raise self.error

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait for something, the failure of the pass, or its deadline."""
        if ready() or self.error is not None:
            return
        executor = self._engine.agent.executor
        aside = executor.step_aside()
        try:
            left = self.deadline - time.monotonic()
            with self._changed:
                self._changed.wait_for(
                    lambda: ready() or self.error, None if left == FOREVER else max(0.0, left)
                )
        finally:
            if aside:
                executor.step_back()
        if not ready() and self.error is None:
            self.fail(
                CallTimeout(
                    f"the backward pass has not ended within {self.how.seconds:g} s; it waits for "
                    f"{self._missing()}. Give it a longer timeout, or see what they are busy with"
                )
            )

    def awaited(self) -> set[int]:
        """The workers that must do something before this one can be done."""
        with self._lock:
            if self.finished or self.error is not None:
                return set()
            owing = {w for w, ids in self._unanswered_to.items() if set(ids) - self._answers.keys()}
            return owing | self._children | self._unsure

    def _missing(self) -> str:
        peers = {peer.info.id: peer.info.name for peer in self._engine.agent.peers.all()}
        names = [repr(peers.get(worker, worker)) for worker in self.awaited()]
        return "workers " + ", ".join(sorted(names)) if names else "its own part"

    def fail(self, error: BaseException) -> None:
        """Give the pass up, here and everywhere, unless it has ended."""
        with self._changed:
            if self.error is not None or self._committed:
                return
            self.error = error
            self._staged = []
            self._undo_if_failed()
            self._changed.notify_all()
        self._give_up_asking()
        self._engine.fail(self, error)

    def hear(self, call: OpenCall) -> News:
        """Wait for the answer to a message, unless the pass fails first."""
        self._asked.add(call)
        try:
            if self.error is not None:
                self._give_up_asking()
            answer: News = self._engine.agent.hear(call)
            return answer
        finally:
            self._asked.discard(call)

    def _give_up_asking(self) -> None:
        for call in list(self._asked):
            if call.link is not None:
                call.link.give_up(call)

    def commit(self) -> list[tuple[Tensor, Tensor]]:
        """The gradients found here, once the whole pass has succeeded; from now on it cannot fail
        any more. Raises if it has failed."""
        with self._lock:
            if self.error is not None:
                raise self.error
            self._committed = True
            staged, self._staged = self._staged, []
            self._before = []
        return staged


def _make_gates(gates: list[Send], region: Region) -> list[Tensor]:
    """Let torch run the gates after everything else, the newest first. Ordinary nodes count from 0
    too, so those that would come after a gate are lifted."""
    for node in nodes_of(region):
        number = node._sequence_nr()
        if number < len(gates):
            node._set_sequence_nr(number + len(gates))
    tokens = [make_gate(send) for send in sorted(gates, key=lambda send: send.id)]
    for number, token in enumerate(tokens):
        token.grad_fn._set_sequence_nr(number)  # type: ignore[union-attr]
    return tokens


def _place(call: Any) -> str:
    """A function and where it is defined."""
    code = getattr(call, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    return (call if isinstance(call, str) else call_name(call)) + where
