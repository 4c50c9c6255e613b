"""The functions that a `RemoteModule` calls on the worker that has its module."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from gradwire import rpc
from gradwire._core import current
from gradwire._core.rpc.exceptions import add_note, adds_place
from gradwire._core.rpc.function_calls import MethodResult
from gradwire._core.rref.rref import RRef
from gradwire._core.torch_internals import tree_map_only
from gradwire._core.wire.codec import call_name, show_as
from gradwire.nn._turns import turn
from gradwire.optim._owner import changing, copy_to_cpu
from gradwire.optim._parameters import parameter_rrefs

#: None, or a list of functions that will change remote modules later. Normally it is None, and each
#: remote module is changed at once. But `_changing` holds a lock while a module of this worker
#: changes. Meanwhile this variable is a list, and a remote module inside that module only adds a
#: function to the list. When the lock is free again, these functions are called. Each of them
#: changes one remote module. Its argument is a list, to which it adds error messages.
put_off: ContextVar[list[Callable[[list[str]], None]] | None] = ContextVar("put_off", default=None)


# -- construction


@adds_place
@show_as(lambda cls, args, kwargs, _device: (call_name(cls), args, kwargs))
def make_module(*given: Any) -> tuple[RRef[nn.Module], str]:
    """Make a module. Return a reference to it, and the name of its class. The arguments are those
    of `make_module_later`."""
    module = make_module_later(*given)
    return RRef(module), type(module).__qualname__


@adds_place
@show_as(lambda cls, args, kwargs, _device: (call_name(cls), args, kwargs))
def make_module_later(
    module_cls: Callable[..., nn.Module],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: str,
) -> nn.Module:
    """Make a module. The caller gets an error only when it first uses the module."""
    worker, name = rpc.get_worker_info().name, call_name(module_cls)
    try:
        _check_device(device, worker)
        with turn():
            module = module_cls(*args, **kwargs)
        if not isinstance(module, nn.Module):
            raise ValueError(
                f"{module_cls} must return an nn.Module, but returned a {type(module).__name__}"
            )
        return module.to(device)
    except Exception as error:
        add_note(error, f"in the constructor of {name}, for a RemoteModule on worker {worker!r}")
        raise


def _check_device(device: str, worker: str) -> None:
    """Raise an error if this worker cannot use a device."""
    try:
        torch.empty(0, device=device)
    except Exception as error:
        raise ValueError(
            f"worker {worker!r} cannot use device {device!r}: {error}. Name a device that it has, "
            f"for example '{worker}/cpu'"
        ) from error


# -- use


@show_as(lambda _rref, _device, args, kwargs: ("forward", args, kwargs))
def forward(
    module_rref: RRef[nn.Module], device: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> MethodResult:
    module = module_rref.local_value()
    if device == "cpu":
        return MethodResult(type(module), "forward", module(*args, **kwargs))
    args, kwargs = _move((args, kwargs), device)
    return MethodResult(type(module), "forward", _move(module(*args, **kwargs), "cpu"))


def _move(tree: Any, device: str) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), tree)


def parameters(module_rref: RRef[nn.Module], recurse: bool) -> list[RRef[Any]]:
    return parameter_rrefs(module_rref.local_value(), recurse)


def call_method(module_rref: RRef[nn.Module], method: str, value: bool) -> None:
    getattr(module_rref.local_value(), method)(value)


# -- changes of parameters


@contextmanager
def _changing(module: nn.Module) -> Iterator[list[str]]:
    """Return a context manager for a block that changes the parameters and buffers of a module.

    The block gets a list. After the block, the list has the error messages of the remote modules
    inside the module.
    """
    # The block holds this worker's lock for changes of parameters. Every change of a remote module
    # takes the lock of the worker that has the module. If a remote module inside `module` lives on
    # this worker too, its change would wait forever for the lock that the block holds. So remote
    # modules inside `module` change only after the block.
    deferred: list[Callable[[list[str]], None]] = []
    errors: list[str] = []
    token = put_off.set(deferred)
    try:
        with changing([*module.parameters(), *module.buffers()]):
            yield errors
    finally:
        put_off.reset(token)
    for change in deferred:
        change(errors)


def change_module(
    module_rref: RRef[nn.Module], change: Callable[[nn.Module, Any], None], argument: Any
) -> None:
    """Call a function that changes the parameters of a module."""
    module = module_rref.local_value()
    with _changing(module):
        change(module, argument)


def dtypes(module_rref: RRef[nn.Module]) -> set[torch.dtype]:
    """Return the dtypes of the parameters and buffers of a module, also of remote modules in it."""
    found: set[torch.dtype] = set()
    for part in module_rref.local_value().modules():
        remote: Any = part if hasattr(part, "remote_parameters") else None
        if remote is not None:
            found |= remote.dtypes()
        else:
            found.update(tensor.dtype for tensor in part.parameters(recurse=False))
            found.update(tensor.dtype for tensor in part.buffers(recurse=False))
    return found


def change_dtypes(module: nn.Module, changes: dict[torch.dtype, torch.dtype]) -> None:
    """Change the dtype of parameters and buffers. `changes` maps old dtypes to new ones."""
    convert_all: Callable[..., Any] = module._apply
    convert_all(lambda tensor: tensor.to(changes.get(tensor.dtype, tensor.dtype)))


def apply(module: nn.Module, function: Callable[[nn.Module], Any]) -> None:
    module.apply(function)


# -- state


def copy_state(module_rref: RRef[nn.Module]) -> tuple[dict[str, Any], dict[str, Any]]:
    # An optimizer holds `versions.lock` while it changes parameters. `state_dict` is called without
    # this lock, because it calls other workers if the module contains remote modules. The result
    # holds the tensors of the module themselves. They are copied with the lock held, so that no
    # optimizer changes them meanwhile.
    state = module_rref.local_value().state_dict(keep_vars=True)
    with current.runtime().versions.lock:
        return copy_to_cpu(dict(state)), dict(getattr(state, "_metadata", {}))


def load_state(
    module_rref: RRef[nn.Module],
    state: dict[str, Any],
    metadata: dict[str, Any] | None,
    assign: bool,
) -> tuple[list[str], list[str]]:
    module = module_rref.local_value()
    ordered: Any = OrderedDict(state)
    if metadata is not None:
        ordered._metadata = metadata
    with _changing(module) as errors:
        result = module.load_state_dict(ordered, strict=False, assign=assign)
    if errors:
        raise RuntimeError("\n\t".join(errors))
    return list(result.missing_keys), list(result.unexpected_keys)
