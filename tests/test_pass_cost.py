"""The cost of a pass (messages, node runs, visits by the planner) grows only with its work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire import autograd, rpc
from gradwire._core.autograd import region_run
from gradwire._core.autograd.plan import Plan, Root
from gradwire._core.transport.in_process import InProcessTransport
from gradwire._core.wire.messages import Kind
from gradwire.testing import (
    Fault,
    FaultyTransport,
    acting_as,
    cluster,
    open_contexts,
    runtime_of,
    soak,
)
from gradwire.worker import Worker
from tests.processes import until


@pytest.fixture
def network() -> Iterator[FaultyTransport]:
    transport = FaultyTransport(InProcessTransport(), [])
    with cluster(3, transports=[transport]) as workers:
        with acting_as(workers[0]):
            WORKERS[:] = workers
            yield transport
        WORKERS.clear()


#: The workers of the running test.
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


#: How often the backward of each function has run.
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
    """Every layer is remote and has a residual connection."""
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
    """Run a pass, and return the number of messages and answers by kind."""
    before = network.messages + network.answers
    RUNS.clear()
    run_pass()
    total = network.messages + network.answers - before
    for kind in (Kind.HEARTBEAT, Kind.CLEANUP_AUTOGRAD_CONTEXT_REQ):
        total.pop(kind, None)  # sent at any time, independent of the pass
    return total


def test_a_step_with_another_worker_is_one_round_trip(network: FaultyTransport) -> None:
    for _ in range(5):
        with autograd.context() as context_id:
            x, y = chain(1)
            assert messages_of_pass(network, y, context_id) == 2
            assert autograd.get_gradients(context_id)[x].tolist() == [0.5, 0.5]
    assert network.messages[Kind.BACKWARD_AUTOGRAD_OUTCOME] == 0


def fail(gradient: Tensor) -> None:
    raise ZeroDivisionError


def test_only_a_failed_pass_sends_its_outcome(network: FaultyTransport) -> None:
    with autograd.context() as context_id:
        h = torch.ones(2, requires_grad=True) * 1
        h.register_hook(fail)
        z = rpc.rpc_sync("worker1", layer, args=(h, "there"))
        with pytest.raises(ZeroDivisionError):
            autograd.backward(context_id, [z.sum()])
    until(lambda: network.messages[Kind.BACKWARD_AUTOGRAD_OUTCOME] > 0, "the outcome is sent")


def test_messages_grow_with_the_calls(network: FaultyTransport) -> None:
    totals = {}
    for count in (10, 100, 300):
        with autograd.context() as context_id:
            _, y = chain(count)
            totals[count] = messages_of_pass(network, y, context_id)
        assert {str(number): 1 for number in range(count)} == RUNS, "each node runs once"
    # A gradient and its answer per call, and a constant number of other messages.
    assert all(messages <= 2 * count + 8 for count, messages in totals.items()), totals


def test_a_tensor_passed_on_unchanged_needs_no_run_of_the_engine(
    network: FaultyTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    def count_and_run(*arguments: Any, **options: Any) -> Any:
        ran.append(arguments)
        return run_backward(*arguments, **options)

    run_backward = region_run.run_backward
    monkeypatch.setattr(region_run, "run_backward", count_and_run)
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
            assert len(ran) == 10 + 1 + more, (
                "one per function, one for the sum, and one per tensor with a hook"
            )
            assert autograd.get_gradients(context_id)[x].tolist() == [0.5**10] * 2
        if watch is Tensor.retain_grad:
            assert [tensor.grad[0].item() for tensor in seen] == [0.5**n for n in range(9, -1, -1)]


def hook(tensor: Tensor) -> None:
    tensor.register_hook(lambda gradient: None)


def test_a_pass_for_inputs_sends_one_path_request_per_worker(network: FaultyTransport) -> None:
    for forward, count, most in ((chain, 1, 2), (chain, 100, 204), (trunk, 16, 150)):
        with autograd.context() as context_id:
            x, y = forward(count)
            total = messages_of(network, lambda y=y, x=x: autograd.grad(context_id, y.sum(), x))
        assert total.pop(Kind.AUTOGRAD_PATHS_REQ) <= 4, "two requests and their answers"
        assert total.keys() == {Kind.BACKWARD_AUTOGRAD_REQ}
        assert total[Kind.BACKWARD_AUTOGRAD_REQ] <= most, (forward, count)
        assert set(RUNS.values()) == {1}, "each node runs once"


def test_messages_grow_with_the_layers_of_a_trunk(network: FaultyTransport) -> None:
    totals = {}
    for count in (16, 64):
        with autograd.context() as context_id:
            x, y = trunk(count)
            totals[count] = messages_of_pass(network, y, context_id)
            gradient = autograd.get_gradients(context_id)[x]
        expected = 1.75**count  # of a layer: 0.5 on worker0, 0.5 * 0.5 + 1 on the others
        assert torch.allclose(gradient, torch.full((2,), expected))
        names = {f"{n}{where}" for n in range(count) for where in ("", ", before", ", here")}
        assert dict.fromkeys(names, 1) == RUNS, "each node runs once"
    # Four gradients per layer: to worker1, to worker2, and back. Each is a message with an answer.
    assert all(messages <= 8 * count + 8 for count, messages in totals.items()), totals


class Waits(torch.autograd.Function):
    """Its backward waits until worker1 has run the backward of a layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        until(lambda: RUNS["there"] == 1, "worker1 has received the gradient")
        return gradient


def test_a_gradient_is_sent_before_the_run_reaches_its_gate(network: FaultyTransport) -> None:
    """So the other worker can start early, while worker0 still runs other nodes."""
    with autograd.context() as context_id:
        x = torch.ones(2, requires_grad=True)
        h = x * 1
        y = rpc.rpc_sync("worker1", layer, args=(h, "there")) + Waits.apply(h)
        assert messages_of_pass(network, y, context_id) <= 6
        assert autograd.get_gradients(context_id)[x].tolist() == [1.5, 1.5]


def test_releasing_a_context_does_not_block(network: FaultyTransport) -> None:
    network.add(Fault("drop", kind=Kind.CLEANUP_AUTOGRAD_CONTEXT_REQ))
    for _ in range(3):
        with autograd.context() as context_id:
            _, y = chain(2)
            autograd.backward(context_id, [y.sum()])
            before = network.messages.total()
        assert network.messages.total() == before, "nothing was sent when the block ended"
    # The answers to earlier messages may be unread until now.
    until(lambda: runtime_of(WORKERS[0]).agent.metrics.open_calls() == 0, "no call is open")
    network.clear()
    until(
        lambda: not open_contexts(WORKERS),
        "all workers release the contexts later",
    )


class Node:
    """A node that counts how often its edges are read."""

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


def test_planning_visits_every_node_once() -> None:
    """Even with many paths to each node, and many roots."""
    nodes = [Node()]
    for _ in range(10_000):
        nodes.append(Node(nodes[-1], nodes[-1], nodes[len(nodes) // 2]))
    results: list[Any] = [Result(node) for node in nodes[::100]]
    plan = Plan()
    plan.finish([Root(result, torch.ones(())) for result in results])
    assert len(plan.regions) == 1
    assert {node.visits for node in nodes} == {1}


def test_the_soak_test_measures_the_time_for_planning(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--planning", "20000"]) == 0
    assert capsys.readouterr().out.count("µs per node") == 3
