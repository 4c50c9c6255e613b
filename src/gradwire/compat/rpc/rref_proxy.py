"""The names of ``torch.distributed.rpc.rref_proxy``. `RRefProxy` is the class of the objects that
`RRef.rpc_sync`, `RRef.rpc_async` and `RRef.remote` return."""

from __future__ import annotations

from gradwire._core.rref.rref import _Proxy as RRefProxy
from gradwire.compat.rpc import functions
from gradwire.compat.rpc.api import rpc_async
from gradwire.compat.rpc.constants import UNSET_RPC_TIMEOUT

__all__ = ["RRefProxy"]
