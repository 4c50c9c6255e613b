"""A backward pass, on one of the workers that take part.

A *send* is a message with differentiable tensors that this worker sent in the forward pass, a
*recv* such a message that it received. A *recv node* is the autograd node of a received tensor. A
*region* is a connected part of the local autograd graph, which torch's own engine runs in one go
(see `plan`). The rules of a pass:

1. For each recv, this worker answers the sender exactly once in a pass: with gradients, or with the
   statement that there are none.
2. Every worker that may have gradients hears of the pass. The worker where `backward` is called
   tells all workers with which it exchanged messages in the context, and they do the same. Each
   worker reports back to the worker that first told it of the pass, once its own part and the parts
   of the workers that it told are done (see `termination`).
3. A region can run when all its sends are answered. If it has recv nodes, it can also run as soon
   as one send has a gradient, provided this worker knows which nodes of the region gradients will
   reach. Often the gradient of that send reaches all of them. Otherwise this worker asks other
   workers for *forecasts*: which tensors of the other sends will get gradients (see `forecast`).
   Each send that is still unanswered is replaced by a *gate*, an autograd node in which the run
   waits for the answer. Gates run after all other nodes of the region. Among the gates, the gate of
   the message that was sent last runs first. The answer that a gate waits for depends only on what
   happened in the forward pass after the message was sent. So every wait is for something later in
   the forward pass, and workers cannot wait for each other in a circle.
4. A send without gradients is left out of the run. A recv node that depends on such sends alone has
   no gradient, whether or not its region runs.
5. A pass started by `grad` visits only tensors on a path to the inputs of `grad`. The worker that
   starts the pass finds these tensors (see `path_discovery`), and tells every other worker directly
   which of them that worker must handle.
6. Suppose worker A sent a tensor to worker B, and B sent it back unchanged. Then A would send the
   gradient of the returned tensor to B, and B would send this gradient back unchanged. So B offers
   a *shortcut* in its first message of the pass to A: A may use the gradient itself, at once. For
   example, B calls A several times, and passes the result of each call to the next call. Thanks to
   shortcuts, the pass then takes one message and one answer for all these calls together.

Each message of a pass is a request. It is answered at once, after all work that needs no waiting
and before any wait at a gate. The answer carries everything that is ready for the worker that sent
the request.

Gradients become visible when the pass has ended on all workers. If the pass fails on any worker, it
is given up on all workers and leaves no trace.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from gradwire._core.autograd.boundary import Gradient, Gradients, Send, SentTensor
from gradwire._core.autograd.context import Context, add_up
from gradwire._core.autograd.leaf_accumulation import LeafGroup, accumulate, groups_with_any
from gradwire._core.autograd.pass_messages import (
    PassMessage,
    PassOptions,
    make_message,
    pack_request,
    unpack_message,
)
from gradwire._core.autograd.pass_phase import NEXT_PHASES, PassPhase
from gradwire._core.autograd.pass_port import PassPort
from gradwire._core.autograd.pass_state import LeafGradient, PassState
from gradwire._core.autograd.path_discovery import PathShares
from gradwire._core.autograd.plan import Plan, Region, Root
from gradwire._core.autograd.region_run import GradBackup, RegionRun, RunGradients
from gradwire._core.rpc.exceptions import add_note
from gradwire._core.rpc.futures import Future
from gradwire._core.rpc.open_call import OpenCall
from gradwire._core.rpc.server import Request
from gradwire._core.wire.codec import call_name
from gradwire.errors import CallTimeout, ContextReleased, GradwireError

FOREVER = float("inf")

_KNOWN = PassPhase.KNOWN
_BEGUN = PassPhase.BEGUN
_COMMITTED = PassPhase.COMMITTED
_SUCCEEDED = PassPhase.SUCCEEDED


class BackwardPass:
    """One backward pass, on one worker. Attributes that few passes change have their defaults in
    the class, so that `__init__` need not set them."""

    #: The id()s of the leaves that may get gradients in this pass. Empty if none of these leaves
    #: belongs to a group (see `_leaf_groups`).
    _reached: Collection[int] = ()
    #: The groups of leaves whose gradients torch must accumulate together in this pass (see
    #: `leaf_accumulation`).
    _leaf_groups: Sequence[LeafGroup] = ()
    #: Only on the worker that called `grad`. For each other worker: which tensors it must compute
    #: gradients for or pass gradients on. The first request to a worker takes its entry from
    #: this dictionary, and tells the worker.
    _shares: PathShares | None = None
    #: The `.grad` of leaves before this pass changed them, to restore it if the pass fails.
    _backup: GradBackup | None = None

    def __init__(
        self,
        port: PassPort,
        context: Context,
        pass_id: int,
        options: PassOptions,
        parent: int | None,
    ):
        """`parent`: the worker to notify when this worker's part is done; None on the worker that
        starts the pass."""
        self.id = pass_id
        self.context = context
        self.options = options
        self.deadline = time.monotonic() + options.seconds if options.seconds else FOREVER
        self._port = port
        self._lock = threading.Lock()
        #: Signals changes of this object to waiting threads. It is None until a thread has to wait.
        self._changed: threading.Condition | None = None
        self._into_grad = context.into_grad and not options.for_inputs
        self._state = PassState(port.info.id, parent, options, into_grad=self._into_grad)
        #: How far the pass has got. Only a thread that holds the lock may change it, and only as
        #: `NEXT_PHASES` allows. (The tests check this.)
        self.phase = _BEGUN if parent is None else _KNOWN
        #: The error with which the pass failed. It is set when the phase becomes FAILING.
        self.error: BaseException | None = None
        #: The open requests for whose answers a thread waits now, or will wait. If the pass fails,
        #: `_give_up_calls` ends these waits.
        self._asked: set[OpenCall] = set()
        #: The open requests whose answers a thread will read later. Each tuple has the worker that
        #: the request went to, whether it was the first message to that worker, and the request.
        self._unheard: list[tuple[int, bool, OpenCall]] = []
        #: How many threads run regions (parts of the graph) or accumulate gradients at the moment.
        self._running = 0

    @property
    def changes_grad(self) -> bool:
        """Whether the pass changes `.grad` on this worker, even if it restores `.grad` later."""
        return self._into_grad or bool(self._reached)

    @property
    def started_here(self) -> bool:
        """Whether `backward` or `grad` was called on this worker."""
        return self._state.termination.parent is None

    @property
    def finished(self) -> bool:
        """Whether this worker and all its children have done their parts of the pass. The children
        are the workers that report to this worker (see `termination`)."""
        return self._state.termination.finished

    @property
    def involved(self) -> set[int]:
        """The other workers that take part in the pass, as far as this worker knows."""
        return self._state.termination.involved

    def seconds_left(self) -> float:
        """Return how many seconds are left before the deadline of the pass, or 0 if the pass has no
        deadline. This number is the timeout of the next message."""
        return max(0.001, self.deadline - time.monotonic()) if self.options.seconds else 0.0

    # -- beginning

    def claim_begin(self, share: set[SentTensor] | None) -> bool:
        """Return whether the calling thread, which handles a message of the pass, must call
        `begin`. That is true for one thread only. A pass started by `grad` can begin only with the
        message that says which tensors this worker must handle (`share`)."""
        if self.phase is not _KNOWN or (self.options.for_inputs and share is None):
            return False
        with self._lock:
            if self.phase is not _KNOWN:
                return False
            self.phase = _BEGUN
        return True

    def begin(
        self,
        roots: Sequence[Root] = (),
        inputs: Sequence[Tensor] = (),
        shares: PathShares | None = None,
    ) -> None:
        """Plan what this worker has to do. `shares` is given if `grad` started the pass. It maps
        workers to the tensors that they must handle. On the worker that called `grad` it contains
        all workers, elsewhere only this worker."""
        context = self.context
        if context.into_grad:
            self._wait_for_others_to_undo()
        if shares is None:
            plan = context.take_plan()
            plan.add(context.sends, context.recvs)
            # `known` is copied after the plan has read the sends, so that it contains the receivers
            # of all sends in the plan.
            known = set(context.known)
        else:
            others = self._shares = dict(shares)
            share = others.pop(self._port.info.id)
            messages = {message_id for message_id, _ in share}
            sends = {key: send for key, send in dict(context.sends).items() if key in messages}
            recvs = {key: recv for key, recv in dict(context.recvs).items() if key in messages}
            known = set(others)
            plan = Plan(inputs, direct_leaves=True, on_the_way=share)
            plan.add(sends, recvs)
        plan.finish(roots)
        if self._port.leaf_group_providers:
            self._leaf_groups = self._reached_groups(plan)
        must_accumulate = bool(self._leaf_groups)
        with self._lock:
            self._state.set_plan(plan, known, inputs, must_accumulate=must_accumulate)
            if self._changed is not None:
                self._notify()

    def _reached_groups(self, plan: Plan) -> Sequence[LeafGroup]:
        """Return the groups of leaves (see `leaf_accumulation`) of which at least one leaf may get
        a gradient in this pass."""
        groups = [group for provider in self._port.leaf_group_providers for group in provider()]
        if self._into_grad or self.options.for_inputs:
            return ()
        proxies = [
            plan.sends[send_id].proxies[n]
            for send_id, direct_leaves in plan.direct_leaves.items()
            for n in direct_leaves
        ]
        leaves = [leaf for region in plan.regions for leaf in region.leaves]
        reached = {id(leaf) for leaf in [*leaves, *proxies]}
        found = groups_with_any(groups, reached)
        if found:
            self._reached = reached
            if self.options.create_graph:
                raise GradwireError(
                    f"the gradients of {found[0]} go through hooks that run after torch has "
                    "accumulated them, so these gradients cannot be differentiated again: leave "
                    "out create_graph"
                )
        return found

    def _wait_for_others_to_undo(self) -> None:
        """Wait until failed passes of the context have restored `.grad`."""
        context = self.context
        with context.lock:
            others = list(context.writers)
            context.writers.add(self)
        for other in others:
            other.wait_until_undone(self.deadline)
            if other.error is not None:
                context.writers.discard(other)

    # -- running

    def drive(self) -> None:
        """Do all work of the pass that can be done now, on this thread, and send the results to
        other workers. A thread that adds work later must call this method itself."""
        while self.error is None and (self._state.has_work() or self._unheard):
            self._run_ready(gated=True)
            if not self._exchange():
                self._accumulate()

    def _run_ready(self, *, gated: bool) -> None:
        """Run the regions (parts of the graph) that can run. `gated`: also run regions that must
        wait for gradients in the middle of their run."""
        state = self._state
        while state.ready or state.to_myself:
            with self._lock:
                region = None if self.error is not None else state.next_region(gated)
                if self._changed is not None:
                    self._notify()
                if region is None:
                    return
                run = RegionRun(region, state, self.options)
                if self._into_grad:
                    self._backup = self._backup or GradBackup()
                    self._backup.remember(region.leaves)
                self._running += 1
            found: RunGradients = ()
            failure: BaseException | None = None
            try:
                found = self._run(run)
            except BaseException as error:
                failure = self._explain(error, region)
            with self._lock:
                self._running -= 1
                if failure is None and self.phase is _BEGUN:
                    state.take_run(region, run.recv_nodes, found)
                if self.error is not None:
                    self._undo_if_failed()
            if failure is not None:
                self.fail(failure)

    def _run(self, run: RegionRun) -> RunGradients:
        deliver = self._deliver_at_once if run.gates else self._deliver
        versions = self._port.versions
        # An optimizer may have changed parameters without raising torch's version counters. They
        # are raised now, because torch compares them to detect that a saved tensor has changed.
        if versions.uncounted:
            versions.count_changes()
        if self.options.create_graph:
            # The run saves tensors for the next derivative. The saved tensors must be protected
            # (see `copy_on_write`), because an optimizer may change parameters before that
            # derivative is computed.
            recording = versions.recording()
            if recording is not None:
                with recording:
                    return run.run(self._wait_at_gate, deliver, self._into_grad)
        return run.run(self._wait_at_gate, deliver, self._into_grad)

    def _deliver(self, message_id: int, position: int, gradient: Gradient) -> None:
        """Store the gradient of a received tensor, in the middle of the run that computes it."""
        with self._lock:
            self._state.settle(message_id, position, gradient)

    def _deliver_at_once(self, message_id: int, position: int, gradient: Gradient) -> None:
        """Store the gradient of a received tensor, in the middle of the run that computes it, and
        send it. The other worker can then go on while this run waits for another gradient."""
        self._deliver(message_id, position, gradient)
        self._send_messages()

    def _wait_at_gate(self, send: Send) -> Gradients | None:
        """In the middle of a run of torch's engine, wait until the sent message `send` is answered.
        Return the gradients of its tensors."""
        answers = self._state.answers
        if send.id not in answers and self.error is None:
            waits = self._port.gate_waits
            waits.append(send)
            try:
                while send.id not in answers and self.error is None:
                    if not self._exchange():
                        # This thread is in the middle of running a region (part of the graph), so
                        # another thread must run the other regions.
                        if self._state.ready:
                            self._drive_elsewhere()
                        self._wait_until(lambda: send.id in answers)
            finally:
                waits.remove(send)
        if self.error is not None:
            raise GradwireError("the backward pass was given up") from self.error
        return answers[send.id]

    def _drive_elsewhere(self) -> None:
        self._port.run_elsewhere(self.drive)

    def _accumulate(self) -> None:
        """When all other work on this worker is done, let torch accumulate the gradients of leaves
        whose hooks need that (see `leaf_accumulation`)."""
        if not self._reached:
            return
        groups = self._leaf_groups
        with self._lock:
            if self.error is not None or not self._state.begin_accumulation():
                return
            leaf_ids = {id(leaf) for group in groups for leaf in group.leaves}
            found = add_up({}, self._state.take_gradients_of(leaf_ids))
            self._running += 1
        gradients: list[LeafGradient] = []
        failure: BaseException | None = None
        try:
            # A hook may block, for example in an allreduce. While it does, another thread must
            # serve the calls that arrive.
            with self._port.blocking():
                # Torch adds the new gradients to those of earlier passes. So this worker must first
                # learn which earlier passes have succeeded.
                self._port.learn_outcomes(self.context)
                before = self.context.gradient_sums()
                for group in groups:
                    gradients += accumulate(group, self._reached, found, before)
        except BaseException as error:
            failure = error
        with self._lock:
            if failure is None:
                self._state.end_accumulation(gradients)
            self._running -= 1
            self._notify()
        if failure is not None:
            self.fail(failure)

    # -- messages

    def receive(self, sender: int, message: PassMessage, answers_first: bool = False) -> None:
        """Handle a message of the pass from the worker `sender`. `answers_first`: the message is
        the sender's answer to this worker's first message to it."""
        # This thread must wait for the plan. Another thread may still be making it. In a pass
        # started by `grad`, the message that says which tensors this worker must handle may not
        # have arrived yet.
        if not self._state.planned:
            self._wait_until(lambda: self._state.planned)
            if not self._state.planned:
                return  # The pass failed before it was planned, so the message is of no use.
        with self._lock:
            if self.phase is not _BEGUN:
                return
            self._state.receive(sender, message, answers_first)
            if self._changed is not None:
                self._notify()

    def _exchange(self) -> bool:
        """Send the messages that are ready. Wait for one answer, unless no answer is expected.
        Return whether this worker may have more to do now."""
        if self.error is not None:
            return False
        if self._state.to_myself:
            with self._lock:
                if self.error is None and self._state.take_own_messages():
                    self._notify()
                    return True
        self._send_messages()
        try:
            worker, first, call = self._unheard.pop(0)
        except IndexError:
            return False
        try:
            value, gradients = self.hear(call)
            # This line does the same as `unpack_message`, but saves the time of a function call.
            answer = make_message((*value, gradients))
        except BaseException as error:
            self._fail_unless_finished(error)
            return False
        self.receive(worker, answer, first)
        return True

    def _send_messages(self) -> None:
        """Send the messages that are ready for other workers."""
        with self._lock:
            messages = [] if self.error is not None else self._state.next_messages()
            if self._changed is not None:
                self._notify()
        if not messages:
            return
        # This thread will read the last answer itself. That is faster than to have another thread
        # read the answer and wake this one.
        last = -1 if self.finished else len(messages) - 1
        context, options = self.context, self.options
        failures = context.failures() if context.into_grad else ()
        recorded_in = context if options.create_graph else None
        try:
            for index, (worker, first, message) in enumerate(messages):
                seconds = self.seconds_left()
                sent_options = (*options[:3], seconds) if seconds else options
                share = self._shares.pop(worker, None) if self._shares else None
                packed = pack_request(context.id, self.id, sent_options, failures, share, message)
                if index != last:
                    future = self._port.tell(worker, packed, seconds, recorded_in)
                    future.at_once(partial(self._hear_later, worker, first))
                    continue
                call = self._port.ask(worker, packed, seconds, recorded_in)
                self._asked.add(call)
                self._unheard.append((worker, first, call))
                # The pass has failed in the meantime, so no thread will wait for this answer.
                if self.error is not None:
                    self._give_up_calls()
        except BaseException as error:
            self._fail_unless_finished(error)

    def _hear_later(self, worker: int, answers_first: bool, future: Future[Any]) -> None:
        """Handle the answer of another worker. This is a callback, because no thread waits for the
        answer."""
        error = future.exception()
        if error is not None:
            self._fail_unless_finished(error)
        else:
            self.receive(worker, unpack_message(*future.value()), answers_first)
            # The thread that runs this callback must go on reading messages for the whole worker.
            # So another thread goes on with the pass.
            self._drive_elsewhere()

    def reply_to(self, request: Request) -> None:
        """Do all work of the pass that needs no waiting. Then answer a message of another
        worker."""
        self._run_ready(gated=False)
        with self._lock:
            error = self.error
            if error is None:
                message = self._state.message_for(request.caller.id)
                if self._changed is not None:
                    self._notify()
        if error is not None:
            request.fail(error, "the backward pass")
        else:
            recorded_in = self.context if self.options.create_graph else None
            self._port.answer(request, message, recorded_in)

    def hear(self, call: OpenCall) -> Any:
        """Wait for the answer to a message, unless the pass fails first."""
        self._asked.add(call)
        try:
            if self.error is not None:
                self._give_up_calls()
            return self._port.hear(call)
        finally:
            self._asked.discard(call)

    def _give_up_calls(self) -> None:
        """Stop waiting for all open requests. Threads that wait for their answers then fail."""
        for call in list(self._asked):
            call.give_up()

    # -- waiting

    def wait(self) -> None:
        """Wait until the pass is done on all workers. Only the worker that started the pass calls
        this. Raise if the pass has failed."""
        if not self.finished:
            self._wait_until(lambda: self.finished)
        if self.error is not None:
            raise self.error

    def wait_until_over(self) -> None:
        """Wait until the gradients are visible, or the pass has failed."""
        with self._lock:
            self._wait(lambda: self.phase is _SUCCEEDED)

    def wait_until_told(self, deadline: float) -> None:
        """If the pass has failed, wait until the thread that noticed the failure has told the other
        workers. They must hear of the failure before they hear of the next pass."""
        with self._lock:
            self._wait_for(lambda: self.phase is PassPhase.FAILED or self.error is None, deadline)

    def wait_until_undone(self, deadline: float) -> None:
        """If the pass has failed, wait until no thread runs or accumulates anything for the pass,
        because such a thread may still change `.grad`."""
        with self._lock:
            self._wait_for(lambda: not self._running or self.error is None, deadline)

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready` returns true, or the pass fails. If neither happens before the
        deadline of the pass, fail the pass."""
        with self._port.blocking(), self._lock:
            self._wait(ready)
        if not ready() and self.error is None:
            self.fail(
                CallTimeout(
                    f"the backward pass has not ended within {self.options.seconds:g} s; it waits "
                    f"for {self._missing()}. Find out why that takes so long, or pass a longer "
                    "timeout"
                )
            )

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready` returns true, the pass fails, or its deadline comes. The caller holds
        the lock."""
        self._wait_for(lambda: ready() or self.error is not None, self.deadline)

    def _wait_for(self, ready: Callable[[], bool], deadline: float) -> None:
        """Wait until `ready` returns true, or until `deadline`. The caller holds the lock, which is
        free during the wait."""
        if self._changed is None:
            self._changed = threading.Condition(self._lock)
        left = deadline - time.monotonic()
        self._changed.wait_for(ready, None if left == FOREVER else max(0.0, left))

    def _notify(self) -> None:
        """Wake the threads that wait for a change of this pass. The caller holds the lock. Code
        that runs for every message first checks `_changed` itself, which usually saves the call."""
        if self._changed is not None:
            self._changed.notify_all()

    def awaited(self) -> set[int]:
        """Return the workers that this worker's part of the pass waits for."""
        with self._lock:
            if self.finished or self.error is not None:
                return set()
            return self._state.awaited()

    def _missing(self) -> str:
        known = self._port.worker_names()
        names = [repr(known.get(worker, worker)) for worker in self.awaited()]
        return "workers " + ", ".join(sorted(names)) if names else "its own part"

    # -- success

    def succeed(self) -> list[LeafGradient]:
        """Make the gradients visible, now that the pass has succeeded on all workers, and return
        them. Other workers hear of the success in the next call to them, or when they ask. Raise if
        the pass has failed, or if its context was released."""
        context = self.context
        with context.lock:
            if context.passes.get(self.id) is not self and self.error is None:
                raise GradwireError(f"autograd context {context.id} was released")
            found, received = self._commit()
            del context.passes[self.id]
            if context.writers:
                context.writers.discard(self)
            context.note_outcome(self.id, None)
            if not self.options.for_inputs:
                context.add_gradients(found, received)
                accumulated = self._state.accumulated
                if accumulated:
                    context.set_gradients(accumulated)
        with self._lock:
            self.phase = _SUCCEEDED
            self._notify()
        return found + received

    def _commit(self) -> tuple[list[LeafGradient], list[LeafGradient]]:
        """Make sure that the pass can no longer fail. Return the gradients computed on this worker,
        and those received from others. Raise if the pass has already failed."""
        with self._lock:
            if self.error is not None:
                raise self.error
            self.phase = _COMMITTED
            state = self._state
            gradients = state.found, state.received
            state.found, state.received = [], []
            self._backup = None
        return gradients

    # -- failure

    def fail(self, error: BaseException) -> None:
        """Give the pass up on all workers, unless it has already succeeded or failed."""
        with self._lock:
            if PassPhase.FAILING not in NEXT_PHASES[self.phase]:
                return
            self.error = error
            self.phase = PassPhase.FAILING
            self._state.found, self._state.received = [], []
            self._undo_if_failed()
            self._notify()
        try:
            self._give_up_calls()
            reason = self._port.encode_failure(error)
            context = self.context
            if context.end_failed_pass(self.id, reason):
                self._port.report_failure(context.id, self.id, reason, self.involved)
        finally:
            with self._lock:
                self.phase = PassPhase.FAILED
                self._notify()

    def _fail_unless_finished(self, error: BaseException) -> None:
        """Fail the pass because a message to another worker failed with `error`. Do nothing if this
        worker's part is finished and the other worker has released the context, because then the
        pass has succeeded."""
        if self.finished and isinstance(error, ContextReleased):
            return
        self.fail(error)

    def _undo_if_failed(self) -> None:
        """If the pass has failed, and none of its threads can change `.grad` any more, undo its
        changes: give each leaf the `.grad` tensor that it had before the pass, with the values of
        that time. The caller holds the lock."""
        if self._running or self.error is None:
            return
        if self._backup is not None:
            self._backup.restore()
        self._notify()

    def _explain(self, error: BaseException, region: Region) -> BaseException:
        """Add a note to `error`, and return `error`. The note says which user code built the
        region (part of the graph) that failed. It names the functions whose results the region
        computed. If there are none, it names the functions whose arguments the region computed."""
        about = [source.about for source in region.sources if isinstance(source, Send)]
        ran_here = [call for call in about if not isinstance(call, tuple)]
        places = [_place(call) for call in ran_here or [call for (call,) in about]]
        if places:
            name = self._port.info.name
            what = "" if ran_here else "what was sent to "
            where = ", ".join(list(dict.fromkeys(places))[:3])
            add_note(error, f"in the backward pass on worker {name!r}, of {what}{where}")
        return error


def _place(call: Any) -> str:
    """Return the name of a function, with the file and line of its definition if known."""
    code = getattr(call, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    return call_name(call) + where
