"""Forecasts say which tensors will get gradients, before the gradients arrive.

A *send* is a message with differentiable tensors that this worker sent. An *entry* is the place
where the gradient of such a tensor enters the local autograd graph. A *region* is a connected part
of that graph, which runs in one go. A *recv node* is the node of a received tensor.

A region with recv nodes can run before all its sends are answered, once this worker knows which
tensors of these sends will get gradients. That depends on the local autograd graph (see
`reachability`) and on the graphs of other workers. So this worker asks the workers that received
the sends for *forecasts*. Those workers may have to ask others in turn. Most passes have no such
region and need no forecasts.

This module sends nothing and uses no threads. `PassState` reports events to a `Forecast`, which
derives from them what is known and what to tell other workers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from gradwire._core.autograd.boundary import OPEN, Gradient, Gradients, ReceivedTensor, Send
from gradwire._core.autograd.pass_messages import SendForecast
from gradwire._core.autograd.plan import Plan, Region, Root
from gradwire._core.autograd.reachability import Reachability


class SendAnswer(NamedTuple):
    """The gradients of the tensors in one sent message, or None if no tensor has a gradient."""

    send_id: int
    gradients: list[Gradient] | None


#: What a worker tells itself in a pass, for example because it called itself in the forward pass.
#: It is one of three things about a message that the worker sent: the gradients of its tensors, a
#: forecast, or only the id of the message, which asks for a forecast.
OwnMessage = SendAnswer | SendForecast | int


def _has_gradient(gradients: Gradients | None, position: int) -> bool:
    """Return whether the answer to a sent message has a gradient for the tensor at a position."""
    if gradients is None or position >= len(gradients):
        return False
    return gradients[position] is not None


class Forecast:
    """The forecasts that one worker knows, needs from other workers, and owes to them in a pass. A
    forecast says which tensors of a message will get gradients.

    After each call of a method here, the caller must call `take_unreachable`, record that these
    tensors get no gradient, and call `tell_if_known` for the received messages with these tensors.
    """

    def __init__(
        self,
        worker_id: int,
        plan: Plan,
        answers: Mapping[int, Gradients | None],
        to_myself: list[OwnMessage],
    ):
        """`answers`: the gradients that have arrived so far, by id of the sent message. The
        `PassState` keeps adding to it. `to_myself`: a list to which the `Forecast` adds its
        questions and forecasts about messages that this worker has sent to itself."""
        self._worker_id = worker_id
        self._plan = plan
        self._answers = answers
        self._to_myself = to_myself
        #: By id of a sent message: the positions of its tensors that will get gradients.
        self._known = plan.forecast
        #: The ids of the sent messages for which this worker has asked for a forecast.
        self._asked: set[int] = set()
        #: By worker: the ids of the sent messages about which to ask that worker.
        self._questions: dict[int, list[int]] = {}
        #: By worker: the forecasts that are still to be sent to that worker.
        self._forecasts: dict[int, list[SendForecast]] = {}
        #: The received tensors that are now known to get no gradient, with the regions (parts of
        #: the graph) that they belong to. `take_unreachable` empties the list.
        self._unreachable: list[tuple[Region, ReceivedTensor]] = []
        self._region_of_recv_node: dict[tuple[int, int], Region] = {}

    def take_unreachable(self) -> list[tuple[Region, ReceivedTensor]]:
        """Return the received tensors that were found to get no gradient since the last call, with
        their regions (parts of the graph)."""
        taken, self._unreachable = self._unreachable, []
        return taken

    # -- messages

    def workers_to_tell(self) -> set[int]:
        """Return the workers to which questions or forecasts are to be sent."""
        return {*self._questions, *self._forecasts}

    def message_for(self, worker: int) -> tuple[list[int], list[tuple[int, Collection[int]]]]:
        """Return the questions and the packed forecasts for a worker, and forget them."""
        # Most passes need no forecasts. For them, this method ends here, after one quick check.
        if not (self._questions or self._forecasts):
            return [], []
        # Questions and forecasts about gradients that are known by now are left out.
        questions = [
            send_id for send_id in self._questions.pop(worker, ()) if send_id not in self._answers
        ]
        forecasts = self._forecasts.pop(worker, ())
        replies = self._plan.replies
        return questions, [(*told,) for told in forecasts if told.send_id in replies]

    # -- events

    def examine(self, region: Region) -> Reachability:
        """Return a `Reachability`: which nodes of a region (part of the graph) gradients will
        reach, as far as this worker knows. The first call makes it from all answers and forecasts
        so far."""
        if region.reach is not None:
            return region.reach
        region.reach = Reachability(region.entries, region.recv_nodes)
        for source, position, edge in region.entries:
            if type(source) is Root:
                self._note_reached(region, region.reach.mark_alive(edge.node))
                continue
            assert type(source) is Send
            send_id = source.id
            if send_id in self._answers:
                alive = _has_gradient(self._answers[send_id], position)
                self._resolve(region, send_id, position, alive=alive)
            elif send_id in self._known:
                alive = position in self._known[send_id]
                self._resolve(region, send_id, position, alive=alive)
        return region.reach

    def ask_about(self, region: Region) -> None:
        """Queue questions to other workers: which tensors of the unanswered sends of this region
        will get gradients?"""
        sends = self.examine(region).open_sends() - self._asked
        self._asked |= sends
        if not region.asking and sends:
            region.asking = True
            # Other workers may need forecasts about this region before they can answer these
            # questions. So this worker sends them the forecasts that it knows already, without
            # being asked.
            for message_id in {recv.id for recv, _ in region.recv_nodes}:
                self.tell_if_known(message_id)
        for send_id in sends:
            worker = self._plan.sends[send_id].to
            if worker == self._worker_id:
                self._to_myself.append(send_id)
            else:
                self._questions.setdefault(worker, []).append(send_id)

    def note_answer(self, region: Region, send: Send, gradients: Gradients | None) -> None:
        """Record which tensors of a sent message have a gradient, now that it is answered."""
        self.examine(region)
        for position in self._entry_positions(send):
            alive = _has_gradient(gradients, position)
            self._resolve(region, send.id, position, alive=alive)

    def note_forecast(self, send_id: int, positions: Collection[int]) -> Region | None:
        """Record a forecast for a message that this worker sent. Return the region (part of the
        graph) about which more is known now, or None."""
        if send_id in self._answers or send_id in self._known:
            return None
        self._known[send_id] = set(positions)
        region = self._plan.region_of(send_id)
        if region is None or region.reach is None:
            return None
        for position in self._entry_positions(self._plan.sends[send_id]):
            self._resolve(region, send_id, position, alive=position in positions)
        return region

    def note_question(self, message_id: int) -> None:
        """Handle a question from the sender of a received message: which of its tensors will get
        gradients? Ask other workers for what this worker does not know."""
        reply = self._plan.replies.get(message_id)
        if reply is None:
            return  # All gradients for this message are known, so the sender needs no forecast.
        for position, gradient in enumerate(reply.gradients):
            if gradient is OPEN and position not in reply.alive:
                self.ask_about(self._region_with(message_id, position))

    def tell_if_known(self, message_id: int) -> None:
        """Queue the forecast for the sender of a received message, if this worker knows for each
        tensor of the message whether it gets a gradient."""
        reply = self._plan.replies.get(message_id)
        if reply is None or reply.told or len(reply.alive) < reply.open:
            return
        positions: list[int] = []
        for position, gradient in enumerate(reply.gradients):
            if gradient is OPEN and position not in reply.alive:
                return
            if gradient is not None:
                positions.append(position)
        reply.told = True
        told = SendForecast(message_id, positions)
        if reply.sender == self._worker_id:
            self._to_myself.append(told)
        else:
            self._forecasts.setdefault(reply.sender, []).append(told)

    # -- conclusions

    def _entry_positions(self, send: Send) -> Iterable[int]:
        """Return the positions of the tensors in a sent message, except those of direct leaves
        (leaves that were themselves sent). The gradient of a direct leaf needs no run of the
        graph."""
        direct_leaves = self._plan.direct_leaves.get(send.id)
        positions = range(len(send.proxies))
        return [n for n in positions if n not in direct_leaves] if direct_leaves else positions

    def _resolve(self, region: Region, send_id: int, position: int, *, alive: bool) -> None:
        """Record whether a gradient will enter a region (part of the graph) at the place of a sent
        tensor."""
        assert region.reach is not None
        concerned = region.reach.resolve(send_id, position, alive=alive)
        if alive:
            self._note_reached(region, concerned)
            return
        for received in concerned:
            self._unreachable.append((region, received))

    def _note_reached(self, region: Region, received: Sequence[ReceivedTensor]) -> None:
        """Record that some received tensors of a region will get gradients."""
        messages = set()
        for recv, position in received:
            reply = self._plan.replies.get(recv.id)
            if reply is not None:
                reply.alive.add(position)
                messages.add(recv.id)
        if region.asking:
            for message_id in messages:
                self.tell_if_known(message_id)

    def _region_with(self, message_id: int, position: int) -> Region:
        """Return the region (part of the graph) that contains the node of a received tensor."""
        if not self._region_of_recv_node:
            self._region_of_recv_node = {
                (recv.id, of_recv): region
                for region in self._plan.regions
                for recv, of_recv in region.recv_nodes
            }
        return self._region_of_recv_node[message_id, position]
