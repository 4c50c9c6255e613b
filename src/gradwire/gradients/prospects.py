"""Which tensors gradients will come to, as far as that is known before they do: pure bookkeeping.

A region that holds anchors may run before all its sources are answered, once it is known to which
of them gradients will come. That follows from the graphs alone (see `reach`), but from those of
others too: they are asked, and ask in turn. Most passes have no such region, and need none of this.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from gradwire.gradients.functions import OPEN, Gradients, Send
from gradwire.gradients.graph import Anchor, Region, Root
from gradwire.gradients.news import Prospect
from gradwire.gradients.reach import Reach

if TYPE_CHECKING:
    from gradwire.gradients.ledger import Ledger


def _has(gradients: Gradients | None, position: int) -> bool:
    """Whether a tensor of a send has got a gradient."""
    if gradients is None or position >= len(gradients):
        return False
    return gradients[position] is not None


class Prospects:
    """The part of a ledger that looks ahead."""

    def __init__(self, ledger: Ledger):
        self._ledger = ledger  # until that lets go of this
        #: Which tensors of sends gradients will come to, as far as that is known.
        self.known = ledger.plan.prospects
        #: The sends others were asked about; and what they must hear, by worker.
        self._asked: set[int] = set()
        self._questions: dict[int, list[int]] = {}
        self._answers: dict[int, list[Prospect]] = {}
        self._region_of_anchor: dict[tuple[int, int], Region] = {}

    def whom_to_tell(self) -> set[int]:
        return {*self._questions, *self._answers}

    def news_for(self, worker: int) -> tuple[list[int], list[Prospect]]:
        """The sends to ask about, and what there is to say about others."""
        if not (self._questions or self._answers):  # mostly
            return [], []
        ledger = self._ledger
        # What was answered since needs no asking and no telling.
        questions = [id for id in self._questions.pop(worker, ()) if id not in ledger.answers]
        told = self._answers.pop(worker, ())
        return questions, [prospect for prospect in told if prospect[0] in ledger.replies]

    def look_into(self, region: Region) -> Reach:
        """Where in a region gradients can come to, as far as that is known."""
        if region.reach is not None:
            return region.reach
        region.reach = Reach(region)
        answers = self._ledger.answers
        for source, position, edge in region.starts:
            if type(source) is Root:
                self._will_come_to(region, region.reach.bring_to_life(edge.node))
                continue
            assert type(source) is Send
            id = source.id
            if id in answers:
                self._resolve(region, id, position, alive=_has(answers[id], position))
            elif id in self.known:
                self._resolve(region, id, position, alive=position in self.known[id])
        return region.reach

    def ask_about(self, region: Region) -> None:
        """Ask for what is not known of a region."""
        ledger = self._ledger
        asked = self.look_into(region).open_sends() - self._asked
        self._asked |= asked
        if not region.asking and asked:
            region.asking = True
            for message in {recv.id for recv, _ in region.anchors}:
                self._tell(message)  # whom it asks will want to know the like
        for id in asked:
            to = ledger.sends[id].to
            if to == ledger.me:
                ledger.to_myself.append(partial(self.take_question, id))
            else:
                self._questions.setdefault(to, []).append(id)

    def take_answer(self, region: Region, send: Send, gradients: Gradients | None) -> None:
        """A source of a region is answered."""
        self.look_into(region)
        for position in self._starting(send):
            self._resolve(region, send.id, position, alive=_has(gradients, position))

    def _starting(self, send: Send) -> Iterable[int]:
        """Those of its tensors that are starts."""
        loose = self._ledger.plan.loose.get(send.id)
        positions = range(len(send.ends))
        return [n for n in positions if n not in loose] if loose else positions

    def take(self, id: int, positions: Collection[int]) -> None:
        """Another worker says which tensors of a send gradients will come to."""
        ledger = self._ledger
        if id in ledger.answers or id in self.known:
            return
        self.known[id] = set(positions)
        region = ledger.plan.region_of(id)
        if region is None or region.reach is None:
            return
        for position in self._starting(ledger.sends[id]):
            self._resolve(region, id, position, alive=position in positions)
        ledger.consider(region)

    def take_question(self, id: int) -> None:
        """Another worker asks which tensors of a send gradients will come to."""
        reply = self._ledger.replies.get(id)
        if reply is None:
            return  # it was answered
        for position, gradient in enumerate(reply.gradients):
            if gradient is OPEN and position not in reply.alive:
                self.ask_about(self._region_with(id, position))
        self._tell(id)

    def _resolve(self, region: Region, send: int, position: int, *, alive: bool) -> None:
        """It is known whether a gradient comes to a start."""
        assert region.reach is not None
        concerned = region.reach.resolve(send, position, alive=alive)
        if alive:
            self._will_come_to(region, concerned)
            return
        for recv, of_recv in concerned:
            self._ledger.settle(recv.id, of_recv, None)
            if region.asking:
                self._tell(recv.id)

    def _will_come_to(self, region: Region, anchors: Sequence[Anchor]) -> None:
        concerned = set()
        for recv, position in anchors:
            reply = self._ledger.replies.get(recv.id)
            if reply is not None:
                reply.alive.add(position)
                concerned.add(recv.id)
        if region.asking:
            for message in concerned:
                self._tell(message)

    def _tell(self, message: int) -> None:
        """Something is known of a recv: tell its sender, once all is."""
        ledger = self._ledger
        reply = ledger.replies.get(message)
        if reply is None or reply.told or len(reply.alive) < reply.open:
            return
        positions: list[int] = []
        for position, gradient in enumerate(reply.gradients):
            if gradient is OPEN and position not in reply.alive:
                return
            if gradient is not None:
                positions.append(position)
        reply.told = True
        if reply.sender == ledger.me:
            ledger.to_myself.append(partial(self.take, message, positions))
        else:
            self._answers.setdefault(reply.sender, []).append((message, positions))

    def _region_with(self, message: int, position: int) -> Region:
        """The region that an anchor is in."""
        if not self._region_of_anchor:
            self._region_of_anchor = {
                (recv.id, of_recv): region
                for region in self._ledger.plan.regions
                for recv, of_recv in region.anchors
            }
        return self._region_of_anchor[message, position]
