"""`RemoteModule` for ``torch.distributed.nn``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from gradwire import nn as gradwire_nn
from gradwire.wire.values import is_encoding

__all__ = ["RemoteModule"]


class RemoteModule(gradwire_nn.RemoteModule):
    """A module on another worker; see `gradwire.nn.RemoteModule`."""

    #: What torch says of such a module when it neither moves tensors between devices by a map nor
    #: can be compiled.
    is_device_map_set = False
    is_scriptable = False

    def __init__(
        self,
        remote_device: Any,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        _module_interface_cls: Any = None,
    ):
        if isinstance(module_cls, type) and not issubclass(module_cls, nn.Module):
            raise ValueError(
                "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, "
                f"but {module_cls} is no such class"
            )
        super().__init__(remote_device, module_cls, args, kwargs)

    def __reduce__(self) -> Any:
        if not is_encoding():
            raise RuntimeError(
                "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled "
                "when using RPC: save what its state_dict() gives instead"
            )
        return super().__reduce__()


_RemoteModule = RemoteModule
