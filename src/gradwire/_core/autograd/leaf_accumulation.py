"""Leaves whose gradients torch itself must accumulate, for hooks that look at `.grad`.

The reducer of `DistributedDataParallel`, for example, works in hooks that run when torch has put a
gradient into `.grad`, and it looks at several leaves together. Such leaves form a `LeafGroup`.
When all other work of a backward pass on this worker is done, torch accumulates the gradients that
the pass has found for a group into `.grad`, in one run of its engine per group. At that time no
other worker waits for this one, so the hooks may take long. The value that `.grad` then has is
stored in the context, and `.grad` gets its previous value back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from gradwire._core.autograd.boundary import Gradients
from gradwire._core.autograd.context import GradientSums
from gradwire._core.autograd.region_run import GradBackup
from gradwire._core.autograd.storage import use_count
from gradwire._core.torch_internals import run_backward


class LeafGroup:
    """Leaves whose gradients torch must accumulate together, because hooks look at the `.grad` of
    all of them. A leaf is in one group at most."""

    leaves: Sequence[Tensor]

    def accumulating(self) -> AbstractContextManager[object]:
        """Return a context manager. Torch accumulates the gradients of the group inside its `with`
        block. When the block ends, the context manager raises an error if the hooks of the group
        did not finish their work."""
        raise NotImplementedError


def groups_with_any(groups: Collection[LeafGroup], leaf_ids: Collection[int]) -> list[LeafGroup]:
    """Return the groups with at least one of these leaves, which are given by their id()."""
    return [group for group in groups if any(id(leaf) in leaf_ids for leaf in group.leaves)]


def accumulate(
    group: LeafGroup, reached: Collection[int], new: GradientSums, before: GradientSums
) -> list[tuple[Tensor, Tensor]]:
    """Let torch add the gradients that a pass has found for a group (`new`) to the gradients that
    the context had before. Return the sums. Hooks may have changed the sums.

    `reached`: the id() of each leaf that the pass reaches. The hooks of those leaves run even if
    the pass has found no gradient for a leaf.
    """
    leaves = group.leaves
    taking_part = [leaf for leaf in leaves if id(leaf) in reached]
    gradients = [new[id(leaf)][1] if id(leaf) in new else None for leaf in taking_part]
    backup = GradBackup()
    backup.remember(leaves)
    try:
        for leaf in leaves:
            leaf.grad = before[id(leaf)][1].clone() if id(leaf) in before else None
        with group.accumulating(), _without_tensor_hooks(taking_part):
            _run(taking_part, gradients)
        return [(leaf, _unshared(leaf.grad)) for leaf in leaves if leaf.grad is not None]
    finally:
        backup.restore()


def _run(leaves: Sequence[Tensor], gradients: Gradients) -> None:
    with torch.enable_grad():
        token: Tensor = _GradientSource.apply(  # type: ignore[no-untyped-call]
            gradients, *leaves
        )
    seed = torch.ones_like(token)
    run_backward((token,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True)


class _GradientSource(torch.autograd.Function):
    """An autograd function. Its backward gives each leaf its gradient, or None if the pass found
    none. The leaves cannot themselves be the roots of a backward: each root must have a gradient,
    but the hooks of a leaf without a gradient must run too."""

    @staticmethod
    def forward(ctx: Any, gradients: Gradients, *_leaves: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, _token: Tensor) -> Any:
        return (None, *ctx.gradients)


@contextmanager
def _without_tensor_hooks(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Remove the tensor hooks of the leaves inside the `with` block. The pass has called these
    hooks already, when it found the gradients."""
    with_hooks: list[Any] = [leaf._backward_hooks for leaf in leaves if leaf._backward_hooks]
    backups = [(hooks, dict(hooks)) for hooks in with_hooks]
    for hooks, _ in backups:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, entries in backups:
            hooks.update(entries)


def _unshared(gradient: Tensor) -> Tensor:
    """Return the gradient, or a copy of it if other tensors share its storage. Hooks may have
    replaced `.grad` by a view of a buffer, and may write into this buffer again later."""
    gradient = gradient.detach()
    if gradient.layout is torch.strided and use_count(gradient.untyped_storage()) > 3:
        return gradient.clone()
    return gradient
