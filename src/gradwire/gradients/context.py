"""Contexts: what one forward pass has recorded on a worker, and the gradients it got.

A context is made on first sight of its id, on every worker that takes part. Its creator releases
it everywhere; a released id is remembered, so that a late message does not bring it back.
"""

from __future__ import annotations

import contextvars
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from sys import getrefcount
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradwire.errors import ContextReleased, GradwireError, WorkerLost
from gradwire.gradients.functions import Recv, Send
from gradwire.gradients.graph import Plan
from gradwire.ids import COUNTER_MASK, INTO_GRAD, IdSource

if TYPE_CHECKING:
    from gradwire.gradients.passes import Pass

_REMEMBERED_RELEASES = 100_000
#: Beyond this many messages nothing is planned ahead, and no more nodes than this at a time: there
#: may be no pass, and calls would wait for it.
_MESSAGES_AHEAD = 1_000
_NODES_AHEAD = 5_000

_strided = torch.strided

#: Why a pass has failed: an exception, encoded.
Reason = tuple["bytes | memoryview", Sequence[Tensor]]
GradientSums = dict[int, tuple[Tensor, Tensor]]

#: The id of the context the current code runs in.
current_id: contextvars.ContextVar[int | None] = contextvars.ContextVar(
    "gradwire_context", default=None
)


def add_up(sums: GradientSums, gradients: Iterable[tuple[Tensor, Tensor]]) -> GradientSums:
    """Add gradients to those there are, by identity of the leaf."""
    for leaf, gradient in gradients:
        key = id(leaf)
        if key in sums:
            # Torch adds a sparse tensor to a dense one, but not the other way round.
            _, before = sums[key]
            gradient = gradient + before if before.is_sparse else before + gradient
        sums[key] = (leaf, gradient)
    return sums


class Context:
    """One forward pass, as far as this worker is concerned."""

    def __init__(self, id: int, messages: IdSource):
        self.id = id
        #: Whether gradients go into `.grad` instead of being collected here.
        self.into_grad = bool(id & INTO_GRAD)
        self._messages = messages
        self.lock = threading.RLock()
        self.sends: dict[int, Send] = {}
        self.recvs: dict[int, Recv] = {}
        #: The workers this one has exchanged messages with in this context.
        self.known: set[int] = set()
        self._gradients: GradientSums = {}
        self.passes: dict[int, Pass] = {}
        #: Passes that are over: why they have failed, or None.
        self._ended: dict[int, Reason | None] = {}
        #: The passes known to have succeeded, and how many of them others were told of.
        self._successes: list[int] = []
        self._told: dict[int, int] = {}
        #: Passes that may still change `.grad` here, or undo what they have changed.
        self.writers: set[Pass] = set()
        #: What a pass will need, as far as there was time for it.
        self._plan: Plan | None = None
        self._plans_later = False
        #: The name of a worker that took part, and is gone with what it had recorded.
        self.lost: str | None = None
        self.released = False

    def send(self, to: int, tensors: Sequence[Tensor], about: Any) -> int:
        """Record a message that leaves; returns its id, 0 if it has nothing to differentiate."""
        self.known.add(to)
        if self.released:  # now: nobody else would tell that worker of the end
            self._check()
        if not tensors:
            return 0
        send = Send(self._messages.next(), to, tensors, about)
        self.sends[send.id] = send
        return send.id

    def receive(self, id: int, sender: int) -> Callable[[Tensor], Tensor] | None:
        """Record a message that arrives; returns what its tensors that require gradients must go
        through."""
        self.known.add(sender)
        if not id:
            return None
        if self.released:
            self._check()
        recv = self.recvs[id] = Recv(id, sender, self.into_grad)
        return recv.take

    def messages(self) -> tuple[list[Send], list[Recv]]:
        """What has left and what has arrived so far."""
        return list(self.sends.values()), list(self.recvs.values())

    def plan_ahead(self) -> None:
        """There is time: a pass that begins later has less to do."""
        with self.lock:
            if self.released or self._plans_later or len(self.sends) > _MESSAGES_AHEAD:
                return
            if self._plan is None:
                self._plan = self._new_plan()
            try:
                self._plan.add(self.sends, self.recvs, _NODES_AHEAD)
                self._plan.make_gates()
            except Exception:  # the pass will meet the like of it again
                self._plan = None
                self._plans_later = True

    def take_plan(self) -> Plan:
        """What was planned ahead, to be used once; if that is of any use."""
        with self.lock:
            plan, self._plan = self._plan, None
        if plan is None or not plan.still_holds():
            return self._new_plan()
        return plan

    def _new_plan(self) -> Plan:
        # Torch has to put the gradients of leaves into `.grad`, also if they were just sent back.
        return Plan(loose=not self.into_grad)

    def add_gradients(
        self, found: Iterable[tuple[Tensor, Tensor]], received: Iterable[tuple[Tensor, Tensor]]
    ) -> None:
        """Add what a pass has found here, and what it has received: that is in memory of its own,
        but may be one element in the place of many. The lock is held."""
        sums = _unshared(add_up({}, found)) if found else {}
        add_up(sums, [(leaf, _unexpanded(gradient)) for leaf, gradient in received])
        self._gradients = add_up(self._gradients, sums.values()) if self._gradients else sums

    def set_gradients(self, gradients: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Instead of those there are, which they include. The lock is held."""
        self._gradients.update({id(leaf): (leaf, gradient) for leaf, gradient in gradients})

    def gradient_sums(self) -> GradientSums:
        """The gradients so far, by identity of the leaf."""
        with self.lock:
            return dict(self._gradients)

    def gradients(self) -> dict[Tensor, Tensor]:
        with self.lock:
            return dict(self._gradients.values())

    def check_pass(self, id: int) -> Reason | None:
        """Whether a pass may begin, or go on, here. If it has failed already, this is why."""
        if self.released:
            self._check()
        if self.lost is not None:
            raise WorkerLost(
                f"worker {self.lost!r} took part in autograd context {self.id} and was lost, with "
                "its part of the graph. Begin again in a new context",
                worker=self.lost,
                call="backward",
            )
        return self._ended.get(id)

    def note_outcome(self, id: int, reason: Reason | None) -> None:
        """Remember how a pass has ended, to pass it on, and so that a late message does not start
        it anew; also one that this worker had no part in. The lock is held."""
        if id not in self._ended:
            self._ended[id] = reason
            if reason is None:
                self._successes.append(id)

    def successes_for(self, worker: int) -> Sequence[int]:
        """Those that a worker is told of now; not again, for it can ask."""
        successes = self._successes
        if not successes:
            return ()
        told = self._told.get(worker, 0)
        self._told[worker] = len(successes)
        return successes[told:]

    def is_over(self, id: int) -> bool:
        return id in self._ended

    def has_succeeded(self, id: int) -> bool:
        """Whether a pass has succeeded; waits for the end of one that is just ending. (Not of one
        that goes on: it may be in the middle of what asks.)"""
        with self.lock:
            ending = self.passes.get(id)
        if ending is not None and ending.finished:
            ending.wait_until_over()
        return id in self._ended and self._ended[id] is None

    def failures(self) -> tuple[int, ...]:
        """The passes known to have failed."""
        return tuple(id for id, reason in list(self._ended.items()) if reason is not None)

    def _check(self) -> None:
        """(What is recorded in the moment of the release goes with the context.)"""
        if self.released:
            raise ContextReleased(f"autograd context {self.id} was released while it was in use")

    def release(self) -> set[int]:
        """Let go of everything; returns the workers to tell."""
        with self.lock:
            self.released = True
            unfinished = []
            for found in list(self.passes.values()):
                if not found.finished:
                    unfinished.append(found)
                elif not found.started_here:
                    # It may not be known how it has ended. (One that was started here is about to
                    # succeed.)
                    del self.passes[found.id]
                    found.let_go()
            self._plan = None  # first: it must not be the last that knows some nodes
            self.sends, self.recvs, self._gradients, self.writers = {}, {}, {}, set()
            known = set(self.known)
        for found in unfinished:
            found.fail(GradwireError(f"autograd context {self.id} was released"))
        return known


def _unshared(gradients: GradientSums) -> GradientSums:
    """Gradients that can be changed in place, clipped for one, without changing anything else: a
    function may have given the same memory to two of its inputs, or one element in the place of
    many; and a hook may have kept one."""
    memories = set()
    for key, (leaf, gradient) in gradients.items():
        is_held = getrefcount(gradient) > _OWN_REFERENCES and not gradient.requires_grad
        if gradient.layout is _strided:
            memory = gradient.data_ptr()
            is_shared = 0 in gradient.stride()
        else:
            elements = gradient._values() if gradient.is_sparse else gradient.values()
            memory = elements.data_ptr()
            is_shared = False
        if is_shared or is_held or memory in memories:
            gradients[key] = leaf, _copied(gradient)
        memories.add(memory)
    return gradients


def _unexpanded(gradient: Tensor) -> Tensor:
    is_expanded = gradient.layout is _strided and 0 in gradient.stride()
    return _copied(gradient) if is_expanded else gradient


def _copied(gradient: Tensor) -> Tensor:
    if gradient.layout is not torch.strided:
        return gradient.clone()
    return gradient.clone(memory_format=torch.contiguous_format)


def _count_own_references() -> int:
    staged = [(torch.empty(0), torch.empty(0))]
    return max(getrefcount(gradient) for _, (_, gradient) in add_up({}, staged).items())


#: How often a gradient is referred to that nobody else holds.
_OWN_REFERENCES = _count_own_references()


class Contexts:
    """The contexts of one worker."""

    def __init__(self, worker_id: int):
        self._ids = IdSource(worker_id)
        self._messages = IdSource(worker_id)
        self._messages.next()  # 0 means: nothing to differentiate
        self.max_id = worker_id << 48 | COUNTER_MASK
        #: (The garbage collector may release a context wherever something is made.)
        self._lock = threading.RLock()
        self._contexts: dict[int, Context] = {}
        self._released: OrderedDict[int, None] = OrderedDict()
        #: Told of contexts that other workers made, when they are first heard of here.
        self.heard_of: Callable[[Context], None] = lambda _context: None

    def new(self, into_grad: bool = False) -> Context:
        id = self._ids.next() | (INTO_GRAD if into_grad else 0)
        context = self._contexts[id] = Context(id, self._messages)
        return context

    def get(self, id: int) -> Context:
        context = self._contexts.get(id)
        if context is None:
            raise GradwireError(
                f"Could not find autograd context with id: {id}. It was released, or never known "
                "on this worker"
            )
        return context

    def peek(self, id: int) -> Context | None:
        """The context, if there is one here now."""
        return self._contexts.get(id)

    def find(self, id: int) -> Context | None:
        """The context, or None if nothing of it has ever got here."""
        context = self._contexts.get(id)
        if context is None:
            with self._lock:
                self._check_not_released(id)
                context = self._contexts.get(id)
        return context

    def get_or_create(self, id: int) -> Context:
        context = self._contexts.get(id)
        if context is None:
            made = Context(id, self._messages)
            with self._lock:
                self._check_not_released(id)
                context = self._contexts.setdefault(id, made)
            if context is made:
                self.heard_of(context)
        return context

    def _check_not_released(self, id: int) -> None:
        if id in self._released:
            raise ContextReleased(f"autograd context {id} was released already")

    def is_released(self, id: int) -> bool:
        return id in self._released

    def release(self, id: int) -> set[int]:
        """Forget a context; returns the workers that must be told."""
        with self._lock:
            self._released[id] = None
            while len(self._released) > _REMEMBERED_RELEASES:
                self._released.popitem(last=False)
            context = self._contexts.pop(id, None)
        return set() if context is None else context.release()

    def all(self) -> list[Context]:
        return list(self._contexts.values())

    def __len__(self) -> int:
        return len(self._contexts)
