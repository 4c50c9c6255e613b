"""`grad` runs what is on the way to the tensors it is asked for, on every worker, and nothing else:
as `torch.autograd.grad` does in one process."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire import autograd, current, rpc
from gradwire.errors import WorkerLost
from gradwire.gradients.functions import Recv, SentTensor
from gradwire.gradients.survey import WANTED, Chart, Charting, Place, Survey
from gradwire.ids import COUNTER_BITS, creator, serial
from gradwire.testing import Fault, FaultyTransport, cluster
from gradwire.transport.memory import MemoryNetwork
from gradwire.wire.messages import Kind
from tests.processes import until

# -- charts


class Node:
    def __init__(self, *children: Node | None):
        self.next_functions = tuple((child, 0) for child in children)

    def leads_to(self) -> set[Node]:
        below = [child.leads_to() for child, _ in self.next_functions if child is not None]
        return {self}.union(*below)


def places_behind(place: Place | None, junctions: list[set[Place]]) -> set[Place]:
    if type(place) is not int or place == WANTED:
        return set() if place is None else {place}
    return set().union(*(places_behind(further, junctions) for further in junctions[place]))


def test_a_chart_leads_where_the_graph_does() -> None:
    for seed in range(100):
        check_chart(random.Random(seed))


def check_chart(chance: random.Random) -> None:
    nodes = [Node() for _ in range(4)]
    for _ in range(chance.randrange(20)):
        nodes.append(Node(None, *chance.choices(nodes, k=chance.randint(1, 3))))
    recv = Recv(7, 1)
    recv.anchors += nodes[:2]
    charting = Charting([recv])
    charting._wanted_nodes = {chance.choice(nodes)}  # type: ignore[assignment]
    for node in chance.sample(nodes, 3):
        place = charting.place_of(node)
        _, junctions = charting.draw([])
        reached = node.leads_to()
        expected: set[Place] = {(7, n) for n in range(2) if nodes[n] in reached}
        if charting._wanted_nodes & reached:  # type: ignore[operator]
            expected.add(WANTED)
        assert places_behind(place, junctions) == expected
        assert len(junctions) <= len(nodes)


def test_a_chart_does_not_grow_with_the_nodes_where_ways_meet_again() -> None:
    first, second = Node(), Node()
    recv = Recv(7, 1)
    recv.anchors += [first, second]
    node = first
    for _ in range(1000):
        node = Node(node, second)
    charting = Charting([recv])
    charting.place_of(node)
    assert len(charting.draw([])[1]) == 1


# -- surveys


class World:
    """A random graph over workers: messages, and what each tensor was made of."""

    def __init__(self, chance: random.Random):
        self.workers = chance.randint(1, 4)
        self.made_of: dict[SentTensor, list[Place]] = {}
        self.receiver: dict[SentTensor, int] = {}
        arrived: list[list[SentTensor]] = [[] for _ in range(self.workers)]
        for count in range(1, chance.randrange(1, 16)):
            sender, receiver = (chance.randrange(self.workers) for _ in range(2))
            for position in range(chance.randint(1, 2)):
                sent = (sender << COUNTER_BITS | count, position)
                of: list[Place] = chance.sample(
                    arrived[sender], min(len(arrived[sender]), chance.randrange(3))
                )
                if sender == 0 and chance.random() < 0.4:
                    of.append(WANTED)
                self.made_of[sent] = of
                self.receiver[sent] = receiver
            arrived[receiver] += [sent for sent in self.made_of if serial(sent[0]) == count]
        self.outputs = chance.sample(arrived[0], min(len(arrived[0]), 2))

    def chart(self, worker: int) -> Chart:
        ways: dict[SentTensor, Place] = {}
        junctions: list[set[Place]] = []
        for sent, of in self.made_of.items():
            if creator(sent[0]) == worker and of:
                ways[sent] = len(junctions)
                junctions.append(set(of))
        return ways, junctions

    def on_the_way(self) -> set[SentTensor]:
        def wanted(place: Place) -> bool:
            if place == WANTED:
                return True
            return any(wanted(further) for further in self.made_of[place])  # type: ignore[index]

        reached: set[Any] = set()
        stack: list[Any] = list(self.outputs)
        while stack:
            place = stack.pop()
            if place != WANTED:
                reached.add(place)
                stack += self.made_of[place]
        return {sent for sent in reached if wanted(sent)}


def test_a_survey_finds_what_is_on_the_way() -> None:
    for seed in range(200):
        check_survey(World(random.Random(seed)))


def check_survey(world: World) -> None:
    survey = Survey(0, world.chart(0), world.outputs)
    asked: set[int] = {0}
    while missing := survey.missing():
        assert not missing & asked, "each worker is asked once"
        asked |= missing
        for worker in missing:
            survey.take(worker, world.chart(worker))
    shares = survey.shares()
    assert set().union(*shares.values()) == world.on_the_way()
    for worker, share in shares.items():
        for sent in share:
            assert worker in (creator(sent[0]), world.receiver[sent])
    for sent in world.on_the_way():
        assert sent in shares[creator(sent[0])]
        assert sent in shares[world.receiver[sent]]


# -- what comes of it on workers


class Notes(torch.autograd.Function):
    """Takes note of who ran it backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        RUNS.append(ctx.name)
        return gradient * 2, None


RUNS: list[str] = []
WEIGHT = torch.ones(2, requires_grad=True)


def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return Notes.apply(x, "x there"), Notes.apply(y, "y there"), Notes.apply(WEIGHT, "weight")


def test_only_the_way_to_the_inputs_is_run(trio: object) -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    RUNS.clear()
    with autograd.context() as context_id:
        arguments = (Notes.apply(x, "x here"), Notes.apply(y, "y here"))
        results = rpc.rpc_sync("worker1", both, args=arguments)
        hooked: list[Tensor] = []
        for result in results:
            result.register_hook(hooked.append)
        total = (results[0] + results[1] + results[2]).sum()
        (gradient,) = autograd.grad(context_id, total, x)
        assert gradient.tolist() == [4, 4]
    assert sorted(RUNS) == ["x here", "x there"]
    assert len(hooked) == 1


def broken(x: Tensor) -> Tensor:
    """Cannot be differentiated: what backward needs is changed."""
    squared = WEIGHT * 1
    product = squared * squared
    squared.add_(1)
    return x * 3 + product


def test_an_error_off_the_way_is_none(trio: object) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", broken, args=(x,)).sum()
        (gradient,) = autograd.grad(context_id, loss, x, retain_graph=True)
        assert gradient.tolist() == [3, 3]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            autograd.backward(context_id, [loss])


def test_inputs_may_be_tensors_that_came_from_others(trio: object) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", torch.mul, args=(x, 3))
        z = rpc.rpc_sync("worker2", torch.mul, args=(y, 5))
        of_z, of_y, of_x = autograd.grad(context_id, z.sum(), [z, y, x])
    assert (of_z.tolist(), of_y.tolist(), of_x.tolist()) == ([1, 1], [5, 5], [15, 15])


def test_what_does_not_lead_to_the_inputs_is_not_even_told(trio: object) -> None:
    x, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        loss = (x * rpc.rpc_sync("worker1", torch.mul, args=(other, 3))).sum()
        (gradient,) = autograd.grad(context_id, loss, x, retain_graph=True)
        assert gradient.tolist() == [3, 3]
        with pytest.raises(RuntimeError, match="allow_unused=True"):
            autograd.grad(context_id, loss, torch.ones(2, requires_grad=True))


def test_hooks_of_an_only_output_run_though_it_leads_nowhere(trio: object) -> None:
    """As in torch; and not if there are others."""
    x, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    for outputs, runs in ((1, 1), (2, 0)):
        for call in (lambda _to, function, args: function(*args), rpc.rpc_sync):
            hooked: list[Tensor] = []
            with autograd.context() as context_id:
                y = call("worker1", torch.mul, (x, 3)).sum()
                y.register_hook(hooked.append)
                found = autograd.grad(context_id, [y] * outputs, unused, allow_unused=True)
            assert found == (None,)
            assert len(hooked) == runs


def relay(x: Tensor) -> Tensor:
    return rpc.rpc_sync("worker2", torch.mul, args=(x, 3)) * 2


def test_a_worker_that_hears_of_the_pass_from_another_waits_for_its_share() -> None:
    network = FaultyTransport(MemoryNetwork(), [])
    with cluster(3, transports=[network]) as workers:
        token = current.enter(workers[0])
        x = torch.ones(2, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", relay, args=(x,)).sum()
            late = Fault(
                "delay",
                kind=Kind.BACKWARD_AUTOGRAD_REQ,
                sender="worker0",
                receiver="worker2",
                seconds=0.2,
            )
            network.add(late)
            (gradient,) = autograd.grad(context_id, loss, x)
            assert gradient.tolist() == [6, 6]
        assert network.done
        current.exit(token)


def test_the_loss_of_a_worker_that_has_done_its_part_is_noticed() -> None:
    """Though nothing was ever exchanged with it but the pass."""
    network = FaultyTransport(MemoryNetwork(), [])
    with cluster(3, transports=[network], graceful=False) as workers:
        token = current.enter(workers[0])
        x = torch.ones(2, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", relay, args=(x,)).sum()
            # It cannot say that it is done.
            network.add(Fault("drop", kind=Kind.BACKWARD_AUTOGRAD_REQ, sender="worker2", times=1))
            errors: list[BaseException] = []
            waiting = in_thread(lambda: autograd.grad(context_id, loss, x, timeout=0), errors)
            until(lambda: bool(network.done), "it has done its part")
            network.add(Fault("drop", sender="worker2"))
            workers[2].agent.close(time.monotonic() + 0.1)
            waiting.join(30)
        (error,) = errors
        assert isinstance(error, WorkerLost)
        assert error.worker == "worker2"
        current.exit(token)


@pytest.mark.parametrize("cause", ["release", "loss"])
def test_a_survey_ends_when_the_pass_does(cause: str) -> None:
    network = FaultyTransport(MemoryNetwork(), [])
    with cluster(3, transports=[network], graceful=False) as workers:
        token = current.enter(workers[0])
        x = torch.ones(2, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", torch.mul, args=(x, 3)).sum()
            rpc.rpc_sync("worker2", torch.mul, args=(x, 3))
            network.add(Fault("drop", kind=Kind.AUTOGRAD_CHART_REQ))
            errors: list[BaseException] = []
            waiting = in_thread(lambda: autograd.grad(context_id, loss, x, timeout=0), errors)
            until(lambda: bool(network.done), "it waits for a chart")
            if cause == "release":
                workers[0].engine.release(context_id)
            else:
                workers[2].agent.close(time.monotonic() + 0.1)
            waiting.join(30)
        (error,) = errors
        assert ("was released" if cause == "release" else "'worker2' was lost") in str(error)
        current.exit(token)


def in_thread(action: Callable[[], object], errors: list[BaseException]) -> threading.Thread:
    def run() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=copy_context().run, args=(run,))
    thread.start()
    return thread
