"""Gradients through calls to other workers, under the names of ``torch.distributed.autograd``.

>>> with autograd.context() as context_id:                              # doctest: +SKIP
...     loss = rpc.rpc_sync("worker1", model_half, args=(x,)).sum()
...     autograd.backward(context_id, [loss])
...     gradients = autograd.get_gradients(context_id)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from gradwire import current
from gradwire.config import UNSET_TIMEOUT
from gradwire.gradients.context import current_id
from gradwire.gradients.graph import Root

__all__ = ["backward", "context", "get_gradients"]


@contextmanager
def context() -> Iterator[int]:
    """Record the calls of a block, so that `backward` can go through them; gives the context's id.

    >>> with context() as context_id:      # doctest: +SKIP
    ...     loss = rpc.rpc_sync("worker1", compute_loss, args=(x,))
    ...     backward(context_id, [loss])
    """
    worker = current.worker()
    made = worker.contexts.new()
    token = current_id.set(made.id)
    try:
        yield made.id
    finally:
        current_id.reset(token)
        worker.engine.release(made.id)


def backward(
    context_id: int,
    roots: Sequence[Tensor],
    retain_graph: bool = False,
    *,
    grad_tensors: Sequence[Tensor | None] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> None:
    """Compute the gradients of the roots in every leaf they depend on, on whichever worker it is.
    They are collected in the context; see `get_gradients`.

        >>> backward(context_id, [loss])       # doctest: +SKIP
    """
    worker = current.worker()
    found = worker.contexts.get(context_id)
    worker.engine.backward(
        found, _roots(roots, grad_tensors), retain_graph, worker.agent.timeout(timeout)
    )


def _roots(tensors: Sequence[Tensor], gradients: Sequence[Tensor | None] | None) -> list[Root]:
    if not tensors:
        raise ValueError("No tensors provided for gradient computation.")
    given = gradients if gradients is not None else [None] * len(tensors)
    if len(given) != len(tensors):
        raise ValueError(f"{len(tensors)} roots, but {len(given)} gradients for them")
    roots = []
    for tensor, gradient in zip(tensors, given, strict=True):
        if not tensor.requires_grad:
            raise ValueError(f"requires_grad not set on root {tensor!r}")
        if gradient is None and tensor.numel() != 1:
            raise ValueError(
                f"root of shape {tuple(tensor.shape)} is not a scalar, all roots need to be scalar "
                "unless grad_tensors gives their gradients"
            )
        if tensor.grad_fn is None:
            raise ValueError("a root does not have a valid gradient function: it is a leaf")
        roots.append(Root(tensor, gradient))
    return roots


def get_gradients(context_id: int) -> dict[Tensor, Tensor]:
    """The gradients that the passes of a context gave leaves of this worker.

    >>> get_gradients(context_id)[weight]      # doctest: +SKIP
    """
    worker = current.worker()
    found = worker.contexts.get(context_id)
    worker.engine.learn_outcomes(found)
    gradients: dict[Tensor, Tensor] = found.gradients()
    return gradients
