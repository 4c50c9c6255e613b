"""Starts backward passes, takes part in those of others, and ends them; releases contexts.

What a pass does on a worker is in `passes`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from gradwire.agent.agent import Agent
from gradwire.agent.service import Request
from gradwire.errors import GradwireError, WorkerLost
from gradwire.gradients.context import Context, Contexts
from gradwire.gradients.graph import Root
from gradwire.gradients.passes import Pass
from gradwire.ids import IdSource, WorkerInfo, creator
from gradwire.wire.messages import Kind

#: How long released contexts are collected before other workers are told in a message.
_CLEANUP_SECONDS = 0.2


class Engine:
    """Starts passes, takes part in those of others, and ends them."""

    def __init__(self, agent: Agent, contexts: Contexts):
        self.agent = agent
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

    def backward(
        self, context: Context, roots: Sequence[Root], retain_graph: bool, timeout: float
    ) -> None:
        """Run a pass from here; returns when its gradients are where they belong."""
        running_pass = Pass(self, context, self._ids.next(), retain_graph)
        if timeout:
            running_pass.deadline = time.monotonic() + timeout
        with context.lock:
            context.passes[running_pass.id] = running_pass
        try:
            running_pass.begin(roots)
        except BaseException as error:
            running_pass.fail(error)
            raise
        running_pass.work()
        running_pass.wait()
        self.end(running_pass, succeeded=True)

    def _serve(self, request: Request) -> None:
        context_id, pass_id, retain_graph, sends, answers = request.decode()
        try:
            context = self._contexts.get(context_id)
        except GradwireError:
            # Nothing that was sent in this context has arrived here.
            request.answer([(id, None) for id in sends])
            return
        with context.lock:
            context.check_pass(pass_id)
            found = context.passes.get(pass_id)
            if found is None:
                found = Pass(self, context, pass_id, retain_graph)
                found.parent = request
                context.passes[pass_id] = found
        first = found.parent is request
        if first:
            try:
                found.begin(())
            except BaseException as error:
                found.fail(error)
                return
        found.take(request.caller.id, sends, answers)
        if not first:
            request.answer([])
        found.work()

    # -- outcomes

    def end(self, ended: Pass, *, succeeded: bool) -> None:
        """A pass is over: make its gradients visible or drop them. A failure is told to all who
        were told of the pass; of success they hear with the next call, or when they ask."""
        context = ended._context
        with context.changed:
            if context.passes.pop(ended.id, None) is None:
                return
            context.remember_pass(ended.id, succeeded)
            if succeeded:
                ended.settle()
            context.changed.notify_all()
        if succeeded:
            return
        reason = str(ended.error)
        for worker in ended.told - {self.agent.info.id}:
            value = (context.id, ended.id, reason)
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
        if found is not None:
            found.fail(GradwireError(f"the backward pass was given up: {reason}"))

    def hear_of_success(self, context: Context, passes: Sequence[int]) -> None:
        """These passes have succeeded, as a worker knows that took part."""
        for id in passes:
            found = context.passes.get(id)
            if found is not None and found.finished:
                self.end(found, succeeded=True)
            elif found is None:
                context.note_success(id)

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

    def release(self, context_id: int) -> None:
        """Release a context here and wherever it is known. Others hear of it with the next call
        that goes to them anyway; and soon by a message of its own, for many contexts at once."""
        for worker in self._contexts.release(context_id) - {self.agent.info.id}:
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
            self.release(id)
        request.answer(None)

    def _clear_up_after(self, info: WorkerInfo) -> None:
        """A worker is gone: so are the contexts it made, and the passes it took part in."""
        for context in self._contexts.all():
            if info.id not in context.known:
                continue
            with context.lock:
                passes = list(context.passes.values())
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
