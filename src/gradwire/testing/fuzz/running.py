"""Run the bodies of random programs: `run_body` is the same in one process and on workers.

A `Backend` defines how a body makes calls, and how it differentiates in an inner context. A
`WorkerState` holds the parameters that a program uses on one worker, and records the gradients that
hooks have received.
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

#: A function that waits for a call and returns its results.
GetResults = Callable[[], list[Tensor]]


@dataclass(frozen=True)
class ParameterKind:
    """The properties of a parameter. With `is_parameter`, the parameter is an `nn.Parameter` and
    not a plain tensor. With `has_attribute`, the program sets an extra Python attribute on it."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    is_parameter: bool = False
    has_attribute: bool = False


#: The parameters of every worker. Each is created when it is first used.
PARAMETERS = (
    ParameterKind((3,)),
    ParameterKind((2, 3), is_parameter=True),
    ParameterKind(()),
    ParameterKind((5, 3), is_parameter=True),
    ParameterKind((3,), torch.complex128),
    ParameterKind((0,)),
    ParameterKind((64, 100)),  # This parameter is large enough to travel in shared memory.
    ParameterKind((3, 2), torch.float32),
    ParameterKind((3,), torch.bfloat16),
    ParameterKind((4,), is_parameter=True, has_attribute=True),
)


def parameters_of(precision: Precision) -> list[int]:
    """Return the numbers of the parameters in `PARAMETERS` that have this precision or a better
    one."""
    excluded = {"float64": {7, 8}, "float32": {8}, "bfloat16": set[int]()}[precision]
    return [number for number in range(len(PARAMETERS)) if number not in excluded]


@dataclass
class Report:
    """The gradients and hook calls of a program on one worker."""

    #: The gradient of each parameter and leaf, by name; None if there is no gradient.
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    #: For each hook, by name: how often it was called with a gradient, and the sum of these
    #: gradients.
    hooks: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    #: For each hook, by name: how often it was called with None.
    calls_with_none: dict[str, int] = field(default_factory=dict)


class WorkerState:
    """The state of one program on one worker."""

    def __init__(self, seed: int, worker: int):
        self._seed = seed
        self._worker = worker
        self._lock = threading.Lock()
        self._leaves: dict[str, Tensor] = {}
        self._hooks: dict[str, tuple[int, Tensor]] = {}
        self._nones: dict[str, int] = {}
        #: The started calls that the program does not wait for. Each is stored as a function that
        #: waits for the call.
        self.abandoned: list[GetResults] = []

    def parameter(self, number: int) -> Tensor:
        name = f"parameter {number}"
        with self._lock:
            if name not in self._leaves:
                self._leaves[name] = self._make_parameter(name, PARAMETERS[number])
            return self._leaves[name]

    def _make_parameter(self, name: str, kind: ParameterKind) -> Tensor:
        randomness = random.Random(f"{self._seed} {self._worker} {name}")
        maker = torch.Generator().manual_seed(randomness.getrandbits(32))
        made = torch.randn(kind.shape, generator=maker, dtype=torch.float64)
        made = made.to(kind.dtype) * (1 + 0.5j if kind.dtype.is_complex else 1)
        made = torch.nn.Parameter(made) if kind.is_parameter else made.requires_grad_()
        if kind.has_attribute:
            made.label = name  # type: ignore[attr-defined]
        if randomness.random() < 0.2:
            self._add_hook(name, made, 0.5)
        return made

    def leaf(self, key: int, x: Tensor) -> Tensor:
        """Make a new leaf with the value of x."""
        made = operations.as_floating(x).detach().clone().requires_grad_()
        with self._lock:
            self._leaves[f"leaf {key}"] = made
        return made

    def hook(self, key: int, x: Tensor) -> Tensor:
        """Add a hook that records and scales the gradient of x."""
        if not x.requires_grad:
            return x
        if x.is_leaf:
            # A backward pass on another thread may be using the leaf. It would sometimes call a
            # new hook of the leaf and sometimes not. So add the hook to a copy, which is new.
            x = x * 1
        self._add_hook(f"hook {key}", x, 0.75)
        return x

    def _add_hook(self, name: str, x: Tensor, factor: float) -> None:
        def hook(gradient: Tensor | None) -> Tensor | None:
            if gradient is None:
                with self._lock:
                    self._nones[name] = self._nones.get(name, 0) + 1
                return None
            seen = _dense(gradient)
            with self._lock:
                count, total = self._hooks.get(name, (0, torch.zeros_like(seen)))
                self._hooks[name] = (count + 1, total + seen)
            return gradient * factor

        x.register_hook(hook)  # type: ignore[no-untyped-call]

    def leaves(self) -> dict[str, Tensor]:
        with self._lock:
            return dict(sorted(self._leaves.items()))

    def report(self, gradient_of: Callable[[Tensor], Tensor | None]) -> Report:
        by_name = {name: gradient_of(leaf) for name, leaf in self.leaves().items()}
        with self._lock:
            hooks, nones = dict(self._hooks), dict(self._nones)
        gradients = {name: None if g is None else _dense(g) for name, g in by_name.items()}
        return Report(gradients, hooks, nones)


def _dense(gradient: Tensor) -> Tensor:
    gradient = gradient.detach()
    return gradient.to_dense() if gradient.is_sparse else gradient.clone()


class Backend(Protocol):
    """Defines how a body makes its calls: on workers, or in one process."""

    state: WorkerState

    def begin(self, step: Step, arguments: list[Tensor]) -> GetResults:
        """Call the body of a step. Return a function that waits for the results."""
        ...

    def inner_gradients(
        self, body: Body, arguments: list[Tensor], *, by_grad: bool
    ) -> list[Tensor | None]:
        """Differentiate the loss of a body in a context of its own, with `grad` or with `backward`.
        Return the gradients of the arguments."""
        ...


def run_body(body: Body, arguments: Sequence[Tensor], backend: Backend) -> list[Tensor]:
    """Run a body, and return its results."""
    variables = list(arguments)
    started: dict[int, GetResults] = {}
    for step in body.steps:
        inputs = [variables[position] for position in step.inputs]
        if step.action == "start":
            started[step.key] = backend.begin(step, inputs)
        elif step.action == "wait":
            variables += operations.without_overlap(_results(started.pop(step.number, None), step))
        else:
            variables += _run_step(step, inputs, backend)
    backend.state.abandoned += started.values()
    return [variables[position] for position in body.returns]


def _results(get_results: GetResults | None, step: Step) -> list[Tensor]:
    """Wait for a started call and return its results. If shrinking has removed the step that
    started the call, return constants."""
    return get_results() if get_results is not None else constants(step.results)


def constants(count: int) -> list[Tensor]:
    return [torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64) for _ in range(count)]


def _run_step(step: Step, inputs: list[Tensor], backend: Backend) -> list[Tensor]:
    if step.action == "call":
        return operations.without_overlap(backend.begin(step, inputs)())
    if step.action == "quiet call":
        with torch.no_grad():
            return operations.without_overlap(backend.begin(step, inputs)())
    if step.action == "parameter":
        return [backend.state.parameter(step.number)]
    if step.action == "leaf":
        return [backend.state.leaf(step.key, inputs[0])]
    if step.action == "hook":
        return [backend.state.hook(step.key, inputs[0])]
    if step.action == "constant":
        return constants(step.results)
    if step.action == "branch":
        value = operations.convert(inputs[0].detach(), torch.float64).sum()
        return run_body(step.bodies[0 if value > 0 else 1], inputs, backend)
    if step.action == "inner":
        return _inner(step, inputs, backend)
    operation, _, _ = operations.OPERATIONS[step.action]
    return operation(inputs, step.number)


def _inner(step: Step, inputs: list[Tensor], backend: Backend) -> list[Tensor]:
    leaves = [operations.as_floating(x).detach().clone().requires_grad_() for x in inputs]
    gradients = backend.inner_gradients(step.bodies[0], leaves, by_grad=step.number == 1)
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


def penalty_inputs(results: Sequence[Tensor], backend: Backend, variant: int) -> list[Tensor]:
    """Return the tensors whose gradients enter a penalty, which is a function of gradients."""
    inputs = list(backend.state.leaves().values())
    if variant % 2:
        # Skip results with hooks. For these, torch may return the gradient from before the hook or
        # the one from after it, so the two runs might differ.
        inputs += [x for x in results if x.requires_grad and not x._backward_hooks]
    return inputs


def roots_of(
    results: Sequence[Tensor], backward_pass: Pass
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the roots of a backward pass and their gradients, or two empty lists if no result
    depends on a leaf."""
    if backward_pass.roots == "loss":
        loss = loss_of(results, backward_pass.variant)
        return ([loss], [None]) if loss.requires_grad else ([], [])
    roots = [result for result in results if result.requires_grad and not result.is_leaf]
    return roots, [
        _root_gradient(root, position + backward_pass.variant)
        for position, root in enumerate(roots)
    ]


def _root_gradient(root: Tensor, variant: int) -> Tensor | None:
    if root.numel() == 1 and not root.is_complex() and variant % 2:
        return None
    ramp = torch.arange(root.numel(), dtype=torch.float64).reshape(root.shape)
    return (ramp.remainder(5) - 1.5 + variant).to(root.dtype)


def penalty_of(gradients: Sequence[Tensor | None], variant: int) -> Tensor:
    """Return the squared norm of the gradients, or their product with a vector."""
    total = torch.zeros((), dtype=torch.float64)
    for gradient in gradients:
        if gradient is not None:
            other = gradient if variant % 2 else _root_gradient(gradient, 2 * variant)
            assert other is not None
            total = total + operations.convert(gradient * other.conj(), torch.float64).sum()
    return total


def finish_second_order(
    episode: Episode, penalty: Tensor, loss: Tensor, backend: Backend
) -> Tensor:
    """Return the root of the second backward pass. It is the penalty, a function of the first
    gradients. Some episodes add the loss to it, or the results of the body `between`."""
    total = penalty + loss * 0.5 if episode.passes[0].variant & 2 else penalty
    if episode.between is not None:
        total = total + loss_of(run_body(episode.between, [penalty], backend))
    return total
