"""What a pass has to do on one worker, and how far that has got: pure bookkeeping.

A ledger belongs to a pass, which calls it with its lock held. It knows the regions of the plan, the
sends that wait for answers and the answers of recvs that are being put together, and what others
must be told. When all of it is done is between it and its `Family`; what can be said of gradients
before they come is with its `Prospects`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from gradwire.gradients.family import Family
from gradwire.gradients.functions import NOTHING, OPEN, PASSED_ON, Gradient, Send
from gradwire.gradients.graph import Anchor, Plan, Region, Reply, Root
from gradwire.gradients.news import Answer, News, Shortcut, put_beside, take_from
from gradwire.gradients.prospects import Prospects

if TYPE_CHECKING:
    from gradwire.gradients.accumulation import Group


class How(NamedTuple):
    """What kind of a pass it is; everybody who takes part must know."""

    retain_graph: bool = False
    create_graph: bool = False
    #: Gradients are wanted for given tensors where the pass was started, and for no leaves: it has
    #: to do with what is on the way to those (see `survey`).
    for_inputs: bool = False
    #: How long it may take from now on; 0: for ever.
    seconds: float = 0.0


class Ledger:
    """See the module's text."""

    def __init__(self, me: int, parent: int | None, how: How, *, into_grad: bool = False):
        self.me = me
        self.family = Family(parent)
        self._how = how
        #: Torch puts gradients into `.grad`, and has to run all there is.
        self._into_grad = into_grad
        self.planned = False
        #: How many regions have to run, recvs to answer and sends to be answered; before there is
        #: a plan, that.
        self._left = 1
        #: By send: the answer once it is there.
        self.answers: dict[int, list[Gradient] | None] = {}
        self.ready: list[Region] = []
        #: Answers that others must hear, and what there is for this worker itself.
        self._outbox: dict[int, tuple[list[Answer], list[Tensor]]] = {}
        self.to_myself: list[Callable[[], None]] = []
        self._prospects: Prospects | None = None
        #: Gradients of leaves, not visible yet, to add to those there are: found here, and sent by
        #: others, which are in memory of their own; and those to have instead.
        self.found: list[tuple[Tensor, Tensor]] = []
        self.received: list[tuple[Tensor, Tensor]] = []
        self.accumulated: Sequence[tuple[Tensor, Tensor]] = ()
        #: What torch has to accumulate once all else is done; see `accumulation`.
        self._groups: Sequence[Group] = ()
        self._accumulating = False

    @property
    def prospects(self) -> Prospects:
        if self._prospects is None:
            self._prospects = Prospects(self)
        return self._prospects

    def close(self) -> None:
        """It is not needed any more: do not leave a circle behind."""
        self._prospects = None

    # -- planning

    def open(
        self,
        plan: Plan,
        known: set[int],
        wanted: Sequence[Tensor] = (),
        groups: Sequence[Group] = (),
    ) -> None:
        """Take over a plan. `known` are the workers to tell, `wanted` the tensors whose gradients
        are asked for, if not all leaves are; `groups` have leaves among those of the plan."""
        self.plan = plan
        self.sends, self.replies = plan.sends, plan.replies
        self._wanted = {id(tensor) for tensor in wanted} if wanted else ()
        self._groups = groups
        for message in plan.empty:
            self._post(self.replies.pop(message).sender, message, None)
        self._left = len(plan.regions) + len(self.replies) + len(self.sends)
        for recv, position in plan.unreached:
            self.settle(recv.id, position, None)
        if self.me in known:
            self._answer_unknown(self.me, self._unanswered(self.me))
            known.remove(self.me)
        self.family.untold = known
        for region in plan.regions:
            if region.has_gradient:
                self.consider(region)
        self.planned = True
        self._conclude()

    def consider(self, region: Region) -> None:
        """Have a region run if it can: when all its sources are answered, or at least it is known
        where gradients will come to."""
        if region.queued:
            return
        if region.out:
            if not region.has_gradient or not region.anchors:
                return
            if not self.prospects.look_into(region).is_known:
                if not region.asking:
                    self.prospects.ask_about(region)
                return
        region.queued = True
        if not region.out and (region.bypassed or (not self._into_grad and region.is_straight())):
            self._pass_on(region)
        else:
            self.ready.append(region)

    def _pass_on(self, region: Region) -> None:
        """A straight region has nothing to run."""
        source, position, _ = region.starts[0]
        gradient: Gradient
        if type(source) is Root:
            gradient = source.gradient
        else:
            answer = self.answers[source.id]
            gradient = answer[position] if answer and position < len(answer) else None
            self.answers[source.id] = None  # used up
        recv, received = region.anchors[0]
        if gradient is PASSED_ON:  # whoever would be answered has it
            del self.replies[recv.id]
            self._left -= 1
        else:
            self.settle(recv.id, received, gradient)
        self._left -= 1

    def _shortcuts(self, worker: int) -> list[Shortcut]:
        """What comes from a worker, and would go back there as it is."""
        if self._into_grad or self._how.create_graph:
            return []
        found = []
        for region in self.plan.regions:
            if region.out != 1 or not region.is_straight():
                continue
            source, position, _ = region.starts[0]
            recv, _ = region.anchors[0]
            assert type(source) is Send
            reply = self.replies.get(recv.id)
            if reply and len(reply.gradients) == 1 and source.to == recv.sender == worker:
                region.bypassed = True
                found.append((source.id, position, recv.id))
        return found

    def _unanswered(self, worker: int) -> list[int]:
        found = []
        for id, send in self.sends.items():
            if send.to == worker and id not in self.answers:
                found.append(id)
        return found

    def next_region(self, gated: bool) -> Region | None:
        """A region to run; one that has to wait at gates only if asked for."""
        if self.to_myself:
            self.take_own_answers()
        ready = self.ready
        for number, region in enumerate(ready):
            if not region.out:
                return ready.pop(number)
        return ready.pop(0) if gated and ready else None

    def take_run(
        self, region: Region, anchors: Sequence[Anchor], found: Sequence[Tensor | None]
    ) -> None:
        """Take what the run of a region has brought: the gradients of its leaves and of anchors, as
        far as they have not got here on the way. What it has not come to has none."""
        gradients = iter(found)
        for leaf in region.leaves:
            gradient = next(gradients, None)
            if gradient is not None and self._is_wanted(leaf):
                self.found.append((leaf, gradient))
        for recv, position in anchors:
            brought: Gradient = next(gradients, NOTHING)
            if brought is NOTHING:
                brought = None
            elif brought is None:  # backward has not come there, or with nothing
                reach = self.prospects.look_into(region)
                brought = NOTHING if reach.includes(recv.anchors[position]) else None
            self.settle(recv.id, position, brought)
        for source in region.sources:
            # (One may be still to come: with gradients for loose ends, but none for the region.)
            if source.id in self.answers:
                self.answers[source.id] = None  # used up
        self._left -= 1
        self._conclude()

    def open_anchors(self, region: Region) -> Sequence[Anchor]:
        """The anchors of a region whose gradients are not known yet."""
        found = []
        for recv, position in region.anchors:
            reply = self.replies.get(recv.id)
            if reply is not None and reply.gradients[position] is OPEN:
                found.append((recv, position))
        return found

    # -- answers

    def take(self, sender: int, news: News, was_told: bool) -> None:
        """Take in what another worker has to tell. `was_told`: it answers our first message."""
        (sends, shortcuts, answers, standing, questions, prospects), gradients = news
        self.family.hear_from(sender, standing, was_told)
        if sends:
            self._answer_unknown(sender, sends)
        for id, position, message in shortcuts:
            reply = self.replies.get(id)  # which has fewer tensors if it was just arriving
            if reply and message in self.sends and position < len(reply.gradients):
                reply.shortcut = position, message
        beside = iter(gradients)
        for id, places in answers:
            self._take_answer(id, take_from(beside, places), self.received)
        for id, positions in prospects:
            self.prospects.take(id, positions)
        for id in questions:
            self.prospects.take_question(id)
        self._conclude()

    def _answer_unknown(self, sender: int, sends: Sequence[int]) -> None:
        """Sends that never got here have no gradients."""
        for id in sends:
            if id not in self.plan.recvs:
                self._post(sender, id, None)

    def _post(self, to: int, id: int, gradients: list[Gradient] | None) -> None:
        if to == self.me:
            self.to_myself.append(partial(self._take_answer, id, gradients, self.found))
            return
        if to not in self._outbox:
            self._outbox[to] = [], []
        answers, beside = self._outbox[to]
        answers.append((id, put_beside(beside, gradients)))

    def take_own_answers(self) -> bool:
        if not self.to_myself:
            return False
        while self.to_myself:
            self.to_myself.pop()()
        self._conclude()
        return True

    def _take_answer(
        self,
        id: int,
        gradients: list[Gradient] | None,
        of_leaves: list[tuple[Tensor, Tensor]],
    ) -> None:
        """A send is answered. Gradients of loose ends are added to those `of_leaves`."""
        send = self.sends.get(id)
        if send is None or id in self.answers:
            return
        self.answers[id] = gradients
        self._left -= 1
        given = gradients or []
        loose = self.plan.loose.get(id, ())
        for position in loose:
            gradient = given[position] if position < len(given) else None
            if gradient is None:
                continue
            given[position] = None  # it belongs nowhere else
            leaf = send.ends[position]
            if gradient is not NOTHING and self._is_wanted(leaf):
                of_leaves.append((leaf, gradient))
        region = self.plan.region_of(id)
        if region is None:
            return
        region.out -= 1
        if region.queued:
            return  # it waits for it
        count = len([gradient for gradient in given if gradient is not None])
        region.has_gradient |= count > 0
        reach = region.reach
        expected = count + len(loose) == len(send.ends) if reach is None else reach.is_known
        if region.anchors and not expected:
            self.prospects.take_answer(region, send, gradients)
        self.consider(region)

    def settle(self, message: int, position: int, gradient: Gradient) -> None:
        """The gradient of one received tensor is known; with the last one the recv answers."""
        reply = self.replies.get(message)
        if reply is None or reply.gradients[position] is not OPEN:
            return
        if gradient is not None:
            reply.has_gradient = True
            if gradient is not NOTHING and gradient.requires_grad and not self._how.create_graph:
                gradient = gradient.detach()
        reply.gradients[position] = gradient
        reply.open -= 1
        if not reply.open:
            del self.replies[message]
            self._left -= 1
            if reply.shortcut is not None:
                self._take_shortcut(reply, *reply.shortcut)
            self._post(reply.sender, message, reply.gradients if reply.has_gradient else None)

    def _take_shortcut(self, reply: Reply, position: int, send: int) -> None:
        """Keep the gradient that would come back, and go on with it."""
        gradient = reply.gradients[position]
        if gradient is not None:
            reply.gradients[position] = PASSED_ON
            self.to_myself.append(partial(self._take_answer, send, [gradient], self.found))

    def _is_wanted(self, leaf: Tensor) -> bool:
        return not self._how.for_inputs or id(leaf) in self._wanted

    # -- accumulating

    def take_groups(self) -> Sequence[Group]:
        """The groups to accumulate, once; when all their gradients are known, and nobody waits for
        anything from here."""
        if not self._can_accumulate() or self._outbox or self.family.untold:
            return []
        groups, self._groups = self._groups, ()
        self._accumulating = True
        return groups

    def _can_accumulate(self) -> bool:
        return bool(self._groups) and not self._left and not self.to_myself

    def take_gradients_of(self, groups: Sequence[Group]) -> list[tuple[Tensor, Tensor]]:
        """The gradients of groups of leaves; they are not among the others any more."""
        members = {id(leaf) for group in groups for leaf in group.leaves}
        taken = [pair for pair in self.found + self.received if id(pair[0]) in members]
        self.found = [pair for pair in self.found if id(pair[0]) not in members]
        self.received = [pair for pair in self.received if id(pair[0]) not in members]
        return taken

    def has_accumulated(self, gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.accumulated = gradients
        self._accumulating = False
        self._conclude()

    # -- telling others

    def all_news(self) -> list[tuple[int, bool, News]]:
        """What has to be told, to whom, and whether it is the first that worker is told."""
        family = self.family
        workers = {*family.untold, *self._outbox}
        if self._prospects is not None:
            workers |= self._prospects.whom_to_tell()
        if family.parent is not None and family.owes_parent():
            workers.add(family.parent)
        news = []
        for worker in workers:
            first = family.expect(worker)
            news.append((worker, first, self.news_for(worker)))
        return news

    def news_for(self, worker: int) -> News:
        sends: list[int] = []
        shortcuts: list[Shortcut] = []
        if self.family.tell(worker):
            sends, shortcuts = self._unanswered(worker), self._shortcuts(worker)
        self._conclude()  # now that this one is told
        standing = self.family.standing_to(worker)
        answers, gradients = self._outbox.pop(worker, ([], []))
        if self._prospects is None:
            return (sends, shortcuts, answers, standing, [], []), gradients
        prospects = self._prospects.news_for(worker)
        return (sends, shortcuts, answers, standing, *prospects), gradients

    def _conclude(self) -> None:
        """See whether this worker's part has come to its end, when anything has changed."""
        if not self._left and not (self.to_myself or self._groups or self._accumulating):
            self.family.conclude()

    def has_work(self) -> bool:
        """Whether there is something to drive."""
        return bool(
            self.ready
            or self._outbox
            or self.family.untold
            or self.to_myself
            or (self._prospects is not None and self._prospects.whom_to_tell())
            or self._can_accumulate()
            or self.family.owes_parent()
        )

    def awaited(self) -> set[int]:
        """The workers that must do something before this one can be done."""
        if not self.planned:
            # Who says with what to begin; or this worker itself, in a moment.
            return set() if self.family.parent is None else {self.family.parent}
        owing = {send.to for id, send in self.sends.items() if id not in self.answers}
        return owing | self.family.waits_for
