"""The storages of tensors: which tensors share one, and which storages are free."""

from __future__ import annotations

from torch import Tensor, UntypedStorage

from gradwire._core.torch_internals import neg_view, storage_use_count

#: Identifies the storage that a tensor shares with all its views.
StorageId = int


def storage_id(tensor: Tensor) -> StorageId:
    identity: StorageId = tensor.untyped_storage()._cdata
    return identity


def find_storage_id(tensor: Tensor) -> StorageId | None:
    """Return the id of a tensor's storage. Return None if the tensor does not have exactly one
    storage. Sparse tensors, for example, have several."""
    try:
        return storage_id(tensor)
    except (NotImplementedError, RuntimeError):
        return None


def use_count(storage: UntypedStorage) -> int:
    """Return the number of references to a storage. Each tensor that uses the storage holds one
    reference, and the object `storage` holds another."""
    count: int = storage_use_count(storage._cdata)
    return count


def is_shared(parameter: Tensor) -> bool:
    """Return whether other tensors or processes share the storage of a parameter. If they do, they
    see changes of the parameter."""
    storage = parameter.untyped_storage()
    in_other_processes = storage.device.type == "cpu" and storage.is_shared()
    return in_other_processes or use_count(storage) > 2 or storage.nbytes() != parameter.nbytes


def keep_one_free(storages: list[UntypedStorage]) -> UntypedStorage | None:
    """Remove from a list the storages that no tensor uses, but keep one of them. Return the unused
    storage that was kept, or None if tensors use all storages of the list."""
    free = [storage for storage in storages if use_count(storage) == 1]
    storages[:] = [storage for storage in storages if storage not in free[1:]]
    return free[0] if free else None


def tensor_in(storage: UntypedStorage, like: Tensor) -> Tensor:
    """Return a tensor in a storage, with the dtype, offset, shape and strides of another tensor."""
    layout = like.storage_offset(), like.size(), like.stride()
    tensor = like.new_empty(0).set_(storage, *layout)
    tensor = tensor.conj() if like.is_conj() else tensor
    return neg_view(tensor) if like.is_neg() else tensor
