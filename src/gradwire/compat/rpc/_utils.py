"""The names of ``torch.distributed.rpc._utils``. In torch, its functions add and remove workers of
a group that is already running. In gradwire, they raise an error."""

from __future__ import annotations

from gradwire.compat.rpc import api
from gradwire.compat.rpc.agents import TensorPipeAgent
from gradwire.compat.rpc.refused import _group_membership_management, _update_group_membership

__all__ = ["_group_membership_management", "_update_group_membership"]
