"""What a pass costs grows with the work: messages, runs of nodes, visits of the planner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire import autograd, current, rpc
from gradwire.gradients import runs
from gradwire.gradients.graph import Plan, Root
from gradwire.testing import Fault, FaultyTransport, cluster, soak
from gradwire.transport.memory import MemoryNetwork
from gradwire.wire.messages import Kind
from gradwire.worker import Worker
from tests.processes import until


@pytest.fixture
def network() -> Iterator[FaultyTransport]:
    transport = FaultyTransport(MemoryNetwork(), [])
    with cluster(3, transports=[transport]) as workers:
        token = current.enter(workers[0])
        WORKERS[:] = workers
        yield transport
        current.exit(token)
        WORKERS.clear()


WORKERS: list[Worker] = []


class Counts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x * 0.5

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        RUNS[ctx.name] += 1
        return gradient * 0.5, None


RUNS: Counter[str] = Counter()


def layer(x: Tensor, name: str) -> Tensor:
    return Counts.apply(x, name)


def relay(x: Tensor, name: str) -> Tensor:
    return rpc.rpc_sync("worker2", layer, args=(Counts.apply(x, name + ", before"), name)) + x


def chain(count: int) -> tuple[Tensor, Tensor]:
    x = torch.ones(2, requires_grad=True)
    y = x * 1
    for number in range(count):
        y = rpc.rpc_sync(f"worker{1 + number % 2}", layer, args=(y, str(number)))
    return x, y


def trunk(count: int) -> tuple[Tensor, Tensor]:
    """Every layer is elsewhere, and is gone around."""
    x = torch.ones(2, requires_grad=True)
    y = x * 1
    for number in range(count):
        y = Counts.apply(y, f"{number}, here") + rpc.rpc_sync("worker1", relay, (y, str(number)))
    return x, y


def messages_of_pass(network: FaultyTransport, y: Tensor, context_id: int) -> int:
    total = messages_of(network, lambda: autograd.backward(context_id, [y.sum()]))
    assert total.keys() == {Kind.BACKWARD_AUTOGRAD_REQ}
    return total[Kind.BACKWARD_AUTOGRAD_REQ]


def messages_of(network: FaultyTransport, run_pass: Callable[[], object]) -> Counter[Kind]:
    """Messages and answers, by kind."""
    before = network.messages + network.answers
    RUNS.clear()
    run_pass()
    total = network.messages + network.answers - before
    for kind in (Kind.HEARTBEAT, Kind.CLEANUP_AUTOGRAD_CONTEXT_REQ):
        total.pop(kind, None)  # goes on at times of its own
    return total


def test_a_step_with_another_worker_is_one_round_trip(network: FaultyTransport) -> None:
    for _ in range(5):
        with autograd.context() as context_id:
            x, y = chain(1)
            assert messages_of_pass(network, y, context_id) == 2
            assert autograd.get_gradients(context_id)[x].tolist() == [0.5, 0.5]
    assert network.messages[Kind.BACKWARD_AUTOGRAD_OUTCOME] == 0


def test_messages_grow_with_the_calls(network: FaultyTransport) -> None:
    found = {}
    for count in (10, 100, 300):
        with autograd.context() as context_id:
            _, y = chain(count)
            found[count] = messages_of_pass(network, y, context_id)
        assert {str(number): 1 for number in range(count)} == RUNS, "each node runs once"
    # A gradient and its answer per call; the workers are told once.
    assert all(messages <= 2 * count + 8 for count, messages in found.items()), found


def test_what_is_sent_on_as_it_came_takes_no_run(
    network: FaultyTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    def count_and_run(*arguments: Any, **options: Any) -> Any:
        ran.append(arguments)
        return run_backward(*arguments, **options)

    run_backward = runs.run_backward
    monkeypatch.setattr(runs, "run_backward", count_and_run)
    for watch, more in ((None, 0), (Tensor.retain_grad, 9), (hook, 9)):
        with autograd.context() as context_id:
            x = torch.ones(2, requires_grad=True)
            y, seen = x, []
            for number in range(10):
                y = rpc.rpc_sync("worker1", layer, args=(y, str(number)))
                if watch is not None:
                    watch(y)
                    seen.append(y)
            ran.clear()
            autograd.backward(context_id, [y.sum()])
            assert len(ran) == 10 + 1 + more, "for the functions, the sum, and what is watched"
            assert autograd.get_gradients(context_id)[x].tolist() == [0.5**10] * 2
        if watch is Tensor.retain_grad:
            assert [tensor.grad[0].item() for tensor in seen] == [0.5**n for n in range(9, -1, -1)]


def hook(tensor: Tensor) -> None:
    tensor.register_hook(lambda gradient: None)


def test_a_pass_for_inputs_asks_every_worker_once(network: FaultyTransport) -> None:
    for forward, count, most in ((chain, 1, 2), (chain, 100, 204), (trunk, 16, 150)):
        with autograd.context() as context_id:
            x, y = forward(count)
            total = messages_of(network, lambda y=y, x=x: autograd.grad(context_id, y.sum(), x))
        assert total.pop(Kind.AUTOGRAD_CHART_REQ) <= 4, "and is answered"
        assert total.keys() == {Kind.BACKWARD_AUTOGRAD_REQ}
        assert total[Kind.BACKWARD_AUTOGRAD_REQ] <= most, (forward, count)
        assert set(RUNS.values()) == {1}, "each node runs once"


def test_messages_grow_with_the_layers_of_a_trunk(network: FaultyTransport) -> None:
    found = {}
    for count in (16, 64):
        with autograd.context() as context_id:
            x, y = trunk(count)
            found[count] = messages_of_pass(network, y, context_id)
            gradient = autograd.get_gradients(context_id)[x]
        expected = 1.75**count  # a layer is 0.5 here, 0.5 * 0.5 + 1 there
        assert torch.allclose(gradient, torch.full((2,), expected))
        names = {f"{n}{where}" for n in range(count) for where in ("", ", before", ", here")}
        assert dict.fromkeys(names, 1) == RUNS, "each node runs once"
    # Four gradients per layer: into worker 1 and 2, and back. Each is a message or an answer.
    assert all(messages <= 8 * count + 8 for count, messages in found.items()), found


class Waits(torch.autograd.Function):
    """In its backward, until worker 1 has run that of a layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        until(lambda: RUNS["there"] == 1, "the gradient is there")
        return gradient


def test_others_work_while_a_run_comes_to_its_gate(network: FaultyTransport) -> None:
    """A gradient leaves when it is found, not when there is nothing else to do here."""
    with autograd.context() as context_id:
        x = torch.ones(2, requires_grad=True)
        h = x * 1
        y = rpc.rpc_sync("worker1", layer, args=(h, "there")) + Waits.apply(h)
        assert messages_of_pass(network, y, context_id) <= 6
        assert autograd.get_gradients(context_id)[x].tolist() == [1.5, 1.5]


def test_the_release_of_a_context_is_waited_for_by_nobody(network: FaultyTransport) -> None:
    network.add(Fault("drop", kind=Kind.CLEANUP_AUTOGRAD_CONTEXT_REQ))
    for _ in range(3):
        with autograd.context() as context_id:
            _, y = chain(2)
            autograd.backward(context_id, [y.sum()])
            before = network.messages.total()
        assert network.messages.total() == before, "nothing was sent when the block ended"
    # (Of what was told along the way some may have been answered and not been looked at yet.)
    until(lambda: WORKERS[0].agent.open_calls() == 0, "nobody waits")
    network.clear()
    until(lambda: not any(len(worker.contexts) for worker in WORKERS), "all hear of it later")


class Node:
    """Of a graph that counts who looks at it."""

    def __init__(self, *children: Node):
        self._children = children
        self.visits = 0

    @property
    def next_functions(self) -> tuple[tuple[Node, int], ...]:
        self.visits += 1
        return tuple((child, 0) for child in self._children)


class Result:
    requires_grad = True
    output_nr = 0

    def __init__(self, node: Node):
        self.grad_fn = node


def test_planning_looks_at_every_node_once() -> None:
    """Though there are many ways to each, and many sources."""
    nodes = [Node()]
    for _ in range(10_000):
        nodes.append(Node(nodes[-1], nodes[-1], nodes[len(nodes) // 2]))
    results: list[Any] = [Result(node) for node in nodes[::100]]
    plan = Plan()
    plan.finish([Root(result, torch.ones(())) for result in results])
    assert len(plan.regions) == 1
    assert {node.visits for node in nodes} == {1}


def test_the_time_for_planning_can_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--planning", "20000"]) == 0
    assert capsys.readouterr().out.count("µs per node") == 3
