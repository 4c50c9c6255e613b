"""A gradient that would only pass through this worker stays on the worker that computed it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire import autograd, rpc
from gradwire._core.autograd.boundary import Recv, Send
from gradwire._core.autograd.pass_messages import PassMessage, PassOptions, ShortcutOffer
from gradwire._core.autograd.pass_state import PassState
from gradwire._core.autograd.plan import Plan
from gradwire._core.autograd.termination import NOT_A_CHILD
from gradwire._core.transport.in_process import InProcessTransport
from gradwire._core.wire.messages import Kind
from gradwire.testing import FaultyTransport, acting_as, cluster


@pytest.fixture
def network() -> Iterator[FaultyTransport]:
    transport = FaultyTransport(InProcessTransport(), [])
    with cluster(3, transports=[transport]) as workers:
        with acting_as(workers[0]):
            yield transport


Call = Callable[..., Any]


def locally(_to: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(*args)


def layer(x: Tensor, weight: Tensor) -> Tensor:
    return (x * weight).sin()


def unchanged(x: Tensor) -> Tensor:
    return x


def both(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x * weight, x + weight


def first(x: Tensor, _unused: Tensor) -> Tensor:
    return x * 2


class Leaves:
    def __init__(self) -> None:
        self.x = torch.tensor([0.5, 2.0], requires_grad=True)
        self.weight = torch.tensor([3.0, 0.7], requires_grad=True)
        #: The gradients that hooks were called with.
        self.seen: list[list[float]] = []
        self.kept = self.x


def chain(call: Call, leaves: Leaves) -> Tensor:
    h = leaves.x * 1
    for _ in range(10):
        h = call("worker1", layer, (h, leaves.weight))
    return h


def chain_through_two_workers(call: Call, leaves: Leaves) -> Tensor:
    h = leaves.x * 1
    for number in range(10):
        h = call(f"worker{1 + number % 2}", layer, (h, leaves.weight))
    return h


def chain_without_operations(call: Call, leaves: Leaves) -> Tensor:
    """Tensors are passed through unchanged on both sides."""
    h = call("worker1", layer, (leaves.x, leaves.weight))
    for _ in range(5):
        h = call("worker1", unchanged, (h,))
    return h


def chain_with_a_hook(call: Call, leaves: Leaves) -> Tensor:
    h = call("worker1", layer, (leaves.x, leaves.weight))
    h.register_hook(lambda gradient: leaves.seen.append(gradient.tolist()))
    return call("worker1", layer, (h, leaves.weight))


def chain_with_retained_grad(call: Call, leaves: Leaves) -> Tensor:
    h = call("worker1", layer, (leaves.x, leaves.weight))
    h.retain_grad()
    leaves.kept = h
    return call("worker1", layer, (h, leaves.weight))


def chain_with_two_results(call: Call, leaves: Leaves) -> Tensor:
    """One of two tensors received in one message is sent back unchanged."""
    product, total = call("worker1", both, (leaves.x, leaves.weight))
    return call("worker1", layer, (product, leaves.weight)) + total


def chain_that_forks(call: Call, leaves: Leaves) -> Tensor:
    h = call("worker1", layer, (leaves.x, leaves.weight))
    parts = [call("worker1", layer, (h, leaves.weight)) for _ in range(3)]
    return parts[0] + parts[1] * parts[2]


def chain_with_an_unused_tensor(call: Call, leaves: Leaves) -> Tensor:
    """A tensor that was received and sent on gets no gradient."""
    unused = call("worker1", layer, (leaves.x, leaves.weight))
    return call("worker1", first, (leaves.x * 3, unused))


FACTOR = torch.tensor([3.0, 0.7], requires_grad=True)


def beside_a_factor(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, FACTOR


def chain_with_a_known_unused_tensor(call: Call, leaves: Leaves) -> Tensor:
    """The missing gradient is known before the other worker learns of the pass."""
    h = call("worker1", layer, (leaves.weight, leaves.weight)) * leaves.x
    _, factor = call("worker1", beside_a_factor, (h,))
    return leaves.x * factor


MESSAGES = {
    chain: 1,
    chain_through_two_workers: None,
    chain_without_operations: 1,
    chain_with_a_hook: 2,
    chain_with_retained_grad: 2,
    chain_with_two_results: None,
    chain_that_forks: None,
    chain_with_an_unused_tensor: None,
    chain_with_a_known_unused_tensor: None,
}


@pytest.mark.parametrize("program", MESSAGES, ids=lambda program: program.__name__)
def test_gradients_are_those_of_one_process(network: FaultyTransport, program: Any) -> None:
    here, there = Leaves(), Leaves()
    program(locally, here).sum().backward()
    with autograd.context() as context_id:
        loss = program(rpc.rpc_sync, there).sum()
        before = network.messages[Kind.BACKWARD_AUTOGRAD_REQ]
        autograd.backward(context_id, [loss], timeout=20)
        sent = network.messages[Kind.BACKWARD_AUTOGRAD_REQ] - before
        gradients = autograd.get_gradients(context_id)
    pairs = [(here.x, gradients.get(there.x)), (here.weight, gradients.get(there.weight))]
    if there.kept is not there.x:
        pairs.append((here.kept, there.kept.grad))
    for tensor, gradient in pairs:
        assert (tensor.grad is None) == (gradient is None)
        assert gradient is None or torch.allclose(gradient, tensor.grad)
    assert there.seen == here.seen
    assert MESSAGES[program] in (None, sent)


def test_gradients_that_have_a_history_take_no_shortcuts(network: FaultyTransport) -> None:
    here, there = Leaves(), Leaves()
    (first_order,) = torch.autograd.grad(chain(locally, here).sum(), here.x, create_graph=True)
    (expected,) = torch.autograd.grad(first_order.sum(), here.x)
    with autograd.context() as context_id:
        loss = chain(rpc.rpc_sync, there).sum()
        (first_gradient,) = autograd.grad(context_id, [loss], [there.x], create_graph=True)
        (second,) = autograd.grad(context_id, [first_gradient.sum()], [there.x])
    assert torch.allclose(first_gradient, first_order)
    assert torch.allclose(second, expected)


def test_a_second_pass_takes_shortcuts_too(network: FaultyTransport) -> None:
    leaves = Leaves()
    with autograd.context() as context_id:
        loss = chain(rpc.rpc_sync, leaves).sum()
        autograd.backward(context_id, [loss], retain_graph=True)
        once = autograd.get_gradients(context_id)
        before = network.messages[Kind.BACKWARD_AUTOGRAD_REQ]
        autograd.backward(context_id, [loss])
        assert network.messages[Kind.BACKWARD_AUTOGRAD_REQ] == before + 1
        twice = autograd.get_gradients(context_id)
    assert all(torch.allclose(twice[leaf], 2 * once[leaf]) for leaf in (leaves.x, leaves.weight))


PARAMETERS = [torch.ones(3, requires_grad=True) for _ in range(2)]
KEPT: list[Tensor] = []


def parameter(number: int) -> Tensor:
    return PARAMETERS[number]


def keep_and_add(x: Tensor) -> Tensor | None:
    KEPT.append(x)
    return KEPT[0] + KEPT[1] if len(KEPT) == 2 else None


def halve_gradients(context_id: int) -> list[list[float]]:
    gradients = autograd.get_gradients(context_id)
    for gradient in gradients.values():
        gradient.mul_(0.5)
    return [gradients[parameter].tolist() for parameter in PARAMETERS]


def test_gradients_that_took_a_shortcut_share_no_storage(network: FaultyTransport) -> None:
    """Torch gives both inputs of a sum the same tensor, and users clip gradients in place."""
    with autograd.context() as context_id:
        for number in range(2):
            received = rpc.rpc_sync("worker1", parameter, args=(number,))
            total = rpc.rpc_sync("worker1", keep_and_add, args=(received,))
        KEPT.clear()
        autograd.backward(context_id, [total.sum()])
        halves = rpc.rpc_sync("worker1", halve_gradients, args=(context_id,))
    assert halves == [[0.5] * 3] * 2


def test_a_message_that_is_still_arriving_takes_no_shortcut() -> None:
    send = Send(1, 0, [torch.ones(2, requires_grad=True) * 1], "")
    recv = Recv(2, 0)
    arrived = recv.take(
        torch.ones(2, requires_grad=True)
    )  # the first of two tensors of the message
    other = Send(3, 0, [arrived * 2], "")
    plan = Plan(direct_leaves=True)
    plan.add({send.id: send, other.id: other}, {recv.id: recv})
    plan.finish([])
    state = PassState(1, 0, PassOptions())
    state.set_plan(plan, {0})
    offer = ShortcutOffer(recv.id, 1, send.id)
    message = PassMessage([], [offer], [], NOT_A_CHILD, [], [])
    state.receive(0, message, answers_first=False)
    state.settle(recv.id, 0, torch.ones(2))
    assert send.id not in state.answers
