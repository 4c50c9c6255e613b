"""Releasing autograd contexts, on this worker and on all workers that take part.

The worker that releases a context need not send a message at once: the metadata of its next call to
another worker names the context. That call may be lost, or never be made. So a cleanup message
follows soon. It names many contexts at once, and is repeated until it is answered.

When a worker is lost, the contexts that it created are released. But this worker may also have a
context that a third worker created, and may know it only from messages of the lost worker. The
creator may not know that this worker has the context, and the lost worker can no longer pass on the
notice of the release. So this worker *joins* the context: it asks the creator for a notice.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from gradwire._core.autograd.context import Context, ContextContainer
from gradwire._core.ids import WorkerInfo, creator
from gradwire._core.rpc.agent import Agent
from gradwire._core.rpc.futures import Future
from gradwire._core.rpc.server import Request
from gradwire._core.wire.messages import Kind
from gradwire.errors import GradwireError, WorkerLost

#: After a release, a worker waits this long for more releases, to name them in the same cleanup
#: message.
_CLEANUP_SECONDS = 0.2


class ContextReleases:
    """Releases this worker's autograd contexts, notifies the other workers, and handles their
    notifications."""

    def __init__(self, agent: Agent, contexts: ContextContainer):
        self._agent = agent
        self._contexts = contexts
        #: Reentrant, because the garbage collector may release a context at any allocation, even
        #: on a thread that holds this lock.
        self._lock = threading.RLock()
        #: For each worker, the released contexts to mention in the next call to it. Calls take them
        #: without a lock, so a context may be missed. That does no harm: the cleanup message lists
        #: every released context again.
        self.notices: dict[int, list[int]] = {}
        #: For each worker, the released contexts to name in the next cleanup message.
        self._unconfirmed: dict[int, list[int]] = {}
        self._cleanup_due = False
        agent.handle(Kind.CLEANUP_AUTOGRAD_CONTEXT_REQ, self._serve_cleanup)
        agent.handle(Kind.JOIN_AUTOGRAD_CONTEXT_REQ, self._serve_join)
        agent.on_gone.append(self.clear_up_after)
        contexts.on_remote_context.append(self._join_if_creator_is_gone)

    # -- releasing

    def release(self, context_id: int, heard_from: int = -1) -> None:
        """Release a context on this worker, and tell every worker with which this one exchanged
        messages in that context, except `heard_from`, the worker that sent the notice."""
        others = self._contexts.release(context_id) - {heard_from, self._agent.info.id}
        if not others:
            return
        with self._lock:
            for worker in others:
                self.notices.setdefault(worker, []).append(context_id)
                self._unconfirmed.setdefault(worker, []).append(context_id)
            is_first, self._cleanup_due = not self._cleanup_due, True
        if is_first:
            self._agent.timers.call_later(_CLEANUP_SECONDS, self._send_cleanups)

    def hear_of(self, context_ids: Sequence[int], sender: int) -> None:
        """Release contexts that the metadata of a call names. The leader (the worker thread that
        reads messages) does so after it has served the call, so that the call need not wait."""

        def release() -> None:
            for context_id in context_ids:
                self.release(context_id, sender)

        executor = self._agent.executor
        if executor.is_leader():
            executor.post(release)
        else:
            release()

    def _send_cleanups(self) -> None:
        with self._lock:
            unconfirmed, self._unconfirmed = self._unconfirmed, {}
            self.notices.clear()
            self._cleanup_due = False
        for worker, context_ids in unconfirmed.items():
            try:
                peer = self._agent.peers.find(worker)
                self._agent.sender.send_until_answered(
                    peer.info, Kind.CLEANUP_AUTOGRAD_CONTEXT_REQ, context_ids
                )
            except GradwireError:
                pass  # The other worker has left the group, so it needs no notice.

    def _serve_cleanup(self, request: Request) -> None:
        for context_id in request.decode():
            # Usually the metadata of an earlier call has named the context, so that it is already
            # released.
            if not self._contexts.is_released(context_id):
                self.release(context_id, request.caller.id)
        request.answer(None)

    # -- lost workers

    def clear_up_after(self, info: WorkerInfo) -> None:
        """When a worker is lost or has left, release the contexts that it created, and fail the
        backward passes in which it took part."""
        for context in self._contexts.all():
            with context.lock:
                if info.id in context.known:
                    context.lost = info.name
                # If this worker's part of a pass is finished, the pass may be finished on all
                # workers. Only the worker that started the pass knows whether it is. So such a pass
                # fails only if that worker is lost.
                passes = [
                    active
                    for active in context.passes.values()
                    if info.id == creator(active.id)
                    or (info.id in context.known | active.involved and not active.finished)
                ]
            for active in passes:
                active.fail(
                    WorkerLost(
                        f"worker {info.name!r} was lost during the backward pass",
                        worker=info.name,
                        call="backward",
                    )
                )
            made_by = creator(context.id)
            if made_by == info.id:
                self.release(context.id)
            elif context.lost == info.name and made_by not in context.known | {self._agent.info.id}:
                self._join(context)

    def _join_if_creator_is_gone(self, context: Context) -> None:
        """Join a context that is new to this worker, if the creator of the context is gone. (Such a
        context comes with a delayed call, or from a worker that has not noticed the loss.) If the
        creator cannot be reached, joining releases the context. Without the join, this worker would
        never release the context."""
        if self._agent.liveness.is_gone(creator(context.id)):
            self._agent.executor.submit(lambda: self._join(context))

    def _join(self, context: Context) -> None:
        """Ask the creator of a context to tell this worker when the context is released. Release
        the context at once if the creator is gone, or has already released it."""

        def joined(answer: Future[bool]) -> None:
            if answer.exception() is not None or not answer.value():
                self.release(context.id)

        try:
            peer = self._agent.peers.find(creator(context.id))
        except Exception:
            # The creator cannot be asked, because it has left, or because the store that has its
            # address has failed.
            self.release(context.id)
        else:
            asked = self._agent.sender.send_until_answered(
                peer.info, Kind.JOIN_AUTOGRAD_CONTEXT_REQ, context.id
            )
            asked.add_done_callback(joined)

    def _serve_join(self, request: Request) -> None:
        """Remember that the calling worker wants a notice when a context is released. Answer
        whether the context still exists."""
        context = self._contexts.find(request.decode())
        if context is not None:
            context.known.add(request.caller.id)
        request.answer(context is not None and not context.released)
