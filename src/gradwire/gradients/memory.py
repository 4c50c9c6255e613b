"""The memory that tensors are in: who shares it, and when it is free."""

from __future__ import annotations

import torch
from torch import Tensor, UntypedStorage

#: Names the memory that a tensor shares with all its views.
Memory = int


def address(tensor: Tensor) -> Memory:
    found: Memory = tensor.untyped_storage()._cdata
    return found


def memory_of(tensor: Tensor) -> Memory | None:
    try:
        return address(tensor)
    except (NotImplementedError, RuntimeError):  # a sparse one, for instance, is in several places
        return None


def uses(storage: UntypedStorage) -> int:
    """How many tensors are in this memory; `storage` itself counts too."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


def must_stay(parameter: Tensor) -> bool:
    """Whether others look at the memory of a parameter and expect it to change there."""
    storage = parameter.untyped_storage()
    in_other_processes = storage.device.type == "cpu" and storage.is_shared()
    return in_other_processes or uses(storage) > 2 or storage.nbytes() != parameter.nbytes


def trim(left: list[UntypedStorage]) -> UntypedStorage | None:
    """Of memory that nobody is in any more, one is kept; this one."""
    free = [storage for storage in left if uses(storage) == 1]
    left[:] = [storage for storage in left if storage not in free[1:]]
    return free[0] if free else None


def in_memory(elements: UntypedStorage, tensor: Tensor) -> Tensor:
    """Like a tensor, but in other memory of the same kind."""
    place = tensor.storage_offset(), tensor.size(), tensor.stride()
    found = tensor.new_empty(0).set_(elements, *place)
    found = found.conj() if tensor.is_conj() else found
    return torch._neg_view(found) if tensor.is_neg() else found
