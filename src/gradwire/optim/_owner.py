"""The part of a `DistributedOptimizer` on each worker that owns parameters, and the function
`changing`, which protects running backward passes from changes of parameters.

An optimizer of torch takes gradients from `.grad`. But `.grad` of a parameter belongs to local
training, which may be adding to it at the same time. So the optimizer gets *stand-ins* instead of
the parameters: tensors with a `.grad` of their own, which share the storage of the parameters
during a step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradwire import autograd
from gradwire._core import current
from gradwire._core.autograd.storage import find_storage_id, storage_id
from gradwire._core.rref.rref import RRef
from gradwire._core.torch_internals import make_subclass, tree_map_only

#: One group of parameters. The key "params" has the parameters, or RRefs to them. The other keys
#: are settings like "lr".
ParamGroup = dict[str, Any]

#: Held while an optimizer is created. When torch creates the first optimizer of a process, it
#: imports its compiler. When it creates the first optimizer of a class, it patches the class. Both
#: are unsafe in several threads at once.
creation_lock = threading.Lock()


def settings_of(group: ParamGroup) -> ParamGroup:
    """Return the settings of a parameter group: the group without its parameters.

    >>> settings_of({"params": [], "lr": 0.1})
    {'lr': 0.1}
    """
    return {key: value for key, value in group.items() if key != "params"}


def make_local_optimizer(
    optimizer_class: Callable[..., torch.optim.Optimizer],
    groups: list[ParamGroup],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[RRef[LocalOptimizer], dict[str, Any], list[ParamGroup]]:
    """Make an optimizer for parameters of this worker. Return a reference to its `LocalOptimizer`,
    its default settings, and the settings of its groups."""
    stand_ins, versions = _StandIns(), current.runtime().versions
    for group in groups:
        # `local_value` may wait until the value exists, so it is called before the lock is taken.
        group["params"] = [rref.local_value() for rref in group["params"]]
    # A stand-in is a tensor that the optimizer gets instead of a parameter. While a stand-in is
    # made, it shares the storage of the parameter for a moment. Without the lock, another thread
    # could call `ParameterVersions.track` for the parameter at that moment. `track` would note that
    # other tensors share the storage, and that the parameter must therefore stay in it.
    with versions.lock:
        for group in groups:
            group["params"] = [stand_ins.get(parameter) for parameter in group["params"]]
    params: list[Any] = groups
    if len(groups) == 1 and not settings_of(groups[0]):
        # Not every class of optimizers accepts groups of parameters. So a single group without
        # settings is passed as a plain list of parameters.
        params = groups[0]["params"]
    with creation_lock:
        optimizer = optimizer_class(params, *args, **kwargs)
    stand_ins.release_storages()
    versions.track(stand_ins.parameters)
    settings = [settings_of(group) for group in optimizer.param_groups]
    return RRef(LocalOptimizer(optimizer, stand_ins)), optimizer.defaults, settings


class _StandIns:
    """The tensors that an optimizer has instead of the parameters. They share the storages of the
    parameters only during a step."""

    def __init__(self) -> None:
        self._by_parameter: dict[Tensor, Tensor] = {}
        #: During a step: each parameter, the tensor that the optimizer has instead of it, and the
        #: `.grad` of that tensor before the step.
        self._active: list[tuple[Tensor, Tensor, Tensor | None]] = []

    @property
    def parameters(self) -> list[Tensor]:
        return list(self._by_parameter)

    def get(self, parameter: Any) -> Any:
        """Return the stand-in for a parameter: the tensor that the optimizer gets instead of it.

        The stand-in has the same value in a storage of its own, because other threads may use the
        parameter while the optimizer is created. If a parameter does not have exactly one storage,
        for example because it is sparse, the parameter itself is returned.
        """
        # An object that is not a tensor is returned as it is. The class of the optimizer will raise
        # an error for it.
        if not isinstance(parameter, Tensor):
            return parameter
        stand_in = self._by_parameter.get(parameter)
        if stand_in is None:
            if not parameter.is_leaf:
                raise ValueError("can't optimize a non-leaf Tensor")
            stand_in = parameter
            if find_storage_id(parameter) is not None:
                stand_in = parameter.detach().clone()
                if isinstance(parameter, torch.nn.Parameter):
                    stand_in = make_subclass(type(parameter), stand_in)
                stand_in.requires_grad_(parameter.requires_grad)
                # The stand-in gets the attributes that were set on the parameter, because some
                # optimizers read them.
                stand_in.__dict__.update(parameter.__dict__)
            self._by_parameter[parameter] = stand_in
        return stand_in

    def release_storages(self) -> None:
        """Give the stand-ins, the tensors that the optimizer has instead of parameters, empty
        storages until the next step."""
        for parameter, stand_in in self._by_parameter.items():
            if stand_in is not parameter:
                stand_in.data = stand_in.new_empty(0)

    def begin_step(self, gradients: dict[Tensor, Tensor]) -> None:
        """Prepare the stand-ins, the tensors that the optimizer has instead of parameters, for a
        step. During the step, each stand-in shares the storage of its parameter. The `.grad` of the
        stand-in is the gradient of the parameter."""
        for parameter, stand_in in self._by_parameter.items():
            before = stand_in.grad
            if stand_in is not parameter:
                stand_in.data = parameter.detach()
            self._active.append((parameter, stand_in, before))
            stand_in.grad = gradients.get(parameter)

    def end_step(self) -> None:
        """Give the stand-ins, the tensors that the optimizer has instead of parameters, empty
        storages again. A stand-in that still shared the storage of a parameter would force the
        parameter to stay in that storage (see `copy_on_write`)."""
        while self._active:
            parameter, stand_in, before = self._active.pop()
            stand_in.grad = before
            if stand_in is parameter:
                continue
            if storage_id(stand_in) != storage_id(parameter):
                # The optimizer has not changed the values of the stand-in in place, but has given
                # it another storage. The parameter gets this storage, and so the new values.
                parameter.data = stand_in.detach()
            stand_in.data = stand_in.new_empty(0)


class LocalOptimizer:
    """The part of one `DistributedOptimizer` for the parameters of this worker."""

    def __init__(self, optimizer: torch.optim.Optimizer, stand_ins: _StandIns):
        self._optimizer = optimizer
        self._stand_ins = stand_ins

    def step(self, context_id: int, changes: list[ParamGroup]) -> bool:
        """Apply the gradients of a context, and return whether there were any. `changes` has the
        changed settings of each group. They take effect before the step."""
        # `get_gradients` may ask other workers, so it is called before the lock is taken.
        gradients = autograd.get_gradients(context_id)
        groups, stand_ins = self._optimizer.param_groups, self._stand_ins
        changed_parameters = [each for each in stand_ins.parameters if each in gradients]
        with changing(changed_parameters):
            for group, changed in zip(groups, changes, strict=True):
                group.update(changed)
            try:
                stand_ins.begin_step(gradients)
                self._optimizer.step()
            finally:
                stand_ins.end_step()
        return bool(changed_parameters)

    def state_dict(self) -> dict[str, Any]:
        with current.runtime().versions.lock:
            state: dict[str, Any] = copy_to_cpu(self._optimizer.state_dict())
            return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        with current.runtime().versions.lock:
            self._optimizer.load_state_dict(state_dict)


@contextmanager
def changing(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Return a context manager for a block of code that changes parameters of this worker in place.

    A backward pass whose forward pass has used the parameters before the block still sees their old
    values. Steps of a `DistributedOptimizer` use such a block themselves. Every other change of
    parameters that several trainers use belongs in such a block. The blocks of a worker run one
    after the other.

    Name all parameters that the block changes. Torch's version counters, which reveal in-place
    changes to autograd, stand still during the block. After the block, gradwire increments them for
    the named parameters only. Make no calls to other workers in the block, so that the block ends
    soon: until then, forward passes that use the parameters wait.

        >>> with changing([weight]), torch.no_grad():      # doctest: +SKIP
        ...     weight.mul_(0.5)
    """
    with current.runtime().versions.changing(parameters):
        yield


def copy_to_cpu(tree: Any) -> Any:
    """Return a copy of a state, such as a `state_dict`, with all tensors on the CPU. The copy can
    be sent to any worker, and later changes of the parameters do not change the copy.

        >>> copy_to_cpu({"weight": [torch.ones(2)]})
        {'weight': [tensor([1., 1.])]}
    """
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), tree)
