"""`RemoteModule` for ``torch.distributed.nn``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from gradwire import nn as gradwire_nn
from gradwire._core.wire.encoding import is_encoding

__all__ = ["RemoteModule"]


class RemoteModule(gradwire_nn.RemoteModule):
    """A module on another worker; see `gradwire.nn.RemoteModule`."""

    #: torch's `RemoteModule` has the attributes `is_device_map_set` and `is_scriptable`. Both are
    #: False here, because a remote module of gradwire has no device map and cannot be compiled by
    #: TorchScript.
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
        # With `wait=False`, an error of the constructor is raised only when the module is first
        # used, as in torch.
        super().__init__(remote_device, module_cls, args, kwargs, wait=False)

    def __reduce__(self) -> Any:
        if not is_encoding():
            raise RuntimeError(
                "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled "
                "when using RPC: save its state_dict() instead"
            )
        return super().__reduce__()


_RemoteModule = RemoteModule
