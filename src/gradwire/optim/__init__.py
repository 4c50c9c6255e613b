"""Optimizers for parameters that live on several workers.

`DistributedOptimizer` has the name and the arguments of the class in ``torch.distributed.optim``.

    the worker that makes it                      every owner of parameters
    ------------------------                      -------------------------
    DistributedOptimizer                          LocalOptimizer (in `_owner`)
      param_groups: RRefs, lr, momentum, ...        has an optimizer of the given class
      step(context_id)      ==== settings ====>     gives it the gradients of the context
      state_dict()          <===== state ======
      load_state_dict()     ====== state =====>

Settings that were changed in `param_groups` are sent with every step. Learning rate schedulers
change only such settings, so the schedulers of ``torch.optim.lr_scheduler`` work unchanged.
"""

from __future__ import annotations

import copy
import itertools
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradwire import autograd, rpc
from gradwire._core.autograd.copy_on_write import untracked
from gradwire._core.ids import WorkerInfo
from gradwire._core.rref.rref import RRef
from gradwire._core.wire.codec import call_name
from gradwire.optim._clipping import clip_grad_norm_
from gradwire.optim._gathering import gather
from gradwire.optim._owner import (
    ParamGroup,
    changing,
    creation_lock,
    make_local_optimizer,
    settings_of,
)
from gradwire.optim._parameters import as_rrefs

__all__ = ["DistributedOptimizer", "changing", "clip_grad_norm_", "untracked"]


class DistributedOptimizer(torch.optim.Optimizer):
    """An optimizer for parameters on any workers.

    It creates one optimizer of the class `optimizer_class` on each worker that owns some of the
    parameters. `params_rref` gives the parameters: it is a module, or a list of modules and of
    RRefs to parameters. A module may contain remote modules. `params_rref` may also be a list of
    parameter groups, which are dicts as for torch's optimizers. `optimizer_class` gets all other
    arguments.

        >>> optimizer = DistributedOptimizer(torch.optim.SGD, model, lr=1)   # doctest: +SKIP
        >>> schedule = torch.optim.lr_scheduler.StepLR(optimizer, 30)        # doctest: +SKIP
        >>> with autograd.context() as context_id:                           # doctest: +SKIP
        ...     autograd.backward(context_id, [model(x).sum()])
        ...     optimizer.step(context_id)
        >>> schedule.step()                                                  # doctest: +SKIP

    The optimizers of several trainers may share parameters: on each owner their steps take turns.
    """

    #: For each worker that owns parameters, a reference to its `LocalOptimizer`.
    remote_optimizers: list[RRef[Any]]
    #: For each owner, and for each group, the numbers of the owner's parameters in that group. All
    #: parameters are numbered in the order in which the constructor got them.
    _numbers: list[list[list[int]]]
    #: The name of `optimizer_class`.
    _class_name: str
    #: Whether `step` has warned that a context had no gradients for the parameters.
    _has_warned = False

    def __init__(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        params_rref: nn.Module | Iterable[RRef[Any] | nn.Module] | Iterable[ParamGroup],
        *args: Any,
        **kwargs: Any,
    ):
        if not callable(optimizer_class):
            raise TypeError(
                f"optimizer_class must be a class of optimizers, not a "
                f"{type(optimizer_class).__name__}: write "
                f"DistributedOptimizer({type(optimizer_class).__name__}, model, ...)"
            )
        groups = _as_groups(params_rref)
        rrefs = [rref for group in groups for rref in group["params"]]
        numbers = _numbers_by_owner(groups)
        calls = []
        for owner, numbers_by_group in numbers.items():
            owned_groups = [
                {**group, "params": [rrefs[number] for number in numbers_in_group]}
                for group, numbers_in_group in zip(groups, numbers_by_group, strict=True)
            ]
            future = rpc.rpc_async(
                owner, make_local_optimizer, args=(optimizer_class, owned_groups, args, kwargs)
            )
            calls.append((owner, future.wait))
        results = gather(calls)
        _, defaults, settings = results[0]
        with creation_lock:
            # `Optimizer.__init__` is not called, because it accepts only tensors as parameters.
            # `__setstate__` sets up the optimizer instead, as it does after unpickling.
            self.__setstate__(
                {
                    "defaults": defaults,
                    # The state stays empty here, because the owners of the parameters have it.
                    "state": defaultdict(dict),
                    "param_groups": [
                        {"params": group["params"], **complete}
                        for group, complete in zip(groups, settings, strict=True)
                    ],
                    "remote_optimizers": [rref for rref, _, _ in results],
                    "_numbers": list(numbers.values()),
                    "_class_name": call_name(optimizer_class),
                }
            )
        self._note_sent_settings()

    def __getstate__(self) -> dict[str, Any]:
        names = ("remote_optimizers", "_numbers", "_class_name", "_sent_settings", "_changed_keys")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}

    def __repr__(self) -> str:
        counts = [
            f"{sum(map(len, numbers))} on {rref.owner_name()}"
            for rref, numbers in zip(self.remote_optimizers, self._numbers, strict=True)
        ]
        total = sum(len(group["params"]) for group in self.param_groups)
        name, groups = super().__repr__().split("\n", 1)
        return f"{name}\n{self._class_name} of {total} parameters: {', '.join(counts)}\n{groups}"

    def _call_owners(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of the `LocalOptimizer` of each owner, and return the results. `arguments`
        has a tuple with the arguments for each owner."""
        calls: list[tuple[WorkerInfo, Callable[[], Any]]] = []
        for rref, args in zip(self.remote_optimizers, arguments, strict=True):
            if rref.is_owner():
                # If this worker owns parameters, its own call runs on this thread while the other
                # owners work. The arguments are copied, as they would be if they were sent to
                # another worker.
                run = partial(getattr(rref.local_value(), method), *copy.deepcopy(args))
            else:
                run = getattr(rref.rpc_async(), method)(*args).wait
            calls.append((rref.owner(), run))
        return gather(calls)

    # -- steps

    def step(self, context_id: int) -> None:  # type: ignore[override]
        """Apply the gradients of a context on all workers that own parameters, at the same time.

        Call this method inside the context. It returns when all owners are done. Parameters without
        a gradient in the context stay as they are, and `.grad` is not touched. If none of the
        parameters has a gradient, a warning says so, once for each optimizer.

        If the step fails on some owners, the other owners still make it. The first error is raised,
        and its cause names all owners on which the step failed.

            >>> optimizer.step(context_id)     # doctest: +SKIP
        """
        # If the id is wrong, this call raises an error before any owner has made a step.
        autograd.get_gradients(context_id)
        found_gradients = self._call_owners(
            "step", [(context_id, self._changed_settings())] * len(self.remote_optimizers)
        )
        if not any(found_gradients) and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "this step changed nothing: autograd context "
                f"{context_id} has no gradient for any parameter of the optimizer. Probably the "
                "forward pass ran outside of `with gradwire.autograd.context()`, or "
                "gradwire.autograd.backward(context_id, [loss]) was not called before the step. "
                "(With into_grad=True, gradients go into .grad, and DistributedOptimizer does not "
                "use those.)",
                stacklevel=_stacklevel_of_program(),
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing, because every context starts without gradients.

        >>> optimizer.zero_grad()              # doctest: +SKIP
        """

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Raise an error: all groups must be given to the constructor.

        >>> DistributedOptimizer(SGD, [{"params": a}, {"params": b, "lr": 2}])     # doctest: +SKIP
        """
        raise NotImplementedError(
            "a DistributedOptimizer must be given all its parameter groups when it is made: "
            'DistributedOptimizer(cls, [{"params": rrefs}, {"params": more_rrefs, "lr": 0.1}])'
        )

    # -- settings

    def _note_sent_settings(self) -> None:
        """Note that the owners of the parameters now have the same settings as `param_groups`."""
        self._sent_settings = copy.deepcopy([settings_of(group) for group in self.param_groups])
        #: For each group, the names of the settings that the program has changed since the last
        #: call of this method. `_changed_settings` adds the names.
        self._changed_keys: list[set[str]] = [set() for _ in self.param_groups]

    def _changed_settings(self) -> list[ParamGroup]:
        """Return, for each group, the settings that the program has changed in `param_groups` since
        the optimizer was made or has loaded a state. Only these settings are sent to the owners.
        The reason is that some optimizers keep values of their own among the settings of the
        owners, and these values must not be overwritten."""
        groups = zip(self.param_groups, self._sent_settings, self._changed_keys, strict=True)
        for group, sent, changed_keys in groups:
            for key, value in settings_of(group).items():
                if key not in sent or not _equal(value, sent[key]):
                    changed_keys.add(key)
        return [
            {key: group[key] for key in changed_keys}
            for group, changed_keys in zip(self.param_groups, self._changed_keys, strict=True)
        ]

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizers of all owners, in the form of torch's optimizers.

        Parameters are numbered in the order in which they were given to the constructor. So the
        state can be loaded when the parameters live on other workers, or all in one process.

            >>> torch.save(optimizer.state_dict(), "optimizer.pt")         # doctest: +SKIP
        """
        parts = self._call_owners("state_dict", [()] * len(self.remote_optimizers))
        state = {}
        for numbers_by_group, part in zip(self._numbers, parts, strict=True):
            numbers = list(itertools.chain.from_iterable(numbers_by_group))
            state.update({numbers[key]: entry for key, entry in part["state"].items()})
        next_number = itertools.count()
        groups = []
        for group, group_of_owner, changed in zip(
            self.param_groups, parts[0]["param_groups"], self._changed_settings(), strict=True
        ):
            numbers_in_group = [next(next_number) for _ in group["params"]]
            groups.append({**group_of_owner, **copy.deepcopy(changed), "params": numbers_in_group})
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` has returned. The state may be that of another
        optimizer, if it has as many parameters in the same order.

            >>> optimizer.load_state_dict(torch.load("optimizer.pt"))      # doctest: +SKIP
        """
        state, groups = state_dict["state"], state_dict["param_groups"]
        sizes = [len(group["params"]) for group in groups]
        expected_sizes = [len(group["params"]) for group in self.param_groups]
        if sizes != expected_sizes:
            raise ValueError(
                f"this state does not fit: its groups have {sizes} parameters, the groups of this "
                f"optimizer {expected_sizes}"
            )
        #: Maps the number of a parameter to the key under which the given state lists the
        #: parameter.
        key_of = [key for group in groups for key in group["params"]]
        arguments = []
        for numbers_by_group in self._numbers:
            keys = [key_of[number] for number in itertools.chain.from_iterable(numbers_by_group)]
            next_key = itertools.count()
            groups_of_owner = [
                {**group, "params": [next(next_key) for _ in numbers]}
                for group, numbers in zip(groups, numbers_by_group, strict=True)
            ]
            state_of_owner = {
                new_key: state[key] for new_key, key in enumerate(keys) if key in state
            }
            arguments.append(({"state": state_of_owner, "param_groups": groups_of_owner},))
        self._call_owners("load_state_dict", arguments)
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update(copy.deepcopy(settings_of(loaded)))
        self._note_sent_settings()


def _stacklevel_of_program() -> int:
    """Return the `stacklevel` with which the calling function can warn so that the warning shows a
    line of the program. This level also skips functions of torch, because torch and its schedulers
    wrap `step` in functions of their own."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES:
        frame, level = frame.f_back, level + 1
    return level


_LIBRARIES = ("gradwire", "torch")


def _as_groups(params_rref: Any) -> list[ParamGroup]:
    is_one = isinstance(params_rref, nn.Module | RRef)
    given: list[Any] = [params_rref] if is_one else list(params_rref)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    groups = [{**group, "params": as_rrefs(group["params"])} for group in groups]
    if not any(group["params"] for group in groups):
        raise ValueError("params_rref is empty: there is nothing to optimize")
    return groups


def _numbers_by_owner(groups: list[ParamGroup]) -> dict[WorkerInfo, list[list[int]]]:
    """Number all parameters in order. Return, for each owner and each group, the numbers of the
    owner's parameters in that group."""
    numbers: dict[WorkerInfo, list[list[int]]] = {}
    next_number = itertools.count()
    for position, group in enumerate(groups):
        for rref in group["params"]:
            numbers_by_group = numbers.setdefault(rref.owner(), [[] for _ in groups])
            numbers_by_group[position].append(next(next_number))
    return numbers


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)
