"""The constants of ``torch.distributed.rpc.constants``."""

from __future__ import annotations

from datetime import timedelta

from gradwire.options import DEFAULT_TIMEOUT, UNSET_TIMEOUT, Options

_DEFAULT_RPC_TIMEOUT_SEC: float = DEFAULT_TIMEOUT
_DEFAULT_INIT_METHOD: str = Options.init_method
_DEFAULT_NUM_WORKER_THREADS: int = Options.num_worker_threads
_UNSET_RPC_TIMEOUT: float = UNSET_TIMEOUT

DEFAULT_RPC_TIMEOUT_SEC = _DEFAULT_RPC_TIMEOUT_SEC
DEFAULT_INIT_METHOD = _DEFAULT_INIT_METHOD
DEFAULT_SHUTDOWN_TIMEOUT: float = 0
DEFAULT_NUM_WORKER_THREADS = _DEFAULT_NUM_WORKER_THREADS
DEFAULT_PROCESS_GROUP_TIMEOUT = timedelta(milliseconds=2**31 - 1)
UNSET_RPC_TIMEOUT = _UNSET_RPC_TIMEOUT
