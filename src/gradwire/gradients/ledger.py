"""What a pass has to do on one worker, and how far that has got: pure bookkeeping.

A ledger belongs to a pass, which calls it with its lock held. It knows the regions of the plan, the
sends that wait for answers and the answers of recvs that are being put together, and what others
must be told. When all of it is done is between it and its `Family`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from gradwire.gradients.family import Family
from gradwire.gradients.functions import NOTHING, Gradient, Gradients, Recv, Send
from gradwire.gradients.graph import Anchor, Plan, Region, Root
from gradwire.gradients.news import Answer, News, Prospect
from gradwire.gradients.reach import Reach

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


OPEN: Any = object()  # in place of what is not known yet
_NOTHING: frozenset[int] = frozenset()


def _has(gradients: Gradients | None, position: int) -> bool:
    """Whether a tensor of a send has got a gradient."""
    if gradients is None or position >= len(gradients):
        return False
    return gradients[position] is not None


class _Reply:
    """The answer of a recv, while its gradients come in."""

    __slots__ = ("alive", "gradients", "has_gradient", "open", "sender", "told")

    def __init__(self, sender: int, size: int):
        self.sender = sender
        #: Which tensors gradients will come to, as far as known; whether the sender was told.
        self.alive: set[int] = set()
        self.told = False
        self.open = size
        self.gradients: list[Gradient] = [OPEN] * self.open
        self.has_gradient = False


class Ledger:
    """See the module's text."""

    def __init__(self, me: int, parent: int | None, how: How):
        self._me = me
        self.family = Family(parent)
        self._how = how
        self.planned = False
        self._sends: dict[int, Send] = {}
        self._wanted: set[int] = set()
        #: By send, which of its tensors are loose: they get what is sent back.
        self._loose: dict[int, set[int]] = {}
        #: By send: the region it is a source of, and the answer once it is there.
        self._region_of: dict[int, Region] = {}
        self.answers: dict[int, list[Gradient] | None] = {}
        self.ready: list[Region] = []
        self._unfinished = 0
        self._recv_ids: frozenset[int] = frozenset()
        self._replies: dict[int, _Reply] = {}
        #: Answers that others must hear, and those for this worker itself.
        self._outbox: dict[int, list[Answer]] = {}
        self._to_myself: list[Callable[[], None]] = []
        #: Which tensors of sends gradients will come to, as far as that is known; the sends others
        #: were asked about; and what they must hear in this matter.
        self.prospects: dict[int, set[int]] = {}
        self._asked: set[int] = set()
        self._questions: dict[int, list[int]] = {}
        self._prospects_for: dict[int, list[Prospect]] = {}
        self._regions: list[Region] = []
        self._region_of_anchor: dict[tuple[int, int], Region] = {}
        #: Gradients of leaves, not visible yet: to add to those there are, and to have instead.
        self.staged: list[tuple[Tensor, Tensor]] = []
        self.accumulated: list[tuple[Tensor, Tensor]] = []
        #: What torch has to accumulate once all else is done; see `accumulation`.
        self._groups: list[Group] = []
        self._accumulating = False

    # -- planning

    def open(
        self,
        plan: Plan,
        sends: Sequence[Send],
        recvs: Sequence[Recv],
        known: set[int],
        wanted: Sequence[Tensor],
        groups: Sequence[Group] = (),
    ) -> None:
        """Take over a plan. `known` are the workers to tell, `wanted` the tensors whose gradients
        are asked for, if not all leaves are; `groups` have leaves among those of the plan."""
        self._wanted = {id(tensor) for tensor in wanted}
        self._groups = list(groups)
        self._sends = {send.id: send for send in sends}
        self._loose = plan.loose
        self.prospects = plan.prospects
        self._replies = {recv.id: _Reply(recv.sender, plan.sizes[recv.id]) for recv in recvs}
        self._recv_ids = frozenset(self._replies)
        self._regions = plan.regions
        for region in plan.regions:
            for source in region.sources:
                if type(source) is Send:
                    self._region_of[source.id] = region
                    region.out += 1
            region.has_gradient = region.out < len(region.sources)
        self._unfinished = len(plan.regions)
        for recv in recvs:
            if not plan.sizes[recv.id]:  # what it carried could not be decoded, or not yet
                self.settle(recv.id, 0, None)
        for recv, position in plan.unreached:
            self.settle(recv.id, position, None)
        if self._me in known:
            self._answer_unknown(self._me, self._unanswered(self._me))
        self.family.untold = known - {self._me}
        for region in plan.regions:
            self._consider(region)
        self.planned = True
        self._conclude()

    def _consider(self, region: Region) -> None:
        """Have a region run if it can: when all its sources are answered, or have gradients to
        come, so that a run knows at which to wait."""
        if region.queued:
            return
        if region.out:
            if not region.has_gradient or not region.anchors:
                return
            if not region.asking:
                self._ask_about(region)
            if not self._look_into(region).is_known:
                return
        region.queued = True
        self.ready.append(region)

    def _unanswered(self, worker: int) -> list[int]:
        answers = self.answers
        return [id for id, send in self._sends.items() if send.to == worker and id not in answers]

    def next_region(self, *, gated: bool) -> Region | None:
        """A region to run; one that has to wait at gates only if asked for."""
        if self._to_myself:
            self.take_own_answers()
        for region in self.ready:
            if not region.out:
                break
        else:
            if not gated or not self.ready:
                return None
            region = self.ready[0]
        self.ready.remove(region)
        return region

    def settle_missing(self, region: Region, recv: Recv, position: int) -> None:
        """A run has brought an anchor no gradient: backward has not come there, or with nothing."""
        comes_there = self._look_into(region).includes(recv.anchors[position])
        self.settle(recv.id, position, NOTHING if comes_there else None)

    def has_run(self, region: Region) -> None:
        """Backward has not come to what its run has brought nothing."""
        for recv, position in region.anchors:
            if recv.id in self._replies:
                self.settle(recv.id, position, None)
        for source in region.sources:
            # (One may be still to come: with gradients for loose ends, but none for the region.)
            if type(source) is Send and source.id in self.answers:
                self.answers[source.id] = None  # used up
        self._unfinished -= 1
        self._conclude()

    def open_anchors(self, region: Region) -> list[Anchor]:
        """The anchors of a region whose gradients are not known yet."""
        return [
            (recv, position)
            for recv, position in region.anchors
            if (reply := self._replies.get(recv.id)) and reply.gradients[position] is OPEN
        ]

    # -- answers

    def take(self, sender: int, news: News, *, was_told: bool) -> None:
        """Take in what another worker has to tell. `was_told`: it answers our first message."""
        sends, answers, standing, questions, prospects = news
        self.family.hear_from(sender, standing, was_told=was_told)
        if sends:
            self._answer_unknown(sender, sends)
        for id, gradients in answers:
            self._take_answer(id, gradients)
        for id, positions in prospects:
            self._take_prospects(id, positions)
        for id in questions:
            self._take_question(id)
        self._conclude()

    def _answer_unknown(self, sender: int, sends: Sequence[int]) -> None:
        """Sends that never got here have no gradients."""
        for id in sends:
            if id not in self._recv_ids:
                self._post(sender, (id, None))

    def _post(self, to: int, answer: Answer) -> None:
        if to == self._me:
            self._to_myself.append(partial(self._take_answer, *answer))
        else:
            self._outbox.setdefault(to, []).append(answer)

    def take_own_answers(self) -> bool:
        if not self._to_myself:
            return False
        while self._to_myself:
            self._to_myself.pop()()
        self._conclude()
        return True

    def _take_answer(self, id: int, gradients: list[Gradient] | None) -> None:
        send = self._sends.get(id)
        if send is None or id in self.answers:
            return
        self.answers[id] = gradients
        loose = self._loose.get(id, _NOTHING)
        incomplete = gradients is None or len(gradients) < len(send.ends)
        has_gradient = False
        for position, gradient in enumerate(gradients or ()):
            if position not in loose:
                incomplete |= gradient is None
                has_gradient |= gradient is not None
            elif gradient is not None and gradient is not NOTHING:
                assert gradients is not None
                self.stage(send.ends[position], gradient)
                gradients[position] = None  # it has got where it belongs
        region = self._region_of.get(id)
        if region is None:
            return
        region.out -= 1
        region.has_gradient |= has_gradient
        if region.queued:
            return  # it knew what would come
        if region.anchors and (incomplete or region.reach is not None):
            self._look_into(region)
            for position in range(len(send.ends)):
                self._resolve(region, id, position, alive=_has(gradients, position))
        self._consider(region)

    # -- prospects

    def _look_into(self, region: Region) -> Reach:
        """Where in a region gradients can come to, as far as that is known."""
        if region.reach is not None:
            return region.reach
        region.reach = Reach(region)
        for source, position, edge in region.starts:
            if type(source) is Root:
                self._will_come_to(region, region.reach.bring_to_life(edge.node))
                continue
            assert type(source) is Send
            id = source.id
            if id in self.answers:
                self._resolve(region, id, position, alive=_has(self.answers[id], position))
            elif id in self.prospects:
                self._resolve(region, id, position, alive=position in self.prospects[id])
        return region.reach

    def _ask_about(self, region: Region) -> None:
        """Ask for what is not known of a region."""
        region.asking = True
        for id in self._look_into(region).open_sends() - self._asked:
            self._asked.add(id)
            to = self._sends[id].to
            if to == self._me:
                self._to_myself.append(partial(self._take_question, id))
            else:
                self._questions.setdefault(to, []).append(id)

    def _resolve(self, region: Region, send: int, position: int, *, alive: bool) -> None:
        """It is known whether a gradient comes to a start."""
        assert region.reach is not None
        concerned = region.reach.resolve(send, position, alive=alive)
        if alive:
            self._will_come_to(region, concerned)
            return
        for recv, of_recv in concerned:
            self.settle(recv.id, of_recv, None)
            if region.asking:
                self._tell_prospects(recv.id)

    def _will_come_to(self, region: Region, anchors: Sequence[Anchor]) -> None:
        for recv, position in anchors:
            reply = self._replies.get(recv.id)
            if reply is not None:
                reply.alive.add(position)
                if region.asking:  # whom it asks will want to know the like
                    self._tell_prospects(recv.id)

    def _take_prospects(self, id: int, positions: Sequence[int]) -> None:
        """Another worker says which tensors of a send gradients will come to."""
        if id in self.answers or id in self.prospects:
            return
        self.prospects[id] = set(positions)
        region = self._region_of.get(id)
        if region is None or region.reach is None:
            return
        for position in range(len(self._sends[id].ends)):
            self._resolve(region, id, position, alive=position in positions)
        self._consider(region)

    def _take_question(self, id: int) -> None:
        """Another worker asks which tensors of a send gradients will come to."""
        reply = self._replies.get(id)
        if reply is None:
            return  # it was answered
        for position, gradient in enumerate(reply.gradients):
            if gradient is OPEN and position not in reply.alive:
                self._ask_about(self._region_with(id, position))
        self._tell_prospects(id)

    def _tell_prospects(self, message: int) -> None:
        """Something is known of a recv: tell its sender, once all is."""
        reply = self._replies.get(message)
        if reply is None or reply.told or len(reply.alive) < reply.open:
            return
        positions = []
        for position, gradient in enumerate(reply.gradients):
            if gradient is OPEN and position not in reply.alive:
                return
            if gradient is not None:
                positions.append(position)
        reply.told = True
        if reply.sender == self._me:
            self._to_myself.append(partial(self._take_prospects, message, positions))
        else:
            self._prospects_for.setdefault(reply.sender, []).append((message, positions))

    def _region_with(self, message: int, position: int) -> Region:
        """The region that an anchor is in."""
        if not self._region_of_anchor:
            self._region_of_anchor = {
                (recv.id, of_recv): region
                for region in self._regions
                for recv, of_recv in region.anchors
            }
        return self._region_of_anchor[message, position]

    def settle(self, message: int, position: int, gradient: Gradient) -> None:
        """The gradient of one received tensor is known; with the last one the recv answers."""
        reply = self._replies.get(message)
        if reply is None:
            return
        gradients = reply.gradients
        if gradients:
            if gradients[position] is not OPEN:
                return
            if gradient is not None:
                reply.has_gradient = True
                if gradient is not NOTHING and gradient.requires_grad:
                    gradient = gradient if self._how.create_graph else gradient.detach()
            gradients[position] = gradient
            reply.open -= 1
        if not reply.open:
            del self._replies[message]
            self._post(reply.sender, (message, gradients if reply.has_gradient else None))

    def stage(self, leaf: Tensor, gradient: Tensor) -> None:
        if not self._how.for_inputs or id(leaf) in self._wanted:
            self.staged.append((leaf, gradient))

    # -- accumulating

    def take_groups(self) -> list[Group]:
        """The groups to accumulate, once; when all their gradients are known, and nobody waits for
        anything from here."""
        if not self._can_accumulate() or self._outbox or self.family.untold:
            return []
        groups, self._groups = self._groups, []
        self._accumulating = True
        return groups

    def _can_accumulate(self) -> bool:
        return bool(self._groups) and self._has_all_gradients()

    def _has_all_gradients(self) -> bool:
        return not (
            self._unfinished
            or self._replies
            or self._to_myself
            or len(self.answers) < len(self._sends)
        )

    def take_staged(self, groups: Sequence[Group]) -> list[tuple[Tensor, Tensor]]:
        """The gradients of groups of leaves; they are not staged any more."""
        members = {id(leaf) for group in groups for leaf in group.leaves}
        taken = [pair for pair in self.staged if id(pair[0]) in members]
        self.staged = [pair for pair in self.staged if id(pair[0]) not in members]
        return taken

    def has_accumulated(self, gradients: list[tuple[Tensor, Tensor]]) -> None:
        self.accumulated = gradients
        self._accumulating = False
        self._conclude()

    # -- telling others

    def all_news(self) -> list[tuple[int, bool, News]]:
        """What has to be told, to whom, and whether it is the first that worker is told."""
        family = self.family
        workers = {*family.untold, *self._outbox, *self._questions, *self._prospects_for}
        if family.parent is not None and family.owes_parent():
            workers.add(family.parent)
        return [(worker, family.expect(worker), self.news_for(worker)) for worker in workers]

    def news_for(self, worker: int) -> News:
        sends = self._unanswered(worker) if self.family.tell(worker) else []
        self._conclude()  # now that this one is told
        standing = self.family.standing_to(worker)
        questions: list[int] = []
        prospects: list[Prospect] = []
        if self._questions or self._prospects_for:
            # What was answered since needs no asking and no telling.
            questions = [id for id in self._questions.pop(worker, ()) if id not in self.answers]
            told = self._prospects_for.pop(worker, ())
            prospects = [prospect for prospect in told if prospect[0] in self._replies]
        return sends, self._outbox.pop(worker, []), standing, questions, prospects

    def _conclude(self) -> None:
        """See whether this worker's part has come to its end, when anything has changed."""
        if self._unfinished or not self.planned:  # mostly
            return
        if (
            self.family.finished
            or self.family.waits()
            or self._groups
            or self._accumulating
            or not self._has_all_gradients()
        ):
            return
        self.family.conclude()

    def has_work(self) -> bool:
        """Whether there is something to drive."""
        return bool(
            self.ready
            or self._outbox
            or self.family.untold
            or self._to_myself
            or self._questions
            or self._prospects_for
            or self._can_accumulate()
            or self.family.owes_parent()
        )

    def awaited(self) -> set[int]:
        """The workers that must do something before this one can be done."""
        if not self.planned and self.family.parent is not None:
            return {self.family.parent}  # who says with what to begin
        owing = {send.to for id, send in self._sends.items() if id not in self.answers}
        return owing | self.family.awaited()
