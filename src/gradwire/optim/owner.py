"""What a `DistributedOptimizer` has on each worker that owns parameters, and how parameters are
changed there.

An optimizer of torch looks for gradients in `.grad`, which belongs to those who train locally, and
who may be adding to it right now. So it is given stand-ins: tensors with a `.grad` of their own,
which lie in the memory of the parameters while it steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from gradwire import autograd, current
from gradwire.gradients.memory import address, memory_of
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
    stand_ins, versions = _StandIns(), current.worker().versions
    for group in groups:
        group["params"] = [rref.local_value() for rref in group["params"]]  # may have to wait
    with versions.lock:  # who is in the memory of a parameter that others begin to track keeps it
        for group in groups:
            group["params"] = [stand_ins.get(parameter) for parameter in group["params"]]
    params: list[Any] = groups
    if len(groups) == 1 and not settings_of(groups[0]):
        params = groups[0]["params"]  # as it was given; not every class knows groups
    with making_optimizers:
        optimizer = optimizer_class(params, *args, **kwargs)
    stand_ins.rest()
    versions.track(stand_ins.parameters)
    settings = [settings_of(group) for group in optimizer.param_groups]
    return RRef(LocalOptimizer(optimizer, stand_ins)), optimizer.defaults, settings


class _StandIns:
    """What an optimizer has in the place of parameters."""

    def __init__(self) -> None:
        self._by_parameter: dict[Tensor, Tensor] = {}
        #: Those that are in the place of their parameters now; and with what in `.grad` before.
        self._up: list[tuple[Tensor, Tensor, Tensor | None]] = []

    @property
    def parameters(self) -> list[Tensor]:
        return list(self._by_parameter)

    def get(self, parameter: Any) -> Any:
        """The one for a parameter. It has its value, in memory of its own: others may be using the
        parameter while an optimizer is made."""
        if not isinstance(parameter, Tensor):
            return parameter  # whoever makes the optimizer says what is wrong
        found = self._by_parameter.get(parameter)
        if found is None:
            if not parameter.is_leaf:
                raise ValueError("can't optimize a non-leaf Tensor")
            found = parameter  # a sparse one, for instance, is in several places
            if memory_of(parameter) is not None:
                found = parameter.detach().clone()
                if isinstance(parameter, torch.nn.Parameter):
                    found = torch.Tensor._make_subclass(type(parameter), found)
                found.requires_grad_(parameter.requires_grad)
                found.__dict__.update(parameter.__dict__)  # some optimizers look for marks there
            self._by_parameter[parameter] = found
        return found

    def rest(self) -> None:
        """Be in nobody's memory: who is in that of a parameter keeps it in place."""
        for parameter, stand_in in self._by_parameter.items():
            if stand_in is not parameter:
                stand_in.data = stand_in.new_empty(0)

    def step_up(self, gradients: dict[Tensor, Tensor]) -> None:
        """Take the places of the parameters, with these gradients."""
        for parameter, stand_in in self._by_parameter.items():
            before = stand_in.grad
            if stand_in is not parameter:
                stand_in.data = parameter.detach()
            self._up.append((parameter, stand_in, before))
            stand_in.grad = gradients.get(parameter)

    def step_down(self) -> None:
        while self._up:
            parameter, stand_in, before = self._up.pop()
            stand_in.grad = before
            if stand_in is parameter:
                continue
            if address(stand_in) != address(parameter):  # the optimizer has given it other memory
                parameter.data = stand_in.detach()
            stand_in.data = stand_in.new_empty(0)


class LocalOptimizer:
    """The optimizer of one trainer for the parameters of this worker."""

    def __init__(self, optimizer: torch.optim.Optimizer, stand_ins: _StandIns):
        self._optimizer = optimizer
        self._stand_ins = stand_ins

    def step(self, context_id: int, changes: list[Group]) -> None:
        gradients = autograd.get_gradients(context_id)  # before the lock: it may ask other workers
        groups, stand_ins = self._optimizer.param_groups, self._stand_ins
        with changing([found for found in stand_ins.parameters if found in gradients]):
            for group, changed in zip(groups, changes, strict=True):
                group.update(changed)
            try:
                stand_ins.step_up(gradients)
                self._optimizer.step()
            finally:
                stand_ins.step_down()

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
