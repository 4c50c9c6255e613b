"""`DistributedDataParallel` inside of a context."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from gradwire.gradients.context import current_id
from gradwire.ids import INTO_GRAD


def forward_like(original: Callable[..., Any]) -> Callable[..., Any]:
    """Its `forward`, which does not let a program go on with gradients that are not averaged."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = current_id.get()
        if context is not None and not context & INTO_GRAD and torch.is_grad_enabled():
            raise NotImplementedError(
                "DistributedDataParallel averages gradients as torch puts them into .grad, and "
                "those of a context of torch.distributed.autograd are not put there. Open the "
                "context with gradwire.autograd.context(into_grad=True), and use an ordinary "
                "optimizer on each worker"
            )
        return original(self, *args, **kwargs)

    return forward
