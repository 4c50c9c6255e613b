"""Gradients through calls to other workers, under the names of ``torch.distributed.autograd``.

>>> with autograd.context() as context_id:                              # doctest: +SKIP
...     loss = rpc.rpc_sync("worker1", model_half, args=(x,)).sum()
...     autograd.backward(context_id, [loss])
...     gradients = autograd.get_gradients(context_id)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gradwire import current
from gradwire.config import UNSET_TIMEOUT
from gradwire.gradients.context import add_up, current_id
from gradwire.gradients.graph import make_roots
from gradwire.gradients.ledger import How

__all__ = ["backward", "context", "get_gradients", "grad"]


class context:
    """Record the calls of a block, so that `backward` can go through them; gives the context's id.

    Gradients are collected in the context, for `get_gradients` and
    `gradwire.optim.DistributedOptimizer`. With ``into_grad=True`` they go into the ``.grad`` of the
    leaves instead, on every worker, as those of a local backward do: hooks that run after that,
    `DistributedDataParallel` inside a worker and ordinary optimizers then work as they are.

        >>> with context() as context_id:      # doctest: +SKIP
        ...     loss = rpc.rpc_sync("worker1", compute_loss, args=(x,))
        ...     backward(context_id, [loss])
    """

    _id: int

    def __init__(self, into_grad: bool = False):
        self._into_grad = into_grad

    def __enter__(self) -> int:
        self._worker = current.worker()
        self._id = self._worker.contexts.new(self._into_grad).id
        self._token = current_id.set(self._id)
        self._recording = self._worker.versions.recording()
        if self._recording is not None:
            self._recording.__enter__()
        return self._id

    def __exit__(self, *_error: object) -> None:
        try:
            if self._recording is not None:
                self._recording.__exit__(None, None, None)
            current_id.reset(self._token)
        except ValueError:
            pass  # it ends elsewhere: with a generator or a task that was never finished
        finally:
            self._worker.engine.release(self._id)


def backward(
    context_id: int,
    roots: Sequence[Tensor],
    retain_graph: bool = False,
    *,
    grad_tensors: Sequence[Tensor | None] | None = None,
    create_graph: bool = False,
    timeout: float = UNSET_TIMEOUT,
) -> None:
    """Compute the gradients of the roots in every leaf they depend on, on whichever worker it is.
    They are collected in the context; see `get_gradients`. Those of several passes add up.

    With ``create_graph=True`` the gradients can be differentiated again, across workers too.

        >>> backward(context_id, [loss])       # doctest: +SKIP
    """
    worker = current.worker()
    found = worker.contexts.get(context_id)
    seconds = worker.agent.timeout(timeout)
    how = How(retain_graph or create_graph, create_graph, seconds=seconds)
    worker.engine.run(found, make_roots(roots, grad_tensors), how)


def grad(
    context_id: int,
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool = False,
    *,
    timeout: float = UNSET_TIMEOUT,
) -> tuple[Tensor | None, ...]:
    """The gradients of outputs with regard to tensors of this worker, through calls to others, as
    `torch.autograd.grad` gives them locally. Nothing is accumulated anywhere.

        >>> (slope,) = grad(context_id, [loss], [x], create_graph=True)    # doctest: +SKIP
    """
    worker = current.worker()
    found = worker.contexts.get(context_id)
    outputs, inputs = _listed(outputs), _listed(inputs)
    for tensor in inputs:
        if not tensor.requires_grad:
            raise ValueError("one of the inputs does not require gradients")
    how = How(
        create_graph if retain_graph is None else retain_graph,
        create_graph,
        for_inputs=True,
        seconds=worker.agent.timeout(timeout),
    )
    given = None if grad_outputs is None else _listed(grad_outputs)
    sums = add_up({}, worker.engine.run(found, make_roots(outputs, given), how, inputs))
    result = tuple(sums[id(tensor)][1] if id(tensor) in sums else None for tensor in inputs)
    if not allow_unused and None in [None if g is None else 0 for g in result]:
        raise RuntimeError(
            "one of the inputs was not used to compute the outputs. If that is as it should be, "
            "say allow_unused=True and get None for it"
        )
    return result


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def get_gradients(context_id: int) -> dict[Tensor, Tensor]:
    """The gradients that the passes of a context gave leaves of this worker.

    >>> get_gradients(context_id)[weight]      # doctest: +SKIP
    """
    worker = current.worker()
    found = worker.contexts.get(context_id)
    worker.engine.learn_outcomes(found)
    gradients: dict[Tensor, Tensor] = found.gradients()
    return gradients
