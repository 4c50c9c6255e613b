"""Training across workers changes parameters exactly as the same training in one process."""

from __future__ import annotations

import copy
import inspect
import io
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

from gradwire import autograd, rpc
from gradwire.errors import CallError, GradwireError
from gradwire.nn import RemoteModule
from gradwire.optim import DistributedOptimizer, clip_grad_norm_
from gradwire.testing import acting_as, cluster
from gradwire.worker import Worker
from tests.processes import run_group

# -- a model of three layers: the first here, the others on worker1 and worker2


def layer(number: int) -> nn.Module:
    generator = torch.Generator().manual_seed(number)
    made = nn.Linear(4, 4)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
    return made


def parameters_of(module: rpc.RRef[nn.Module]) -> list[rpc.RRef[nn.Parameter]]:
    return [rpc.RRef(parameter) for parameter in module.local_value().parameters()]


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(99)
    return [torch.rand(8, 4, generator=generator) for _ in range(count)]


class Remote:
    """The model across workers."""

    def __init__(self) -> None:
        homes = [rpc.get_worker_info().name, "worker1", "worker2"]
        self.layers = [rpc.remote(home, layer, (n,)) for n, home in enumerate(homes)]
        self.params = [
            rref
            for module in self.layers
            for rref in rpc.rpc_sync(module.owner(), parameters_of, (module,))
        ]

    def loss(self, x: Tensor) -> Tensor:
        for module in self.layers:
            x = torch.tanh(module.rpc_sync().forward(x))
        return x.square().mean()

    def train(
        self, optimizer: DistributedOptimizer, xs: list[Tensor], scheduler: Any = None
    ) -> list[float]:
        losses = []
        for x in xs:
            with autograd.context() as context_id:
                loss = self.loss(x)
                autograd.backward(context_id, [loss])
                optimizer.step(context_id)
            losses.append(loss.item())
            if scheduler is not None:
                advance(scheduler, losses[-1])
        return losses

    def values(self) -> list[Tensor]:
        return [param.to_here().detach().clone() for param in self.params]


class Local:
    """The same model in one process."""

    def __init__(self) -> None:
        self.layers = [layer(n) for n in range(3)]
        self.params = [param for module in self.layers for param in module.parameters()]

    def train(
        self, optimizer: optim.Optimizer, xs: list[Tensor], scheduler: Any = None
    ) -> list[float]:
        losses = []
        for x in xs:
            optimizer.zero_grad()
            for module in self.layers:
                x = torch.tanh(module(x))
            loss = x.square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if scheduler is not None:
                advance(scheduler, losses[-1])
        return losses


def advance(scheduler: Any, loss: float) -> None:
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(loss)
    else:
        scheduler.step()


def assert_equal(left: list[Tensor], right: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# -- equality with one process


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (optim.SGD, {"lr": 0.1}),
        (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        (optim.Adam, {"lr": 0.01, "amsgrad": True}),
        (optim.AdamW, {"lr": 0.01}),
        (optim.Adagrad, {"lr": 0.05}),
        (optim.Adadelta, {}),
        (optim.RMSprop, {"lr": 0.01}),
        (optim.Rprop, {"lr": 0.01}),
        (optim.NAdam, {"lr": torch.tensor(0.01)}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_training_equals_that_of_one_process(
    trio: list[Worker], kind: Any, settings: dict[str, Any]
) -> None:
    remote, local = Remote(), Local()
    losses = remote.train(DistributedOptimizer(kind, remote.params, **settings), batches(4))
    assert losses == local.train(kind(local.params, **settings), batches(4))
    assert_equal(remote.values(), local.params)


def test_training_equals_that_of_one_process_across_processes() -> None:
    def body(rank: int) -> list[float] | None:
        if rank:
            return None
        remote = Remote()
        return remote.train(DistributedOptimizer(optim.Adam, remote.params, lr=0.05), batches(6))

    local = Local()
    expected = local.train(optim.Adam(local.params, lr=0.05), batches(6))
    assert run_group(3, body)[0] == expected


def test_parameter_groups_have_settings_of_their_own(trio: list[Worker]) -> None:
    def grouped(params: list[Any]) -> list[dict[str, Any]]:
        return [{"params": params[:3], "lr": 0.5}, {"params": params[3:], "momentum": 0.9}]

    remote, local = Remote(), Local()
    optimizer = DistributedOptimizer(optim.SGD, grouped(remote.params), lr=0.1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    remote.train(optimizer, batches(3))
    local.train(optim.SGD(grouped(local.params), lr=0.1), batches(3))
    assert_equal(remote.values(), local.params)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 3, sparse=True)
        nn.init.ones_(self.table.weight)

    def forward(self, rows: Tensor) -> Tensor:
        picked: Tensor = self.table(rows)
        return picked


def test_sparse_gradients_change_only_their_rows(trio: list[Worker]) -> None:
    remote, local = rpc.remote("worker1", Table), Table()
    (weight,) = rpc.rpc_sync("worker1", parameters_of, (remote,))
    remote_optimizer = DistributedOptimizer(optim.SparseAdam, [weight], lr=0.1)
    local_optimizer = optim.SparseAdam(local.parameters(), lr=0.1)
    for rows in (torch.tensor([0, 2, 2]), torch.tensor([2, 5])):
        with autograd.context() as context_id:
            autograd.backward(context_id, [remote.rpc_sync().forward(rows).square().sum()])
            remote_optimizer.step(context_id)
        local_optimizer.zero_grad()
        local(rows).square().sum().backward()
        local_optimizer.step()
    assert torch.equal(weight.to_here(), local.table.weight)
    assert torch.equal(local.table.weight[1], torch.ones(3))


# -- schedulers


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
        lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
        lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=3),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=2),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=7),
        lambda o: lr_scheduler.CyclicLR(o, base_lr=0.1, max_lr=0.3, step_size_up=2),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10.0),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [3]
        ),
        lambda o: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(o), lr_scheduler.PolynomialLR(o)]
        ),
    ],
    ids=lambda _: "",
)
# SequentialLR of torch 2.6 warns of a call that it makes itself.
@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
def test_torch_schedulers_work_unchanged(
    trio: list[Worker], make: Callable[[optim.Optimizer], Any], lr: Any
) -> None:
    remote, local = Remote(), Local()
    settings = {"lr": lr, "momentum": 0.9, "foreach": False}
    theirs = DistributedOptimizer(optim.SGD, remote.params, **settings)
    ours = optim.SGD(local.params, **copy.deepcopy(settings))
    schedules = make(theirs), make(ours)
    losses = remote.train(theirs, batches(6), schedules[0])
    assert losses == local.train(ours, batches(6), schedules[1])
    assert schedules[0].get_last_lr() == schedules[1].get_last_lr()
    assert_equal(remote.values(), local.params)


class Counting(optim.SGD):
    """Keeps a number of its own among its settings, as some optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        super().step(closure)


def test_an_optimizer_keeps_the_group_settings_that_it_adds(trio: list[Worker]) -> None:
    remote = Remote()
    optimizer = DistributedOptimizer(Counting, remote.params, lr=0.1)
    remote.train(optimizer, batches(3), lr_scheduler.StepLR(optimizer, 1))
    assert optimizer.state_dict()["param_groups"][0]["steps"] == 3


# -- checkpoints


def saved(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("kind", [optim.Adam, optim.SGD])
def test_training_resumes_from_a_checkpoint(trio: list[Worker], kind: Any) -> None:
    settings = {"lr": 0.01} if kind is optim.Adam else {"lr": 0.1, "momentum": 0.9}
    first = Remote()
    optimizer = DistributedOptimizer(kind, first.params, **settings)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.9)
    first.train(optimizer, batches(3), schedule)
    state, values = saved(optimizer.state_dict()), first.values()

    second = Remote()
    give(second.params, values)
    other = DistributedOptimizer(kind, second.params, **settings)
    other_schedule = lr_scheduler.ExponentialLR(other, 0.9)
    other_schedule.load_state_dict(schedule.state_dict())
    other.load_state_dict(state)
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert first.train(optimizer, batches(6)[3:], schedule) == second.train(
        other, batches(6)[3:], other_schedule
    )
    assert_equal(first.values(), second.values())


def give(params: list[rpc.RRef[Any]], values: list[Tensor]) -> None:
    for param, value in zip(params, values, strict=True):
        rpc.rpc_sync(param.owner(), set_value, (param, value))


def set_value(param: rpc.RRef[Tensor], value: Tensor) -> None:
    param.local_value().data.copy_(value)


def test_checkpoints_equal_those_of_one_process(trio: list[Worker]) -> None:
    """A state moves between workers and a single process, in both directions."""
    remote, local = Remote(), Local()
    theirs = DistributedOptimizer(optim.Adam, remote.params[::-1], lr=0.01)
    ours = optim.Adam(local.params[::-1], lr=0.01)
    remote.train(theirs, batches(2))
    local.train(ours, batches(2))
    left, right = theirs.state_dict(), ours.state_dict()
    assert left["param_groups"] == right["param_groups"]
    assert left["state"].keys() == right["state"].keys()
    for number, kept in right["state"].items():
        assert all(torch.equal(left["state"][number][name], kept[name]) for name in kept)
    ours.load_state_dict(left)
    theirs.load_state_dict(right)
    assert remote.train(theirs, batches(2)) == local.train(ours, batches(2))


def test_a_state_dict_is_a_copy(trio: list[Worker]) -> None:
    remote = Remote()
    optimizer = DistributedOptimizer(optim.Adam, remote.params, lr=0.1)
    remote.train(optimizer, batches(1))
    before = optimizer.state_dict()["state"]
    kept = {number: dict(entry) for number, entry in saved(before).items()}
    remote.train(optimizer, batches(2))
    for number, entry in kept.items():
        assert all(torch.equal(before[number][name], entry[name]) for name in entry)


def test_a_state_dict_that_does_not_fit_is_refused(trio: list[Worker]) -> None:
    remote = Remote()
    optimizer = DistributedOptimizer(optim.SGD, remote.params, lr=0.1)
    state = DistributedOptimizer(optim.SGD, remote.params[:2], lr=0.1).state_dict()
    with pytest.raises(ValueError, match=r"have \[2\] parameters, .* optimizer \[6\]"):
        optimizer.load_state_dict(state)


# -- gradients of other trainers


def test_a_step_leaves_grad_alone(trio: list[Worker]) -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.full((2,), 7.0)
    kept = weight.grad
    unused = nn.Parameter(torch.ones(2))
    unused.grad = torch.full((2,), 8.0)
    rrefs = [rpc.RRef(weight), rpc.RRef(unused)]
    optimizer = DistributedOptimizer(optim.SGD, rrefs, lr=1.0, weight_decay=0.5)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", torch.sum, (weight * 2,))
        autograd.backward(context_id, [loss])
        optimizer.step(context_id)
    assert weight.tolist() == [-1.5, -1.5]
    assert weight.grad is kept
    assert kept.tolist() == [7.0, 7.0]
    assert unused.tolist() == [1.0, 1.0], "it has no gradient in this context"
    assert unused.grad.tolist() == [8.0, 8.0]


SHARED = torch.ones(2, requires_grad=True)


class Disturbed(optim.SGD):
    """Runs a local backward of the same parameter in the middle of a step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (SHARED * 10).sum().backward()
        super().step(closure)


class Failing(optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise ArithmeticError("no step")


class Replacing(optim.SGD):
    """Gives parameters new storages instead of changing them in place."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data - 0.5 * parameter.grad


@pytest.mark.parametrize(
    ("kind", "value", "gradient"),
    [(Disturbed, 0.5, 10.0), (Failing, 1.0, None), (Replacing, 0.5, None)],
)
def test_a_step_uses_only_the_gradients_of_its_context(
    trio: list[Worker], kind: Any, value: float, gradient: float | None
) -> None:
    with torch.no_grad():
        SHARED.fill_(1.0)
    SHARED.grad = None
    optimizer = DistributedOptimizer(kind, [rpc.RRef(SHARED)], lr=0.5)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.sum, (SHARED,))])
        if kind is Failing:
            with pytest.raises(Exception, match="no step"):
                optimizer.step(context_id)
        else:
            optimizer.step(context_id)
        assert autograd.get_gradients(context_id)[SHARED].tolist() == [1.0, 1.0]
    assert SHARED.tolist() == [value, value]
    grad = SHARED.grad
    assert (None if grad is None else grad.tolist()) == (gradient and [gradient, gradient])


class Waiting(optim.SGD):
    """Its constructor waits until the test lets it end."""

    begun, may_end = threading.Event(), threading.Event()

    def __init__(self, params: Any, lr: float):
        super().__init__(params, lr=lr)
        Waiting.begun.set()
        assert Waiting.may_end.wait(30)


def test_a_parameter_steps_while_another_optimizer_is_made(trio: list[Worker]) -> None:
    weight = nn.Parameter(torch.ones(2))
    rref = rpc.RRef(weight)
    x = torch.ones(2, requires_grad=True)
    first = DistributedOptimizer(optim.SGD, [rref], lr=1.0)
    context = copy_context()
    with ThreadPoolExecutor(1) as thread, autograd.context() as context_id:
        loss = rpc.rpc_sync(
            "worker1", torch.sum, (weight * x,)
        )  # saves the weight, so the step must copy it
        autograd.backward(context_id, [loss], retain_graph=True)
        second = thread.submit(context.run, DistributedOptimizer, Waiting, [rref], lr=1.0)
        try:
            assert Waiting.begun.wait(30)
            first.step(context_id)
        finally:
            Waiting.may_end.set()
        second.result()
        assert weight.tolist() == [0.0, 0.0]
        autograd.backward(context_id, [loss])
        assert autograd.get_gradients(context_id)[x].tolist() == [2.0, 2.0], (
            "the weight of the forward"
        )


def test_a_sparse_parameter_can_be_optimized(trio: list[Worker]) -> None:
    weight = torch.eye(2).to_sparse().requires_grad_()
    optimizer = DistributedOptimizer(optim.SGD, [rpc.RRef(weight)], lr=0.5)
    with autograd.context() as context_id:
        doubled = torch.sparse.mm(weight, torch.ones(2, 1))
        autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.sum, (doubled,))])
        optimizer.step(context_id)
    assert weight.grad is None
    assert torch.equal(weight.detach().to_dense(), 0.5 * torch.eye(2))


@pytest.mark.parametrize("value", [[1.0], 3])
def test_only_tensors_can_be_optimized(trio: list[Worker], value: Any) -> None:
    with pytest.raises(Exception, match="optimizer can only optimize Tensors"):
        DistributedOptimizer(optim.SGD, [rpc.RRef(value)], lr=0.5)


def test_only_leaves_can_be_optimized(trio: list[Worker]) -> None:
    with pytest.raises(Exception, match="can't optimize a non-leaf Tensor"):
        DistributedOptimizer(optim.SGD, [rpc.RRef(SHARED * 2)], lr=0.5)


def test_a_context_without_gradients_changes_nothing(trio: list[Worker]) -> None:
    remote = Remote()
    optimizer = DistributedOptimizer(optim.SGD, remote.params, lr=0.1, weight_decay=0.1)
    before = remote.values()
    with autograd.context() as context_id:
        with pytest.warns(UserWarning, match="has no gradient for any parameter"):
            optimizer.step(context_id)
    assert_equal(remote.values(), before)
    with pytest.raises(GradwireError, match="Could not find autograd context"):
        optimizer.step(context_id)


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_step_that_changes_nothing_warns_once_at_the_line_of_the_program(
    trio: list[Worker], scheduled: bool
) -> None:
    remote = Remote()
    optimizer = DistributedOptimizer(optim.SGD, remote.params, lr=0.1)
    if scheduled:
        lr_scheduler.StepLR(optimizer, 1)  # It wraps `step` in a function of torch.
    outside = remote.loss(batches(1)[0])
    with autograd.context() as context_id:
        with pytest.warns(UserWarning, match="this step changed nothing") as caught:
            line = step_twice(optimizer, context_id)
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, line)]
    assert "the forward pass ran outside of `with gradwire" in str(caught[0].message)
    assert outside.requires_grad


def step_twice(optimizer: DistributedOptimizer, context_id: int) -> int:
    """Return the number of the line with the first step."""
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    optimizer.step(context_id)
    optimizer.step(context_id)
    return line


def test_a_step_with_gradients_for_some_owners_does_not_warn(trio: list[Worker]) -> None:
    remote = Remote()
    optimizer = DistributedOptimizer(optim.SGD, remote.params, lr=0.1)
    with autograd.context() as context_id:
        loss = remote.layers[1].rpc_sync().forward(batches(1)[0]).sum()
        autograd.backward(context_id, [loss])
        optimizer.step(context_id)


class Overlapping(optim.SGD):
    """Records whether another step runs at the same time."""

    both_step = threading.Barrier(2)
    overlapped = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        try:
            Overlapping.both_step.wait(0.1)
            Overlapping.overlapped = True
        except threading.BrokenBarrierError:
            Overlapping.both_step.reset()
        super().step(closure)


@pytest.mark.parametrize(("kind", "steps", "trainers"), [(Overlapping, 1, 3), (optim.SGD, 10, 6)])
def test_trainers_that_share_parameters_take_turns(
    trio: list[Worker], kind: Any, steps: int, trainers: int
) -> None:
    """All steps add whole numbers, so the sum is exact in any order unless a step is lost."""
    weight = rpc.remote("worker1", nn.Parameter, (torch.zeros(64, 64),))
    for worker in trio:
        rpc.rpc_sync(worker.name, remember, (weight,))

    def train(number: int) -> None:
        with acting_as(trio[number % 3]):
            mine = WEIGHTS[number % 3]
            optimizer = DistributedOptimizer(kind, [mine], lr=1.0)
            for _ in range(steps):
                with autograd.context() as context_id:
                    loss = rpc.rpc_sync("worker1", total, (mine,))
                    autograd.backward(context_id, [loss * -(number + 1)])
                    optimizer.step(context_id)

    with ThreadPoolExecutor(trainers) as threads:
        for done in [threads.submit(train, number) for number in range(trainers)]:
            done.result()
    WEIGHTS.clear()
    assert not Overlapping.overlapped
    expected = float(steps * sum(range(1, trainers + 1)))
    assert torch.equal(weight.to_here(), torch.full((64, 64), expected))


def test_overlapping_steps_are_recorded() -> None:
    """The test above relies on this record."""
    optimizers = [Overlapping([nn.Parameter(torch.ones(1))], lr=1.0) for _ in range(2)]
    try:
        with ThreadPoolExecutor(2) as threads:
            for _ in range(100):  # until both threads step within 0.1 s
                list(threads.map(lambda optimizer: optimizer.step(), optimizers))
                if Overlapping.overlapped:
                    break
        assert Overlapping.overlapped
    finally:
        Overlapping.overlapped = False


WEIGHTS: dict[int, rpc.RRef[Tensor]] = {}


def remember(weight: rpc.RRef[Tensor]) -> None:
    WEIGHTS[rpc.get_worker_info().id] = weight


def total(weight: rpc.RRef[Tensor]) -> Tensor:
    return weight.local_value().sum()


# -- failures


class Fails(optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise ZeroDivisionError(f"no step on {rpc.get_worker_info().name}")


class FailsElsewhere(optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if rpc.get_worker_info().name == "worker1":
            raise ZeroDivisionError("no step today")
        super().step(closure)


class CannotBeMade(optim.SGD):
    def __init__(self, params: Any):
        raise LookupError("cannot be made")


def test_all_failing_owners_are_named(trio: list[Worker]) -> None:
    remote = Remote()
    with pytest.raises(ZeroDivisionError, match="no step on worker0") as caught:
        remote.train(DistributedOptimizer(Fails, remote.params, lr=0.1), batches(1))
    cause = str(caught.value.__cause__)
    assert "3 of 3 workers failed" in cause
    assert all(f"worker 'worker{n}'" in cause for n in range(3))
    assert all(f"no step on worker{n}" in cause for n in range(3))


def test_a_failing_owner_does_not_stop_the_others(trio: list[Worker]) -> None:
    remote = Remote()
    before = remote.values()
    with pytest.raises(ZeroDivisionError, match="no step today") as caught:
        remote.train(DistributedOptimizer(FailsElsewhere, remote.params, lr=0.1), batches(1))
    assert 'on worker "worker1"' in str(caught.value.__cause__)
    changed = [not torch.equal(a, b) for a, b in zip(before, remote.values(), strict=True)]
    assert changed == [True, True, False, False, True, True]


def test_bad_arguments_are_refused_by_the_constructor(trio: list[Worker]) -> None:
    remote = Remote()
    with pytest.raises(LookupError, match="cannot be made"):
        DistributedOptimizer(CannotBeMade, remote.params)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        DistributedOptimizer(optim.SGD, remote.params, lr=-1.0)
    with pytest.raises(ValueError, match="nothing to optimize"):
        DistributedOptimizer(optim.SGD, [], lr=0.1)
    with pytest.raises(TypeError, match=r"not a Parameter\. Give it the whole model"):
        DistributedOptimizer(optim.SGD, [nn.Parameter(torch.ones(1))], lr=0.1)  # type: ignore[list-item]
    with pytest.raises(NotImplementedError, match="all its parameter groups"):
        DistributedOptimizer(optim.SGD, remote.params, lr=0.1).add_param_group({"params": []})


def test_a_lost_owner_is_named() -> None:
    with cluster(3, graceful=False) as workers:
        with acting_as(workers[0]):
            remote = Remote()
            optimizer = DistributedOptimizer(optim.SGD, remote.params, lr=0.1)
            with autograd.context() as context_id:
                autograd.backward(context_id, [remote.loss(batches(1)[0])])
                workers[2].shutdown(graceful=False)
                with pytest.raises(CallError, match="worker2"):
                    optimizer.step(context_id)


# -- sending, and hooks


def test_an_optimizer_can_be_sent(trio: list[Worker]) -> None:
    remote, local = Remote(), Local()
    optimizer = DistributedOptimizer(optim.SGD, remote.params, lr=0.1, momentum=0.9)
    for x in batches(2):
        with autograd.context() as context_id:
            autograd.backward(context_id, [remote.loss(x)])
            rpc.rpc_sync("worker2", step, (optimizer, context_id))
    local.train(optim.SGD(local.params, lr=0.1, momentum=0.9), batches(2))
    assert_equal(remote.values(), local.params)


def step(optimizer: DistributedOptimizer, context_id: int) -> None:
    optimizer.step(context_id)


def test_hooks_around_steps_run(trio: list[Worker]) -> None:
    remote = Remote()
    optimizer = DistributedOptimizer(optim.SGD, remote.params, lr=0.1)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    remote.train(optimizer, batches(2))
    assert seen == ["before", "after"] * 2


# -- modules in place of parameters


class Mixture(nn.Module):
    """A model whose parts may be on other workers. One is used twice, one has no gradient."""

    def __init__(self, remote: bool) -> None:
        super().__init__()

        def part(worker: str, number: int) -> nn.Module:
            return RemoteModule(worker, layer, (number,)) if remote else layer(number)

        self.first = layer(0)
        self.scale = nn.Parameter(torch.ones(4))
        self.experts = nn.ModuleList([part("worker1", 1), layer(2), part("worker2", 3)])
        self.again = self.experts[0]
        self.unused = part("worker1", 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) * self.scale
        for expert in self.experts:
            x = x + torch.tanh(expert(x))
        return self.again(x)


def train_mixture(
    remote: bool, xs: list[Tensor], group: Callable[[Mixture], Any], max_norm: float
) -> tuple[list[tuple[float, Tensor]], dict[str, Any], dict[str, Any]]:
    """Train with clipping. Return the losses and norms, and the states of model and optimizer."""
    model, seen = Mixture(remote), []
    optimizer: Any = (DistributedOptimizer if remote else local_adamw)(
        optim.AdamW, group(model), lr=0.05, weight_decay=0.1
    )
    for x in xs:
        if remote:
            with autograd.context() as context_id:
                loss = model(x).square().mean()
                autograd.backward(context_id, [loss])
                norm = clip_grad_norm_(context_id, model, max_norm)
                optimizer.step(context_id)
        else:
            model.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
        seen.append((loss.item(), norm))
    return seen, model.state_dict(), optimizer.state_dict()


def local_adamw(kind: Any, given: Any, **settings: Any) -> optim.Optimizer:
    """Make a local optimizer, for modules where `DistributedOptimizer` takes modules."""
    if isinstance(given, nn.Module):
        given = list(given.parameters())
    for group in given:
        if isinstance(group, dict) and isinstance(group["params"], nn.Module):
            group["params"] = list(group["params"].parameters())
    made: optim.Optimizer = kind(given, **settings)
    return made


def all_together(model: Mixture) -> Any:
    return model


def in_groups(model: Mixture) -> Any:
    return [{"params": model.experts, "lr": 0.5}, {"params": model.first}]


def assert_same(left: Any, right: Any) -> None:
    """Compare to the last bit."""
    if isinstance(right, Tensor):
        assert torch.equal(left, right)
    elif isinstance(right, dict):
        assert left.keys() == right.keys()
        for key in right:
            assert_same(left[key], right[key])
    elif isinstance(right, list | tuple):
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


@pytest.mark.parametrize("group", [all_together, in_groups])
def test_an_optimizer_takes_modules_with_local_and_remote_parts(
    trio: list[Worker], group: Callable[[Mixture], Any]
) -> None:
    assert_same(
        train_mixture(True, batches(4), group, 0.5), train_mixture(False, batches(4), group, 0.5)
    )


def test_a_mixture_across_processes_trains_as_in_one() -> None:
    def body(rank: int) -> None:
        if not rank:
            assert_same(train_mixture(True, batches(4), all_together, 0.5), expected)

    expected = train_mixture(False, batches(4), all_together, 0.5)
    run_group(3, body)


class Nest(nn.Module):
    """Is on a worker, and has parts on others."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(RemoteModule("worker2", layer, (1,)), layer(2))
        self.top = layer(3)


def test_remote_modules_inside_remote_modules_are_optimized_too(trio: list[Worker]) -> None:
    model = nn.Sequential(RemoteModule("worker1", Nest), layer(4))
    optimizer = DistributedOptimizer(optim.SGD, model, lr=0.1)
    owners = [rref.owner_name() for rref in optimizer.param_groups[0]["params"]]
    assert owners == ["worker2"] * 2 + ["worker1"] * 4 + ["worker0"] * 2
    assert [rref.owner_name() for rref in model[0].remote_parameters(recurse=False)] == []


def test_what_is_no_parameter_is_refused(trio: list[Worker]) -> None:
    for wrong in ([layer(0).weight], [1], layer(0).parameters(), [{"params": [layer(0).weight]}]):
        with pytest.raises(TypeError, match="must hold modules, or RRefs to parameters, not a"):
            DistributedOptimizer(optim.SGD, wrong, lr=0.1)  # type: ignore[arg-type]
    for empty in ([], nn.Tanh(), [{"params": []}], RemoteModule("worker1", nn.Tanh)):
        with pytest.raises(ValueError, match="is empty: there is nothing to optimize"):
            DistributedOptimizer(optim.SGD, empty, lr=0.1)  # type: ignore[arg-type]


def test_the_repr_of_an_optimizer_names_class_workers_and_groups(trio: list[Worker]) -> None:
    groups = [{"params": Remote().params}, {"params": Mixture(True).first, "lr": 0.5}]
    lines = repr(DistributedOptimizer(optim.SGD, groups, lr=0.1)).splitlines()
    assert lines[:3] == [
        "DistributedOptimizer (",
        "SGD of 8 parameters: 4 on worker0, 2 on worker1, 2 on worker2",
        "Parameter Group 0",
    ]
    assert "    lr: 0.1" in lines
    assert "    lr: 0.5" in lines


# -- clipping


SIZES = [(1,), (3,), (2, 5), (40, 30)]
OWNED: dict[int, list[nn.Parameter]] = {}


def make_parameters(seed: int, sizes: list[tuple[int, ...]]) -> list[rpc.RRef[Any]]:
    """Make parameters on this worker."""
    generator = torch.Generator().manual_seed(seed)
    OWNED[seed] = [nn.Parameter(torch.rand(size, generator=generator) - 0.5) for size in sizes]
    return [rpc.RRef(parameter) for parameter in OWNED[seed]]


def use_parameters(seed: int, factors: list[float]) -> Tensor:
    """Return a value with gradients for the parameters whose factor is not 0."""
    terms = [p.pow(3).sum() * f for p, f in zip(OWNED[seed], factors, strict=True) if f]
    return sum(terms, torch.zeros((), requires_grad=True))


def gradients_of(seed: int, context_id: int, into_grad: bool) -> list[Tensor | None]:
    found = autograd.get_gradients(context_id)
    return [each.grad if into_grad else found.get(each) for each in OWNED[seed]]


@pytest.mark.parametrize("into_grad", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_clipping_equals_that_of_one_process(
    trio: list[Worker], seed: int, into_grad: bool
) -> None:
    chance = random.Random(seed)
    norm_type = chance.choice([2.0, 1, 3.5, float("inf"), 0.5])
    max_norm = chance.choice([0.0, 1e-3, 0.1, 1.0, 1e6])
    sizes = [[chance.choice(SIZES) for _ in range(chance.randint(1, 4))] for _ in trio]
    factors = [[chance.choice([0.0, 1.0, 100.0]) for _ in each] for each in sizes]
    homes = list(zip(("worker0", "worker1", "worker2"), sizes, factors, strict=True))
    rrefs = []
    with autograd.context(into_grad) as context_id:
        loss: Any = 0
        for number, (home, its_sizes, its_factors) in enumerate(homes):
            rrefs += rpc.rpc_sync(home, make_parameters, (number, its_sizes))
            loss = loss + rpc.rpc_sync(home, use_parameters, (number, its_factors))
        autograd.backward(context_id, [loss])
        order = chance.sample(range(len(rrefs)), len(rrefs))
        given = [rrefs[index] for index in order]
        norm = clip_grad_norm_(context_id, given, max_norm, norm_type)
        gradients = []
        for number, (home, *_) in enumerate(homes):
            gradients += rpc.rpc_sync(home, gradients_of, (number, context_id, into_grad))

    whole = [nn.Parameter(p.detach().clone()) for owned in OWNED.values() for p in owned]
    terms = [p.pow(3).sum() * f for p, f in zip(whole, chain(*factors), strict=True) if f]
    if terms:
        sum(terms).backward()
    expected = nn.utils.clip_grad_norm_([whole[index] for index in order], max_norm, norm_type)
    assert torch.equal(norm, expected)
    assert_same(gradients, [parameter.grad for parameter in whole])
    OWNED.clear()


def test_norms_that_are_not_finite_are_an_error_on_request(trio: list[Worker]) -> None:
    remote = RemoteModule("worker1", layer, (1,))
    with autograd.context() as context_id:
        autograd.backward(context_id, [(remote(batches(1)[0]) * float("inf")).sum()])
        for_parameters = context_id, remote.remote_parameters(), 1.0
        with pytest.raises(RuntimeError, match=r"norm of order 2\.0 for gradients .* non-finite"):
            clip_grad_norm_(*for_parameters, error_if_nonfinite=True)
        assert not clip_grad_norm_(*for_parameters).isfinite()


def test_clipping_without_gradients_or_without_a_context(trio: list[Worker]) -> None:
    remote = Remote()
    with autograd.context() as context_id:
        assert clip_grad_norm_(context_id, remote.params, 1.0) == 0
        assert clip_grad_norm_(context_id, [], 1.0) == 0
    with pytest.raises(GradwireError, match="Could not find autograd context"):
        clip_grad_norm_(context_id, remote.params, 1.0)


def test_an_optimizer_in_the_place_of_a_class_is_refused(trio: list[Worker]) -> None:
    local = optim.Adam([torch.ones(2, requires_grad=True)])
    with pytest.raises(TypeError, match=r"write DistributedOptimizer\(Adam, model, ...\)"):
        DistributedOptimizer(local, nn.Linear(2, 2))  # type: ignore[arg-type]
