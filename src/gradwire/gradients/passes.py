"""Backward passes.

The rules, for one pass on one worker:

1. Every recv answers its send exactly once: with gradients, or with none.
2. Everybody is told. The worker where `backward` is called tells those it knows in the context,
   they tell theirs. A worker answers the message from which it first heard of the pass when its own
   part is done and all those it told have answered; other messages it answers at once.
3. A region (see `graph`) runs through torch's own engine when all its sources are answered; or, if
   it holds recvs, as soon as one source has a gradient. Then the sources still out are *gates*: the
   backward of a send waits for its answer.
4. Sources known to have no gradient are left out. A recv that only such sources reach answers none.
5. Gradients of leaves are kept aside and become visible when the whole pass has succeeded.

Why gates do not lock each other up: torch pops ready nodes by descending sequence number, so gates
get the lowest ones, in the order of their sends. A worker then waits only when nothing else can be
done, and at the newest gate; every such wait is for something that happened later in the forward
pass than what waits, so the waits cannot form a circle.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradwire.agent.futures import Future
from gradwire.agent.service import Request
from gradwire.errors import CallTimeout, GradwireError
from gradwire.gradients.context import Context
from gradwire.gradients.functions import Gradients, Recv, Send, running
from gradwire.gradients.graph import Region, Root, make_plan
from gradwire.wire.messages import Kind

if TYPE_CHECKING:
    from gradwire.gradients.engine import Engine

# (message id, the gradients of its tensors or None)
Answer = tuple[int, "Gradients | None"]


class _RegionState:
    """How far a region has got."""

    __slots__ = ("has_gradient", "out", "region", "started")

    def __init__(self, region: Region):
        self.region = region
        self.out = sum(isinstance(source, Send) for source in region.sources)
        self.has_gradient = any(isinstance(source, Root) for source in region.sources)
        self.started = False

    def ready(self) -> bool:
        if self.started:
            return False
        return not self.out or (self.has_gradient and bool(self.region.recvs))


class _Listening:
    """A thread that attaches itself to the answers of messages it has sent."""

    __slots__ = ("heard", "thread")

    def __init__(self, thread: int):
        self.thread = thread
        self.heard = False


class Pass:
    """One backward pass on one worker."""

    def __init__(self, engine: Engine, context: Context, id: int, retain_graph: bool):
        self.id = id
        self._engine = engine
        self._context = context
        self._retain_graph = retain_graph
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        #: Whom to answer when this worker's part is done; None where the pass was started.
        self.parent: Request | None = None
        self._planned = False
        self._answers: dict[int, Gradients | None] = {}
        self._states: list[_RegionState] = []
        self._ready: list[_RegionState] = []
        self._state_of: dict[int, _RegionState] = {}
        self._bit_of: dict[int, int] = {}
        self._alive = 0
        self._unfinished = 0
        self._open_recvs: dict[int, Recv] = {}
        self._recv_ids: set[int] = set()
        self._sends_to: dict[int, list[int]] = {}
        self._outbox: dict[int, list[Answer]] = {}
        self._untold: set[int] = set()
        self._told: set[int] = set()
        self._requests: dict[int, Future[Any] | None] = {}
        self._request_serial = 0
        self.deadline = float("inf")
        self.error: BaseException | None = None
        self.finished = False
        self._staged: list[tuple[Tensor, Tensor]] = []

    # -- planning

    def begin(self, roots: Sequence[Root]) -> None:
        """Find out what there is to do here."""
        with self._context.lock:
            sends = list(self._context.sends.values())
            recvs = list(self._context.recvs.values())
            known = set(self._context.known)
        plan = make_plan([*roots, *sends], recvs)
        with self._lock:
            self._alive = (1 << (len(roots) + len(sends))) - 1
            for bit, send in enumerate(sends, len(roots)):
                self._bit_of[send.id] = 1 << bit
                self._sends_to.setdefault(send.to, []).append(send.id)
            for region in plan.regions:
                state = _RegionState(region)
                self._states.append(state)
                for source in region.sources:
                    if isinstance(source, Send):
                        self._state_of[source.id] = state
                self._consider(state)
            self._unfinished = len(self._states)
            self._recv_ids = {recv.id for recv in recvs}
            self._open_recvs = {recv.id: recv for recv in recvs}
            self._untold = known
            for recv in plan.unreached:
                self._answer(recv, None)
            self._planned = True
            self._changed.notify_all()

    def _consider(self, state: _RegionState) -> None:
        if state.ready():
            state.started = True
            self._ready.append(state)

    def take(self, sender: int, their_sends: Sequence[int], answers: Sequence[Answer]) -> None:
        """A message of the pass has arrived. The sends it names that never got here have no
        gradients."""
        with self._changed:
            # Another thread may have heard of the pass first and be planning it still.
            self._changed.wait_for(lambda: self._planned or self.error)
            for id in their_sends:
                if id not in self._recv_ids:
                    self._outbox.setdefault(sender, []).append((id, None))
            self._take_answers(answers)

    def _take_answers(self, answers: Sequence[Answer]) -> None:
        for id, gradients in answers:
            state = self._state_of.get(id)
            if state is None or id in self._answers:
                continue
            self._answers[id] = gradients
            state.out -= 1
            if gradients is None:
                self._alive &= ~self._bit_of[id]
                for recv, reached in zip(state.region.recvs, state.region.reached, strict=True):
                    if not reached & self._alive:
                        self._answer(recv, None)
            else:
                state.has_gradient = True
            self._consider(state)
        self._changed.notify_all()

    def _answer(self, recv: Recv, gradients: Gradients | None) -> None:
        """Answer a recv, unless that was done before."""
        if self._open_recvs.pop(recv.id, None) is not None:
            self._outbox.setdefault(recv.sender, []).append((recv.id, gradients))

    # -- running

    def work(self) -> None:
        """Run what is ready, on this thread, then tell others what they need to know."""
        heard = True
        while heard:
            self._run_ready()
            heard = self._flush()

    def _run_ready(self) -> None:
        while True:
            with self._lock:
                if self.error is not None or not self._ready:
                    return
                state = self._ready.pop()
            try:
                self._run(state)
            except BaseException as error:
                self.fail(error)

    def _run(self, state: _RegionState) -> None:
        region = state.region
        with self._lock:
            sources = [s for s in region.sources if isinstance(s, Root) or self._is_alive(s)]
            recvs = [recv for recv in region.recvs if recv.id in self._open_recvs]
            gates = [s for s in sources if isinstance(s, Send) and s.id not in self._answers]
        inputs = [*region.leaves, *(recv.anchor for recv in recvs)]
        if sources and inputs:
            _make_gates_last(gates, region.nodes)
            outputs = [s.tensor if isinstance(s, Root) else s.token for s in sources]
            seeds = [s.gradient if isinstance(s, Root) else None for s in sources]
            outer = running.gate, running.deliver
            running.gate, running.deliver = self._gate, self._deliver
            try:
                gradients = torch.autograd.grad(
                    outputs, inputs, seeds, retain_graph=self._retain_graph, allow_unused=True
                )
            finally:
                running.gate, running.deliver = outer
        else:
            gradients = ()
        with self._lock:
            for leaf, gradient in zip(region.leaves, gradients, strict=False):
                if gradient is not None:
                    self._staged.append((leaf, gradient))
            for recv in region.recvs:
                self._answer(recv, None)
            self._unfinished -= 1

    def _is_alive(self, send: Send) -> bool:
        return bool(self._alive & self._bit_of[send.id])

    def _gate(self, send: Send) -> Gradients:
        """The gradients of what was sent; waits for them."""
        if send.id not in self._answers:
            heard = self._flush()
            agent = self._engine.agent
            executor = agent.executor
            if heard or self._ready:  # this thread was to go on with that, and now has to wait
                executor.submit(lambda: agent.run_in_context(self.work))
            aside = executor.step_aside()
            try:
                with self._changed:
                    self._changed.wait_for(lambda: send.id in self._answers or self.error)
            finally:
                if aside:
                    executor.step_back()
        if self.error is not None:
            raise GradwireError("the backward pass was given up") from self.error
        return self._answers[send.id] or [None] * send.count

    def _deliver(self, recv: Recv, gradients: Gradients) -> None:
        given = [None if g is None else g.detach() for g in gradients]
        with self._lock:
            self._answer(recv, None if all(g is None for g in given) else given)

    # -- telling others

    def _flush(self) -> bool:
        """Send what others must know; when all is done, answer the parent. True when answers came
        back meanwhile, so that there may be more to do."""
        messages: list[tuple[int, list[int], list[Answer], int]] = []
        riding: list[Answer] = []
        with self._lock:
            if self.error is not None or self.finished:
                return False
            parent = None if self.parent is None else self.parent.caller.id
            if parent in self._untold and not self._unanswered(parent):
                self._untold.discard(parent)  # it told us, and waits for our part already
            workers = self._untold | self._outbox.keys()
            if self._is_done() and workers <= {parent}:
                if parent is not None:
                    riding = self._outbox.pop(parent, [])
                self.finished = True
                self._changed.notify_all()
            else:
                for worker in workers:
                    sends = self._unanswered(worker) if worker in self._untold else []
                    self._request_serial += 1
                    self._requests[self._request_serial] = None
                    answers = self._outbox.get(worker, [])
                    messages.append((worker, sends, answers, self._request_serial))
                self._told |= workers
                self._untold = set()
                self._outbox = {}
            finished = self.finished
        sent = [(message[-1], self._send(*message)) for message in messages]
        # Only now that all is sent: an answer that is here already is heard on this thread.
        listening = _Listening(threading.get_ident())
        for serial, future in sent:
            if future is not None:
                future.at_once(partial(self._hear, serial, listening))
        listening.thread = 0
        if finished and self.parent is not None:
            self.parent.answer(riding)
        return listening.heard

    def _unanswered(self, worker: int) -> list[int]:
        return [id for id in self._sends_to.get(worker, ()) if id not in self._answers]

    def _is_done(self) -> bool:
        return (
            not self._unfinished
            and not self._open_recvs
            and not self._requests
            and len(self._answers) == len(self._bit_of)
        )

    def _send(
        self, worker: int, sends: list[int], answers: list[Answer], serial: int
    ) -> Future[Any] | None:
        value = (self._context.id, self.id, self._retain_graph, sends, answers)
        left = self.deadline - time.monotonic()
        try:
            future = self._engine.agent.request(
                worker,
                Kind.BACKWARD_AUTOGRAD_REQ,
                value,
                0 if left == float("inf") else max(0.001, left),
            )
        except GradwireError as error:
            self.fail(error)
            return None
        with self._lock:
            if serial in self._requests:
                self._requests[serial] = future
        return future

    def _hear(self, serial: int, listening: _Listening, future: Future[Any]) -> None:
        """A message of ours was answered."""
        error = future.exception()
        if error is not None:
            self.fail(error)
            return
        with self._lock:
            self._requests.pop(serial, None)
            self._take_answers(future.value())
        if listening.thread == threading.get_ident():
            listening.heard = True  # whoever flushes goes on when all its messages are out
        else:
            self.work()

    # -- the end

    def wait(self) -> None:
        """On the worker that started the pass: return when it is done everywhere."""
        while True:
            with self._changed:
                if self.error is not None:
                    raise self.error
                if self.finished:
                    return
                # Reading the answer oneself is faster than being woken by who reads it.
                future = next((f for f in self._requests.values() if f is not None), None)
                if future is None:
                    left = self.deadline - time.monotonic()
                    if not self._changed.wait(None if left == float("inf") else max(0.0, left)):
                        break
            if future is not None:
                self._settle(future)
        error = CallTimeout("the backward pass has not ended before its deadline")
        self.fail(error)
        raise error

    def _settle(self, future: Future[Any]) -> None:
        try:
            future.wait()
        except Exception:
            pass  # heard of by its callback

    def fail(self, error: BaseException) -> None:
        """Give the pass up, here and everywhere."""
        with self._changed:
            if self.error is not None:
                return
            self.error = error
            finished = self.finished
            self._staged = []
            self._changed.notify_all()
        if self.parent is not None and not finished:
            self.parent.fail(error, "the backward pass")
        self._engine.end(self, succeeded=False)

    def settle(self) -> None:
        """The whole pass has succeeded: let its gradients be seen."""
        with self._lock:
            staged, self._staged = self._staged, []
        self._context.add_gradients(staged)

    @property
    def told(self) -> set[int]:
        with self._lock:
            return set(self._told)


def _make_gates_last(gates: list[Send], nodes: list[Any]) -> None:
    """Let torch run the gates after everything else, the newest first. Ordinary nodes count from 0
    too, so those that would come after a gate are lifted."""
    if not gates:
        return
    for node in nodes:
        number = node._sequence_nr()
        if number < len(gates):
            node._set_sequence_nr(number + len(gates))
    for number, send in enumerate(sorted(gates, key=lambda send: send.id)):
        send.node._set_sequence_nr(number)
