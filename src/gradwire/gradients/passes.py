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
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.autograd.variable import Variable

from gradwire.agent.exceptions import add_note
from gradwire.agent.futures import Future
from gradwire.agent.link import OpenCall
from gradwire.agent.service import Request
from gradwire.errors import CallTimeout, GradwireError
from gradwire.gradients.context import Context
from gradwire.gradients.functions import (
    Gradients,
    Recv,
    Send,
    edge_behind,
    make_gate,
    running,
)
from gradwire.gradients.graph import (
    Anchor,
    Region,
    Root,
    is_loose,
    lift_nodes,
    make_plan,
    reached_by,
    starts_of,
)
from gradwire.wire.values import call_name

if TYPE_CHECKING:
    from gradwire.gradients.engine import Engine

# (id of a send, the gradients of its tensors or None)
Answer = tuple[int, "list[Tensor | None] | None"]
# What one worker tells another: its sends that have no answer yet (said once), answers, and how
# the teller stands to the one who is told.
News = tuple["list[int]", "list[Answer]", int]

FOREVER = float("inf")

# Below `torch.autograd.grad`, whose checks cost as much as a small region.
run_backward = Variable._execution_engine.run_backward
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


_OPEN: Any = object()  # in place of what is not known yet


class _Reply:
    """The answer of a recv, while its gradients come in."""

    __slots__ = ("gradients", "open", "sender")

    def __init__(self, recv: Recv):
        self.sender = recv.sender
        self.open = len(recv.anchors)
        self.gradients: list[Tensor | None] = [_OPEN] * self.open


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
        #: Made when somebody has to wait.
        self._changed: threading.Condition | None = None
        self._planned = False
        self._sends: dict[int, Send] = {}
        self._wanted: set[int] = set()
        #: Leaves that were sent get what is sent back; not if torch has to put it into `.grad`.
        self._loose = not context.into_grad or how.for_inputs
        #: By send: the region it is a source of, and the answer once it is there.
        self._region_of: dict[int, Region] = {}
        self._answers: dict[int, list[Tensor | None] | None] = {}
        self._ready: list[Region] = []
        self._unfinished = 0
        self._recv_ids: frozenset[int] = frozenset()
        self._replies: dict[int, _Reply] = {}
        #: What others must hear: that there is a pass, and answers.
        self._untold: set[int] = set()
        self._outbox: dict[int, list[Answer]] = {}
        self._to_myself: list[Answer] = []
        #: Everybody who knows of the pass, as far as this worker knows.
        self.involved: set[int] = set() if parent is None else {parent}
        #: Workers that were told and have not said yet whether they are children.
        self._unsure: set[int] = set()
        self._children: set[int] = set()
        self._done_children: set[int] = set()
        self._parent_knows = False
        self.error: BaseException | None = None
        #: This worker's part is done, and so are those of its children.
        self.finished = False
        self._over = False
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
        self._wanted = {id(tensor) for tensor in inputs}
        with context.lock:
            sends = list(context.sends.values())
            recvs = list(context.recvs.values())
            known = set(context.known)
        wanted = inputs if self.how.for_inputs else None
        plan = make_plan([*roots, *sends], recvs, wanted, loose=self._loose)
        with self._lock:
            self._sends = {send.id: send for send in sends}
            self._replies = {recv.id: _Reply(recv) for recv in recvs}
            self._recv_ids = frozenset(self._replies)
            for region in plan.regions:
                for source in region.sources:
                    if type(source) is Send:
                        self._region_of[source.id] = region
                        region.out += 1
                region.has_gradient = region.out < len(region.sources)
                self._consider(region)
            self._unfinished = len(plan.regions)
            for recv in recvs:
                if not recv.anchors:  # what it carried could not be decoded
                    self._settle(recv.id, 0, None)
            for recv, position in plan.unreached:
                self._settle(recv.id, position, None)
            if self._me in known:
                known.discard(self._me)
                self._answer_unknown(self._me, self._unanswered(self._me))
            self._untold = known
            self._planned = True
            self._notify()

    def _consider(self, region: Region) -> None:
        if not region.queued and (not region.out or (region.has_gradient and region.anchors)):
            region.queued = True
            self._ready.append(region)

    def _unanswered(self, worker: int) -> list[int]:
        answers = self._answers
        return [id for id, send in self._sends.items() if send.to == worker and id not in answers]

    # -- answers

    def take(self, sender: int, news: News, *, was_told: bool = False) -> None:
        """Take in what another worker has to tell. `was_told`: it answers our first message."""
        sends, answers, standing = news
        with self._lock:
            if not self._planned:  # another thread has heard of the pass first
                self._wait(lambda: self._planned)
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
            for id, gradients in answers:
                self._take_answer(id, gradients)
            self._notify()

    def _answer_unknown(self, sender: int, sends: Sequence[int]) -> None:
        """Sends that never got here have no gradients."""
        for id in sends:
            if id not in self._recv_ids:
                self._post(sender, (id, None))

    def _post(self, to: int, answer: Answer) -> None:
        if to == self._me:
            self._to_myself.append(answer)
        else:
            self._outbox.setdefault(to, []).append(answer)

    def _take_own_answers(self) -> bool:
        if not self._to_myself:
            return False
        while self._to_myself:
            self._take_answer(*self._to_myself.pop())
        self._notify()
        return True

    def _take_answer(self, id: int, gradients: list[Tensor | None] | None) -> None:
        send = self._sends.get(id)
        if send is None or id in self._answers:
            return
        self._answers[id] = gradients
        if self._loose and gradients is not None:
            for end, gradient in zip(send.ends, gradients, strict=False):
                if gradient is not None and is_loose(end):
                    self._stage(end, gradient)
        region = self._region_of.get(id)
        if region is None:
            return
        region.out -= 1
        if gradients is not None:
            region.has_gradient = True
        if region.anchors and (gradients is None or any(g is None for g in gradients)):
            self._lose_starts(region, id, gradients or ())
        self._consider(region)

    def _lose_starts(self, region: Region, id: int, gradients: Gradients) -> None:
        """Some tensors of a send have no gradient. Neither have the anchors that are reached from
        nowhere else."""
        for bit, (source, position) in enumerate(starts_of(region)):
            lost = position >= len(gradients) or gradients[position] is None
            if lost and type(source) is Send and source.id == id:
                region.dead |= 1 << bit
        if region.reached is None:
            region.reached = reached_by(region)
        for (recv, position), reached in zip(region.anchors, region.reached, strict=True):
            if not reached & ~region.dead:
                self._settle(recv.id, position, None)

    def _settle(self, message: int, position: int, gradient: Tensor | None) -> None:
        """The gradient of one received tensor is known; with the last one the recv answers."""
        reply = self._replies.get(message)
        if reply is None:
            return
        gradients = reply.gradients
        if gradients:
            if gradients[position] is not _OPEN:
                return
            if gradient is not None and gradient.requires_grad and not self.how.create_graph:
                gradient = gradient.detach()
            gradients[position] = gradient
            reply.open -= 1
        if not reply.open:
            del self._replies[message]
            nothing = all(gradient is None for gradient in gradients)
            self._post(reply.sender, (message, None if nothing else gradients))

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
                self._take_own_answers()
                if self.error is not None or not self._ready:
                    return
                for region in self._ready:
                    if not region.out:
                        break
                else:
                    if not gated:
                        return
                    region = self._ready[0]
                self._ready.remove(region)
                self._running += 1
            failure: BaseException | None = None
            try:
                # What the run saves, if it is to be differentiated too, is there to stay.
                recording = self._engine.versions.recording() if self.how.create_graph else None
                with recording or nullcontext():
                    self._run(region)
            except BaseException as error:
                failure = self._explain(error, region)
            with self._lock:
                self._running -= 1
                self._undo_if_failed()
            if failure is not None:
                self.fail(failure)

    def _run(self, region: Region) -> None:
        how, loose = self.how, self._loose
        outputs: list[Tensor | GradientEdge] = []
        seeds: list[Tensor] = []
        gates: list[Send] = []
        with self._lock:
            for source in region.sources:
                if type(source) is Root:
                    outputs.append(source.tensor)
                    seeds.append(source.gradient)
                    continue
                assert type(source) is Send
                answer = self._answers.get(source.id, _OPEN)
                if answer is _OPEN:
                    gates.append(source)
                    continue
                for position, gradient in enumerate(answer or ()):
                    if gradient is not None and not (loose and is_loose(source.ends[position])):
                        outputs.append(source.target(position))
                        seeds.append(gradient)
            anchors = [
                (recv, position)
                for recv, position in region.anchors
                if (reply := self._replies.get(recv.id)) and reply.gradients[position] is _OPEN
            ]
        if gates:
            tokens = _make_gates(gates, region)
            outputs += tokens
            seeds += [torch.ones_like(token) for token in tokens]
        leaves = region.leaves
        if how.for_inputs and self.parent is not None:
            leaves = []
        found: Sequence[Tensor | None] = ()
        if outputs and (leaves or anchors):
            into_grad = self.context.into_grad and not how.for_inputs
            if into_grad:
                self._remember_grads(leaves)
            if gates or into_grad:
                edges, watching = self._watch(anchors, execute=into_grad)
            else:
                edges = [GradientEdge(recv.anchors[position], 0) for recv, position in anchors]
                watching = []
            outer, running.gate = running.gate, self._gate
            try:
                found = run_backward(
                    tuple(outputs),
                    tuple(seeds),
                    how.retain_graph,
                    how.create_graph,
                    (*leaves, *edges),
                    allow_unreachable=True,
                    accumulate_grad=into_grad,
                )
            finally:
                running.gate = outer
                for handle in watching:
                    handle.remove()
            if into_grad:
                found = ()
            elif gates:
                found = found[: len(leaves)]
        with self._lock:
            count = len(leaves)
            for leaf, gradient in zip(leaves, found, strict=False):
                if gradient is not None:
                    self._stage(leaf, gradient)
            for (recv, position), gradient in zip(anchors, found[count:], strict=False):
                self._settle(recv.id, position, gradient)
            for recv, position in region.anchors:
                self._settle(recv.id, position, None)
            for source in region.sources:
                if type(source) is Send:
                    self._answers[source.id] = None  # used up
            self._unfinished -= 1

    def _stage(self, leaf: Tensor, gradient: Tensor) -> None:
        if not self.how.for_inputs or id(leaf) in self._wanted:
            self._staged.append((leaf, gradient))

    def _watch(
        self, anchors: Sequence[Anchor], *, execute: bool
    ) -> tuple[list[GradientEdge], list[Any]]:
        """Have gradients delivered as soon as they get to an anchor, in the middle of a run. Gives
        what the run must be asked for, so that it passes through the anchors, and handles."""
        edges = []
        handles = []
        for recv, position in anchors:
            node = recv.anchors[position]
            handles.append(node.register_prehook(partial(self._reached, recv.id, position)))
            edges.append(GradientEdge(node, 0) if execute else edge_behind(node))
        return edges, handles

    def _reached(self, message: int, position: int, gradients: Any) -> tuple[None] | None:
        (gradient,) = gradients
        with self._lock:
            self._settle(message, position, gradient)
        # It has been taken; what is behind the anchor cannot handle a sparse one.
        return None if gradient is None or gradient.layout is torch.strided else (None,)

    def _gate(self, send: Send) -> Gradients:
        """The gradients of what was sent; waits for them."""
        while send.id not in self._answers and self.error is None:
            if not self._exchange():
                if self._ready:  # this thread is in the middle of a region, and cannot run others
                    self._drive_elsewhere()
                self._wait_until(lambda: send.id in self._answers)
        if self.error is not None:
            raise GradwireError("the backward pass was given up") from self.error
        answer: list[Tensor | None] = [None] * len(send.ends)
        for position, gradient in enumerate(self._answers[send.id] or ()):
            end = send.ends[position]
            if gradient is not None and not (self._loose and is_loose(end)):
                # Torch has no sparse gradients of an alias, which is what the gate leads to.
                through_alias = end.layout is torch.strided and end.grad_fn is not None
                dense = through_alias and gradient.layout is not torch.strided
                answer[position] = gradient.to_dense() if dense else gradient
        return answer

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
        self._notify()

    def wait_until_undone(self, deadline: float) -> None:
        """Wait for the runs of a pass that has failed; they may change `.grad` still."""
        with self._lock:
            self._wait_for(lambda: not self._running or self.error is None, deadline)

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
        told = []
        with self._lock:
            if self.error is not None:
                return False
            if self._take_own_answers():
                return True
            self._conclude()
            workers = self._untold | self._outbox.keys()
            if self.finished and self.parent is not None and not self._parent_knows:
                workers.add(self.parent)
            for worker in workers:
                first = worker in self._untold
                if first:
                    self._unsure.add(worker)
                told.append((worker, first, self._news_for(worker)))
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
                news = self._news_for(request.caller.id)
        if error is not None:
            request.fail(error, "the backward pass")
        else:
            self._engine.answer(self, request, news)

    def has_work(self) -> bool:
        """Whether there is something to drive. Who adds to it from now on drives it too."""
        return bool(
            self._ready
            or self._outbox
            or self._untold
            or self._to_myself
            or (self.finished and not self._parent_knows)
        )

    def _news_for(self, worker: int) -> News:
        sends: list[int] = []
        self.involved.add(worker)
        if worker in self._untold:
            self._untold.discard(worker)
            sends = self._unanswered(worker)
        self._conclude()  # now that this one is told
        standing = NO_CHILD
        if worker == self.parent:
            self._parent_knows = self.finished
            standing = CHILD_DONE if self.finished else CHILD
        return sends, self._outbox.pop(worker, []), standing

    def _conclude(self) -> None:
        """See whether this worker's part has come to its end."""
        if (
            self._unfinished
            or self._replies
            or self._to_myself
            or self._unsure
            or self._children
            or len(self._answers) < len(self._sends)
        ):
            return
        if not self._untold or self._untold == {self.parent}:
            self.finished = True
            self._notify()

    # -- the end

    def wait(self) -> None:
        """On the worker that started the pass: return when it is done everywhere."""
        if not self.finished:
            self._wait_until(lambda: self.finished)
        if self.error is not None:
            raise self.error

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait for something, the failure of the pass, or its deadline."""
        executor = self._engine.agent.executor
        aside = executor.step_aside()
        try:
            with self._lock:
                self._wait(ready)
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

    def _wait(self, ready: Callable[[], bool]) -> None:
        """The lock is held when this is called and when it returns."""
        self._wait_for(lambda: ready() or self.error is not None, self.deadline)

    def _wait_for(self, ready: Callable[[], bool], deadline: float) -> None:
        if self._changed is None:
            self._changed = threading.Condition(self._lock)
        left = deadline - time.monotonic()
        self._changed.wait_for(ready, None if left == FOREVER else max(0.0, left))

    def _notify(self) -> None:
        """Have those who wait look again."""
        if self._changed is not None:
            self._changed.notify_all()

    def awaited(self) -> set[int]:
        """The workers that must do something before this one can be done."""
        with self._lock:
            if self.finished or self.error is not None:
                return set()
            owing = {send.to for id, send in self._sends.items() if id not in self._answers}
            return owing | self._children | self._unsure

    def _missing(self) -> str:
        peers = {peer.info.id: peer.info.name for peer in self._engine.agent.peers.all()}
        names = [repr(peers.get(worker, worker)) for worker in self.awaited()]
        return "workers " + ", ".join(sorted(names)) if names else "its own part"

    def fail(self, error: BaseException) -> None:
        """Give the pass up, here and everywhere, unless it has ended."""
        with self._lock:
            if self.error is not None or self._committed:
                return
            self.error = error
            self._staged = []
            self._undo_if_failed()
            self._notify()
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

    def is_over(self) -> None:
        """Its outcome is known."""
        with self._lock:
            self._over = True
            self._notify()

    def wait_until_over(self) -> None:
        with self._lock:
            self._wait(lambda: self._over)


def _make_gates(gates: list[Send], region: Region) -> list[Tensor]:
    """Let torch run the gates after everything else, the newest first. Ordinary nodes count from 0
    too, so those that would come after a gate are lifted."""
    lift_nodes(region, len(gates))
    tokens = [make_gate(send) for send in sorted(gates, key=lambda send: send.id)]
    for number, token in enumerate(tokens):
        token.grad_fn._set_sequence_nr(number)  # type: ignore[union-attr]
    return tokens


def _place(call: Any) -> str:
    """A function and where it is defined."""
    code = getattr(call, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    return (call if isinstance(call, str) else call_name(call)) + where
