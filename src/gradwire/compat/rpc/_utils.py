"""The names of ``torch.distributed.rpc._utils``, in which torch's groups admit new workers."""

from __future__ import annotations

from gradwire.compat.rpc import api
from gradwire.compat.rpc.agents import TensorPipeAgent
from gradwire.compat.rpc.refused import _group_membership_management, _update_group_membership

__all__ = ["_group_membership_management", "_update_group_membership"]
