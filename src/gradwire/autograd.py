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

from gradwire._core import current
from gradwire._core.autograd.context import Context, add_up, current_id
from gradwire._core.autograd.pass_messages import PassOptions
from gradwire._core.autograd.plan import make_roots
from gradwire.options import UNSET_TIMEOUT

__all__ = ["backward", "context", "get_gradients", "grad"]


class context:
    """Record the calls made in a ``with`` block, so that `backward` can differentiate through them.
    The block gets the id of the context.

    Gradients are collected in the context, where `get_gradients` and
    `gradwire.optim.DistributedOptimizer` read them. With ``into_grad=True`` they are added to the
    ``.grad`` of the leaves instead, on every worker, as in a local backward pass. Then ordinary
    optimizers work, and so do hooks that run when ``.grad`` has changed, and
    `DistributedDataParallel` within a worker.

        >>> with context() as context_id:      # doctest: +SKIP
        ...     loss = rpc.rpc_sync("worker1", compute_loss, args=(x,))
        ...     backward(context_id, [loss])
    """

    _context: Context | None = None

    def __init__(self, into_grad: bool = False):
        self._into_grad = into_grad

    def __repr__(self) -> str:
        return "<autograd context, not entered>" if self._context is None else repr(self._context)

    def __enter__(self) -> int:
        self._runtime = current.runtime()
        self._context = self._runtime.contexts.new(self._into_grad)
        self._id = self._context.id
        self._token = current_id.set(self._id)
        self._recording = self._runtime.versions.recording()
        if self._recording is not None:
            self._recording.__enter__()
        return self._id

    def __exit__(self, *_error: object) -> None:
        try:
            if self._recording is not None:
                self._recording.__exit__(None, None, None)
            current_id.reset(self._token)
        except ValueError:
            # The block belongs to a generator or task that was never finished. Python ends such a
            # block in another `contextvars` context, where `current_id` cannot be reset.
            pass
        finally:
            self._runtime.releases.release(self._id)


def backward(
    context_id: int,
    roots: Sequence[Tensor],
    retain_graph: bool = False,
    *,
    grad_tensors: Sequence[Tensor | None] | None = None,
    create_graph: bool = False,
    timeout: float = UNSET_TIMEOUT,
) -> None:
    """Compute the gradients of the roots with respect to every leaf that they depend on, on all
    workers. Each worker collects the gradients of its leaves in its part of the context (see
    `get_gradients`). The gradients of several passes in one context are summed.

    With ``create_graph=True`` the gradients can themselves be differentiated, also across workers.

        >>> backward(context_id, [loss])       # doctest: +SKIP
    """
    runtime = current.runtime()
    context = runtime.contexts.get(context_id)
    seconds = runtime.agent.timeout(timeout)
    options = PassOptions(retain_graph or create_graph, create_graph, seconds=seconds)
    runtime.engine.run(context, make_roots(roots, grad_tensors), options)


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
    """Return the gradients of `outputs` with respect to `inputs`, which are tensors of this worker.
    This is `torch.autograd.grad` through calls to other workers. No worker keeps any gradients, in
    the context or in ``.grad``.

        >>> (slope,) = grad(context_id, [loss], [x], create_graph=True)    # doctest: +SKIP
    """
    runtime = current.runtime()
    context = runtime.contexts.get(context_id)
    outputs, inputs = _as_list(outputs), _as_list(inputs)
    for tensor in inputs:
        if not tensor.requires_grad:
            raise ValueError("one of the inputs does not require gradients")
    options = PassOptions(
        create_graph if retain_graph is None else retain_graph,
        create_graph,
        for_inputs=True,
        seconds=runtime.agent.timeout(timeout),
    )
    given = None if grad_outputs is None else _as_list(grad_outputs)
    sums = add_up({}, runtime.engine.run(context, make_roots(outputs, given), options, inputs))
    result = tuple(sums[id(tensor)][1] if id(tensor) in sums else None for tensor in inputs)
    if not allow_unused and any(gradient is None for gradient in result):
        raise RuntimeError(
            "one of the inputs was not used to compute the outputs. If that is intended, pass "
            "allow_unused=True and get None for it"
        )
    return result


def _as_list(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def get_gradients(context_id: int) -> dict[Tensor, Tensor]:
    """Return the gradients of this worker's leaves, summed over the backward passes of a context.

    >>> get_gradients(context_id)[weight]      # doctest: +SKIP
    """
    runtime = current.runtime()
    context = runtime.contexts.get(context_id)
    runtime.engine.learn_outcomes(context)
    gradients: dict[Tensor, Tensor] = context.gradients()
    return gradients
