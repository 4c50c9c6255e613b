"""Optimizers for parameters that live on several workers.

`DistributedOptimizer` has the name and the arguments of the one in ``torch.distributed.optim``.

    where it is made                              on every owner of parameters
    ----------------                              ----------------------------
    DistributedOptimizer                          owner.LocalOptimizer
      param_groups: RRefs, lr, momentum, ...        has an optimizer of the given class
      step(context_id)      ==== settings ====>     gives it the gradients of the context
      state_dict()          <===== state ======
      load_state_dict()     ====== state =====>

What is changed in `param_groups` goes along with every step. Schedulers change nothing else, so
those of ``torch.optim.lr_scheduler`` work as they are.
"""

from __future__ import annotations

import copy
import itertools
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradwire import autograd, rpc
from gradwire.errors import RemoteTraceback
from gradwire.gradients.versions import untracked
from gradwire.ids import WorkerInfo
from gradwire.optim.owner import Group, changing, make, making_optimizers, settings_of
from gradwire.refs.rref import RRef

__all__ = ["DistributedOptimizer", "changing", "untracked"]


class DistributedOptimizer(torch.optim.Optimizer):
    """Applies an optimizer of `optimizer_class` to parameters wherever they live.

    Takes RRefs to them, or groups of RRefs as torch's optimizers take groups of parameters. All
    other arguments go to the class.

        >>> params = model.remote_parameters()                               # doctest: +SKIP
        >>> optimizer = DistributedOptimizer(torch.optim.SGD, params, lr=1)  # doctest: +SKIP
        >>> schedule = torch.optim.lr_scheduler.StepLR(optimizer, 30)        # doctest: +SKIP
        >>> with autograd.context() as context_id:                           # doctest: +SKIP
        ...     autograd.backward(context_id, [model(x).sum()])
        ...     optimizer.step(context_id)
        >>> schedule.step()                                                  # doctest: +SKIP

    The optimizers of several trainers may share parameters: on each owner, their steps take turns.
    """

    #: One for each owner, on that owner.
    remote_optimizers: list[RRef[Any]]
    #: For each owner and group, the numbers of its parameters.
    _numbers: list[list[list[int]]]

    def __init__(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        params_rref: Iterable[RRef[Any]] | Iterable[Group],
        *args: Any,
        **kwargs: Any,
    ):
        groups = _as_groups(params_rref)
        rrefs = [rref for group in groups for rref in group["params"]]
        numbers = _numbers_by_owner(groups)
        calls = []
        for owner, mine in numbers.items():
            part = [
                {**group, "params": [rrefs[number] for number in mine_in_group]}
                for group, mine_in_group in zip(groups, mine, strict=True)
            ]
            future = rpc.rpc_async(owner, make, args=(optimizer_class, part, args, kwargs))
            calls.append((owner, future.wait))
        made = _gather(calls)
        _, defaults, settings = made[0]
        with making_optimizers:
            # Not Optimizer.__init__, which wants tensors; this is how optimizers leave a pickle.
            self.__setstate__(
                {
                    "defaults": defaults,
                    "state": defaultdict(dict),  # the owners have it
                    "param_groups": [
                        {"params": group["params"], **complete}
                        for group, complete in zip(groups, settings, strict=True)
                    ],
                    "remote_optimizers": [rref for rref, _, _ in made],
                    "_numbers": list(numbers.values()),
                }
            )
        self._note_settings()

    def __getstate__(self) -> dict[str, Any]:
        names = ("remote_optimizers", "_numbers", "_known", "_changed")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}

    def _ask_owners(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of the optimizers of all owners, with arguments for each."""
        asked = list(zip(self.remote_optimizers, arguments, strict=True))
        calls: list[tuple[WorkerInfo, Callable[[], Any]]] = []
        for rref, args in asked:
            if rref.is_owner():
                # As if it had been sent, but on this thread, while the others work.
                run = partial(getattr(rref.local_value(), method), *copy.deepcopy(args))
            else:
                run = getattr(rref.rpc_async(), method)(*args).wait
            calls.append((rref.owner(), run))
        return _gather(calls)

    # -- steps

    def step(self, context_id: int) -> None:  # type: ignore[override]
        """Apply the gradients that a context has collected, on all owners at the same time;
        returns when all are done. To be called inside the context. Parameters that have no gradient
        there stay as they are, and `.grad` is not touched.

        If some owners fail, the others have stepped nevertheless. The first error is raised; its
        cause names all owners that failed.

            >>> optimizer.step(context_id)     # doctest: +SKIP
        """
        autograd.get_gradients(context_id)  # so that a wrong id fails here, before anybody steps
        self._ask_owners("step", [(context_id, self._changes())] * len(self.remote_optimizers))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: every context starts without gradients.

        >>> optimizer.zero_grad()              # doctest: +SKIP
        """

    def add_param_group(self, param_group: Group) -> None:
        """Not possible: give all groups to the constructor.

        >>> DistributedOptimizer(SGD, [{"params": a}, {"params": b, "lr": 2}])     # doctest: +SKIP
        """
        raise NotImplementedError(
            "a DistributedOptimizer gets all its parameter groups when it is made: "
            'DistributedOptimizer(cls, [{"params": rrefs}, {"params": more_rrefs, "lr": 0.1}])'
        )

    # -- settings

    def _note_settings(self) -> None:
        """The owners have the settings as they are now."""
        self._known = copy.deepcopy([settings_of(group) for group in self.param_groups])
        self._changed: list[set[str]] = [set() for _ in self.param_groups]

    def _changes(self) -> list[Group]:
        """For each group, the settings that were ever changed here. Others are not mentioned:
        some optimizers keep numbers of their own among them."""
        groups = zip(self.param_groups, self._known, self._changed, strict=True)
        for group, known, changed in groups:
            for key, value in settings_of(group).items():
                if key not in known or not _same(value, known[key]):
                    changed.add(key)
        return [
            {key: group[key] for key in changed}
            for group, changed in zip(self.param_groups, self._changed, strict=True)
        ]

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizers of all owners, as one of torch's optimizers would give it:
        parameters are numbered in the order in which they were given here. So it can be loaded
        again when they live on other workers, or all in one process.

            >>> torch.save(optimizer.state_dict(), "optimizer.pt")         # doctest: +SKIP
        """
        parts = self._ask_owners("state_dict", [()] * len(self.remote_optimizers))
        state = {}
        for numbers, part in zip(self._numbers, parts, strict=True):
            number_of = list(itertools.chain.from_iterable(numbers))
            state.update({number_of[place]: kept for place, kept in part["state"].items()})
        next_number = itertools.count()
        groups = []
        for group, theirs, changes in zip(
            self.param_groups, parts[0]["param_groups"], self._changes(), strict=True
        ):
            numbers_in_group = [next(next_number) for _ in group["params"]]
            groups.append({**theirs, **copy.deepcopy(changes), "params": numbers_in_group})
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` gave, of this optimizer or of another one over
        as many parameters in the same order.

            >>> optimizer.load_state_dict(torch.load("optimizer.pt"))      # doctest: +SKIP
        """
        state, groups = state_dict["state"], state_dict["param_groups"]
        theirs = [len(group["params"]) for group in groups]
        ours = [len(group["params"]) for group in self.param_groups]
        if theirs != ours:
            raise ValueError(
                f"this state does not fit: its groups have {theirs} parameters, the groups of this "
                f"optimizer {ours}"
            )
        key_of = [key for group in groups for key in group["params"]]
        parts = []
        for numbers in self._numbers:
            keys = [key_of[number] for number in itertools.chain.from_iterable(numbers)]
            place = itertools.count()
            part_of_groups = [
                {**group, "params": [next(place) for _ in mine]}
                for group, mine in zip(groups, numbers, strict=True)
            ]
            part_of_state = {place: state[key] for place, key in enumerate(keys) if key in state}
            parts.append(({"state": part_of_state, "param_groups": part_of_groups},))
        self._ask_owners("load_state_dict", parts)
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update(copy.deepcopy(settings_of(loaded)))
        self._note_settings()


def _as_groups(params_rref: Iterable[Any]) -> list[Group]:
    given = list(params_rref)
    if not given:
        raise ValueError("there is nothing to optimize: params_rref is empty")
    groups = given if isinstance(given[0], dict) else [{"params": given}]
    groups = [{**group, "params": list(group["params"])} for group in groups]
    for rref in (rref for group in groups for rref in group["params"]):
        if not isinstance(rref, RRef):
            raise TypeError(
                f"params_rref takes RRefs to parameters, not a {type(rref).__name__}: "
                "RRef(parameter) refers to one of this worker"
            )
    return groups


def _numbers_by_owner(groups: list[Group]) -> dict[WorkerInfo, list[list[int]]]:
    """Number the parameters; for every owner, the numbers of its own in each group."""
    numbers: dict[WorkerInfo, list[list[int]]] = {}
    next_number = itertools.count()
    for position, group in enumerate(groups):
        for rref in group["params"]:
            mine = numbers.setdefault(rref.owner(), [[] for _ in groups])
            mine[position].append(next(next_number))
    return numbers


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def _gather(calls: Sequence[tuple[WorkerInfo, Callable[[], Any]]]) -> list[Any]:
    """The results of all calls, got from this worker first; or, when all have ended, the first
    error, with a cause that tells of all errors."""
    results: dict[int, Any] = {}
    errors = []
    me = rpc.get_worker_info().id
    for place, (owner, result) in sorted(enumerate(calls), key=lambda call: call[1][0].id != me):
        try:
            results[place] = result()
        except Exception as error:
            errors.append((owner.name, error))
    if errors:
        first = errors[0][1]
        if len(errors) > 1:
            first.__cause__ = RemoteTraceback(
                f"{len(errors)} of {len(calls)} workers failed:\n\n"
                + "\n\n".join(f"worker {name!r}:\n{_text(error)}" for name, error in errors)
            )
        raise first
    return [results[place] for place in range(len(calls))]


def _text(error: BaseException) -> str:
    return str(error.__cause__ or "".join(traceback.format_exception_only(type(error), error)))
