"""`DistributedDataParallel` inside of a context.

Its reducer averages gradients between processes. It works in hooks that run when torch has
accumulated a gradient, and looks for them in `.grad`, or in a context of torch's own C++ library.
Here they come to it by way of `.grad`: the parameters of each such module are a group of leaves
that torch accumulates at the end of a pass; see `gradwire.gradients.accumulation`.
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

from gradwire.gradients.accumulation import Group
from gradwire.gradients.context import current_id
from gradwire.gradients.functions import running
from gradwire.ids import INTO_GRAD

#: Of every module that was used here.
_groups: weakref.WeakKeyDictionary[DistributedDataParallel, Averaged] = weakref.WeakKeyDictionary()
_changing = threading.RLock()


def averaged_parameters() -> Collection[Group]:
    with _changing:
        return list(_groups.values())


class Averaged(Group):
    """The parameters of a module whose gradients are averaged between processes."""

    def __init__(self, module: DistributedDataParallel):
        self.leaves = [leaf for leaf in module._module_parameters if leaf.requires_grad]
        self._reducer: Any = module.reducer
        self.in_forward = False
        #: Whether the module was last used inside of `no_sync()`.
        self.unaveraged_on_purpose = False
        #: Whether all gradients are averaged at the end, as those of the first backward of a static
        #: graph are, and not by the hooks.
        self.at_the_end = False

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        times = self._reducer.get_backward_stats()
        yield
        if self.at_the_end:
            self.at_the_end = False
            self._reducer._delay_all_reduce()
            return
        try:
            self._reducer._check_reducer_finalized()
        except RuntimeError as error:
            raise RuntimeError(
                f"the gradients of {self} were not averaged, for some parameters have none. Torch "
                f"says: {error}"
            ) from error
        # The reducer notes when each gradient was there, if it expects them.
        if self._reducer.get_backward_stats() == times and not self.unaveraged_on_purpose:
            raise RuntimeError(
                f"the gradients of {self} would not be averaged: it does so in one backward per "
                "forward, and there was one since. Call the module again before each backward; or "
                "inside of its no_sync(), if they are not to be averaged"
            )

    def __str__(self) -> str:
        return f"a DistributedDataParallel with {len(self.leaves)} parameters"


def forward_like(original: Callable[..., Any]) -> Callable[..., Any]:
    """`DistributedDataParallel.forward`, which takes note of the module."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(self, *args, **kwargs)
        group = _group_of(self)
        group.unaveraged_on_purpose = not self.require_backward_grad_sync
        group.in_forward = True
        try:
            return original(self, *args, **kwargs)
        finally:
            group.in_forward = False

    return forward


def _in_a_context() -> bool:
    """One that collects gradients."""
    context = current_id.get()
    return context is not None and not context & INTO_GRAD


def _group_of(module: Any) -> Averaged:
    if _in_a_context():
        _check(module)
    with _changing:
        found = _groups.get(module)
        if found is None:
            found = Averaged(module)
            _forget_groups_with(found.leaves)
            _groups[module] = found
        return found


def _forget_groups_with(leaves: Sequence[Tensor]) -> None:
    """Where parameters have been given to another module, the one they were in before has had its
    day; torch may still keep it."""
    ids = {id(leaf) for leaf in leaves}
    for module, group in list(_groups.items()):
        if any(id(leaf) in ids for leaf in group.leaves):
            if group.in_forward and _in_a_context():
                raise NotImplementedError(
                    "a DistributedDataParallel is inside of another. Their gradients would be "
                    "averaged twice: leave the inner one out"
                )
            del _groups[module]


def _check(module: Any) -> None:
    """Refuse what averages gradients in ways that a context does not have."""
    unsupported = {
        "delay_all_reduce_named_params": module._delay_grad_buffer is not None,
        "mixed_precision": module.mixed_precision is not None,
        "the reducer written in Python": module._use_python_reducer,
    }
    for what, is_used in unsupported.items():
        if is_used:
            raise NotImplementedError(
                f"DistributedDataParallel with {what} does not work in a context of "
                "torch.distributed.autograd: leave that out, or open the context with "
                "gradwire.autograd.context(into_grad=True) and use an ordinary optimizer"
            )


def sink_like(original: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of the outputs of such a module. Where the graph is static, the first one has
    torch average all gradients when the run ends that it is part of. A pass may consist of several
    runs, and averages at its end."""

    def backward(ctx: Any, *gradients: Any) -> Any:
        module = ctx.ddp_weakref()
        in_a_pass = running.aside
        if in_a_pass and module.static_graph and not module._static_graph_delay_allreduce_enqueued:
            module._static_graph_delay_allreduce_enqueued = True
            _groups[module].at_the_end = True
        return original(ctx, *gradients)

    return backward
