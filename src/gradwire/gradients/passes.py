"""Backward passes.

The rules, for one pass on one worker:

1. Every recv answers its send exactly once: with gradients, or with none.
2. Everybody is told. The worker where `backward` is called tells those it knows in the context,
   they tell theirs; whoever told a worker first is its parent. A worker whose own part is done, and
   that of all its children, says so to its parent.
3. A region (see `graph`) runs through torch's own engine when all its sources are answered; or, if
   it holds anchors, as soon as one source has a gradient and it is known where in the region
   gradients will come to. Mostly that one alone says it: they come to the others from there. If
   not, it takes the *prospects* of those, which follow from the graphs (see `reach`) and are asked
   for. The sources still out are *gates*: the run waits at them, last of all and the newest first,
   so that every wait is for something that happened later in the forward pass, and no circle of
   waits can close.
4. Sources that no gradient comes to are left out. An anchor that is reached only from such sources
   has no gradient, whether or not its region has run.
5. A pass for given tensors (`grad`) has to do with what is on the way to those, nothing else. The
   worker that starts it finds that out beforehand (see `survey`). It is the parent of all others,
   and gives each its share of that, with which it can begin.
6. Where something was received and sent back as it is, its gradient would go back as it is too. The
   other worker is told so when it is told of the pass, and takes the *shortcut*: it has that
   gradient already. A chain of calls to one worker is one message and its answer.

Messages are requests and are answered at once: after what can be done without waiting was done,
before any gate is waited at. What the worker has for the sender by then rides on the answer, so a
thread that asks in turn for one gradient after the other finds each in the answer to its message.

No gradient is visible before the pass has ended everywhere; if anything goes wrong anywhere, it is
given up everywhere and leaves nothing behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradwire.agent.exceptions import add_note
from gradwire.agent.futures import Future
from gradwire.agent.opencall import OpenCall
from gradwire.agent.service import Request
from gradwire.errors import CallTimeout, ContextReleased, GradwireError
from gradwire.gradients.accumulation import Group, accumulate, touched
from gradwire.gradients.context import Context, add_up
from gradwire.gradients.functions import Gradient, Gradients, Send, SentTensor
from gradwire.gradients.graph import Plan, Region, Root
from gradwire.gradients.ledger import How, Ledger
from gradwire.gradients.news import News
from gradwire.gradients.runs import Found, GradBackup, Run
from gradwire.gradients.survey import Shares
from gradwire.wire.values import call_name

if TYPE_CHECKING:
    from gradwire.gradients.engine import Engine

FOREVER = float("inf")


class Pass:
    """One backward pass on one worker."""

    # What few passes change.
    _over = False
    _committed = False
    #: All who know of it have been told of its failure.
    _failure_told = False
    #: The leaves that this pass may have gradients for, by id, if some of them are in groups.
    _reached: Collection[int] = ()
    #: What others must know to begin.
    _shares: Shares | None = None
    #: What `.grad` was.
    _backup: GradBackup | None = None

    def __init__(self, engine: Engine, context: Context, id: int, how: How, parent: int | None):
        self.id = id
        self.context = context
        self.how = how
        self.deadline = time.monotonic() + how.seconds if how.seconds else FOREVER
        self._engine = engine
        self._lock = threading.Lock()
        #: Made when somebody has to wait.
        self._changed: threading.Condition | None = None
        self._into_grad = context.into_grad and not how.for_inputs
        self._ledger = Ledger(engine.agent.info.id, parent, how, into_grad=self._into_grad)
        self.error: BaseException | None = None
        #: Messages whose answers threads wait for, or will; and those nobody waits for yet, with
        #: the worker they went to and whether it was told for the first time.
        self._asked: set[OpenCall] = set()
        self._unheard: list[tuple[int, bool, OpenCall]] = []
        #: Regions that are being run.
        self._running = 0
        self._begun = parent is None

    @property
    def changes_grad(self) -> bool:
        """Whether it changes `.grad` here, if only for a while."""
        return self._into_grad or bool(self._reached)

    @property
    def started_here(self) -> bool:
        return self._ledger.family.parent is None

    @property
    def finished(self) -> bool:
        """This worker's part is done, and so are those it has told of the pass."""
        return self._ledger.family.finished

    def seconds_left(self) -> float:
        """For what is sent to others; 0: for ever."""
        return max(0.001, self.deadline - time.monotonic()) if self.how.seconds else 0.0

    @property
    def involved(self) -> set[int]:
        """Everybody who knows of the pass, as far as this worker knows."""
        return self._ledger.family.involved

    def is_first(self, share: Collection[SentTensor] | None) -> bool:
        """Whether who has heard of the pass now is to begin it; the context's lock is held. Others
        than the worker that started it do not know one's share in a pass for inputs."""
        if self._begun or (self.how.for_inputs and share is None):
            return False
        self._begun = True
        return True

    def begin(
        self,
        roots: Sequence[Root] = (),
        inputs: Sequence[Tensor] = (),
        shares: Shares | None = None,
    ) -> None:
        """Find out what there is to do here. `shares` are needed if the pass is for inputs: the own
        one, and where it is started those of all others."""
        context = self.context
        if context.into_grad:
            self._wait_for_others_to_undo()
        if shares is None:
            plan = context.take_plan()
            plan.add(context.sends, context.recvs)
            known = set(context.known)  # last: whom something was sent to is among them
        else:
            others = self._shares = dict(shares)
            share = others.pop(self._engine.agent.info.id)
            messages = {message for message, _ in share}
            sends = {id: send for id, send in dict(context.sends).items() if id in messages}
            recvs = {id: recv for id, recv in dict(context.recvs).items() if id in messages}
            known = set(others)
            plan = Plan(inputs, loose=True, on_the_way=share)
            plan.add(sends, recvs)
        plan.finish(roots)
        groups: Sequence[Group] = ()
        if all_groups := self._engine.groups():
            groups = self._reached_of(all_groups, plan)
        with self._lock:
            self._ledger.open(plan, known, inputs, groups)
            if self._changed is not None:
                self._notify()

    def _reached_of(self, groups: Collection[Group], plan: Plan) -> Sequence[Group]:
        """Those of the worker's groups of leaves that this pass reaches."""
        if self._into_grad or self.how.for_inputs:
            return ()
        ends = [plan.sends[id].ends[n] for id, loose in plan.loose.items() for n in loose]
        leaves = [leaf for region in plan.regions for leaf in region.leaves]
        reached = {id(leaf) for leaf in [*leaves, *ends]}
        found = touched(groups, reached)
        if found:
            self._reached = reached
            if self.how.create_graph:
                raise GradwireError(
                    f"the gradients of {found[0]} go through hooks behind torch's accumulation, "
                    "and cannot be differentiated again: leave create_graph out"
                )
        return found

    def share_for(self, worker: int) -> Collection[SentTensor] | None:
        """What a worker must know to begin, if it has not been told."""
        return self._shares.pop(worker, None) if self._shares else None

    def take(self, sender: int, news: News, was_told: bool = False) -> None:
        """Take in what another worker has to tell. `was_told`: it answers our first message."""
        if not self._ledger.planned:  # another thread begins it, or will hear how
            self._wait_until(lambda: self._ledger.planned)
            if not self._ledger.planned:
                return  # it has failed before it could begin here
        with self._lock:
            if self._over:
                return
            self._ledger.take(sender, news, was_told)
            if self._changed is not None:
                self._notify()

    # -- running

    def drive(self) -> None:
        """Do all that can be done now, on this thread, and let others know. (Who adds to it from
        now on drives it too.)"""
        while self.error is None and (self._ledger.has_work() or self._unheard):
            self._run_ready(gated=True)
            if not self._exchange():
                self._accumulate()

    def _run_ready(self, *, gated: bool) -> None:
        """Run the regions that can; those that have to wait at gates only if asked to."""
        ledger = self._ledger
        while ledger.ready or ledger.to_myself:
            with self._lock:
                region = None if self.error is not None else ledger.next_region(gated)
                if self._changed is not None:
                    self._notify()
                if region is None:
                    return
                run = Run(region, ledger, self.how)
                if self._into_grad:
                    self._backup = self._backup or GradBackup()
                    self._backup.remember(region.leaves)
                self._running += 1
            found: Found = ()
            failure: BaseException | None = None
            try:
                found = self._run(run)
            except BaseException as error:
                failure = self._explain(error, region)
            with self._lock:
                self._running -= 1
                if failure is None and not self._over:
                    ledger.take_run(region, run.anchors, found)
                if self.error is not None:
                    self._undo_if_failed()
            if failure is not None:
                self.fail(failure)

    def _run(self, run: Run) -> Found:
        deliver = self._deliver_at_once if run.gates else self._deliver
        versions = self._engine.versions
        if versions.owed:  # what has changed since it was saved must be noticed
            versions.pay()
        if self.how.create_graph:
            # What the run saves, to be differentiated too, is there to stay.
            recording = versions.recording()
            if recording is not None:
                with recording:
                    return run.run(self._gate, deliver, self._into_grad)
        return run.run(self._gate, deliver, self._into_grad)

    def _accumulate(self) -> None:
        """See to the groups of leaves, last of all."""
        if not self._reached:
            return
        with self._lock:
            groups = [] if self.error is not None else self._ledger.take_groups()
            if not groups:
                return
            found = add_up({}, self._ledger.take_gradients_of(groups))
            self._running += 1
        gradients: list[tuple[Tensor, Tensor]] = []
        failure: BaseException | None = None
        try:
            # Hooks may wait for other workers in ways of their own.
            with self._engine.agent.executor.aside():
                self._engine.learn_outcomes(self.context)  # what earlier passes have found counts
                before = self.context.gradient_sums()
                for group in groups:
                    gradients += accumulate(group, self._reached, found, before)
        except BaseException as error:
            failure = error
        with self._lock:
            if failure is None:
                self._ledger.has_accumulated(gradients)
            self._running -= 1
            self._notify()
        if failure is not None:
            self.fail(failure)

    def _deliver(self, message: int, position: int, gradient: Gradient) -> None:
        with self._lock:
            self._ledger.settle(message, position, gradient)

    def _deliver_at_once(self, message: int, position: int, gradient: Gradient) -> None:
        """Others can go on with it while this run gets to its next gate."""
        self._deliver(message, position, gradient)
        self._tell()

    def _gate(self, send: Send) -> Gradients | None:
        """The gradients of what was sent; waits for them."""
        answers = self._ledger.answers
        while send.id not in answers and self.error is None:
            if not self._exchange():
                if self._ledger.ready:  # this thread is in the middle of a region
                    self._drive_elsewhere()
                self._wait_until(lambda: send.id in answers)
        if self.error is not None:
            raise GradwireError("the backward pass was given up") from self.error
        return answers[send.id]

    def _drive_elsewhere(self) -> None:
        agent = self._engine.agent
        agent.executor.submit(lambda: agent.run_in_context(self.drive))

    def _undo_if_failed(self) -> None:
        """Put back what `.grad` was, the very tensor with its values, once nothing here can change
        it any more."""
        if self._running or self.error is None:
            return
        if self._backup is not None:
            self._backup.restore()
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
        """Send what others must know, and hear an answer. True when there may be more to do here
        afterwards."""
        if self.error is not None:
            return False
        if self._ledger.to_myself:
            with self._lock:
                if self.error is None and self._ledger.take_own_answers():
                    self._notify()
                    return True
        self._tell()
        try:
            worker, first, call = self._unheard.pop(0)
        except IndexError:
            return False
        try:
            answer: News = self.hear(call)
        except BaseException as error:
            self._fail_unless_over(error)
            return False
        self.take(worker, answer, first)
        return True

    def _tell(self) -> None:
        """Send what others must know."""
        with self._lock:
            told = [] if self.error is not None else self._ledger.all_news()
            if self._changed is not None:
                self._notify()
        if not told:
            return
        # Reading the last answer oneself is faster than being woken by who reads it.
        last = None if self.finished else told.pop()
        try:
            for worker, first, news in told:
                future = self._engine.tell(self, worker, news)
                future.at_once(partial(self._hear_later, worker, first))
            if last is not None:
                worker, first, news = last
                call = self._engine.ask(self, worker, news)
                self._asked.add(call)
                self._unheard.append((worker, first, call))
                if self.error is not None:  # nobody will wait for it any more
                    self._give_up_asking()
        except BaseException as error:
            self._fail_unless_over(error)

    def _fail_unless_over(self, error: BaseException) -> None:
        """Something could not be told. If it is that others are done with the context, and so is
        this worker with its part, then all has gone well."""
        if self.finished and isinstance(error, ContextReleased):
            return
        self.fail(error)

    def _hear_later(self, worker: int, was_told: bool, future: Future[Any]) -> None:
        error = future.exception()
        if error is not None:
            self._fail_unless_over(error)
        else:
            self.take(worker, future.value(), was_told)
            self._drive_elsewhere()  # this thread may be in the middle of something

    def reply_to(self, request: Request) -> None:
        """Answer a message, with what there is for its sender once all is done that can be done
        without waiting."""
        self._run_ready(gated=False)
        with self._lock:
            error = self.error
            if error is None:
                news = self._ledger.news_for(request.caller.id)
                if self._changed is not None:
                    self._notify()
        if error is not None:
            request.fail(error, "the backward pass")
        else:
            self._engine.answer(self, request, news)

    # -- the end

    def wait(self) -> None:
        """On the worker that started the pass: return when it is done everywhere."""
        if not self.finished:
            self._wait_until(lambda: self.finished)
        if self.error is not None:
            raise self.error

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait for something, the failure of the pass, or its deadline."""
        with self._engine.agent.executor.aside(), self._lock:
            self._wait(ready)
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
        """Have those who wait look again. (Where it is called for every message, whether there are
        any is looked at first.)"""
        if self._changed is not None:
            self._changed.notify_all()

    def awaited(self) -> set[int]:
        """The workers that must do something before this one can be done."""
        with self._lock:
            if self.finished or self.error is not None:
                return set()
            return self._ledger.awaited()

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
            self._ledger.found, self._ledger.received = [], []
            self._undo_if_failed()
            self._notify()
        try:
            self._give_up_asking()
            self._engine.fail(self, error)
        finally:
            with self._lock:
                self._failure_told = True
                self._notify()

    def wait_until_told(self, deadline: float) -> None:
        """Wait for the thread that found out about the failure of the pass, and tells others. Who
        learns of the failure may begin anew, and they must not hear of that first."""
        with self._lock:
            self._wait_for(lambda: self._failure_told or self.error is None, deadline)

    def hear(self, call: OpenCall) -> Any:
        """Wait for the answer to a message, unless the pass fails first."""
        self._asked.add(call)
        try:
            if self.error is not None:
                self._give_up_asking()
            return self._engine.agent.hear(call)
        finally:
            self._asked.discard(call)

    def _give_up_asking(self) -> None:
        for call in list(self._asked):
            call.give_up()

    def commit(self) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
        """The gradients found here and received, once the whole pass has succeeded; from now on it
        cannot fail any more. Raises if it has failed."""
        with self._lock:
            if self.error is not None:
                raise self.error
            self._committed = True
            ledger = self._ledger
            gradients = ledger.found, ledger.received
            ledger.found, ledger.received = [], []
            self._backup = None
        return gradients

    @property
    def accumulated(self) -> Sequence[tuple[Tensor, Tensor]]:
        """The gradients that include what the context had before."""
        return self._ledger.accumulated

    def is_over(self) -> None:
        """Its outcome is known."""
        with self._lock:
            self._over = True
            self._notify()
        self.let_go()

    def let_go(self) -> None:
        """Leave no circles behind. (With no lock: the garbage collector may release a context, and
        come by here, wherever something is made.)"""
        self._ledger.close()

    def wait_until_over(self) -> None:
        with self._lock:
            self._wait(lambda: self._over)


def _place(call: Any) -> str:
    """A function and where it is defined."""
    code = getattr(call, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    return (call if isinstance(call, str) else call_name(call)) + where
