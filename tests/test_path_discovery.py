"""`grad` runs only the nodes on paths to its inputs, on every worker, as `torch.autograd.grad` does
in one process."""

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

from gradwire import autograd, rpc
from gradwire._core.autograd.boundary import Recv, SentTensor
from gradwire._core.autograd.path_discovery import (
    WANTED,
    GraphSummarizer,
    GraphSummary,
    PathDiscovery,
    Target,
)
from gradwire._core.ids import COUNTER_BITS, creator, serial
from gradwire._core.transport.in_process import InProcessTransport
from gradwire._core.wire.messages import Kind
from gradwire.errors import WorkerLost
from gradwire.testing import Fault, FaultyTransport, acting_as, cluster, runtime_of
from tests.processes import until

# -- summaries


class Node:
    def __init__(self, *children: Node | None):
        self.next_functions = tuple((child, 0) for child in children)

    def leads_to(self) -> set[Node]:
        below = [child.leads_to() for child, _ in self.next_functions if child is not None]
        return {self}.union(*below)


def targets_behind(target: Target | None, junctions: list[set[Target]]) -> set[Target]:
    if type(target) is not int or target == WANTED:
        return set() if target is None else {target}
    return set().union(*(targets_behind(further, junctions) for further in junctions[target]))


def test_a_summary_reaches_the_same_targets_as_the_graph() -> None:
    for seed in range(100):
        check_summary(random.Random(seed))


def check_summary(chance: random.Random) -> None:
    nodes = [Node() for _ in range(4)]
    for _ in range(chance.randrange(20)):
        nodes.append(Node(None, *chance.choices(nodes, k=chance.randint(1, 3))))
    recv = Recv(7, 1)
    recv.recv_nodes += nodes[:2]
    summarizer = GraphSummarizer([recv])
    summarizer._wanted_nodes = {chance.choice(nodes)}  # type: ignore[assignment]
    for node in chance.sample(nodes, 3):
        target = summarizer.target_of(node)
        _, junctions = summarizer.summarize([])
        reached = node.leads_to()
        expected: set[Target] = {(7, n) for n in range(2) if nodes[n] in reached}
        if summarizer._wanted_nodes & reached:  # type: ignore[operator]
            expected.add(WANTED)
        assert targets_behind(target, junctions) == expected
        assert len(junctions) <= len(nodes)


def test_a_summary_does_not_grow_with_nodes_where_paths_rejoin() -> None:
    first, second = Node(), Node()
    recv = Recv(7, 1)
    recv.recv_nodes += [first, second]
    node = first
    for _ in range(1000):
        node = Node(node, second)
    summarizer = GraphSummarizer([recv])
    summarizer.target_of(node)
    assert len(summarizer.summarize([])[1]) == 1


# -- path discovery


class World:
    """A random graph over workers: each sent tensor with the tensors it was computed from."""

    def __init__(self, chance: random.Random):
        self.workers = chance.randint(1, 4)
        self.computed_from: dict[SentTensor, list[Target]] = {}
        self.receiver: dict[SentTensor, int] = {}
        arrived: list[list[SentTensor]] = [[] for _ in range(self.workers)]
        for count in range(1, chance.randrange(1, 16)):
            sender, receiver = (chance.randrange(self.workers) for _ in range(2))
            for position in range(chance.randint(1, 2)):
                sent = (sender << COUNTER_BITS | count, position)
                of: list[Target] = chance.sample(
                    arrived[sender], min(len(arrived[sender]), chance.randrange(3))
                )
                if sender == 0 and chance.random() < 0.4:
                    of.append(WANTED)
                self.computed_from[sent] = of
                self.receiver[sent] = receiver
            arrived[receiver] += [sent for sent in self.computed_from if serial(sent[0]) == count]
        self.outputs = chance.sample(arrived[0], min(len(arrived[0]), 2))

    def summary(self, worker: int) -> GraphSummary:
        targets: dict[SentTensor, Target] = {}
        junctions: list[set[Target]] = []
        for sent, of in self.computed_from.items():
            if creator(sent[0]) == worker and of:
                targets[sent] = len(junctions)
                junctions.append(set(of))
        return targets, junctions

    def on_paths(self) -> set[SentTensor]:
        def wanted(target: Target) -> bool:
            if target == WANTED:
                return True
            return any(wanted(further) for further in self.computed_from[target])  # type: ignore[index]

        reached: set[Any] = set()
        stack: list[Any] = list(self.outputs)
        while stack:
            target = stack.pop()
            if target != WANTED:
                reached.add(target)
                stack += self.computed_from[target]
        return {sent for sent in reached if wanted(sent)}


def test_path_discovery_finds_the_tensors_on_paths_to_the_inputs() -> None:
    for seed in range(200):
        check_discovery(World(random.Random(seed)))


def check_discovery(world: World) -> None:
    discovery = PathDiscovery(0, world.summary(0), world.outputs)
    asked: set[int] = {0}
    while missing := discovery.missing():
        assert not missing & asked, "each worker is asked once"
        asked |= missing
        for worker in missing:
            discovery.add_summary(worker, world.summary(worker))
    shares = discovery.shares()
    assert set().union(*shares.values()) == world.on_paths()
    for worker, share in shares.items():
        for sent in share:
            assert worker in (creator(sent[0]), world.receiver[sent])
    for sent in world.on_paths():
        assert sent in shares[creator(sent[0])]
        assert sent in shares[world.receiver[sent]]


# -- on workers


class Records(torch.autograd.Function):
    """Records its name when its backward runs."""

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
    return Records.apply(x, "x there"), Records.apply(y, "y there"), Records.apply(WEIGHT, "weight")


def test_only_nodes_on_paths_to_the_inputs_run(trio: object) -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    RUNS.clear()
    with autograd.context() as context_id:
        arguments = (Records.apply(x, "x here"), Records.apply(y, "y here"))
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
    """Cannot be differentiated by WEIGHT: a saved tensor is changed."""
    squared = WEIGHT * 1
    product = squared * squared
    squared.add_(1)
    return x * 3 + product


def test_an_error_off_the_paths_is_not_raised(trio: object) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", broken, args=(x,)).sum()
        (gradient,) = autograd.grad(context_id, loss, x, retain_graph=True)
        assert gradient.tolist() == [3, 3]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            autograd.backward(context_id, [loss])


def test_inputs_may_be_received_tensors(trio: object) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", torch.mul, args=(x, 3))
        z = rpc.rpc_sync("worker2", torch.mul, args=(y, 5))
        of_z, of_y, of_x = autograd.grad(context_id, z.sum(), [z, y, x])
    assert (of_z.tolist(), of_y.tolist(), of_x.tolist()) == ([1, 1], [5, 5], [15, 15])


def test_a_call_off_the_paths_takes_no_part(trio: object) -> None:
    x, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        loss = (x * rpc.rpc_sync("worker1", torch.mul, args=(other, 3))).sum()
        (gradient,) = autograd.grad(context_id, loss, x, retain_graph=True)
        assert gradient.tolist() == [3, 3]
        with pytest.raises(RuntimeError, match="allow_unused=True"):
            autograd.grad(context_id, loss, torch.ones(2, requires_grad=True))


def test_hooks_of_a_single_output_run_although_no_path_leads_from_it(trio: object) -> None:
    """As in torch, where they do not run if there are several outputs."""
    x, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    for outputs, runs in ((1, 1), (2, 0)):
        for call in (lambda _to, function, args: function(*args), rpc.rpc_sync):
            hooked: list[Tensor] = []
            with autograd.context() as context_id:
                y = call("worker1", torch.mul, (x, 3)).sum()
                y.register_hook(hooked.append)
                gradients = autograd.grad(context_id, [y] * outputs, unused, allow_unused=True)
            assert gradients == (None,)
            assert len(hooked) == runs


def relay(x: Tensor) -> Tensor:
    return rpc.rpc_sync("worker2", torch.mul, args=(x, 3)) * 2


def test_a_worker_that_gets_a_gradient_before_its_share_waits_for_it() -> None:
    network = FaultyTransport(InProcessTransport(), [])
    with cluster(3, transports=[network]) as workers:
        with acting_as(workers[0]):
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


def test_losing_a_worker_that_could_not_report_is_detected() -> None:
    """Although only the pass itself connects this worker with it."""
    network = FaultyTransport(InProcessTransport(), [])
    with cluster(3, transports=[network], graceful=False) as workers:
        with acting_as(workers[0]):
            x = torch.ones(2, requires_grad=True)
            with autograd.context() as context_id:
                loss = rpc.rpc_sync("worker1", relay, args=(x,)).sum()
                # Its report is lost.
                network.add(
                    Fault("drop", kind=Kind.BACKWARD_AUTOGRAD_REQ, sender="worker2", times=1)
                )
                errors: list[BaseException] = []
                waiting = in_thread(lambda: autograd.grad(context_id, loss, x, timeout=0), errors)
                until(lambda: bool(network.done), "worker2 has run its part")
                network.add(Fault("drop", sender="worker2"))
                runtime_of(workers[2]).agent.close(time.monotonic() + 0.1)
                waiting.join(30)
            (error,) = errors
            assert isinstance(error, WorkerLost)
            assert error.worker == "worker2"


@pytest.mark.parametrize("cause", ["release", "loss"])
def test_path_discovery_ends_when_the_pass_does(cause: str) -> None:
    network = FaultyTransport(InProcessTransport(), [])
    with cluster(3, transports=[network], graceful=False) as workers:
        with acting_as(workers[0]):
            x = torch.ones(2, requires_grad=True)
            with autograd.context() as context_id:
                loss = rpc.rpc_sync("worker1", torch.mul, args=(x, 3)).sum()
                rpc.rpc_sync("worker2", torch.mul, args=(x, 3))
                network.add(Fault("drop", kind=Kind.AUTOGRAD_PATHS_REQ))
                errors: list[BaseException] = []
                waiting = in_thread(lambda: autograd.grad(context_id, loss, x, timeout=0), errors)
                until(lambda: bool(network.done), "the request for a summary is lost")
                if cause == "release":
                    runtime_of(workers[0]).releases.release(context_id)
                else:
                    runtime_of(workers[2]).agent.close(time.monotonic() + 0.1)
                waiting.join(30)
            (error,) = errors
            assert ("was released" if cause == "release" else "'worker2' was lost") in str(error)


def in_thread(action: Callable[[], object], errors: list[BaseException]) -> threading.Thread:
    def run() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=copy_context().run, args=(run,))
    thread.start()
    return thread
