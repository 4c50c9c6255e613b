"""The constants of ``torch.distributed.rpc.constants``."""

from __future__ import annotations

from datetime import timedelta

from gradwire.options import DEFAULT_TIMEOUT, UNSET_TIMEOUT, Options

DEFAULT_RPC_TIMEOUT_SEC: float = DEFAULT_TIMEOUT
DEFAULT_INIT_METHOD: str = Options.init_method
DEFAULT_SHUTDOWN_TIMEOUT: float = 0
DEFAULT_NUM_WORKER_THREADS: int = Options.num_worker_threads
DEFAULT_PROCESS_GROUP_TIMEOUT = timedelta(milliseconds=2**31 - 1)
UNSET_RPC_TIMEOUT: float = UNSET_TIMEOUT
