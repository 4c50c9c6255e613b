"""The functions of ``torch.distributed.autograd``, implemented by gradwire."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gradwire import autograd
from gradwire._core import current
from gradwire._core.autograd.context import current_id
from gradwire._core.autograd.plan import make_roots
from gradwire.compat.graph import DistAutogradContext
from gradwire.errors import GradwireError

__all__ = ["backward", "context", "get_gradients", "is_available"]

get_gradients = autograd.get_gradients


def is_available() -> bool:
    return True


def _init(worker_id: int) -> None:
    """Do nothing. In torch, this function sets the id of the worker. A worker of gradwire knows its
    id already."""


class context:
    """Record the remote calls in a with block for a backward pass; see
    `gradwire.autograd.context`."""

    def __enter__(self) -> int:
        _check_not_inside()
        self._manager = autograd.context()
        return self._manager.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._manager.__exit__(*error)


def backward(context_id: int, roots: Sequence[Tensor], retain_graph: bool = False) -> None:
    """Run a distributed backward pass from the roots; see `gradwire.autograd.backward`."""
    if not isinstance(context_id, int) or not isinstance(roots, (list, tuple)):
        raise TypeError(
            "backward(): incompatible function arguments. It takes a context id and a list of "
            f"tensors, not {context_id!r} and {roots!r}"
        )
    current.runtime().contexts.get(context_id)
    try:
        make_roots(roots)
    except ValueError as error:
        raise RuntimeError(str(error)) from error
    try:
        autograd.backward(context_id, roots, retain_graph)
    except GradwireError:
        raise
    except Exception as error:
        raise RuntimeError(f"Error on Node {_failed_worker_id(error)}: {error}") from error


def _failed_worker_id(error: BaseException) -> int:
    """Return the id of the worker on which a backward pass raised this error."""
    runtime = current.runtime()
    match = re.search('on worker "(.+?)"', str(error.__cause__))
    info = runtime.info if match is None else runtime.worker_info(match[1])
    worker_id: int = info.id
    return worker_id


# -- inspection


def _check_not_inside() -> None:
    if current_id.get() is not None:
        raise RuntimeError(
            "Already have an autograd context id for this thread. Contexts of gradwire.autograd "
            "may nest; those of torch.distributed.autograd may not"
        )


def _new_context() -> DistAutogradContext:
    _check_not_inside()
    context = current.runtime().contexts.new()
    current_id.set(context.id)
    return DistAutogradContext(context)


def _release_context(context_id: int) -> None:
    if current_id.get() == context_id:
        current_id.set(None)
    runtime = current.runtime()
    # This call only checks that the context exists: `get` raises an error if it does not.
    runtime.contexts.get(context_id)
    runtime.releases.release(context_id)


def _retrieve_context(context_id: int) -> DistAutogradContext:
    return DistAutogradContext(current.runtime().contexts.get(context_id))


def _current_context() -> DistAutogradContext:
    context_id = current_id.get()
    if context_id is None:
        raise RuntimeError(
            "this thread has no autograd context: enter torch.distributed.autograd.context() first"
        )
    return _retrieve_context(context_id)


def _is_valid_context(context_id: int) -> None:
    """Raise an error if this worker has no context with this id."""
    _retrieve_context(context_id)


def _get_max_id() -> int:
    max_id: int = current.runtime().contexts.max_id
    return max_id


def _get_debug_info() -> dict[str, str]:
    contexts = current.runtime().contexts.all()
    passes = [each for context in contexts for each in list(context.passes.values())]
    return {
        "num_current_backward_passes": str(sum(not each.finished for each in passes)),
        "num_autograd_contexts": str(len(contexts)),
    }
