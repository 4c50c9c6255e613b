"""Leaves whose gradients torch itself has to accumulate.

Some code works in hooks that run when torch has put a gradient into `.grad`, and looks at several
leaves together: reducers that average gradients between processes do. For leaves that belong to a
`Group`, what a pass has found on this worker goes through torch's accumulation, in one run per
group at the end of this worker's part. By then nobody waits for anything from here, however long
the hooks take, and it does not matter how many regions the leaves were in. What `.grad` is
afterwards is their gradient in the context, and `.grad` is what it was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from gradwire.gradients.context import GradientSums
from gradwire.gradients.functions import Gradients
from gradwire.gradients.memory import uses
from gradwire.gradients.runs import GradBackup, run_backward


class Group:
    """Leaves that the hooks behind their accumulation look at together. No leaf is in two."""

    leaves: Sequence[Tensor]

    def accumulating(self) -> AbstractContextManager[object]:
        """Around an accumulation. Raises if the hooks have not done what they are there for."""
        raise NotImplementedError


def touched(groups: Collection[Group], leaves: Collection[int]) -> list[Group]:
    """The groups that some of these leaves, given by their ids, belong to."""
    return [group for group in groups if any(id(leaf) in leaves for leaf in group.leaves)]


def accumulate(
    group: Group, reached: Collection[int], found: GradientSums, before: GradientSums
) -> list[tuple[Tensor, Tensor]]:
    """Have torch add what a pass has found to what there was before, and give the gradients that
    come out. Leaves that were reached and got none count as well."""
    leaves = group.leaves
    taking_part = [leaf for leaf in leaves if id(leaf) in reached]
    gradients = [found[id(leaf)][1] if id(leaf) in found else None for leaf in taking_part]
    backup = GradBackup()
    backup.remember(leaves)
    try:
        for leaf in leaves:
            leaf.grad = before[id(leaf)][1].clone() if id(leaf) in before else None
        with group.accumulating(), _without_hooks(taking_part):
            _run(taking_part, gradients)
        return [(leaf, _own(leaf.grad)) for leaf in leaves if leaf.grad is not None]
    finally:
        backup.restore()


def _run(leaves: Sequence[Tensor], gradients: Gradients) -> None:
    with torch.enable_grad():
        token: Tensor = _Source.apply(gradients, *leaves)  # type: ignore[no-untyped-call]
    seed = torch.ones_like(token)
    run_backward((token,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True)


class _Source(torch.autograd.Function):
    """Where gradients enter; unlike torch's roots, leaves may have none."""

    @staticmethod
    def forward(ctx: Any, gradients: Gradients, *_leaves: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, _token: Tensor) -> Any:
        return (None, *ctx.gradients)


@contextmanager
def _without_hooks(leaves: Sequence[Tensor]) -> Iterator[None]:
    """The hooks on the leaves themselves have seen the gradients when they were found."""
    found: list[Any] = [leaf._backward_hooks for leaf in leaves if leaf._backward_hooks]
    hooks = [(registered, dict(registered)) for registered in found]
    for registered, _ in hooks:
        registered.clear()
    try:
        yield
    finally:
        for registered, entries in hooks:
            registered.update(entries)


def _own(gradient: Tensor) -> Tensor:
    """A gradient that nobody else changes: hooks may have put a view of memory that they use again
    in the place of `.grad`."""
    gradient = gradient.detach()
    if gradient.layout is torch.strided and uses(gradient.untyped_storage()) > 3:
        return gradient.clone()
    return gradient
