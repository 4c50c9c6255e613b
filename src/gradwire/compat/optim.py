"""gradwire's `DistributedOptimizer`, for ``torch.distributed.optim``."""

from __future__ import annotations

from gradwire.optim import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
