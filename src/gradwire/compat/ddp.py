"""Support for `DistributedDataParallel` modules inside a distributed autograd context.

Such a module has a *reducer*, which averages gradients between processes. The reducer works in
hooks that torch runs after it has accumulated a gradient. It takes the gradients from `.grad`, or
from a context of torch's own C++ library, which gradwire does not have. So gradwire must put the
gradients into `.grad` for the reducer. The parameters of each such module form a group. At the end
of a backward pass, gradwire lets torch accumulate the gradients of the whole group into `.grad`
(see `gradwire._core.autograd.leaf_accumulation`).
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradwire._core.autograd.context import current_id
from gradwire._core.autograd.leaf_accumulation import LeafGroup
from gradwire._core.autograd.region_run import current_run
from gradwire._core.ids import INTO_GRAD
from gradwire._core.torch_internals import (
    DDP_ATTRIBUTES,
    REDUCER_ATTRIBUTES,
    STATIC_GRAPH_ATTRIBUTES,
    check_attributes,
)

#: Maps each `DistributedDataParallel` module that was called in this process to the group of its
#: parameters.
_groups: weakref.WeakKeyDictionary[DistributedDataParallel, AveragedGroup] = (
    weakref.WeakKeyDictionary()
)
_groups_lock = threading.RLock()


def averaged_parameters() -> Collection[LeafGroup]:
    """Return the groups of parameters whose gradients are averaged between processes.

    >>> engine.register_leaf_groups(averaged_parameters)       # doctest: +SKIP
    """
    with _groups_lock:
        return list(_groups.values())


class AveragedGroup(LeafGroup):
    """The parameters of one `DistributedDataParallel` module. The module averages the gradients of
    these parameters between processes."""

    def __init__(self, module: DistributedDataParallel):
        self._reducer: Any = module.reducer
        check_attributes(module, "DistributedDataParallel", DDP_ATTRIBUTES)
        if module.static_graph:
            check_attributes(module, "DistributedDataParallel", STATIC_GRAPH_ATTRIBUTES)
        check_attributes(self._reducer, "its reducer", REDUCER_ATTRIBUTES)
        self.leaves = [leaf for leaf in module._module_parameters if leaf.requires_grad]
        self.in_forward = False
        #: Whether the last call of the module was inside `no_sync()`.
        self.in_no_sync = False
        #: Whether all gradients are averaged together at the end of the backward pass, and not
        #: earlier in hooks. Torch averages them together in the first backward pass of a module
        #: with the option `static_graph`.
        self.averages_at_end = False

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        stats_before = self._reducer.get_backward_stats()
        yield
        if self.averages_at_end:
            self.averages_at_end = False
            self._reducer._delay_all_reduce()
            return
        try:
            self._reducer._check_reducer_finalized()
        except RuntimeError as error:
            raise RuntimeError(
                f"the gradients of {self} were not averaged, for some parameters have none. Torch "
                f"says: {error}"
            ) from error
        # The reducer records when each gradient is ready, but only in a backward pass in which it
        # averages gradients. So if its records have not changed, it has averaged nothing. That is
        # an error, except inside `no_sync()`.
        if self._reducer.get_backward_stats() == stats_before and not self.in_no_sync:
            raise RuntimeError(
                f"the gradients of {self} would not be averaged: it does so in one backward per "
                "forward, and there was one since. Call the module again before each backward. If "
                "the gradients must not be averaged, call it inside its no_sync()"
            )

    def __str__(self) -> str:
        return f"a DistributedDataParallel with {len(self.leaves)} parameters"


def forward_like(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `DistributedDataParallel.forward` that also registers the module's parameters as a
    group whose gradients are averaged.

    >>> DistributedDataParallel.forward = forward_like(original)    # doctest: +SKIP
    """

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(self, *args, **kwargs)
        group = _group_of(self)
        group.in_no_sync = not self.require_backward_grad_sync
        group.in_forward = True
        try:
            return original(self, *args, **kwargs)
        finally:
            group.in_forward = False

    return forward


def _in_collecting_context() -> bool:
    """Return whether this thread is in an autograd context that keeps the gradients in the context
    instead of in `.grad`."""
    context_id = current_id.get()
    return context_id is not None and not context_id & INTO_GRAD


def _group_of(module: Any) -> AveragedGroup:
    if _in_collecting_context():
        _refuse_unsupported(module)
    with _groups_lock:
        group = _groups.get(module)
        if group is None:
            group = AveragedGroup(module)
            _forget_groups_with(group.leaves)
            _groups[module] = group
        return group


def _forget_groups_with(leaves: Sequence[Tensor]) -> None:
    """Remove each registered group that contains at least one of these leaves (parameters).

    A program may wrap parameters in a new `DistributedDataParallel` module and stop using the old
    one. Torch may keep the old module alive. So the group of the old module would stay registered,
    but a parameter may belong to one group only.
    """
    ids = {id(leaf) for leaf in leaves}
    for module, group in list(_groups.items()):
        if any(id(leaf) in ids for leaf in group.leaves):
            if group.in_forward and _in_collecting_context():
                raise NotImplementedError(
                    "a DistributedDataParallel is inside another one. Their gradients would be "
                    "averaged twice: leave the inner one out"
                )
            del _groups[module]


def _refuse_unsupported(module: Any) -> None:
    """Raise an error if the module averages gradients in a way that cannot work in an autograd
    context."""
    unsupported = {
        "delay_all_reduce_named_params": module._delay_grad_buffer is not None,
        "mixed_precision": module.mixed_precision is not None,
        "the reducer written in Python": module._use_python_reducer,
    }
    for feature, is_used in unsupported.items():
        if is_used:
            raise NotImplementedError(
                f"DistributedDataParallel with {feature} does not work in a context of "
                "torch.distributed.autograd: leave that out, or open the context with "
                "gradwire.autograd.context(into_grad=True) and use an ordinary optimizer"
            )


def sink_like(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `backward` for `_DDPSink`, the autograd node behind the outputs of a
    `DistributedDataParallel` module.

    If the module has the option `static_graph`, torch's own `backward` averages all gradients at
    the end of the first run of torch's autograd engine. But a distributed backward pass may consist
    of several runs. So the returned `backward` postpones the averaging to the end of the pass.

        >>> _DDPSink.backward = sink_like(_DDPSink.backward)       # doctest: +SKIP
    """

    def backward(ctx: Any, *gradients: Any) -> Any:
        module = ctx.ddp_weakref()
        in_pass = current_run.collects_gradients
        if in_pass and module.static_graph and not module._static_graph_delay_allreduce_enqueued:
            module._static_graph_delay_allreduce_enqueued = True
            _groups[module].averages_at_end = True
        return original(ctx, *gradients)

    return backward
