"""Trainers that share parameters: each gets the gradients of the values that its forward saw."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import gc
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gradwire import autograd, rpc
from gradwire._core.autograd import copy_on_write as versions_module
from gradwire._core.autograd.copy_on_write import ParameterVersions, Version
from gradwire.optim import DistributedOptimizer, changing, untracked
from gradwire.testing import acting_as, cluster, open_contexts, runtime_of
from gradwire.worker import Worker
from tests.processes import run_group, until

# -- the models of the server


class Scaled(torch.autograd.Function):
    """Saves a parameter by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient * weight, gradient * x


class Model(nn.Module):
    """Uses its parameters in the way that `kind` names."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        shape = (4, 4, 1) if kind == "conv" else (4, 4)
        self.weight = nn.Parameter(torch.rand(shape) - 0.5)
        self.bias = nn.Parameter(torch.rand(4) - 0.5)

    def forward(self, x: Tensor) -> Tensor:
        w, b = self.weight, self.bias
        uses: dict[str, Callable[[], Tensor]] = {
            "linear": lambda: F.linear(F.linear(x, w, b).tanh(), w),
            "embedding": lambda: F.embedding(torch.tensor([0, 2]), w) * x[:2] @ w,
            "mul": lambda: x * w * w + b,
            "matmul": lambda: x @ w.t() @ w,
            "conv": lambda: F.conv1d(F.conv1d(x, w, b), w),
            "norm": lambda: F.layer_norm(x * w, (4,), b, w[0]),
            "custom": lambda: Scaled.apply(Scaled.apply(x, w), w) + b,
            "views": lambda: self._views(x),
            "pow": lambda: (w.pow(3) * x).softmax(0) * b,
        }
        return uses[self.kind]()

    def _views(self, x: Tensor) -> Tensor:
        first, second = self.weight.chunk(2)
        return (x[:, :2] @ first) * self.weight[0] + x[:, 1:3] @ second.view(2, 4) * self.bias[None]


KINDS = ["linear", "embedding", "mul", "matmul", "conv", "norm", "custom", "views", "pow"]
MODELS: dict[str, nn.Module] = {}


def make_model(kind: str, seed: int = 0) -> list[rpc.RRef[Tensor]]:
    torch.manual_seed(seed)
    MODELS[kind] = Model(kind)
    return [rpc.RRef(parameter) for parameter in MODELS[kind].parameters()]


def run_model(kind: str, x: Tensor) -> Tensor:
    out: Tensor = MODELS[kind](x)
    return out


def run_and_keep(kind: str, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the result of the model, and copies of its parameters."""
    return run_model(kind, x), [p.detach().clone() for p in MODELS[kind].parameters()]


def gradients_here(kind: str, context_id: int) -> list[Tensor | None]:
    gradients = autograd.get_gradients(context_id)
    return [gradients.get(parameter) for parameter in MODELS[kind].parameters()]


# -- trainers


class Trainer:
    """One of several trainers in this thread. Each has its own current worker and context."""

    def __init__(
        self, worker: Worker | None, kind: str, optimizer: Any, params: Any, **settings: Any
    ):
        """Train on `worker`, or on the only worker of this process."""
        self._variables = contextvars.copy_context()
        self._worker = worker
        self.kind = kind
        self.optimizer = self.run(DistributedOptimizer, optimizer, params, **settings)
        self.passes = 0

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def run_on_worker() -> Any:
            with acting_as(self._worker) if self._worker else contextlib.nullcontext():
                return function(*args, **kwargs)

        return self._variables.run(run_on_worker)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.run(rpc.rpc_sync, "worker0", function, args)

    def begin(self, x: Tensor) -> None:
        self._block = autograd.context()
        self.context_id = self.run(self._block.__enter__)
        self.passes = 0
        self.x = x.clone().requires_grad_()
        self.y, self.seen = self.call(run_and_keep, self.kind, self.x)

    def backward(self, retain_graph: bool = False) -> None:
        loss = self.y.sin().sum()
        self.run(autograd.backward, self.context_id, [loss], retain_graph)
        self.passes += 1

    def step(self) -> None:
        self.run(self.optimizer.step, self.context_id)

    def check(self) -> None:
        """Compare the gradients with those of a local model that has the values of the forward."""
        model = copy.deepcopy(MODELS[self.kind])
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), self.seen, strict=True):
                parameter.copy_(value)
        x = self.x.detach().requires_grad_()
        loss = model(x).sin().sum()
        wanted = torch.autograd.grad(loss, [x, *model.parameters()], allow_unused=True)
        gradients = [self.run(autograd.get_gradients, self.context_id)[self.x]]
        gradients += self.call(gradients_here, self.kind, self.context_id)
        for expected, got in zip(wanted, gradients, strict=True):
            assert (expected is None) == (got is None)
            if expected is not None:
                assert torch.equal(got, expected * self.passes)

    def end(self) -> None:
        self.run(self._block.__exit__, None, None, None)


def inputs(seed: int, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (4, 4, 3) if kind == "conv" else (4, 4)
    return torch.rand(shape, generator=generator) - 0.5


def versions_alive() -> int:
    gc.collect()
    return sum(isinstance(candidate, Version) for candidate in gc.get_objects())


@pytest.fixture
def team() -> Iterator[list[Worker]]:
    """A server and three trainers, of which the first is the current worker."""
    with cluster(4) as workers:
        with acting_as(workers[1]):
            yield workers
    MODELS.clear()
    until(lambda: versions_alive() == 0, "all versions are freed")


def trainers(
    team: list[Worker], kind: str, optimizer: Any = optim.SGD, **settings: Any
) -> list[Trainer]:
    params = rpc.rpc_sync("worker0", make_model, (kind,))
    settings = settings or {"lr": 0.1}
    # Each trainer has its own references, as it would in a process of its own.
    made = []
    for worker in team[1:]:
        mine = [worker.rpc_sync("worker0", refer_to, (kind, n)) for n in range(len(params))]
        made.append(Trainer(worker, kind, optimizer, mine, **settings))
    return made


def refer_to(kind: str, number: int) -> rpc.RRef[Tensor]:
    return rpc.RRef(list(MODELS[kind].parameters())[number])


# -- exact gradients


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_in_between_does_not_change_gradients(team: list[Worker], kind: str) -> None:
    one, other, third = trainers(team, kind)
    one.begin(inputs(1, kind))
    other.begin(inputs(2, kind))
    other.backward()
    other.check()
    other.step()
    third.begin(inputs(3, kind))
    assert not torch.equal(third.seen[0], one.seen[0])
    third.backward()
    third.step()
    third.check()
    one.backward()
    one.check()
    one.step()
    for trainer in (one, other, third):
        trainer.end()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (optim.Adam, {"lr": 0.05}),
        (optim.SGD, {"lr": 0.1, "fused": True}),  # torch does not count its changes
    ],
    ids=["momentum", "adam", "fused"],
)
def test_random_interleavings(
    team: list[Worker], optimizer: Any, settings: dict[str, Any], seed: int
) -> None:
    chance = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]

    def life(trainer: Trainer) -> Iterator[None]:
        for _ in range(5):
            trainer.begin(inputs(chance.randrange(100), kind))
            yield
            passes = chance.choice([1, 1, 2, 3])
            for number in range(passes):
                trainer.backward(retain_graph=number < passes - 1)
                yield
                trainer.check()
                if chance.random() < 0.8:
                    trainer.step()
                yield
            trainer.end()
            if chance.random() < 0.5:
                yield

    lives = [life(trainer) for trainer in trainers(team, kind, optimizer, **settings)]
    while lives:
        chosen = chance.choice(lives)
        try:
            next(chosen)
        except StopIteration:
            lives.remove(chosen)


def test_a_retained_graph_keeps_its_values(team: list[Worker]) -> None:
    """Also when the step between two passes belongs to the same context."""
    for kind in ("mul", "linear"):
        trainer, *_ = trainers(team, kind)
        trainer.begin(inputs(1, kind))
        for _ in range(3):
            trainer.backward(retain_graph=True)
            trainer.check()
            trainer.step()
        trainer.end()


def slope(context_id: int, y: Tensor, x: Tensor) -> Tensor:
    (slope_of_y,) = autograd.grad(context_id, [y.sum()], [x], create_graph=True)
    assert slope_of_y is not None
    return slope_of_y


def test_second_order_gradients_keep_their_values(team: list[Worker]) -> None:
    """The derivative of x w w by x is w w, and that of w w by w is 2 w, with the old w."""
    one, other, _ = trainers(team, "mul")
    steps: list[Callable[[], None]] = [other.backward, other.step]
    for before_slope in (True, False):
        one.begin(inputs(1, "mul"))
        other.begin(inputs(2, "mul"))
        if before_slope:
            other.backward()
            other.step()
        first_slope = one.run(slope, one.context_id, one.y, one.x)
        assert torch.equal(first_slope, one.seen[0] * one.seen[0])
        if not before_slope:
            for act in steps:
                act()
        one.run(autograd.backward, one.context_id, [first_slope.sum()])
        weight, _bias = one.call(gradients_here, "mul", one.context_id)
        assert torch.equal(weight, 2 * one.seen[0])
        one.end()
        other.end()


def test_several_versions_live_at_the_same_time(team: list[Worker]) -> None:
    one, other, third = trainers(team, "linear")
    trained = []
    for number, trainer in enumerate((one, other, third)):
        trainer.begin(inputs(number, "linear"))
        trained.append(trainer)
        trainer.backward(retain_graph=True)
        trainer.step()
    assert len({trainer.seen[0].sum().item() for trainer in trained}) == 3
    assert versions_alive() >= 2, "the fixture relies on this count"
    for trainer in reversed(trained):
        trainer.backward()
        trainer.check()
        trainer.end()


def test_parameters_of_the_trainer_keep_their_values_for_backward(team: list[Worker]) -> None:
    """In a context of the main program, outside of any served function."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = DistributedOptimizer(optim.SGD, [rpc.RRef(weight)], lr=1.0)
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as outer:
        y = rpc.rpc_sync("worker0", torch.neg, (x * weight,))
        with autograd.context() as inner:
            autograd.backward(inner, [rpc.rpc_sync("worker0", torch.sum, (x * weight,))])
            optimizer.step(inner)
        assert weight.tolist() == [0.0, 0.0]
        autograd.backward(outer, [y.sum()])
        assert autograd.get_gradients(outer)[x].tolist() == [-1.0, -1.0]


TURNS: dict[str, threading.Event] = {}


def turn(name: str) -> threading.Event:
    return TURNS.setdefault(name, threading.Event())


def begin_turn(name: str) -> None:
    turn(name).set()


def wait_for_turn(name: str) -> None:
    assert turn(name).wait(30.0)


def test_trainers_in_processes_get_exact_gradients() -> None:
    def body(rank: int) -> None:
        if rank == 0:
            make_model("linear")
            begin_turn("made")
            wait_for_turn("over")
            return
        rpc.rpc_sync("worker0", wait_for_turn, ("made",))
        params = [rpc.rpc_sync("worker0", refer_to, ("linear", n)) for n in range(2)]
        trainer = Trainer(None, "linear", optim.Adam, params, lr=0.1)
        trainer.call(begin_turn, f"ready {rank}")
        trainer.call(wait_for_turn, f"ready {3 - rank}")
        for n in range(4):
            if rank == 1:
                trainer.begin(inputs(n, "linear"))
                trainer.call(begin_turn, f"forward {n}")
                trainer.call(wait_for_turn, f"step {n}")
            else:
                trainer.call(wait_for_turn, f"forward {n}")
                trainer.begin(inputs(n, "linear"))
            trainer.backward()
            seen = trainer.call(run_and_keep, "linear", inputs(n, "linear"))[1]
            assert torch.equal(seen[0], trainer.seen[0]) == (rank == 2)
            check_alone(trainer)
            trainer.step()
            trainer.end()
            trainer.call(begin_turn, f"step {n}" if rank == 2 else f"round {n}")
            trainer.call(wait_for_turn, f"round {n}")
        if rank == 1:
            trainer.call(begin_turn, "over")

    def check_alone(trainer: Trainer) -> None:
        MODELS["linear"] = Model("linear")
        trainer.check()

    run_group(3, body)


SIDE = 1000


def big_product(x: Tensor) -> Tensor:
    return x * BIG[0]


BIG: list[nn.Parameter] = []


def big_parameter() -> rpc.RRef[Tensor]:
    BIG[:] = [nn.Parameter(torch.zeros(SIDE, SIDE))]
    return rpc.RRef(BIG[0])


def test_a_backward_that_runs_during_a_step_reads_whole_values(team: list[Worker]) -> None:
    """All elements of the parameter have the same value, before and after every step."""
    team[1].rpc_sync("worker0", big_parameter)

    def train(worker: Worker) -> None:
        with acting_as(worker):
            mine = rpc.rpc_sync("worker0", refer_to_big)
            optimizer = DistributedOptimizer(optim.SGD, [mine], lr=1.0)
            for _ in range(15):
                x = torch.ones(SIDE, SIDE, requires_grad=True)
                with autograd.context() as context_id:
                    y = rpc.rpc_sync("worker0", big_product, (x,))
                    autograd.backward(context_id, [y.sum()])
                    seen = autograd.get_gradients(context_id)[x]
                    assert seen.min() == seen.max()
                    optimizer.step(context_id)

    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(train, worker) for worker in team[1:]]:
            done.result()
    BIG.clear()


def refer_to_big() -> rpc.RRef[Tensor]:
    return rpc.RRef(BIG[0])


# -- costs


def test_contexts_that_do_not_overlap_cost_no_copy(team: list[Worker]) -> None:
    versions = runtime_of(team[0]).versions
    sharing = trainers(team, "linear")
    addresses = [p.data_ptr() for p in MODELS["linear"].parameters()]
    for number in range(4):
        for trainer in sharing:
            trainer.begin(inputs(number, "linear"))
            trainer.backward()
            trainer.step()
            trainer.end()
    assert versions.copies == 0
    assert addresses == [p.data_ptr() for p in MODELS["linear"].parameters()]


def test_a_value_is_copied_once_for_all_contexts(team: list[Worker]) -> None:
    versions = runtime_of(team[0]).versions
    one, other, third = trainers(team, "linear")
    one.begin(inputs(1, "linear"))
    other.begin(inputs(2, "linear"))
    for number in range(3):
        third.begin(inputs(number, "linear"))
        third.backward()
        third.step()
        third.end()
        assert versions.copies == 1  # a copy of the weight: no operation saves the bias
    for trainer in (one, other):
        trainer.backward()
        trainer.check()
        trainer.end()


def test_workers_without_tracked_parameters_record_nothing(team: list[Worker]) -> None:
    MODELS["mul"] = Model("mul")
    assert not any(runtime_of(worker).versions.recording() for worker in team)
    sharing = trainers(team, "mul")
    assert [bool(runtime_of(worker).versions.recording()) for worker in team] == [
        True,
        False,
        False,
        False,
    ]
    del sharing
    MODELS.clear()
    until(
        lambda: not (gc.collect(), runtime_of(team[0]).versions.recording())[1],
        "the parameters are freed",
    )


def test_released_contexts_leave_no_versions(team: list[Worker]) -> None:
    one, other, _ = trainers(team, "linear")
    for number in range(5):
        one.begin(inputs(number, "linear"))
        other.begin(inputs(number, "linear"))
        other.backward()
        other.step()
        one.end()  # without a backward
        other.end()
    one.begin(inputs(9, "linear"))  # this call also reports the released contexts
    one.backward()
    one.end()
    gc.disable()  # there must be no cycle that only the collector frees
    try:
        until(lambda: not open_contexts([team[0]]), "the contexts are released")
        alive = sum(isinstance(candidate, Version) for candidate in gc.get_objects())
    finally:
        gc.enable()
    assert alive == 0
    assert len(runtime_of(team[0]).versions._tracked) == 2


def test_storages_are_reused(team: list[Worker]) -> None:
    one, other, _ = trainers(team, "linear")
    places = set()
    for number in range(6):
        one.begin(inputs(number, "linear"))
        other.begin(inputs(number, "linear"))
        other.backward()
        other.step()
        places.add(MODELS["linear"].weight.data_ptr())
        one.backward()
        one.check()
        for trainer in (one, other):
            trainer.end()
    assert len(places) == 2


# -- parameters with aliases


@pytest.mark.parametrize("how", ["shared memory", "part of a whole", "alias", "two parameters"])
def test_a_parameter_with_a_shared_storage_is_changed_in_place(
    team: list[Worker], how: str
) -> None:
    model = MODELS["mul"] = Model("mul")
    whole = torch.rand(8, 4)
    if how == "shared memory":
        model.weight.data.share_memory_()
    elif how == "part of a whole":
        model.weight.data = whole[2:6]
    elif how == "two parameters":
        model.tied = nn.Parameter(model.weight.data)
    alias = model.weight.detach() if how == "alias" else None
    place = model.weight.data_ptr()
    mine = [[w.rpc_sync("worker0", refer_to, ("mul", n)) for n in range(2)] for w in team[1:3]]
    one, other = (
        Trainer(worker, "mul", optim.SGD, params, lr=0.1)
        for worker, params in zip(team[1:3], mine, strict=True)
    )
    for number in range(3):
        one.begin(inputs(number, "mul"))
        other.begin(inputs(number + 9, "mul"))
        other.backward()
        other.step()
        one.backward()
        one.x, x = one.x.detach().requires_grad_(), one.x
        gradient = one.run(autograd.get_gradients, one.context_id)[x]
        assert torch.equal(gradient, one.y.detach().cos() * one.seen[0] * one.seen[0])
        one.end()
        other.end()
    assert runtime_of(team[0]).versions.copies == 3
    assert model.weight.data_ptr() == place
    assert alias is None or torch.equal(alias, model.weight)


def replace(kind: str, value: Tensor) -> None:
    weight = MODELS[kind].weight
    with changing([weight]):
        weight.data = value


def test_a_parameter_may_be_given_another_storage(team: list[Worker]) -> None:
    one, other, _ = trainers(team, "mul")
    for fresh in (None, None, torch.rand(4, 4), torch.rand(8, 4)[2:6], torch.rand(4, 4), None):
        if fresh is not None:
            one.call(replace, "mul", fresh)
        for number, trainer in enumerate((one, other)):
            trainer.begin(inputs(number, "mul"))
        other.backward()
        other.step()
        one.backward()
        one.check()
        one.end()
        other.end()


# -- changes outside of a DistributedOptimizer


def halve(kind: str) -> None:
    parameters = list(MODELS[kind].parameters())
    with changing(parameters), torch.no_grad():
        for parameter in parameters:
            parameter.mul_(0.5)


def halve_carelessly(kind: str) -> None:
    with torch.no_grad():
        for parameter in MODELS[kind].parameters():
            parameter.mul_(0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_changing_protects_the_gradients_from_user_code(team: list[Worker], kind: str) -> None:
    one, *_ = trainers(team, kind)
    one.begin(inputs(1, kind))
    one.call(halve, kind)
    one.backward()
    one.check()
    one.end()


@pytest.mark.parametrize("kind", KINDS)
def test_an_unannounced_change_is_an_error(team: list[Worker], kind: str) -> None:
    one, *_ = trainers(team, kind)
    one.begin(inputs(1, kind))
    one.call(halve_carelessly, kind)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        one.backward()
    one.end()


def change_slowly(kind: str) -> None:
    weight = MODELS[kind].weight
    with changing([weight]), torch.no_grad():
        begin_turn("changing")
        wait_for_turn("saving")
        for _ in range(100):
            weight.add_(0.01)


def save_meanwhile(kind: str, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    wait_for_turn("changing")
    begin_turn("saving")
    return run_and_keep(kind, x)


def test_a_parameter_saved_during_a_change_has_its_new_value(team: list[Worker]) -> None:
    one, other, _ = trainers(team, "mul")
    one.begin(inputs(1, "mul"))
    future = other.run(rpc.rpc_async, "worker0", change_slowly, ("mul",))
    one.y, one.seen = one.call(save_meanwhile, "mul", one.x)
    future.wait()
    one.backward()
    one.check()
    one.end()
    TURNS.clear()


def test_a_step_after_an_unrecorded_save_is_an_error(
    team: list[Worker],
) -> None:
    weight = nn.Parameter(torch.ones(2))
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker0", torch.sum, (x * weight,))
        optimizer = DistributedOptimizer(optim.SGD, [rpc.RRef(weight)], lr=1.0)
        autograd.backward(context_id, [loss], retain_graph=True)
        optimizer.step(context_id)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            autograd.backward(context_id, [loss])


RUNS, MAY_END = threading.Event(), threading.Event()


def run_meanwhile() -> None:
    RUNS.set()
    assert MAY_END.wait(30)


@pytest.mark.parametrize("not_recorded", ["untracked", "thread"])
def test_an_unrecorded_save_detects_a_step_beside_other_functions(
    team: list[Worker], not_recorded: str
) -> None:
    """Torch cannot count the change meanwhile: their threads may be saving tensors."""
    RUNS.clear()
    MAY_END.clear()
    weight = nn.Parameter(torch.ones(2))
    x = torch.ones(2, requires_grad=True)
    optimizer = DistributedOptimizer(optim.SGD, [rpc.RRef(weight)], lr=1.0)
    losses = []

    def forward() -> None:
        losses.append(rpc.rpc_sync("worker2", torch.sum, (x * weight,)))

    with autograd.context() as context_id:
        if not_recorded == "untracked":
            with untracked():
                forward()
        else:
            thread = threading.Thread(target=contextvars.copy_context().run, args=(forward,))
            thread.start()
            thread.join()
        autograd.backward(context_id, losses, retain_graph=True)
        other = rpc.rpc_async(rpc.get_worker_info(), run_meanwhile)
        assert RUNS.wait(30)
        optimizer.step(context_id)
        forward()  # recorded, and after the step: this one works
        MAY_END.set()
        other.wait()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            autograd.backward(context_id, losses[:1])
        gradients = autograd.grad(context_id, losses[1:], [x])
        assert torch.equal(gradients[0], weight.detach())


@pytest.mark.parametrize("alias", ["data", "tied", "view", "detached"])
def test_a_value_saved_during_an_uncounted_change_can_be_used(
    team: list[Worker], alias: str
) -> None:
    """Some tensors in the storage of a parameter have a version counter of their own."""
    RUNS.clear()
    MAY_END.clear()
    weight, tied = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    tied.data = weight.data
    x = torch.ones(2, requires_grad=True)
    optimizer = DistributedOptimizer(optim.SGD, [rpc.RRef(weight)], lr=1.0)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker2", torch.sum, (weight * 3,))])
        other = rpc.rpc_async(rpc.get_worker_info(), run_meanwhile)
        assert RUNS.wait(30)
        optimizer.step(context_id)
        aliases = {
            "data": weight.data,
            "tied": tied,
            "view": weight[:],
            "detached": weight.detach(),
        }
        loss = rpc.rpc_sync("worker2", torch.sum, (x * aliases[alias],))
        MAY_END.set()
        other.wait()
        autograd.backward(context_id, [loss])
        assert autograd.get_gradients(context_id)[x].tolist() == [-2.0, -2.0]


def open_a_context() -> Iterator[int]:
    with autograd.context() as context_id:
        yield context_id


def test_the_garbage_collector_may_release_a_context_while_a_change_is_counted(
    team: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = nn.Parameter(torch.ones(2))
    DistributedOptimizer(optim.SGD, [rpc.RRef(weight)], lr=1.0)
    count = versions_module.increment_version
    forgotten: list[Any] = []

    def count_while_collecting(parameter: Any) -> None:
        forgotten.clear()
        count(parameter)

    with autograd.context():
        forgotten.append(open_a_context())
        next(forgotten[0])
        monkeypatch.setattr(versions_module, "increment_version", count_while_collecting)
        number = weight._version
        with changing([weight]), torch.no_grad():
            weight.mul_(2)
        assert not forgotten
        assert weight._version == number + 1


def spoil(x: Tensor, how: str) -> Tensor:
    if how == "input":
        copied = x * 1
        y = copied * copied
        copied.add_(1)
    elif how == "output":
        y = x.exp()
        y.add_(1)
    else:
        kept = torch.ones(4, 4)
        y = x * kept
        kept.add_(1)
    return y


@pytest.mark.parametrize("how", ["input", "output", "constant"])
def test_changing_another_saved_tensor_is_an_error(team: list[Worker], how: str) -> None:
    one, *_ = trainers(team, "mul")
    assert runtime_of(team[0]).versions.recording() is not None
    one.begin(inputs(1, "mul"))
    y = one.call(spoil, one.x, how)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        one.run(autograd.backward, one.context_id, [y.sum()])
    one.end()


# -- other users of saved-tensor hooks


PACKED: list[Tensor] = []


def with_own_hooks(kind: str, x: Tensor) -> Tensor:
    def pack(tensor: Tensor) -> Tensor:
        PACKED.append(tensor)
        return tensor.detach().clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return run_model(kind, x)


def with_save_on_cpu(kind: str, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return run_model(kind, x)


def with_checkpoint(kind: str, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(MODELS[kind], x, use_reentrant=False)
    return out


@pytest.mark.parametrize("function", [with_own_hooks, with_save_on_cpu, with_checkpoint])
def test_other_saved_tensor_hooks_keep_working(team: list[Worker], function: Any) -> None:
    one, other, _ = trainers(team, "linear")
    one.begin(inputs(1, "linear"))
    one.y = one.call(function, "linear", one.x)
    if function is with_own_hooks:  # these hooks copy, so a step changes nothing
        assert PACKED
        PACKED.clear()
        other.begin(inputs(1, "linear"))
        other.backward()
        other.step()
        other.end()
    one.backward()
    one.check()
    one.end()


def with_transform(kind: str, x: Tensor) -> Tensor:
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(lambda x: (x**3).sum())(x.detach())
    with untracked():
        inside: Tensor = torch.func.grad(lambda x: (x**3).sum())(x.detach())
    return run_model(kind, x) + inside * 0


def test_function_transforms_run_when_untracked(team: list[Worker]) -> None:
    one, other, _ = trainers(team, "mul")
    one.begin(inputs(1, "mul"))
    one.y = one.call(with_transform, "mul", one.x)
    other.begin(inputs(1, "mul"))
    other.backward()
    other.step()
    one.backward()
    one.check()
    one.end()
    other.end()


# -- views, and races


def keep_view(x: Tensor) -> Tensor:
    """Take a view of a parameter before a step, and use it afterwards."""
    view = MODELS["mul"].weight.t()
    rpc.rpc_sync("worker1", wait_for_turn, ("stepped",))
    return x @ view


def test_a_view_from_before_a_step_can_be_used_after_it(team: list[Worker]) -> None:
    one, other, third = trainers(team, "mul")
    one.begin(inputs(1, "mul"))
    future = one.run(rpc.rpc_async, "worker0", keep_view, (one.x,))
    for n, trainer in enumerate((other, third)):
        trainer.begin(inputs(2, "mul"))
        trainer.backward(retain_graph=True)
        trainer.step()
        if n == 0:
            begin_turn("stepped")
            future.wait()
    before = future.wait()
    one.run(autograd.backward, one.context_id, [before.sum()])
    gradient = one.run(autograd.get_gradients, one.context_id)[one.x]
    viewed = torch.linalg.lstsq(one.x.detach(), before.detach()).solution
    assert torch.allclose(gradient, viewed.sum(1).expand(4, 4), atol=1e-4)
    for trainer in (one, other, third):
        trainer.end()
    TURNS.clear()


def test_functions_may_end_while_a_parameter_is_changed() -> None:
    versions, parameter = ParameterVersions(), nn.Parameter(torch.ones(3))
    versions.track([parameter])
    recordings: dict[Any, Any] = {number: EndingRecording(versions, number) for number in range(3)}
    versions._recordings = recordings
    with versions.changing([parameter]):
        pass
    assert not versions._recordings


class EndingRecording:
    """The key of a recording. Comparing it with a thread ends the recording."""

    def __init__(self, versions: ParameterVersions, number: Any):
        self._versions = versions
        self._number = number

    def __eq__(self, thread: object) -> bool:
        del self._versions._recordings[self._number]
        return True

    def __hash__(self) -> int:
        raise NotImplementedError
