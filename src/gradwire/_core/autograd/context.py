"""Contexts: what one forward pass records on a worker, and the gradients of its backward passes.

Every worker that takes part makes its own `Context` when the first message with the context's id
arrives. The worker that created the context releases it on all workers. Every worker remembers the
ids of released contexts, so that a late message does not create such a context again.
"""

from __future__ import annotations

import contextvars
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from sys import getrefcount
from typing import Any, Protocol

import torch
from torch import Tensor

from gradwire._core.autograd.boundary import Recv, Send
from gradwire._core.autograd.plan import Plan
from gradwire._core.ids import INTO_GRAD, IdSource, creator, max_id
from gradwire.errors import ContextReleased, GradwireError, WorkerLost

#: How many ids of released contexts a worker remembers.
_REMEMBERED_RELEASES = 100_000
#: A backward pass can be planned early, during the forward pass. Early planning delays calls, and
#: is wasted if no backward pass follows. So contexts with more sent messages than `_MESSAGES_AHEAD`
#: are not planned early, and one planning step visits at most `_NODES_AHEAD` autograd nodes.
_MESSAGES_AHEAD = 1_000
_NODES_AHEAD = 5_000

_strided = torch.strided

#: The encoded exception with which a backward pass failed. The first item is the encoding as bytes,
#: without the tensors that the exception holds. The second item is these tensors.
FailureReason = tuple["bytes | memoryview", Sequence[Tensor]]
#: Leaves and their gradients, by the id() of the leaf.
GradientSums = dict[int, tuple[Tensor, Tensor]]

#: The id of the context that the current code runs in.
current_id: contextvars.ContextVar[int | None] = contextvars.ContextVar(
    "gradwire_context", default=None
)


def add_up(sums: GradientSums, gradients: Iterable[tuple[Tensor, Tensor]]) -> GradientSums:
    """Add gradients of leaves to `sums`, which this function changes and returns."""
    for leaf, gradient in gradients:
        key = id(leaf)
        if key in sums:
            # Torch can add a sparse tensor to a dense one, but not a dense one to a sparse one. So
            # a sparse tensor must be the second operand.
            _, before = sums[key]
            gradient = gradient + before if before.is_sparse else before + gradient
        sums[key] = (leaf, gradient)
    return sums


class ActivePass(Protocol):
    """A backward pass on one worker. The context keeps it until this worker knows how the pass
    ended."""

    id: int
    error: BaseException | None

    @property
    def started_here(self) -> bool:
        """Whether `backward` or `grad` was called on this worker."""

    @property
    def finished(self) -> bool:
        """Whether this worker and all its children have done their parts of the pass. The children
        are the workers that report to this worker (see `termination`)."""

    @property
    def involved(self) -> set[int]:
        """The other workers that take part in the pass, as far as this worker knows."""

    def awaited(self) -> set[int]:
        """Return the workers that this worker's part of the pass waits for."""

    def succeed(self) -> object:
        """Make the gradients visible, now that the pass has succeeded on all workers."""

    def fail(self, error: BaseException) -> None:
        """Give the pass up on all workers, unless it has already succeeded or failed."""

    def wait_until_over(self) -> None:
        """Block until the pass has succeeded, with its gradients visible here, or has failed."""

    def wait_until_undone(self, deadline: float) -> None:
        """If the pass has failed, wait until this worker has undone its changes to `.grad`."""


class Context:
    """What one forward pass has recorded on one worker, and the gradients of its backward
    passes."""

    def __init__(self, context_id: int, messages: IdSource):
        self.id = context_id
        #: Whether passes add gradients to `.grad` of the leaves, instead of to this context.
        self.into_grad = bool(context_id & INTO_GRAD)
        self._messages = messages
        self.lock = threading.RLock()
        self.sends: dict[int, Send] = {}
        self.recvs: dict[int, Recv] = {}
        #: The ids of the workers with which this one has exchanged messages in this context.
        self.known: set[int] = set()
        self._gradients: GradientSums = {}
        #: By id, the backward passes that have not ended, as far as this worker knows.
        self.passes: dict[int, ActivePass] = {}
        #: For each backward pass that has ended, by its id: why it failed, or None if it succeeded.
        self._outcomes: dict[int, FailureReason | None] = {}
        #: The ids of the passes that have succeeded, in the order in which this worker learned of
        #: the successes.
        self._successes: list[int] = []
        #: By worker, how many ids from the beginning of `_successes` were sent to that worker.
        self._successes_told: dict[int, int] = {}
        #: Passes that may still change `.grad` on this worker, or restore it after a failure.
        self.writers: set[ActivePass] = set()
        #: A plan for the next backward pass, made while this worker waits for answers.
        self._plan: Plan | None = None
        #: Whether planning ahead has raised an error. The next pass then makes its plan itself.
        self._cannot_plan_ahead = False
        #: The name of a worker that took part in this context and was lost, for example because it
        #: died. Its part of the autograd graph is lost too.
        self.lost: str | None = None
        self.released = False

    def __repr__(self) -> str:
        here = f"sends: {len(self.sends)}, recvs: {len(self.recvs)}, leaves: {len(self._gradients)}"
        state = "released" if self.released else f"open on this worker, {here}"
        return f"<autograd context {self.id} of worker {creator(self.id)}, {state}>"

    # -- recording

    def send(self, to: int, tensors: Sequence[Tensor], about: Any) -> int:
        """Record a message to the worker `to`. `tensors`: the tensors of the message that require
        gradients. Return the id of the message, or 0 if there are no such tensors."""
        self.known.add(to)
        # `release` sets `released` and then reads `known`. This method adds to `known` and then
        # reads `released`. So either `release` finds the worker in `known`, or this check raises.
        if self.released:
            self._check_not_released()
        if not tensors:
            return 0
        send = Send(self._messages.next(), to, tensors, about)
        self.sends[send.id] = send
        return send.id

    def receive(self, message_id: int, sender: int) -> Callable[[Tensor], Tensor] | None:
        """Record a message that arrives. Return a function that attaches a tensor to the autograd
        graph. It must be called for each tensor of the message that requires gradients. If there is
        no such tensor, `message_id` is 0, and None is returned."""
        self.known.add(sender)
        if not message_id:
            return None
        if self.released:
            self._check_not_released()
        recv = self.recvs[message_id] = Recv(message_id, sender, self.into_grad)
        return recv.take

    def messages(self) -> tuple[list[Send], list[Recv]]:
        """Return the messages with differentiable tensors that were sent and received so far."""
        return list(self.sends.values()), list(self.recvs.values())

    # -- planning

    def plan_ahead(self) -> None:
        """Plan the next backward pass as far as possible, while this worker waits for an answer."""
        with self.lock:
            if self.released or self._cannot_plan_ahead or len(self.sends) > _MESSAGES_AHEAD:
                return
            if self._plan is None:
                self._plan = self._new_plan()
            try:
                self._plan.add(self.sends, self.recvs, _NODES_AHEAD)
                self._plan.make_gates()
            except Exception:
                # Nothing is raised here. The next pass will get the same error, and raise it.
                self._plan = None
                self._cannot_plan_ahead = True

    def take_plan(self) -> Plan:
        """Return the plan that was made ahead, or a new plan if leaves or messages have changed
        since. A plan serves only one pass, so the next call does not return it again."""
        with self.lock:
            plan, self._plan = self._plan, None
        if plan is None or not plan.still_holds():
            return self._new_plan()
        return plan

    def _new_plan(self) -> Plan:
        # A direct leaf is a leaf that was itself sent. The gradient that comes back for it needs no
        # run of torch's engine, except with `into_grad`: only torch's engine can add it to `.grad`.
        return Plan(direct_leaves=not self.into_grad)

    # -- gradients

    def add_gradients(
        self, found: Iterable[tuple[Tensor, Tensor]], received: Iterable[tuple[Tensor, Tensor]]
    ) -> None:
        """Add the gradients of a pass. Those in `found` were computed on this worker. Those in
        `received` came in messages, so they share no storage with other tensors of this worker. The
        caller holds the lock."""
        sums = _unshared(add_up({}, found)) if found else {}
        add_up(sums, [(leaf, _unexpanded(gradient)) for leaf, gradient in received])
        self._gradients = add_up(self._gradients, sums.values()) if self._gradients else sums

    def set_gradients(self, gradients: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Replace the gradients of some leaves by new totals. The caller holds the lock."""
        self._gradients.update({id(leaf): (leaf, gradient) for leaf, gradient in gradients})

    def gradient_sums(self) -> GradientSums:
        """Return the gradients so far, by the id() of the leaf."""
        with self.lock:
            return dict(self._gradients)

    def gradients(self) -> dict[Tensor, Tensor]:
        """Return the gradients so far, by leaf."""
        with self.lock:
            return dict(self._gradients.values())

    # -- passes

    def check_pass(self, pass_id: int) -> FailureReason | None:
        """Raise if this worker can no longer take part in passes of the context. Return why the
        given pass has failed, or None if it has not failed."""
        if self.released:
            self._check_not_released()
        if self.lost is not None:
            raise WorkerLost(
                f"worker {self.lost!r} took part in autograd context {self.id} and was lost, with "
                "its part of the graph. Begin again in a new context",
                worker=self.lost,
                call="backward",
            )
        return self._outcomes.get(pass_id)

    def note_outcome(self, pass_id: int, reason: FailureReason | None) -> None:
        """Remember that a pass has succeeded (`reason` is None) or why it has failed. This worker
        can then tell others, and does not begin the pass when a late message of it arrives. This
        worker need not have taken part in the pass. The caller holds the lock."""
        if pass_id not in self._outcomes:
            self._outcomes[pass_id] = reason
            if reason is None:
                self._successes.append(pass_id)

    def end_failed_pass(self, pass_id: int, reason: FailureReason) -> bool:
        """Remember why a pass has failed, and drop the pass object. Return False if there is no
        such pass."""
        with self.lock:
            if self.passes.pop(pass_id, None) is None:
                return False
            self.note_outcome(pass_id, reason)
        return True

    def successes_for(self, worker: int) -> Sequence[int]:
        """Return the ids of the passes that have succeeded since the last call of this method for
        the same worker. The ids travel with one message only. If that message is lost, the worker
        can still ask for the outcome of a pass."""
        successes = self._successes
        if not successes:
            return ()
        told = self._successes_told.get(worker, 0)
        self._successes_told[worker] = len(successes)
        return successes[told:]

    def is_over(self, pass_id: int) -> bool:
        """Return whether this worker knows that a pass has succeeded or failed."""
        return pass_id in self._outcomes

    def has_succeeded(self, pass_id: int) -> bool:
        """Return whether a pass has succeeded. If this worker's part of the pass is finished, wait
        for the outcome. Do not wait for an unfinished pass: it may itself be waiting for the answer
        to this question."""
        with self.lock:
            ending = self.passes.get(pass_id)
        if ending is not None and ending.finished:
            ending.wait_until_over()
        return pass_id in self._outcomes and self._outcomes[pass_id] is None

    def failures(self) -> tuple[int, ...]:
        """Return the ids of the passes that are known to have failed."""
        return tuple(
            pass_id for pass_id, reason in list(self._outcomes.items()) if reason is not None
        )

    # -- the end

    def _check_not_released(self) -> None:
        if self.released:
            raise ContextReleased(f"autograd context {self.id} was released while it was in use")

    def release(self) -> set[int]:
        """Drop everything that was recorded. Return the ids of the workers to notify."""
        with self.lock:
            self.released = True
            unfinished = []
            for active in list(self.passes.values()):
                if not active.finished:
                    unfinished.append(active)
                elif not active.started_here:
                    # This worker's part of the pass is done. After the release, perhaps no message
                    # will tell this worker how the pass ended, so the pass is dropped now. (If this
                    # worker started the pass, the pass is about to succeed, so it is not dropped.)
                    del self.passes[active.id]
            # The plan is dropped first, while the sends still keep its autograd nodes alive. If
            # only the plan referred to a node, threads could deadlock (see `edges.edge_of_leaf`).
            self._plan = None
            self.sends, self.recvs, self._gradients, self.writers = {}, {}, {}, set()
            known = set(self.known)
        for active in unfinished:
            active.fail(GradwireError(f"autograd context {self.id} was released"))
        return known


def _unshared(gradients: GradientSums) -> GradientSums:
    """Copy each gradient whose storage is shared: by another gradient, by a tensor that a hook has
    kept, or by several elements of the gradient itself. Without the copy, an in-place change of one
    gradient would change the others too. Put the copies into `gradients`, and return it."""
    seen = set()
    for key, (leaf, gradient) in gradients.items():
        is_held = getrefcount(gradient) > _OWN_REFERENCES and not gradient.requires_grad
        if gradient.layout is _strided:
            address = gradient.data_ptr()
            is_shared = 0 in gradient.stride()
        else:
            elements = gradient._values() if gradient.is_sparse else gradient.values()
            address = elements.data_ptr()
            is_shared = False
        if is_shared or is_held or address in seen:
            gradients[key] = leaf, _copied(gradient)
        seen.add(address)
    return gradients


def _unexpanded(gradient: Tensor) -> Tensor:
    """Return the gradient, or a copy of it if several of its elements share one place in memory."""
    is_expanded = gradient.layout is _strided and 0 in gradient.stride()
    return _copied(gradient) if is_expanded else gradient


def _copied(gradient: Tensor) -> Tensor:
    if gradient.layout is not torch.strided:
        return gradient.clone()
    return gradient.clone(memory_format=torch.contiguous_format)


def _count_own_references() -> int:
    sums = [(torch.empty(0), torch.empty(0))]
    return max(getrefcount(gradient) for _, (_, gradient) in add_up({}, sums).items())


#: The reference count that `_unshared` sees for a gradient to which no other code has a reference.
_OWN_REFERENCES = _count_own_references()


class ContextContainer:
    """The contexts of one worker (torch: DistAutogradContainer)."""

    def __init__(self, worker_id: int):
        self._ids = IdSource(worker_id)
        self._messages = IdSource(worker_id)
        # The id 0 stands for a message without differentiable tensors, so no message may get it.
        self._messages.next()
        self.max_id = max_id(worker_id)
        #: Reentrant, because the garbage collector may release a context at any allocation, even
        #: on a thread that holds this lock.
        self._lock = threading.RLock()
        self._contexts: dict[int, Context] = {}
        self._released: OrderedDict[int, None] = OrderedDict()
        #: Called with each context that another worker created, when it is first used here.
        self.on_remote_context: list[Callable[[Context], None]] = []

    def new(self, into_grad: bool = False) -> Context:
        """Create a context."""
        context_id = self._ids.next() | (INTO_GRAD if into_grad else 0)
        context = self._contexts[context_id] = Context(context_id, self._messages)
        return context

    def get(self, context_id: int) -> Context:
        """Return a context. Raise if this worker does not have it."""
        context = self._contexts.get(context_id)
        if context is None:
            raise self._not_found(context_id)
        return context

    def _not_found(self, context_id: Any) -> Exception:
        text = f"Could not find autograd context with id: {context_id}. "
        if not isinstance(context_id, int):
            return TypeError(
                f"{text}Write `with autograd.context() as context_id:`, and use context_id in the "
                "block"
            )
        if context_id in self._released:
            return ContextReleased(
                f"{text}It was released when its `with autograd.context()` block ended: use it "
                "inside the block"
            )
        return GradwireError(f"{text}It was released long ago, or never known on this worker")

    def peek(self, context_id: int) -> Context | None:
        """Return a context, or None if this worker does not have it."""
        return self._contexts.get(context_id)

    def find(self, context_id: int) -> Context | None:
        """Return a context, or None if it was never used on this worker. Raise if it was
        released."""
        context = self._contexts.get(context_id)
        if context is None:
            with self._lock:
                self._check_not_released(context_id)
                context = self._contexts.get(context_id)
        return context

    def get_or_create(self, context_id: int) -> Context:
        """Return a context. Create it if this worker never used it. Raise if it was released."""
        context = self._contexts.get(context_id)
        if context is None:
            made = Context(context_id, self._messages)
            with self._lock:
                self._check_not_released(context_id)
                context = self._contexts.setdefault(context_id, made)
            if context is made:
                for callback in self.on_remote_context:
                    callback(context)
        return context

    def _check_not_released(self, context_id: int) -> None:
        if context_id in self._released:
            raise ContextReleased(f"autograd context {context_id} was released already")

    def is_released(self, context_id: int) -> bool:
        """Return whether the context is among the last ones that were released on this worker."""
        return context_id in self._released

    def release(self, context_id: int) -> set[int]:
        """Release a context on this worker. Return the ids of the workers to notify."""
        with self._lock:
            self._released[context_id] = None
            while len(self._released) > _REMEMBERED_RELEASES:
                self._released.popitem(last=False)
            context = self._contexts.pop(context_id, None)
        return set() if context is None else context.release()

    def all(self) -> list[Context]:
        """Return all contexts that are not released."""
        return list(self._contexts.values())

    def __len__(self) -> int:
        return len(self._contexts)
