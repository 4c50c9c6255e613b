"""The names of ``torch.distributed.rpc.server_process_global_profiler``."""

from __future__ import annotations

from gradwire.compat.rpc.refused import (
    _disable_server_process_global_profiler,
    _enable_server_process_global_profiler,
    _server_process_global_profile,
)

__all__ = [
    "_disable_server_process_global_profiler",
    "_enable_server_process_global_profiler",
    "_server_process_global_profile",
]
