"""A remote module behaves like a local module, although it is on another worker."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from gradwire import Options, autograd, rpc
from gradwire.errors import EncodingError, UnknownWorkerError
from gradwire.nn import RemoteModule
from gradwire.optim import DistributedOptimizer, changing
from gradwire.optim._parameters import parameter_rrefs
from gradwire.testing import acting_as, cluster
from gradwire.worker import Worker
from tests.processes import run_group


class Scale(nn.Module):
    def __init__(self, factor: float, *, bias: float = 0.0):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))
        self.inner = nn.Module()
        self.inner.bias = nn.Parameter(torch.tensor(bias))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor, *, times: int = 1) -> Tensor:
        self.calls += 1
        return (x * self.factor + self.inner.bias) * times


def training_of(module: rpc.RRef[nn.Module]) -> bool:
    return module.local_value().training


# -- the worker of a module


@pytest.mark.parametrize(
    ("place", "worker"),
    [
        ("worker1", "worker1"),
        ("worker1/cpu", "worker1"),
        ("rank:2", "worker2"),
        ("rank:2/cpu", "worker2"),
        ("cpu", "worker0"),
        (torch.device("cpu"), "worker0"),
    ],
)
def test_the_remote_device_chooses_the_worker(trio: list[Worker], place: Any, worker: str) -> None:
    remote = RemoteModule(place, Scale, (2.0,), {"bias": 1.0})
    assert remote.on == remote.get_module_rref().owner_name() == worker
    assert remote.device == "cpu"
    assert repr(remote) == f"RemoteModule(Scale on {worker}/cpu)"
    assert remote(torch.ones(2)).tolist() == [3.0, 3.0]
    assert remote.forward(torch.ones(2), times=2).tolist() == [6.0, 6.0]
    assert remote.forward_async(torch.ones(2), times=3).wait().tolist() == [9.0, 9.0]


@pytest.mark.parametrize("place", ["", "/cpu", "worker1/", "worker1/nowhere", "worker1/cpu/0"])
def test_malformed_remote_devices_are_refused(trio: list[Worker], place: str) -> None:
    with pytest.raises(ValueError, match="write 'worker1', 'worker1/cuda:0'"):
        RemoteModule(place, Scale, (2.0,))


def test_unknown_workers_and_bad_modules_are_refused(trio: list[Worker]) -> None:
    for place in ("nobody", "rank:9", "rank:one"):
        with pytest.raises(UnknownWorkerError, match="could not find destination"):
            RemoteModule(place, Scale, (2.0,))
    with pytest.raises(TypeError, match="remote_device must be a str, not a int"):
        RemoteModule(1, Scale, (2.0,))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be a class of nn"):
        RemoteModule("worker1", dict)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="but returned a Tensor"):
        RemoteModule("worker1", torch.ones, (2,))  # type: ignore[arg-type]


def test_a_module_is_refused_where_its_class_is_needed(trio: list[Worker]) -> None:
    form = (
        r"""\('worker1', Linear, args=\(...\)\), as in RemoteModule\("worker1", nn.Linear, args"""
    )
    with pytest.raises(TypeError, match=form):
        RemoteModule("worker1", nn.Linear(4, 2))
    with pytest.raises(TypeError, match="must be a class or a function, not a str"):
        RemoteModule("worker1", "Linear")  # type: ignore[arg-type]


def test_arguments_that_are_no_sequence_are_refused(trio: list[Worker]) -> None:
    for args in (0, 4.0, "abc", torch.ones(2)):
        with pytest.raises(
            TypeError, match=r"args must be a tuple.* of Scale, .* write args=\(x,\)"
        ):
            RemoteModule("worker1", Scale, args)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="kwargs must be a dict of the keyword arguments of Scale"):
        RemoteModule("worker1", Scale, (2.0,), ["bias"])  # type: ignore[arg-type]


# -- construction


def notes_of(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", ()))


def test_an_error_of_the_constructor_comes_at_construction(trio: list[Worker]) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'") as caught:
        RemoteModule("worker1", Scale, (2.0,), {"colour": "red"})
    note = "in the constructor of Scale, for a RemoteModule on worker 'worker1'"
    assert notes_of(caught.value) == note
    later = RemoteModule("worker1", Scale, (2.0,), {"colour": "red"}, wait=False)
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'") as caught:
        later.remote_parameters()
    assert note in notes_of(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without this device")
def test_a_device_that_the_worker_does_not_have_is_an_error_at_construction(
    trio: list[Worker],
) -> None:
    with pytest.raises(ValueError, match=r"'worker1' cannot use device 'cuda:0': .*'worker1/cpu'"):
        RemoteModule("worker1/cuda:0", Scale, (2.0,))


class Meeting:
    """Where constructors meet that run at the same time."""

    place = threading.Barrier(2)


def seeded(seed: int) -> nn.Module:
    """Make a module from a seed. If another constructor runs now, it seeds the generator too."""
    torch.manual_seed(seed)
    with contextlib.suppress(threading.BrokenBarrierError):
        Meeting.place.wait(0.05)
    Meeting.place.reset()
    return nn.Linear(4, 4)


def weight_of(remote: RemoteModule) -> Tensor:
    weight: Tensor = remote.state_dict()["weight"]
    return weight


def seeded_here(seed: int) -> Tensor:
    torch.manual_seed(seed)
    return nn.Linear(4, 4).weight.detach()


@pytest.mark.parametrize("wait", [True, False])
def test_constructors_on_one_worker_have_the_generator_to_themselves(
    trio: list[Worker], wait: bool
) -> None:
    made = [RemoteModule("worker1", seeded, (seed,), wait=wait) for seed in range(4)]
    weights = [weight_of(remote) for remote in made]
    for seed, weight in enumerate(weights):
        assert torch.equal(weight, seeded_here(seed))


def test_constructors_asked_for_by_several_workers_take_turns(trio: list[Worker]) -> None:
    def make(number: int) -> Tensor:
        with acting_as(trio[number % 3]):
            return weight_of(RemoteModule("worker1", seeded, (number,)))

    with ThreadPoolExecutor(4) as threads:
        weights = list(threads.map(make, range(4)))
    for number, weight in enumerate(weights):
        assert torch.equal(weight, seeded_here(number))


def seeded_around(place: str) -> nn.Module:
    """Make a module that contains a remote one, and is made from a seed of its own."""
    torch.manual_seed(7)
    inner = RemoteModule(place, seeded, (3,))
    return nn.Sequential(nn.Linear(4, 4), inner)


@pytest.mark.parametrize("place", ["worker1", "worker2", "cpu"])
def test_a_constructor_may_make_remote_modules(place: str) -> None:
    with cluster(3, options=Options(rpc_timeout=20)) as workers:
        with acting_as(workers[0]):
            state = RemoteModule("worker1", seeded_around, (place,)).state_dict()
            assert torch.equal(state["0.weight"], seeded_here(7))
            assert torch.equal(state["1.weight"], seeded_here(3))


def test_constructors_may_make_modules_on_each_other_s_worker() -> None:
    def body(rank: int) -> list[bool] | None:
        if rank:
            return None
        pair = [
            RemoteModule(here, seeded_around, (there,), wait=False)
            for here, there in [("worker1", "worker2"), ("worker2", "worker1")]
        ]
        states = [remote.state_dict() for remote in pair]
        return [
            torch.equal(state[key], seeded_here(seed))
            for state in states
            for key, seed in (("0.weight", 7), ("1.weight", 3))
        ]

    assert run_group(3, body, rpc_timeout=20)[0] == [True] * 4


# -- gradients


def test_training_equals_that_of_a_local_module(trio: list[Worker]) -> None:
    remote, local = RemoteModule("worker1", Scale, (2.0,)), Scale(2.0)
    here, local_here = nn.Linear(3, 3), nn.Linear(3, 3)
    local_here.load_state_dict(here.state_dict())
    model, local_model = nn.Sequential(here, remote), nn.Sequential(local_here, local)
    rrefs = [rpc.RRef(p) for p in model.parameters()] + remote.remote_parameters()
    optimizer = DistributedOptimizer(optim.Adam, rrefs, lr=0.1)
    local_optimizer = optim.Adam(local_model.parameters(), lr=0.1)
    for seed in range(4):
        x = torch.rand(5, 3, generator=torch.Generator().manual_seed(seed))
        with autograd.context() as context_id:
            loss = model(x).square().sum()
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        local_optimizer.zero_grad()
        local_loss = local_model(x).square().sum()
        local_loss.backward()
        local_optimizer.step()
        assert torch.equal(loss, local_loss)
    left, right = model.state_dict(), local_model.state_dict()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)


def test_remote_parameters_are_references(trio: list[Worker]) -> None:
    remote = RemoteModule("worker1", Scale, (2.0,), {"bias": 1.0})
    assert [rref.to_here().item() for rref in remote.remote_parameters()] == [2.0, 1.0]
    assert [rref.to_here().item() for rref in remote.remote_parameters(recurse=False)] == [2.0]
    remote.requires_grad_(False)
    assert not any(rref.to_here().requires_grad for rref in remote.remote_parameters())


# -- as part of a local module


def test_a_local_module_may_contain_a_remote_one(trio: list[Worker]) -> None:
    remote = RemoteModule("worker1", Scale, (2.0,))
    model = nn.Sequential(nn.Linear(2, 2), remote)
    assert len(list(model.parameters())) == 2, "the parameters of the local module"
    assert list(model.modules()) == [model, model[0], remote]
    assert "RemoteModule(Scale on worker1/cpu)" in repr(model)
    model.eval()
    assert not rpc.rpc_sync("worker1", training_of, (remote.module_rref,))
    assert model.train() is model
    assert rpc.rpc_sync("worker1", training_of, (remote.module_rref,))


def test_a_remote_state_is_part_of_the_state_of_the_model(trio: list[Worker]) -> None:
    def whole(remote: bool) -> nn.Module:
        parts = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        return nn.Sequential(RemoteModule("worker1", copy.deepcopy, (parts,)) if remote else parts)

    remote, local = whole(True), whole(False)
    saved = local.state_dict()
    assert remote.load_state_dict(saved).missing_keys == []
    remote_state = remote.state_dict()
    assert remote_state.keys() == saved.keys()
    assert all(torch.equal(remote_state[key], saved[key]) for key in remote_state)
    assert remote_state._metadata["0.1"] == saved._metadata["0.1"]  # type: ignore[attr-defined]
    assert local.load_state_dict(remote_state).missing_keys == []
    assert remote.load_state_dict(remote_state).missing_keys == []
    assert remote[0].load_state_dict(remote[0].state_dict()).missing_keys == []
    remote[0].train()
    remote(torch.rand(4, 2))
    assert remote_state["0.1.num_batches_tracked"] == 0, "it is a copy"
    assert remote.state_dict()["0.1.num_batches_tracked"] == 1


def test_a_state_dict_that_does_not_fit_is_refused(trio: list[Worker]) -> None:
    model = nn.Sequential(RemoteModule("worker1", nn.Linear, (2, 3)))
    weight, bias = torch.ones(3, 2), torch.ones(3)
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.bias"):
        model.load_state_dict({"0.weight": weight})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*0\.colour"):
        model.load_state_dict({"0.weight": weight, "0.bias": bias, "0.colour": bias})
    with pytest.raises(RuntimeError, match=r"on worker 'worker1'.*\s.*size mismatch for weight"):
        model.load_state_dict({"0.weight": torch.ones(7, 7), "0.bias": bias})
    result = model.load_state_dict({"0.weight": weight, "0.colour": bias}, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["0.bias"], ["0.colour"])


def take_turns() -> None:
    with changing([]):
        pass


class Inner(nn.Linear):
    """Needs worker1 to be able to change parameters while its state is loaded."""

    def _load_from_state_dict(self, *args: Any) -> None:
        if rpc.get_worker_info().name != "worker1":
            rpc.rpc_sync("worker1", take_turns)
        super()._load_from_state_dict(*args)


class Outer(nn.Module):
    """Contains a remote module, which had another name in old states."""

    def __init__(self, place: str):
        super().__init__()
        self.own = nn.Linear(2, 2)
        self.inside = RemoteModule(place, Inner, (2, 2))
        self.register_load_state_dict_pre_hook(rename)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inside(self.own(x))
        return result


def rename(_module: nn.Module, state: dict[str, Any], *_: Any) -> None:
    for key in [key for key in state if key.startswith("old.")]:
        state[key.replace("old.", "inside.")] = state.pop(key)


@pytest.mark.parametrize("place", ["worker1", "worker2"])
def test_a_remote_module_may_contain_another(place: str) -> None:
    with cluster(3, options=Options(rpc_timeout=20)) as workers:
        with acting_as(workers[0]):
            remote = RemoteModule("worker1", Outer, (place,))
            state = {key: torch.rand_like(value) for key, value in remote.state_dict().items()}
            assert [*state] == ["own.weight", "own.bias", "inside.weight", "inside.bias"]
            assert remote.load_state_dict(state).missing_keys == []
            remote_state = remote.state_dict()
            assert all(torch.equal(remote_state[key], state[key]) for key in state)

            renamed = {key.replace("inside.", "old."): -value for key, value in state.items()}
            assert remote.load_state_dict(renamed).missing_keys == []
            assert torch.equal(remote.state_dict()["inside.bias"], -state["inside.bias"])

            odd = {"own.weight": torch.ones(2, 2), "inside.bias": torch.ones(2)}
            odd |= {"own.colour": torch.ones(1), "inside.colour": torch.ones(1)}
            result = remote.load_state_dict(odd, strict=False)
            assert result.missing_keys == ["own.bias", "inside.weight"]
            assert result.unexpected_keys == ["own.colour", "inside.colour"]
            with pytest.raises(RuntimeError, match=rf"'worker1': .*'{place}'.*\s.*for weight"):
                remote.load_state_dict({**state, "inside.weight": torch.ones(7, 7)})


def test_methods_that_cannot_reach_the_module_are_refused(trio: list[Worker]) -> None:
    remote = RemoteModule("worker1", Scale, (2.0,))
    for name in ("parameters", "named_parameters"):
        with pytest.raises(ValueError, match=rf"^{name}\(\).*'worker1': use remote_parameters"):
            getattr(remote, name)()
    for name in ("cuda", "xpu", "to_empty"):
        with pytest.raises(ValueError, match="remote_device sets where"):
            getattr(remote, name)("cpu")
    for name in ("add_module", "register_buffer", "register_forward_hook", "buffers"):
        with pytest.raises(ValueError, match="call a function on that worker"):
            getattr(remote, name)("x", None)


# -- methods of a local module that change all its parts


def in_two_parts(second: str) -> nn.Module:
    """Return a module with a remote part, which contains another one on the worker `second`."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(2, 2), RemoteModule("worker1", Outer, (second,)))


def dtypes_of(model: nn.Module) -> set[torch.dtype]:
    return {value.dtype for value in model.state_dict().values()}


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("phase", torch.tensor(1j))
        self.weight = nn.Parameter(torch.ones(2))


def require_gradients(model: nn.Module) -> set[bool]:
    copies = [rref.to_here() for rref in parameter_rrefs(model)]
    assert len(copies) == 6
    return {parameter.requires_grad for parameter in copies}


@pytest.mark.parametrize("second", ["worker1", "worker2"])
def test_changes_of_dtype_reach_the_remote_parts(trio: list[Worker], second: str) -> None:
    model = in_two_parts(second)
    before = model.state_dict()
    assert model.double() is model
    assert dtypes_of(model) == {torch.float64}
    assert all(torch.equal(model.state_dict()[key], before[key].double()) for key in before)
    assert model(torch.ones(2, dtype=torch.float64)).dtype is torch.float64
    assert dtypes_of(model.to(torch.float32)) == {torch.float32}
    assert dtypes_of(model.half()) == {torch.float16}
    assert dtypes_of(model.bfloat16().float()) == {torch.float32}
    assert dtypes_of(model[1].to(torch.float64)) == {torch.float64}
    assert model.to("cpu").cpu() is model
    mixed = RemoteModule("worker1", Mixed)
    kept = {"calls": torch.int64, "phase": torch.complex64, "weight": torch.float64}
    state = nn.Sequential(mixed).double()[0].state_dict()
    assert {key: value.dtype for key, value in state.items()} == kept


def test_a_change_that_cannot_reach_the_remote_part_is_an_error(trio: list[Worker]) -> None:
    model = nn.Sequential(RemoteModule("worker1", nn.Conv2d, (2, 2, 2)), nn.Linear(2, 2))
    stays = r"only the dtype of RemoteModule\(Conv2d on worker1/cpu\).*'cpu' of worker 'worker1'"
    for change in (
        lambda: model.to("meta"),
        lambda: model.to(memory_format=torch.channels_last),
        model.share_memory,
        lambda: model.to_empty(device="cpu"),
    ):
        with pytest.raises(ValueError, match=stays):
            change()
    elsewhere = nn.Sequential(RemoteModule("worker1/meta", nn.Linear, (2, 2)))
    with pytest.raises(ValueError, match="stays on device 'meta' of worker 'worker1'"):
        elsewhere.cpu()
    elsewhere.double()


@pytest.mark.parametrize("second", ["worker1", "worker2"])
def test_requires_grad_of_a_model_reaches_the_remote_parts(trio: list[Worker], second: str) -> None:
    model = nn.Sequential(in_two_parts(second))
    assert model.requires_grad_(False) is model
    assert require_gradients(model) == {False}
    assert len(list(model.parameters())) == 2, "looking at the local parameters changes nothing"
    assert require_gradients(model) == {False}
    model.requires_grad_()
    assert require_gradients(model) == {True}


def gradients_of(parameters: list[rpc.RRef[Tensor]]) -> list[bool]:
    return [rref.local_value().grad is not None for rref in parameters]


def test_zero_grad_of_a_model_reaches_the_remote_parts(trio: list[Worker]) -> None:
    remote = RemoteModule("worker1", nn.Linear, (2, 2))
    model = nn.Sequential(nn.Linear(2, 2), remote)
    with autograd.context(into_grad=True) as context_id:
        autograd.backward(context_id, [model(torch.ones(2)).sum()])
    parameters = remote.remote_parameters()
    assert rpc.rpc_sync("worker1", gradients_of, (parameters,)) == [True, True]
    model.zero_grad()
    assert rpc.rpc_sync("worker1", gradients_of, (parameters,)) == [False, False]


def fill(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 3.0)


@pytest.mark.parametrize("second", ["worker1", "worker2"])
def test_apply_on_a_model_reaches_the_remote_parts(trio: list[Worker], second: str) -> None:
    model = in_two_parts(second)
    assert model.apply(fill) is model
    weights = [value for key, value in model.state_dict().items() if "weight" in key]
    assert len(weights) == 3
    assert all(torch.equal(weight, torch.full((2, 2), 3.0)) for weight in weights)
    with pytest.raises(EncodingError, match="cannot be sent"):
        model.apply(lambda module: None)


# -- errors name the module


class Halves(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        result.register_hook(refuse_gradient)
        return result / 2


def refuse_gradient(_gradient: Tensor) -> None:
    raise ZeroDivisionError("no gradient today")


def test_an_error_of_the_backward_names_the_module(trio: list[Worker]) -> None:
    remote = RemoteModule("worker1", Halves, (2, 2))
    for call in (remote, remote.module_rref.rpc_sync().forward):
        with autograd.context() as context_id:
            loss = call(torch.ones(2)).sum()
            with pytest.raises(ZeroDivisionError) as caught:
                autograd.backward(context_id, [loss])
        line = Halves.forward.__code__.co_firstlineno
        place = f"Halves.forward ({__file__}:{line})"
        assert notes_of(caught.value) == f"in the backward pass on worker 'worker1', of {place}"


def test_a_result_from_outside_a_context_names_the_module(trio: list[Worker]) -> None:
    y = RemoteModule("worker1", Scale, (2.0,))(torch.ones(2))
    with autograd.context() as context_id:
        with pytest.raises(RuntimeError, match=r"result of Scale\.forward on worker 'worker1', c"):
            autograd.backward(context_id, [y.sum()])


# -- sharing a module


def use(remote: RemoteModule, x: Tensor) -> tuple[Tensor, str, bool]:
    return remote(x), remote.on, remote.training


def test_a_remote_module_can_be_sent_to_other_workers(trio: list[Worker]) -> None:
    remote = RemoteModule("worker1", Scale, (2.0,)).eval()
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        y, on, training = rpc.rpc_sync("worker2", use, (remote, x))
        assert (on, training) == ("worker1", False)
        autograd.backward(context_id, [y.sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == [2.0, 2.0]
    assert remote.state_dict()["calls"] == 1


def test_remote_modules_can_share_a_module(trio: list[Worker]) -> None:
    rref = rpc.remote("worker1", Scale, (3.0,))
    first, second = (RemoteModule.init_from_module_rref("worker1/cpu", rref) for _ in range(2))
    assert first(torch.ones(1)) == second(torch.ones(1)) == 3.0
    assert first.module_rref is second.module_rref is rref
    assert second.state_dict()["calls"] == 2
    assert RemoteModule.init_from_module_rref("worker2", rref).on == "worker1", (
        "the worker that has the module"
    )


def linear(seed: int, inputs: int, outputs: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs)


def test_a_model_across_processes_learns() -> None:
    def body(rank: int) -> list[float] | None:
        if rank:
            return None
        model = nn.Sequential(
            RemoteModule("worker1", linear, (1, 2, 16)),
            nn.Tanh(),
            RemoteModule("worker2", linear, (2, 16, 1)),
        )
        rrefs = [*model[0].remote_parameters(), *model[2].remote_parameters()]
        optimizer = DistributedOptimizer(optim.Adam, rrefs, lr=0.05)
        losses = []
        for _ in range(10):
            with autograd.context() as context_id:
                loss = (model(x) - y).square().mean()
                autograd.backward(context_id, [loss])
                optimizer.step(context_id)
            losses.append(loss.item())
        return losses

    x = torch.rand(64, 2, generator=torch.Generator().manual_seed(3))
    y = x.prod(1, keepdim=True)
    local = nn.Sequential(linear(1, 2, 16), nn.Tanh(), linear(2, 16, 1))
    optimizer = optim.Adam(local.parameters(), lr=0.05)
    expected = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = (local(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert expected[-1] < expected[0]
    assert run_group(3, body)[0] == expected


def test_a_remote_module_is_pickled_for_calls_only(trio: list[Worker]) -> None:
    remote = RemoteModule("worker1", nn.Linear, args=(2, 2))
    for copy_it in (pickle.dumps, copy.deepcopy):
        with pytest.raises(RuntimeError, match=r"use state_dict\(\)"):
            copy_it(nn.Sequential(remote))
    assert rpc.rpc_sync("worker2", repr, args=(remote,)) == repr(remote)


def test_a_remote_module_is_not_moved_to_a_device_that_torch_lacks(trio: list[Worker]) -> None:
    remote = RemoteModule("worker1", nn.Linear, args=(2, 2))
    with pytest.raises(ValueError, match="only the dtype of RemoteModule"):
        remote.to("cuda")
