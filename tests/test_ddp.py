"""`DistributedDataParallel` averages gradients in a context, or raises an error if it cannot."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import compat
from tests.processes import PATIENCE, processes, rendezvous_file

TRAINERS = 2


@pytest.fixture(autouse=True, scope="module")
def _import_once() -> None:
    """Import the modules that every forked process would otherwise import."""
    importlib.import_module("torch._dynamo")  # torch imports it when it makes such a module
    compat.install()
    compat.uninstall()


def with_trainers(train: Callable[[int], Any]) -> list[Any]:
    """Run `train(rank)` on two trainers, with a server. Return the results by rank."""
    with rendezvous_file() as place, rendezvous_file() as trainers:

        def worker(rank: int) -> Any:
            compat.install()
            from torch.distributed import rpc

            options = rpc.TensorPipeRpcBackendOptions(init_method=place)
            rpc.init_rpc(
                f"worker{rank}", rank=rank, world_size=TRAINERS + 1, rpc_backend_options=options
            )
            result = None
            if rank < TRAINERS:
                dist.init_process_group(
                    "gloo", init_method=trainers, rank=rank, world_size=TRAINERS
                )
                result = train(rank)
                dist.barrier()
            rpc.shutdown()
            return result

        bodies = [lambda rank=rank: worker(rank) for rank in range(TRAINERS + 1)]
        with processes(*bodies) as started:
            return [process.result() for process in started][:TRAINERS]


def call(to: str, function: Callable[..., Any], *args: Any) -> Any:
    from torch.distributed import rpc

    return rpc.rpc_sync(to, function, args=args)


@contextmanager
def context() -> Iterator[int]:
    import torch.distributed.autograd as dist_autograd

    with dist_autograd.context() as context_id:
        yield context_id


def backward(context_id: int, loss: Tensor, retain_graph: bool = False) -> None:
    import torch.distributed.autograd as dist_autograd

    dist_autograd.backward(context_id, [loss.sum()], retain_graph=retain_graph)


def gradients(context_id: int, module: nn.Module) -> list[Tensor | None]:
    import torch.distributed.autograd as dist_autograd

    of_parameter = dist_autograd.get_gradients(context_id)
    return [of_parameter.get(parameter) for parameter in module.parameters()]


class Model(nn.Module):
    """Two layers with a function between them, and a layer that is not always used."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.sometimes = nn.Linear(4, 2)

    def forward(self, x: Tensor, between: Callable[[Tensor], Tensor], more: bool) -> Tensor:
        y = between(self.first(x))
        return self.last(y) + self.sometimes(y) if more else self.last(y)


def there(x: Tensor) -> Tensor:
    return call("worker2", torch.tanh, x)


def inputs(rank: int, step: int) -> Tensor:
    return torch.rand(5, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def same(left: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    return all(
        (a is None) == (b is None) and (a is None or b is None or torch.allclose(a, b))
        for a, b in zip(left, expected, strict=True)
    )


KINDS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "views of buckets": {"gradient_as_bucket_view": True},
    "unused parameters": {"find_unused_parameters": True},
    "a static graph": {"static_graph": True},
    "a static graph, views of buckets": {"static_graph": True, "gradient_as_bucket_view": True},
    "many buckets": {"bucket_cap_mb": 1e-5},
}


def compare(rank: int, options: dict[str, Any]) -> None:
    """Compare the gradients with the `.grad` of a second module that is trained locally."""
    remote, local = (DistributedDataParallel(Model(1), **options) for _ in range(2))
    sometimes = "find_unused_parameters" in options
    mine = list(remote.parameters())
    for step in range(4):
        more = not sometimes or (step > 1 and (rank == 0 or step > 2))
        for parameter in mine:
            parameter.grad = torch.full_like(parameter, 7.0) if step % 2 else None
        # Where torch looks for unused parameters, it must see how the output depends on them.
        between = torch.tanh if sometimes else there
        with context() as context_id:
            y = remote(call("worker2", torch.sin, inputs(rank, step)), between, more)
            kept = [
                parameter.grad for parameter in mine
            ]  # torch may have moved gradients into buckets
            backward(context_id, call("worker2", torch.square, y))
            averaged_gradients = gradients(context_id, remote)
        local.zero_grad()
        local(inputs(rank, step).sin(), torch.tanh, more).square().sum().backward()
        assert same(averaged_gradients, [parameter.grad for parameter in local.parameters()]), (
            step,
            options,
        )
        for parameter, gradient in zip(mine, kept, strict=True):
            assert parameter.grad is gradient
            assert (gradient is not None) == step % 2
            assert gradient is None or bool((gradient == 7).all())


def test_gradients_are_those_of_a_local_backward() -> None:
    def train(rank: int) -> None:
        for options in KINDS.values():
            compare(rank, options)

    with_trainers(train)


def test_passes_of_a_context_add_up_and_those_in_no_sync_are_not_averaged() -> None:
    def train(rank: int) -> None:
        for options in ({}, {"gradient_as_bucket_view": True}):
            module, local = (DistributedDataParallel(Model(1), **options) for _ in range(2))
            with context() as context_id:
                for step, averaged in enumerate((False, False, True, False, True)):
                    for one in (module, local):
                        one.require_backward_grad_sync = averaged
                    backward(context_id, module(inputs(rank, step), there, True))
                    local(inputs(rank, step), torch.tanh, True).sum().backward()
                    averaged_gradients = gradients(context_id, module)
                    assert same(
                        averaged_gradients, [parameter.grad for parameter in local.parameters()]
                    )
                    by_rank: list[Any] = [None] * TRAINERS
                    dist.all_gather_object(by_rank, averaged_gradients)
                    assert same(*by_rank) == averaged

    with_trainers(train)


def test_only_parameters_of_ddp_modules_are_averaged() -> None:
    def train(rank: int) -> None:
        torch.manual_seed(rank)
        beside = nn.Linear(3, 3)
        torch.manual_seed(0)
        layers = nn.Linear(3, 3), nn.Linear(3, 3)
        first, second = (DistributedDataParallel(layer) for layer in layers)
        before = first(inputs(rank, 0))  # outside of the context
        with context() as context_id:
            loss = second(there(beside(there(before)))).square().sum()
            backward(context_id, loss)
            expected = torch.autograd.grad(
                layers[1](beside(layers[0](inputs(rank, 0)).tanh()).tanh()).square().sum(),
                [*beside.parameters(), *layers[0].parameters(), *layers[1].parameters()],
            )
            assert same(gradients(context_id, beside), [*expected[:2]])
            for gradient in expected[2:]:
                dist.all_reduce(gradient)
                gradient /= TRAINERS
            averaged_gradients = [*gradients(context_id, first), *gradients(context_id, second)]
            assert same(averaged_gradients, [*expected[2:]])

    with_trainers(train)


def test_trainers_with_fewer_batches_join() -> None:
    kept = []  # torch may hang when it frees a module that has joined

    def train(rank: int) -> None:
        kept.extend(DistributedDataParallel(Model(1)) for _ in range(2))
        averaged_gradients, expected = [], []
        with kept[0].join():
            for step in range(1 + rank):
                with context() as context_id:
                    backward(context_id, kept[0](inputs(rank, step), there, True))
                    averaged_gradients.append(gradients(context_id, kept[0]))
        with kept[1].join():
            for step in range(1 + rank):
                kept[1].zero_grad()
                kept[1](inputs(rank, step), torch.tanh, True).sum().backward()
                expected.append([parameter.grad for parameter in kept[1].parameters()])
        assert len(averaged_gradients) == 1 + rank
        assert all(same(*both) for both in zip(averaged_gradients, expected, strict=True))

    with_trainers(train)


def thrice(_state, bucket):  # torch refuses annotations that are strings
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer() * 3)
    return done


def test_communication_hooks_are_used() -> None:
    def train(rank: int) -> None:
        torch.manual_seed(rank)
        layer = nn.Linear(3, 2)
        module = DistributedDataParallel(layer)
        module.register_comm_hook(None, thrice)
        with context() as context_id:
            backward(context_id, there(module(inputs(rank, 0))))
            averaged_gradients = gradients(context_id, module)
        loss = layer(inputs(rank, 0)).tanh().sum()
        assert same(
            averaged_gradients, [3 * g for g in torch.autograd.grad(loss, [*layer.parameters()])]
        )

    with_trainers(train)


@contextmanager
def raises(kind: type[Exception], words: str) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    assert words in str(caught.value)


class Fragile(torch.autograd.Function):
    works = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if not Fragile.works:
            raise ZeroDivisionError("no gradient today")
        return gradient


def test_a_failed_pass_leaves_grad_alone_and_can_be_repeated() -> None:
    def train(rank: int) -> None:
        module, local = (DistributedDataParallel(Model(1)) for _ in range(2))
        weight = module.module.last.weight
        kept = weight.grad = torch.ones_like(weight)

        def refuse(_parameter: Tensor) -> None:
            raise LookupError("nor that")

        with context() as context_id:
            y = Fragile.apply(module(inputs(rank, 0), there, True))
            with raises(RuntimeError, "no gradient today"):
                backward(context_id, y, retain_graph=True)
            Fragile.works = True
            handle = module.module.first.weight.register_post_accumulate_grad_hook(refuse)
            with raises(RuntimeError, "nor that"):
                backward(context_id, y, retain_graph=True)
            handle.remove()
            assert gradients(context_id, module) == [None] * 6
            assert module.module.first.weight.grad is None
            backward(context_id, y)
            averaged_gradients = gradients(context_id, module)
        local(inputs(rank, 0), torch.tanh, True).sum().backward()
        assert same(averaged_gradients, [parameter.grad for parameter in local.parameters()])
        assert weight.grad is kept
        assert torch.equal(kept, torch.ones_like(weight))

    with_trainers(train)


def test_gradients_that_would_not_be_averaged_are_an_error() -> None:
    def train(rank: int) -> None:
        module = DistributedDataParallel(Model(1))
        with context() as context_id:
            loss = module(inputs(rank, 0), there, True)
            backward(context_id, loss, retain_graph=True)
            averaged_gradients = gradients(context_id, module)
            with raises(RuntimeError, "it does so in one backward per forward"):
                backward(context_id, loss)
            assert same(gradients(context_id, module), averaged_gradients)
        with context() as context_id:
            outside = module(inputs(rank, 0), torch.tanh, True)
            module(inputs(rank, 1), torch.tanh, True).sum().backward()  # averages the gradients
            with raises(RuntimeError, "it does so in one backward per forward"):
                backward(context_id, outside)
        with context() as context_id:
            loss = module(inputs(rank, 0), there, False)
            with raises(RuntimeError, "were not averaged, for some parameters have none"):
                backward(context_id, loss)
            assert gradients(context_id, module) == [None] * 6

    with_trainers(train)


def test_options_that_need_grad_are_refused() -> None:
    def train(rank: int) -> None:
        layer = nn.Linear(3, 2)
        named = [("weight", layer.weight)]
        module = DistributedDataParallel(
            layer, delay_all_reduce_named_params=named, param_to_hook_all_reduce=layer.bias
        )
        with context(), raises(NotImplementedError, "delay_all_reduce_named_params"):
            module(inputs(rank, 0))

    with_trainers(train)


def test_nested_ddp_modules_are_refused_and_successive_ones_work() -> None:
    def train(rank: int) -> None:
        layer = nn.Linear(3, 2)
        modules = [DistributedDataParallel(layer) for _ in range(2)]
        for module in [*modules, modules[0]]:
            with context() as context_id:
                backward(context_id, module(inputs(rank, 0)))
                assert None not in [g if g is None else 0 for g in gradients(context_id, layer)]
        outer = DistributedDataParallel(nn.Sequential(modules[0]))
        with context(), raises(NotImplementedError, "leave the inner one out"):
            outer(inputs(rank, 0))
        outer(inputs(rank, 0))  # outside of contexts torch allows it

    with_trainers(train)


SERVED: dict[str, Any] = {}
served = threading.Event()


def serve(x: Tensor) -> Tensor:
    module: DistributedDataParallel = SERVED["module"]
    return module(x, torch.tanh, True)


def served_gradients(context_id: int) -> list[Tensor | None]:
    return gradients(context_id, SERVED["module"])


def finish() -> None:
    served.set()


def test_modules_in_functions_on_other_workers_are_averaged() -> None:
    def train(rank: int) -> None:
        SERVED["module"] = DistributedDataParallel(Model(1))
        dist.barrier()
        if rank == 0:
            with context() as context_id:
                # worker1 needs nothing from worker0, and worker0 waits for the gradient of worker1.
                middle = call("worker0", serve, inputs(0, 0))
                backward(context_id, call("worker1", serve, torch.cat([middle, middle[:, :1]], 1)))
                averaged_gradients = [
                    call(f"worker{n}", served_gradients, context_id) for n in range(TRAINERS)
                ]
            assert None not in [
                gradient if gradient is None else 0 for gradient in averaged_gradients[0]
            ]
            assert same(*averaged_gradients)
            call("worker1", finish)
        else:
            assert served.wait(PATIENCE)

    with_trainers(train)
