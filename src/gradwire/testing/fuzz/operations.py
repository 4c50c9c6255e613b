"""The operations of random programs.

Every operation takes tensors of any shape and dtype, so that random programs do not fail because of
shapes. Whether a result shares storage with an input never depends on strides: sending a tensor may
change its strides, so they may differ between a run on workers and a run in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "complex128": torch.complex128,
}


# -- adapting tensors


def as_floating(x: Tensor) -> Tensor:
    """Return x, converted to a floating point dtype if its dtype cannot have gradients."""
    return x if x.is_floating_point() or x.is_complex() else x.to(torch.float64)


def convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    x = as_floating(x)
    if x.is_complex() and not dtype.is_complex:
        x = x.real + x.imag  # `to` alone would drop the imaginary part and give a warning.
    return x.to(dtype)


def fit(x: Tensor, like: Tensor) -> Tensor:
    """Turn x into a tensor that can be added to `like`."""
    x = convert(x, like.dtype)
    return x if x.shape == like.shape else x.sum()


def squash(x: Tensor) -> Tensor:
    """Map x to values between -1 and 1, so that numbers stay small in long programs."""
    return x / (1 + x.abs())


def halve(x: Tensor) -> Tensor:
    """Halve x if it can have gradients. A worker that passes on another worker's results does this,
    so that its own part of the autograd graph is not empty."""
    return x * 0.5 if x.is_floating_point() or x.is_complex() else x


def to_sparse(x: Tensor) -> Tensor:
    """Return x as a sparse tensor, if x has a dimension and floating point values."""
    return x.to_sparse() if x.dim() and x.is_floating_point() else x


def to_dense(x: Tensor) -> Tensor:
    return x.to_dense() if x.is_sparse else x


def writable(x: Tensor) -> Tensor:
    """Return x, or a copy if x cannot be changed in place because x is a leaf that requires
    gradients, or a view of such a leaf."""
    base = x if x._base is None else x._base
    return x * 1 if base.is_leaf and base.requires_grad else x


def indices(x: Tensor, limit: int) -> Tensor:
    """Turn x into integers below the limit."""
    x = x.detach()
    if x.is_floating_point() or x.is_complex():
        x = (convert(x, torch.float64).nan_to_num().clamp(-100, 100) * 10).round().to(torch.int64)
    return x.reshape(-1)[:4].remainder(limit)


def without_overlap(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors, with a copy in the place of each expanded tensor. The elements of an
    expanded tensor overlap in storage, so such a tensor cannot be changed in place."""
    made: dict[int, Tensor] = {}
    for x in tensors:
        overlaps = any(
            not stride and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)
        )
        # Make the copy with gradients enabled, even if the caller is under no_grad. The copy must
        # have the autograd history of the tensor that it replaces.
        with torch.enable_grad():
            made.setdefault(id(x), x.contiguous() if overlaps else x)
    return [made[id(x)] for x in tensors]


# -- custom autograd functions


class NoGradientForSecond(torch.autograd.Function):
    """A function that gives no gradient for its second input, even if this input requires one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return gradient * y.conj(), None


class SeveralOutputs(torch.autograd.Function):
    """A function that has two outputs with gradients and one without."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        signs = (x.real if x.is_complex() else x) > 0
        ctx.mark_non_differentiable(signs)
        return x * 2, signs, x * x

    @staticmethod
    def backward(ctx: Any, double: Tensor, _signs: Any, square: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return double * 2 + square * 2 * x.conj()


# -- the operations

Operation = Callable[[list[Tensor], int], list[Tensor]]


def _add(inputs: list[Tensor], _number: int) -> list[Tensor]:
    first = as_floating(inputs[0])
    return [first + fit(inputs[-1], first)]


def _multiply(inputs: list[Tensor], _number: int) -> list[Tensor]:
    first = as_floating(inputs[0])
    return [first * squash(fit(inputs[-1], first))]


def _wave(inputs: list[Tensor], _number: int) -> list[Tensor]:
    x = as_floating(inputs[0])
    return [squash(x) if x.is_complex() else x.sin()]


def _total(inputs: list[Tensor], _number: int) -> list[Tensor]:
    return [as_floating(inputs[0]).sum()]


def _outer(inputs: list[Tensor], _number: int) -> list[Tensor]:
    first = as_floating(inputs[0])
    second = convert(inputs[-1], first.dtype)
    return [squash(first.reshape(-1)[:4].outer(second.reshape(-1)[:3]))]


def _join(inputs: list[Tensor], _number: int) -> list[Tensor]:
    first = as_floating(inputs[0])
    second = convert(inputs[-1], first.dtype)
    return [torch.cat([first.reshape(-1)[:2], second.reshape(-1)[:2]])]


def _convert(inputs: list[Tensor], number: int) -> list[Tensor]:
    """Convert a tensor to the dtype with this number in `DTYPES`. The generator chooses only dtypes
    that are precise enough for the program."""
    return [convert(inputs[0], list(DTYPES.values())[number])]


def _view(inputs: list[Tensor], number: int) -> list[Tensor]:
    """Return a view of a tensor, which shares the tensor's storage and may have other strides."""
    x = inputs[0]
    if number == 0:
        return [x.transpose(0, -1) if x.dim() else x.unsqueeze(0)]
    if number == 1:
        return [x[..., ::2] if x.dim() else x[None]]
    if number == 2:
        return [x[:0] if x.dim() else x.expand(0)]
    if number == 3:
        return [x.conj() if x.is_complex() else x.unsqueeze(-1)]
    if number == 4:
        return [x.conj().imag if x.is_complex() else x[..., :1] if x.dim() else x[None]]
    return [x.select(0, 0) if x.dim() and len(x) else x.unsqueeze(0)]


def _expand(inputs: list[Tensor], _number: int) -> list[Tensor]:
    x = inputs[0]
    return [x.unsqueeze(0).expand(2, *x.shape) if x.dim() < 3 else x.sum(0).expand(x.shape)]


def _change(inputs: list[Tensor], number: int) -> list[Tensor]:
    """Change a tensor in place: directly, through a view, or under no_grad."""
    x = writable(inputs[0])
    if not (x.is_floating_point() or x.is_complex()):
        return [x.logical_not_() if x.dtype is torch.bool else x.add_(1)]
    if number == 0:
        x.mul_(0.5)
    elif number == 1:
        (x[..., :1] if x.dim() else x).mul_(3).add_(1)
    elif number == 2:
        # Both inputs may be the same tensor, so make a copy with `* 1`. Otherwise the tensor would
        # be part of its own autograd history, and torch would never free it.
        x.add_(squash(fit(inputs[-1], x) * 1))
    elif number == 3:
        (x.transpose(0, -1)[0] if x.dim() and x.numel() else x).neg_()
    else:
        with torch.no_grad():
            x.add_(1)
    return [x]


def _change_copy(inputs: list[Tensor], _number: int) -> list[Tensor]:
    x = as_floating(inputs[0]) * 1
    x.mul_(0.5)
    if x.dim() and x.numel():
        x[..., 0].add_(fit(inputs[-1], x[..., 0]))
    return [x]


def _detach(inputs: list[Tensor], _number: int) -> list[Tensor]:
    """Detach a tensor. If the tensor is a leaf, detach a copy instead: the detached tensor may be
    changed in place later, which must not change the leaf."""
    return [writable(inputs[0]).detach()]


def _no_grad(inputs: list[Tensor], _number: int) -> list[Tensor]:
    with torch.no_grad():
        return [as_floating(inputs[0]) * 2]


def _integers(inputs: list[Tensor], _number: int) -> list[Tensor]:
    return [indices(inputs[0], 5)]


def _pick(inputs: list[Tensor], _number: int) -> list[Tensor]:
    """Index the first tensor with integers that are made from the last tensor."""
    x = inputs[0].reshape(-1)
    return [x[indices(inputs[-1], len(x))] if len(x) else x * 1]


def _lookup(inputs: list[Tensor], _number: int) -> list[Tensor]:
    """Look up rows of a table, so that the table gets a sparse gradient. Do not do this with tables
    of one column, because torch loses their sparse gradient when it adds a dense gradient."""
    table = inputs[0]
    if table.dim() != 2 or not table.is_floating_point() or not len(table) or len(table[0]) < 2:
        return _pick(inputs, 0)
    return [functional.embedding(indices(inputs[-1], len(table)), table, sparse=True)]


def _own_function(inputs: list[Tensor], _number: int) -> list[Tensor]:
    first = as_floating(inputs[0])
    second = squash(fit(inputs[-1], first)).expand(first.shape)
    return [NoGradientForSecond.apply(first, second)]  # type: ignore[no-untyped-call]


def _own_function_of_many(inputs: list[Tensor], _number: int) -> list[Tensor]:
    return list(SeveralOutputs.apply(squash(as_floating(inputs[0]))))  # type: ignore[no-untyped-call]


def _checkpoint(inputs: list[Tensor], _number: int) -> list[Tensor]:
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return squash(x) * squash(fit(y, x)) + x * x

    first = squash(as_floating(inputs[0]))
    made: Tensor = checkpoint(
        forward, first, inputs[-1], use_reentrant=False, preserve_rng_state=False
    )
    return [made]


def _constant(_inputs: list[Tensor], _number: int) -> list[Tensor]:
    return [torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64)]


#: For each operation, by name: the function, the number of variants and the number of results.
OPERATIONS: dict[str, tuple[Operation, int, int]] = {
    "add": (_add, 1, 1),
    "multiply": (_multiply, 1, 1),
    "wave": (_wave, 1, 1),
    "total": (_total, 1, 1),
    "outer": (_outer, 1, 1),
    "join": (_join, 1, 1),
    "convert": (_convert, len(DTYPES), 1),
    "view": (_view, 6, 1),
    "expand": (_expand, 1, 1),
    "change": (_change, 5, 1),
    "change copy": (_change_copy, 1, 1),
    "detach": (_detach, 1, 1),
    "no_grad": (_no_grad, 1, 1),
    "integers": (_integers, 1, 1),
    "pick": (_pick, 1, 1),
    "lookup": (_lookup, 1, 1),
    "own function": (_own_function, 1, 1),
    "own function of many": (_own_function_of_many, 1, 3),
    "checkpoint": (_checkpoint, 1, 1),
    "constant": (_constant, 1, 1),
}
