"""What a `DistributedOptimizer` has on each worker that owns parameters, and how parameters are
changed there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from gradwire import autograd, current
from gradwire.refs.rref import RRef

#: Parameters, or RRefs to them, under "params"; beside them lr and other settings.
Group = dict[str, Any]

#: torch imports its compiler when a process makes its first optimizer, and patches a class at its
#: first instance. Threads had better not do that at the same time.
making_optimizers = threading.Lock()


def settings_of(group: Group) -> Group:
    return {key: value for key, value in group.items() if key != "params"}


def make(
    optimizer_class: Callable[..., torch.optim.Optimizer],
    groups: list[Group],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[RRef[LocalOptimizer], dict[str, Any], list[Group]]:
    """Make an optimizer for parameters of this worker; tells its defaults and settings too."""
    for group in groups:
        group["params"] = [rref.local_value() for rref in group["params"]]
    params: list[Any] = groups
    if len(groups) == 1 and not settings_of(groups[0]):
        params = groups[0]["params"]  # as it was given; not every class knows groups
    with making_optimizers:
        optimizer = optimizer_class(params, *args, **kwargs)
    current.worker().versions.track(parameters_of(optimizer))
    settings = [settings_of(group) for group in optimizer.param_groups]
    return RRef(LocalOptimizer(optimizer)), optimizer.defaults, settings


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class LocalOptimizer:
    """The optimizer of one trainer for the parameters of this worker."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer

    def step(self, context_id: int, changes: list[Group]) -> None:
        gradients = autograd.get_gradients(context_id)  # before the lock: it may ask other workers
        groups, parameters = self._optimizer.param_groups, parameters_of(self._optimizer)
        with changing([parameter for parameter in parameters if parameter in gradients]):
            for group, changed in zip(groups, changes, strict=True):
                group.update(changed)
            own_gradients = [parameter.grad for parameter in parameters]
            try:
                for parameter in parameters:
                    parameter.grad = gradients.get(parameter)
                self._optimizer.step()
            finally:
                for parameter, gradient in zip(parameters, own_gradients, strict=True):
                    parameter.grad = gradient

    def state_dict(self) -> dict[str, Any]:
        with current.worker().versions.lock:
            state: dict[str, Any] = copied(self._optimizer.state_dict())
            return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        with current.worker().versions.lock:
            self._optimizer.load_state_dict(state_dict)


@contextmanager
def changing(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Around every change of parameters of this worker that is not a step of a
    `DistributedOptimizer`: changes take turns, and the backward passes of contexts whose forward
    has seen the parameters before still see them as they were.

    Name everything that is changed inside: torch does not notice changes there. Make no calls to
    other workers: forward passes that need the parameters wait.

        >>> with changing([weight]), torch.no_grad():      # doctest: +SKIP
        ...     weight.mul_(0.5)
    """
    with current.worker().versions.changing(parameters):
        yield


def copied(tree: Any) -> Any:
    """A state to be sent: it can be read when the parameters are changed again, and nobody needs
    the devices of this worker for it.

        >>> copied({"weight": [torch.ones(2)]})
        {'weight': [tensor([1., 1.])]}
    """
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), tree)
