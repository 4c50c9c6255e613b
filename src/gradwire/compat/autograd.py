"""gradwire as ``torch.distributed.autograd``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gradwire import autograd, current
from gradwire.compat.graph import DistAutogradContext
from gradwire.gradients.context import current_id

__all__ = ["backward", "context", "get_gradients", "is_available"]

get_gradients = autograd.get_gradients


def is_available() -> bool:
    return True


def _init(worker_id: int) -> None:  # noqa: ARG001
    """torch is told its rank here; a worker of gradwire knows it."""


class context:
    """Records the calls of a block; see `gradwire.autograd.context`."""

    def __enter__(self) -> int:
        self._manager = autograd.context()
        return self._manager.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._manager.__exit__(*error)


def backward(context_id: int, roots: Sequence[Tensor], retain_graph: bool = False) -> None:
    """Compute the gradients of the roots; see `gradwire.autograd.backward`."""
    autograd.backward(context_id, roots, retain_graph)


# -- looking inside


def _new_context() -> DistAutogradContext:
    made = current.worker().contexts.new()
    current_id.set(made.id)
    return DistAutogradContext(made)


def _release_context(context_id: int) -> None:
    if current_id.get() == context_id:
        current_id.set(None)
    worker = current.worker()
    worker.contexts.get(context_id)
    worker.engine.release(context_id)


def _retrieve_context(context_id: int) -> DistAutogradContext:
    return DistAutogradContext(current.worker().contexts.get(context_id))


def _current_context() -> DistAutogradContext:
    id = current_id.get()
    if id is None:
        raise RuntimeError(
            "this thread has no autograd context: enter torch.distributed.autograd.context() first"
        )
    return _retrieve_context(id)


def _is_valid_context(context_id: int) -> None:
    """Raises an error if there is no such context."""
    _retrieve_context(context_id)


def _get_max_id() -> int:
    id: int = current.worker().contexts.max_id
    return id


def _get_debug_info() -> dict[str, str]:
    contexts = current.worker().contexts.all()
    passes = sum(not found.finished for one in contexts for found in list(one.passes.values()))
    return {
        "num_current_backward_passes": str(passes),
        "num_autograd_contexts": str(len(contexts)),
    }
