"""Clipping of gradients across workers.

the worker that clips                         every owner of parameters
---------------------                         -------------------------
clip_grad_norm_          ====== rrefs =====>  norms_of: the norm of each gradient
  adds up the norms      <===== norms ======
                         === coefficient ==>  scale, only if the total norm is too large
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradwire import autograd, rpc
from gradwire._core.ids import INTO_GRAD, WorkerInfo
from gradwire._core.rref.rref import RRef
from gradwire.optim._gathering import gather
from gradwire.optim._parameters import as_rrefs


@torch.no_grad()
def clip_grad_norm_(
    context_id: int,
    parameters: nn.Module | RRef[Any] | Iterable[nn.Module | RRef[Any]],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients of a context, on all workers, so that their total norm is at most
    `max_norm`. Return the total norm before the scaling, as `torch.nn.utils.clip_grad_norm_` does.

    `parameters` are RRefs to the parameters, or modules, whose parts may be remote modules. Call
    this function inside the context, after the backward pass.

        >>> autograd.backward(context_id, [loss])                            # doctest: +SKIP
        >>> clip_grad_norm_(context_id, model, max_norm=1.0)                 # doctest: +SKIP
        tensor(3.7417)
        >>> optimizer.step(context_id)                                       # doctest: +SKIP
    """
    max_norm, norm_type = float(max_norm), float(norm_type)
    rrefs = as_rrefs(parameters)
    #: Maps each owner to a dict of its parameters. The dict maps positions in `rrefs` to RRefs.
    owned: dict[WorkerInfo, dict[int, RRef[Any]]] = {}
    for position, rref in enumerate(rrefs):
        owned.setdefault(rref.owner(), {})[position] = rref
    # `get_gradients` is called only because it raises an error if `context_id` is wrong.
    autograd.get_gradients(context_id)
    norm_of: dict[int, Tensor] = {}
    found = _call_owners(owned, norms_of, context_id, norm_type)
    for positions, norms in zip(owned.values(), found, strict=True):
        norm_of.update(
            (position, norm)
            for position, norm in zip(positions, norms, strict=True)
            if norm is not None
        )
    # Torch adds up the norms in the order of the parameters. The same order is used here, so that
    # the total is equal, to the last bit, to the total that torch computes in one process.
    in_order = [norm_of[position] for position in sorted(norm_of)]
    if not in_order:
        return torch.tensor(0.0)
    total_norm: Tensor = torch.linalg.vector_norm(torch.stack(in_order), norm_type)
    if error_if_nonfinite and not total_norm.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, "
            "so it cannot be clipped. To disable this error and scale the gradients by the "
            "non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    coefficient = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
    if coefficient != 1:
        _call_owners(owned, scale, context_id, coefficient)
    return total_norm


def _call_owners(
    owned: dict[WorkerInfo, dict[int, RRef[Any]]],
    function: Callable[[int, list[RRef[Any]], Any], Any],
    context_id: int,
    argument: float | Tensor,
) -> list[Any]:
    """Call a function on each owner of parameters, and return the results."""
    calls: list[tuple[WorkerInfo, Callable[[], Any]]] = []
    me = rpc.get_worker_info().id
    for owner, rrefs in owned.items():
        args = context_id, list(rrefs.values()), argument
        if owner.id == me:
            calls.append((owner, partial(function, *args)))
        else:
            calls.append((owner, rpc.rpc_async(owner, function, args).wait))
    return gather(calls)


# -- on the owners of the parameters


def norms_of(context_id: int, rrefs: Sequence[RRef[Any]], norm_type: float) -> list[Tensor | None]:
    """Return the norm of the gradient of each parameter, or None if it has no gradient."""
    with torch.no_grad():
        return [
            None if gradient is None else torch.linalg.vector_norm(gradient, norm_type)
            for gradient in _gradients(context_id, rrefs)
        ]


def scale(context_id: int, rrefs: Sequence[RRef[Any]], coefficient: Tensor) -> None:
    """Multiply the gradient of each parameter by a number, in place."""
    with torch.no_grad():
        for gradient in _gradients(context_id, rrefs):
            if gradient is not None:
                gradient.mul_(coefficient)


def _gradients(context_id: int, rrefs: Sequence[RRef[Any]]) -> list[Tensor | None]:
    """Return the gradient of each parameter in a context. If the passes of the context put
    gradients into `.grad`, return those."""
    collected = autograd.get_gradients(context_id)
    parameters = [rref.local_value() for rref in rrefs]
    if context_id & INTO_GRAD:
        return [parameter.grad for parameter in parameters]
    return [collected.get(parameter) for parameter in parameters]
