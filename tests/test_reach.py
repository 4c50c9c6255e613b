"""Torch runs the nodes on every worker that it would run in one process, and no others."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gradwire import autograd, current, rpc
from gradwire.gradients.functions import Recv, Send
from gradwire.gradients.graph import Plan, Region, Root
from gradwire.gradients.ledger import How, Ledger
from gradwire.gradients.reach import Reach
from gradwire.testing import FaultyTransport, cluster
from gradwire.transport.memory import MemoryNetwork
from gradwire.wire.messages import Kind

# -- what follows from a graph


class Node:
    def __init__(self, *children: Node):
        self.next_functions = tuple((child, 0) for child in children)

    def reaches(self, other: Node) -> bool:
        return self is other or any(child.reaches(other) for child, _ in self.next_functions)


def random_region(chance: random.Random) -> tuple[Region, dict[tuple[int, int], Node]]:
    nodes = [Node() for _ in range(3)]
    for _ in range(chance.randrange(12)):
        nodes.append(Node(*chance.sample(nodes, chance.randint(1, 3))))
    sends = [
        Send(id, 1, [torch.ones(1, requires_grad=True)] * 2, "")
        for id in range(chance.randint(1, 4))
    ]
    region = Region(sends[0], [])
    starts = {}
    for id, send in enumerate(sends):
        for position in range(2):
            starts[id, position] = node = chance.choice(nodes)
            region.starts.append((send, position, GradientEdge(node, 0)))  # type: ignore[arg-type]
    if chance.random() < 0.3:
        root = Root(torch.ones(1), torch.ones(1))
        edge = GradientEdge(chance.choice(nodes), 0)  # type: ignore[arg-type]
        region.starts.append((root, 0, edge))
    recv = Recv(7, 1)
    recv.anchors += nodes[:2]
    reached = [n for n in (0, 1) if any(e.node.reaches(nodes[n]) for _, _, e in region.starts)]
    region.anchors = [(recv, position) for position in reached]
    return region, starts


@pytest.mark.parametrize("seed", range(200))
def test_anchors_live_and_die_as_the_ways_to_them_do(seed: int) -> None:
    chance = random.Random(seed)
    region, starts = random_region(chance)
    reach = Reach(region)
    alive = [e.node for source, _, e in region.starts if type(source) is Root]
    for node in alive:
        reach.bring_to_life(node)
    dead: list[tuple[Recv, int]] = []
    undecided = list(starts.items())
    chance.shuffle(undecided)
    while undecided:
        open_sends = {send for (send, _), node in undecided if not reach.includes(node)}
        assert reach.open_sends() == open_sends, "where gradients come anyway nobody has to ask"
        assert reach.is_known == (not open_sends)
        (send, position), node = undecided.pop()
        lives = chance.random() < 0.4
        concerned = reach.resolve(send, position, alive=lives)
        assert reach.resolve(send, position, alive=not lives) == [], "it is known already"
        if lives:
            alive.append(node)
        else:
            dead += concerned
        for node in starts.values():
            assert reach.includes(node) == any(source.reaches(node) for source in alive)
        for recv, n in region.anchors:
            anchor = recv.anchors[n]
            assert reach.includes(anchor) == any(node.reaches(anchor) for node in alive)
            hope = alive + [node for _, node in undecided]
            assert ((recv, n) in dead) == (not any(node.reaches(anchor) for node in hope))
    assert reach.is_known


# -- what comes of it on workers


class Zeros(torch.autograd.Function):
    """Gives zeros for no gradient, as functions do unless they say otherwise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        RUNS.append(gradient)
        return gradient * 2


class Nothing(Zeros):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


RUNS: list[Tensor] = []
TOP = torch.ones(2, requires_grad=True)


def mix(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x * TOP, y * 3


def skipping(used: int) -> tuple[Tensor, Tensor, Tensor]:
    """The caller's part is one region with a gate; one of two results is used."""
    x, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    h = x * 1
    results = rpc.rpc_sync("worker1", mix, args=(h, Zeros.apply(unused)))
    return x, unused, (h + results[used]).sum()


def test_what_is_not_used_elsewhere_is_not_run_here(trio: object) -> None:
    RUNS.clear()
    with autograd.context() as context_id:
        x, unused, loss = skipping(0)
        autograd.backward(context_id, [loss])
        gradients = autograd.get_gradients(context_id)
    assert gradients[x].tolist() == [2, 2]
    assert unused not in gradients, "None, not zeros"
    assert RUNS == []


def test_what_is_used_elsewhere_is_run_here(trio: object) -> None:
    RUNS.clear()
    with autograd.context() as context_id:
        x, used, loss = skipping(1)
        autograd.backward(context_id, [loss])
        gradients = autograd.get_gradients(context_id)
    assert gradients[x].tolist() == [1, 1]
    assert gradients[used].tolist() == [6, 6]
    assert len(RUNS) == 1


def without_gradient(x: Tensor) -> Tensor:
    return Nothing.apply(x)


def test_a_function_that_gives_no_gradient_is_one_where_backward_goes_on(trio: object) -> None:
    """With nothing, of which the function before it makes zeros: as in one process."""

    def step(call: Any) -> tuple[Tensor, Tensor]:
        x = torch.ones(2, requires_grad=True)
        return x, call("worker1", without_gradient, (Zeros.apply(x),)).sum()

    x, loss = step(lambda _to, function, args: function(*args))
    loss.backward()
    assert x.grad is not None
    with autograd.context() as context_id:
        x, loss = step(rpc.rpc_sync)
        autograd.backward(context_id, [loss])
        assert autograd.get_gradients(context_id)[x].tolist() == [0, 0]


def first_of(h: Tensor, _w: Tensor) -> Tensor:
    return h * 2


def freeze_what_was_sent(to: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """A region that has to wait for what it has sent beside a leaf that has no part any more."""
    h, w = x * 1, torch.ones(2, requires_grad=True)
    y = rpc.rpc_sync(to, first_of, args=(h, w)) + h
    w.requires_grad_(False)
    return h, y


def freeze_here_or_elsewhere(x: Tensor, elsewhere: bool) -> tuple[Tensor, Tensor]:
    if elsewhere:
        return rpc.rpc_sync("worker1", freeze_what_was_sent, args=("worker2", x))
    return freeze_what_was_sent("worker1", x)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_was_frozen_is_no_place_to_wait_at(trio: object, elsewhere: bool) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        h, y = freeze_here_or_elsewhere(x, elsewhere)
        autograd.backward(context_id, [h.sum() + y.sum()], timeout=20)
        assert autograd.get_gradients(context_id)[x].tolist() == [4, 4]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_gate_that_cannot_be_made_fails_the_pass(
    trio: object, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    def refuse(*_: object) -> None:
        raise IndexError("no gate today")  # as from a function of a user

    monkeypatch.setattr("gradwire.gradients.runs.make_gate", refuse)
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        h, y = freeze_here_or_elsewhere(x, elsewhere)
        with pytest.raises(IndexError, match="no gate today"):
            autograd.backward(context_id, [h.sum() + y.sum()], timeout=20)


def messages_of_a_pass(loss: Callable[[], Tensor]) -> int:
    network = FaultyTransport(MemoryNetwork(), [])
    with cluster(2, transports=[network]) as workers:
        token = current.enter(workers[0])
        with autograd.context() as context_id:
            autograd.backward(context_id, [loss()])
        current.exit(token)
    return network.messages[Kind.BACKWARD_AUTOGRAD_REQ]


def test_a_trunk_needs_no_questions() -> None:
    """A gradient comes to everything that was sent, whether or not one comes back."""

    def trunk() -> Tensor:
        h = torch.ones(2, requires_grad=True) * 1
        for _ in range(20):
            h = h + rpc.rpc_sync("worker1", torch.mul, (h, 0.5))
        return h.sum()

    assert messages_of_a_pass(trunk) == 20


def test_the_prospects_of_many_branches_are_one_question() -> None:
    def branches() -> Tensor:
        h = rpc.rpc_sync("worker1", torch.mul, (torch.ones(2, requires_grad=True), 2))
        parts = [rpc.rpc_sync("worker1", torch.mul, (h * n, 0.5)) for n in range(20)]
        return (sum(parts) + h).sum()

    assert messages_of_a_pass(branches) == 1 + 21, "one that asks, and one for each gradient"


def test_what_arrives_while_a_pass_begins_has_no_part_in_it() -> None:
    recv = Recv(7, 1)
    recv.take(torch.ones(2, requires_grad=True))
    plan = Plan()
    plan.add({}, {recv.id: recv})
    plan.finish([])
    recv.take(torch.ones(2, requires_grad=True))
    ledger = Ledger(0, None, How())
    ledger.open(plan, {1})
    (_, _, answers, *_), _ = ledger.news_for(1)
    assert answers == [(7, None)]
