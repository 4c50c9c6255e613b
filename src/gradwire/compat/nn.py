"""gradwire's `RemoteModule`, for ``torch.distributed.nn``."""

from __future__ import annotations

from gradwire.nn import RemoteModule

__all__ = ["RemoteModule"]
