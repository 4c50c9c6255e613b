"""Torch runs the nodes on every worker that it would run in one process, and no others."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gradwire import autograd, rpc
from gradwire._core.autograd.boundary import Recv, Send
from gradwire._core.autograd.pass_messages import PassOptions
from gradwire._core.autograd.pass_state import PassState
from gradwire._core.autograd.plan import Plan, Region, Root
from gradwire._core.autograd.reachability import Reachability
from gradwire._core.transport.in_process import InProcessTransport
from gradwire._core.wire.messages import Kind
from gradwire.testing import FaultyTransport, acting_as, cluster

# -- a random graph


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
        Send(send_id, 1, [torch.ones(1, requires_grad=True)] * 2, "")
        for send_id in range(chance.randint(1, 4))
    ]
    region = Region(sends[0], [])
    entries = {}
    for send_id, send in enumerate(sends):
        for position in range(2):
            entries[send_id, position] = node = chance.choice(nodes)
            region.entries.append((send, position, GradientEdge(node, 0)))  # type: ignore[arg-type]
    if chance.random() < 0.3:
        root = Root(torch.ones(1), torch.ones(1))
        edge = GradientEdge(chance.choice(nodes), 0)  # type: ignore[arg-type]
        region.entries.append((root, 0, edge))
    recv = Recv(7, 1)
    recv.recv_nodes += nodes[:2]
    reached = [n for n in (0, 1) if any(e.node.reaches(nodes[n]) for _, _, e in region.entries)]
    region.recv_nodes = [(recv, position) for position in reached]
    return region, entries


@pytest.mark.parametrize("seed", range(200))
def test_a_recv_node_is_alive_if_a_live_path_leads_to_it(seed: int) -> None:
    chance = random.Random(seed)
    region, entries = random_region(chance)
    reach = Reachability(region.entries, region.recv_nodes)
    alive = [e.node for source, _, e in region.entries if type(source) is Root]
    for node in alive:
        reach.mark_alive(node)
    dead: list[tuple[Recv, int]] = []
    undecided = list(entries.items())
    chance.shuffle(undecided)
    while undecided:
        open_sends = {send for (send, _), node in undecided if not reach.includes(node)}
        assert reach.open_sends() == open_sends, "an entry at a node that is alive does not matter"
        assert reach.is_known == (not open_sends)
        (send, position), node = undecided.pop()
        lives = chance.random() < 0.4
        concerned = reach.resolve(send, position, alive=lives)
        assert reach.resolve(send, position, alive=not lives) == [], "the first answer counts"
        if lives:
            alive.append(node)
        else:
            dead += concerned
        for node in entries.values():
            assert reach.includes(node) == any(source.reaches(node) for source in alive)
        for recv, n in region.recv_nodes:
            recv_node = recv.recv_nodes[n]
            assert reach.includes(recv_node) == any(node.reaches(recv_node) for node in alive)
            hope = alive + [node for _, node in undecided]
            assert ((recv, n) in dead) == (not any(node.reaches(recv_node) for node in hope))
    assert reach.is_known


# -- on workers


class Zeros(torch.autograd.Function):
    """Receives zeros in place of a missing gradient, as functions do by default."""

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
    """Return a loss that uses one of two results. The caller has one region, which has a gate."""
    x, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    h = x * 1
    results = rpc.rpc_sync("worker1", mix, args=(h, Zeros.apply(unused)))
    return x, unused, (h + results[used]).sum()


def test_a_node_whose_output_is_not_used_elsewhere_does_not_run(trio: object) -> None:
    RUNS.clear()
    with autograd.context() as context_id:
        x, unused, loss = skipping(0)
        autograd.backward(context_id, [loss])
        gradients = autograd.get_gradients(context_id)
    assert gradients[x].tolist() == [2, 2]
    assert unused not in gradients, "None, not zeros"
    assert RUNS == []


def test_a_node_whose_output_is_used_elsewhere_runs(trio: object) -> None:
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


def test_backward_goes_on_behind_a_function_that_gives_no_gradient(trio: object) -> None:
    """Its missing gradient becomes zeros in the next function, as in one process."""

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


def freeze_a_sent_leaf(to: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Have a region with a gate, and freeze a leaf that was sent in the same message."""
    h, w = x * 1, torch.ones(2, requires_grad=True)
    y = rpc.rpc_sync(to, first_of, args=(h, w)) + h
    w.requires_grad_(False)
    return h, y


def freeze_here_or_elsewhere(x: Tensor, elsewhere: bool) -> tuple[Tensor, Tensor]:
    if elsewhere:
        return rpc.rpc_sync("worker1", freeze_a_sent_leaf, args=("worker2", x))
    return freeze_a_sent_leaf("worker1", x)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_no_gate_waits_for_a_frozen_leaf(trio: object, elsewhere: bool) -> None:
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
        raise IndexError("no gate today")  # such as a function of a user could raise

    monkeypatch.setattr("gradwire._core.autograd.region_run.make_gate", refuse)
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        h, y = freeze_here_or_elsewhere(x, elsewhere)
        with pytest.raises(IndexError, match="no gate today"):
            autograd.backward(context_id, [h.sum() + y.sum()], timeout=20)


def messages_of_a_pass(loss: Callable[[], Tensor]) -> int:
    network = FaultyTransport(InProcessTransport(), [])
    with cluster(2, transports=[network]) as workers:
        with acting_as(workers[0]):
            with autograd.context() as context_id:
                autograd.backward(context_id, [loss()])
    return network.messages[Kind.BACKWARD_AUTOGRAD_REQ]


def test_a_trunk_needs_no_forecasts() -> None:
    """Every sent tensor gets a gradient in any case, so no worker asks for a forecast."""

    def trunk() -> Tensor:
        h = torch.ones(2, requires_grad=True) * 1
        for _ in range(20):
            h = h + rpc.rpc_sync("worker1", torch.mul, (h, 0.5))
        return h.sum()

    assert messages_of_a_pass(trunk) == 20


def test_forecasts_for_many_branches_are_one_message() -> None:
    def branches() -> Tensor:
        h = rpc.rpc_sync("worker1", torch.mul, (torch.ones(2, requires_grad=True), 2))
        parts = [rpc.rpc_sync("worker1", torch.mul, (h * n, 0.5)) for n in range(20)]
        return (sum(parts) + h).sum()

    assert messages_of_a_pass(branches) == 1 + 21, "one forecast request, and one for each gradient"


def test_a_tensor_that_arrives_while_a_pass_begins_takes_no_part() -> None:
    recv = Recv(7, 1)
    recv.take(torch.ones(2, requires_grad=True))
    plan = Plan()
    plan.add({}, {recv.id: recv})
    plan.finish([])
    recv.take(torch.ones(2, requires_grad=True))
    state = PassState(0, None, PassOptions())
    state.set_plan(plan, {1})
    assert state.message_for(1).answers == [(7, None)]
