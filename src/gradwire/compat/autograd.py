"""gradwire as ``torch.distributed.autograd``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gradwire import autograd, current
from gradwire.compat.graph import DistAutogradContext
from gradwire.errors import GradwireError
from gradwire.gradients.context import current_id
from gradwire.gradients.graph import make_roots

__all__ = ["backward", "context", "get_gradients", "is_available"]

get_gradients = autograd.get_gradients


def is_available() -> bool:
    return True


def _init(worker_id: int) -> None:
    """torch is told its rank here; a worker of gradwire knows it."""


class context:
    """Records the calls of a block; see `gradwire.autograd.context`."""

    def __enter__(self) -> int:
        _check_not_inside()
        self._manager = autograd.context()
        return self._manager.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._manager.__exit__(*error)


def backward(context_id: int, roots: Sequence[Tensor], retain_graph: bool = False) -> None:
    """Compute the gradients of the roots; see `gradwire.autograd.backward`."""
    if not isinstance(context_id, int) or not isinstance(roots, (list, tuple)):
        raise TypeError(
            "backward(): incompatible function arguments. It takes the id of a context and a list "
            f"of tensors, not {context_id!r} and {roots!r}"
        )
    current.worker().contexts.get(context_id)
    try:
        make_roots(roots)
    except ValueError as error:
        raise RuntimeError(str(error)) from error
    try:
        autograd.backward(context_id, roots, retain_graph)
    except GradwireError:
        raise
    except Exception as error:
        raise RuntimeError(f"Error on Node {_where(error)}: {error}") from error


def _where(error: BaseException) -> int:
    """The id of the worker on which a pass has failed."""
    worker = current.worker()
    found = re.search('on worker "(.+?)"', str(error.__cause__))
    info = worker.info if found is None else worker.worker_info(found[1])
    id: int = info.id
    return id


# -- looking inside


def _check_not_inside() -> None:
    if current_id.get() is not None:
        raise RuntimeError(
            "Already have an autograd context id for this thread. Contexts of gradwire.autograd "
            "may nest; those of torch.distributed.autograd may not"
        )


def _new_context() -> DistAutogradContext:
    _check_not_inside()
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
