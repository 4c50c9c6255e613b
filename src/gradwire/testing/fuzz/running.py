"""Running bodies, whatever a call means: `run_body` is the same in one process and on workers.

A `World` says what calls and inner contexts mean; a `Bench` is what a program finds on a worker and
where it is noted what becomes of it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from gradwire.testing.fuzz import operations
from gradwire.testing.fuzz.programs import Body, Episode, Pass, Precision, Step

Finish = Callable[[], list[Tensor]]


@dataclass(frozen=True)
class Kind:
    """What a parameter is like."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    is_parameter: bool = False
    has_attribute: bool = False


#: The parameters that every worker has, each made when it is first used.
PARAMETERS = (
    Kind((3,)),
    Kind((2, 3), is_parameter=True),
    Kind(()),
    Kind((5, 3), is_parameter=True),
    Kind((3,), torch.complex128),
    Kind((0,)),
    Kind((64, 100)),  # large enough for a buffer of its own and shared memory
    Kind((3, 2), torch.float32),
    Kind((3,), torch.bfloat16),
    Kind((4,), is_parameter=True, has_attribute=True),
)
#: Which of them has an attribute of its own, which makes torch pickle it in another way.
WITH_ATTRIBUTE = 9


def parameters_of(precision: Precision) -> list[int]:
    """The numbers of those that are fine enough."""
    left_out = {"float64": {7, 8}, "float32": {8}, "bfloat16": set[int]()}[precision]
    return [number for number in range(len(PARAMETERS)) if number not in left_out]


@dataclass
class Report:
    """What a program has left on a worker."""

    #: Of parameters and of other leaves, by name.
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    #: How often a hook was called with a gradient, and the sum of what it saw.
    hooks: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    #: How often hooks were called with None.
    calls_with_none: dict[str, int] = field(default_factory=dict)


class Bench:
    """What one program finds on one worker."""

    def __init__(self, seed: int, worker: int):
        self._seed = seed
        self._worker = worker
        self._lock = threading.Lock()
        self._leaves: dict[str, Tensor] = {}
        self._hooks: dict[str, tuple[int, Tensor]] = {}
        self._nones: dict[str, int] = {}
        #: Calls that nobody has waited for.
        self.abandoned: list[Finish] = []

    def parameter(self, number: int) -> Tensor:
        name = f"parameter {number}"
        with self._lock:
            if name not in self._leaves:
                self._leaves[name] = self._make_parameter(name, PARAMETERS[number])
            return self._leaves[name]

    def _make_parameter(self, name: str, kind: Kind) -> Tensor:
        dice = random.Random(f"{self._seed} {self._worker} {name}")
        maker = torch.Generator().manual_seed(dice.getrandbits(32))
        made = torch.randn(kind.shape, generator=maker, dtype=torch.float64)
        made = made.to(kind.dtype) * (1 + 0.5j if kind.dtype.is_complex else 1)
        made = torch.nn.Parameter(made) if kind.is_parameter else made.requires_grad_()
        if kind.has_attribute:
            made.label = name  # type: ignore[attr-defined]
        if dice.random() < 0.2:
            self._watch(name, made, 0.5)
        return made

    def leaf(self, key: int, x: Tensor) -> Tensor:
        """A new leaf with the value of x."""
        made = operations.smooth(x).detach().clone().requires_grad_()
        with self._lock:
            self._leaves[f"leaf {key}"] = made
        return made

    def hook(self, key: int, x: Tensor) -> Tensor:
        """Watch and scale the gradient of x."""
        if not x.requires_grad:
            return x
        if x.is_leaf:
            # Hooks on parameters are there from the beginning: a pass may be under way.
            x = x * 1
        self._watch(f"hook {key}", x, 0.75)
        return x

    def _watch(self, name: str, x: Tensor, factor: float) -> None:
        def watch(gradient: Tensor | None) -> Tensor | None:
            if gradient is None:
                with self._lock:
                    self._nones[name] = self._nones.get(name, 0) + 1
                return None
            seen = _dense(gradient)
            with self._lock:
                count, total = self._hooks.get(name, (0, torch.zeros_like(seen)))
                self._hooks[name] = (count + 1, total + seen)
            return gradient * factor

        x.register_hook(watch)  # type: ignore[no-untyped-call]

    def leaves(self) -> dict[str, Tensor]:
        with self._lock:
            return dict(sorted(self._leaves.items()))

    def report(self, gradient_of: Callable[[Tensor], Tensor | None]) -> Report:
        found = {name: gradient_of(leaf) for name, leaf in self.leaves().items()}
        with self._lock:
            hooks, nones = dict(self._hooks), dict(self._nones)
        gradients = {name: None if g is None else _dense(g) for name, g in found.items()}
        return Report(gradients, hooks, nones)


def _dense(gradient: Tensor) -> Tensor:
    gradient = gradient.detach()
    return gradient.to_dense() if gradient.is_sparse else gradient.clone()


class World(Protocol):
    """Where a body runs."""

    bench: Bench

    def begin(self, step: Step, arguments: list[Tensor]) -> Finish:
        """Call the body of a step; the result says how to get at its results."""
        ...

    def inner_gradients(
        self, body: Body, arguments: list[Tensor], *, by_grad: bool
    ) -> list[Tensor | None]:
        """The gradients of a body's loss in its arguments, found in a context of its own; by a
        pass for them alone, or for all leaves."""
        ...


def run_body(body: Body, arguments: Sequence[Tensor], world: World) -> list[Tensor]:
    """What the body returns."""
    variables = list(arguments)
    started: dict[int, Finish] = {}
    for step in body.steps:
        inputs = [variables[position] for position in step.inputs]
        if step.action == "start":
            started[step.key] = world.begin(step, inputs)
        elif step.action == "wait":
            variables += operations.arrived(_results(started.pop(step.number, None), step))
        else:
            variables += _run_step(step, inputs, world)
    world.bench.abandoned += started.values()
    return [variables[position] for position in body.returns]


def _results(finish: Finish | None, step: Step) -> list[Tensor]:
    """Of a call that was started; a program that was cut down may not have started it."""
    return finish() if finish is not None else constants(step.results)


def constants(count: int) -> list[Tensor]:
    return [torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64) for _ in range(count)]


def _run_step(step: Step, inputs: list[Tensor], world: World) -> list[Tensor]:
    if step.action == "call":
        return operations.arrived(world.begin(step, inputs)())
    if step.action == "quiet call":
        with torch.no_grad():
            return operations.arrived(world.begin(step, inputs)())
    if step.action == "parameter":
        return [world.bench.parameter(step.number)]
    if step.action == "leaf":
        return [world.bench.leaf(step.key, inputs[0])]
    if step.action == "hook":
        return [world.bench.hook(step.key, inputs[0])]
    if step.action == "constant":
        return constants(step.results)
    if step.action == "branch":
        value = operations.convert(inputs[0].detach(), torch.float64).sum()
        return run_body(step.bodies[0 if value > 0 else 1], inputs, world)
    if step.action == "inner":
        return _inner(step, inputs, world)
    operation, _, _ = operations.OPERATIONS[step.action]
    return operation(inputs, step.number)


def _inner(step: Step, inputs: list[Tensor], world: World) -> list[Tensor]:
    leaves = [operations.smooth(x).detach().clone().requires_grad_() for x in inputs]
    gradients = world.inner_gradients(step.bodies[0], leaves, by_grad=step.number == 1)
    return [
        torch.zeros_like(leaf) if gradient is None else _dense(gradient)
        for leaf, gradient in zip(leaves, gradients, strict=True)
    ]


# -- from results to roots


def loss_of(results: Sequence[Tensor], variant: int = 0) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for position, result in enumerate(results, 1):
        total = total + operations.convert(result, torch.float64).sum() * (position + variant)
    return total


def penalty_inputs(results: Sequence[Tensor], world: World, variant: int) -> list[Tensor]:
    """What a penalty is a function of the gradients of."""
    inputs = list(world.bench.leaves().values())
    if variant % 2:
        # Torch gives what a hook has made of a gradient, or what it was before: as it happens.
        inputs += [x for x in results if x.requires_grad and not x._backward_hooks]
    return inputs


def roots_of(results: Sequence[Tensor], found: Pass) -> tuple[list[Tensor], list[Tensor | None]]:
    """What a pass starts from, with the gradients it starts with. Empty when nothing depends on
    any leaf."""
    if found.roots == "loss":
        loss = loss_of(results, found.variant)
        return ([loss], [None]) if loss.requires_grad else ([], [])
    roots = [result for result in results if result.requires_grad and not result.is_leaf]
    return roots, [_seed(root, position + found.variant) for position, root in enumerate(roots)]


def _seed(root: Tensor, variant: int) -> Tensor | None:
    if root.numel() == 1 and not root.is_complex() and variant % 2:
        return None
    ramp = torch.arange(root.numel(), dtype=torch.float64).reshape(root.shape)
    return (ramp.remainder(5) - 1.5 + variant).to(root.dtype)


def penalty_of(gradients: Sequence[Tensor | None], variant: int) -> Tensor:
    """A scalar made of gradients: their squared norm, or their product with a vector."""
    total = torch.zeros((), dtype=torch.float64)
    for gradient in gradients:
        if gradient is not None:
            other = gradient if variant % 2 else _seed(gradient, 2 * variant)
            assert other is not None
            total = total + operations.convert(gradient * other.conj(), torch.float64).sum()
    return total


def finish_second_order(episode: Episode, penalty: Tensor, loss: Tensor, world: World) -> Tensor:
    """What the second pass starts from."""
    total = penalty + loss * 0.5 if episode.passes[0].variant & 2 else penalty
    if episode.between is not None:
        total = total + loss_of(run_body(episode.between, [penalty], world))
    return total
