"""Modules that live on other workers.

`RemoteModule` has the name and the arguments of the class in ``torch.distributed.nn``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from gradwire import rpc
from gradwire._core import current
from gradwire._core.rpc.futures import Future
from gradwire._core.rref.rref import RRef
from gradwire.errors import GradwireError
from gradwire.optim._owner import changing, copy_to_cpu

__all__ = ["RemoteModule"]

#: None, or a list of functions that will load remote modules later. Normally it is None, and each
#: remote module loads its state at once. But `_load_state` holds a lock while it loads a module of
#: this worker. Meanwhile this variable is a list, and a remote module inside that module only adds
#: a function to the list. When the lock is free again, `_load_state` calls these functions. Each of
#: them loads one remote module. Its argument is a list, to which it adds error messages.
_deferred_loads: ContextVar[list[Callable[[list[str]], None]] | None] = ContextVar(
    "_deferred_loads", default=None
)


class RemoteModule(nn.Module):
    """A module that lives and runs on another worker, and is called as if it were local.

    `remote_device` names the worker and the device: ``"worker1"``, ``"worker1/cuda:0"``,
    ``"rank:1"``, ``"rank:1/cpu"``. A device alone means this worker. `module_cls` is a class of
    modules, or a function that makes one. If `module_cls` raises an error, the first use of the
    module raises that error.

        >>> encoder = RemoteModule("worker1", nn.Linear, args=(784, 64))         # doctest: +SKIP
        >>> model = nn.Sequential(encoder, nn.ReLU(), nn.Linear(64, 10))         # doctest: +SKIP
        >>> model(batch)                                                         # doctest: +SKIP

    A RemoteModule can be a part of local modules. It can be sent to other workers, which then use
    the same module. Gradients flow through it in the contexts of `gradwire.autograd`.
    """

    #: The name of the worker that has the module.
    on: str
    #: The device of the module, on the worker that holds it.
    device: str
    module_rref: RRef[nn.Module]

    def __init__(
        self,
        remote_device: str | torch.device,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ):
        worker, device = _parse_remote_device(remote_device)
        if isinstance(module_cls, type) and not issubclass(module_cls, nn.Module):
            raise ValueError(f"module_cls must be a class of nn.Modules; {module_cls} is not")
        module_rref = rpc.remote(
            worker, _make_module, (module_cls, args or (), kwargs or {}, device)
        )
        self._set_up(module_rref, device)

    def _set_up(self, module_rref: RRef[nn.Module], device: str) -> None:
        super().__init__()
        self.on = module_rref.owner_name()
        self.device = device
        self.module_rref = module_rref

    @classmethod
    def init_from_module_rref(
        cls, remote_device: str | torch.device, module_rref: RRef[nn.Module]
    ) -> RemoteModule:
        """Return a remote module for a module that exists already.

        The module is on the worker that owns `module_rref`. Of `remote_device`, only the device is
        used.

            >>> rref = rpc.remote("worker1", nn.Linear, args=(20, 30))           # doctest: +SKIP
            >>> RemoteModule.init_from_module_rref("worker1/cpu", rref)          # doctest: +SKIP
            RemoteModule(worker1/cpu)
        """
        return _rebuild(cls, module_rref, _parse_remote_device(remote_device)[1], True)

    def __reduce__(self) -> Any:
        return _rebuild, (type(self), self.module_rref, self.device, self.training)

    # -- calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the module for these arguments.

        >>> encoder(torch.ones(784))                        # doctest: +SKIP
        """
        return rpc.rpc_sync(self.on, _run_forward, (self.module_rref, self.device, args, kwargs))

    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call the module without waiting, and return a future of its result.

        >>> futures = [encoder.forward_async(x) for x in batches]                # doctest: +SKIP
        """
        return rpc.rpc_async(self.on, _run_forward, (self.module_rref, self.device, args, kwargs))

    def get_module_rref(self) -> RRef[nn.Module]:
        """Return the reference to the module.

        >>> encoder.get_module_rref().owner_name()          # doctest: +SKIP
        'worker1'
        """
        return self.module_rref

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """Return references to the parameters of the module, for a `DistributedOptimizer`.

        >>> DistributedOptimizer(SGD, encoder.remote_parameters(), lr=0.1)       # doctest: +SKIP
        """
        rrefs: list[RRef[nn.Parameter]] = rpc.rpc_sync(
            self.on, _parameter_rrefs, (self.module_rref, recurse)
        )
        return rrefs

    # -- modes

    def train(self, mode: bool = True) -> RemoteModule:
        """Put the module into training mode, or with False into evaluation mode, as `eval` does.

        >>> encoder.eval()                                  # doctest: +SKIP
        RemoteModule(worker1/cpu)
        """
        rpc.rpc_sync(self.on, _call_method, (self.module_rref, "train", mode))
        self.training = mode
        return self

    def requires_grad_(self, requires_grad: bool = True) -> RemoteModule:
        """Set whether the parameters of the module get gradients.

        >>> encoder.requires_grad_(False)                   # doctest: +SKIP
        RemoteModule(worker1/cpu)
        """
        rpc.rpc_sync(self.on, _call_method, (self.module_rref, "requires_grad_", requires_grad))
        return self

    # -- state

    def state_dict(  # type: ignore[override]
        self,
        *,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,  # noqa: ARG002
    ) -> dict[str, Any]:
        """Return a copy of the module's state, on the CPU.

        If a local module contains this one, the state of the local module includes the copy.
        `keep_vars` has no effect, because the copies of tensors have no autograd history.

            >>> torch.save(model.state_dict(), "model.pt")               # doctest: +SKIP
            >>> model.load_state_dict(torch.load("model.pt"))            # doctest: +SKIP
        """
        state, metadata = rpc.rpc_sync(self.on, _copy_state, (self.module_rref,))
        if destination is None:
            destination = OrderedDict()
            destination._metadata = OrderedDict()
        destination.update({prefix + key: value for key, value in state.items()})
        if hasattr(destination, "_metadata"):
            # `metadata` has the version of each part of the module. The versions are stored twice,
            # because a local or a remote module may load this state later. A local module reads
            # the version of each part under the name of that part. A remote module reads only the
            # entry under its own name, so that entry has all versions, under "parts".
            for part, entry in metadata.items():
                destination._metadata[(prefix + part).rstrip(".")] = entry
            destination._metadata[prefix[:-1]] = {**metadata.get("", {}), "parts": metadata}
        result: dict[str, Any] = destination
        return result

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load the part of a state that belongs to this module. Torch's `load_state_dict` calls
        this method for each module."""
        deferred = _deferred_loads.get()
        if deferred is not None:
            given = (state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys)
            deferred.append(partial(self._load_from_state_dict, *given))
            return
        state = {key[len(prefix) :]: v for key, v in state_dict.items() if key.startswith(prefix)}
        assign = local_metadata.get("assign_to_params_buffers", False)
        arguments = (self.module_rref, state, local_metadata.get("parts"), assign)
        try:
            missing, unexpected = rpc.rpc_sync(self.on, _load_state, arguments)
        except GradwireError:
            raise
        except RuntimeError as error:
            # A tensor of the state does not fit the module. Torch collects such errors in
            # `error_msgs`.
            error_msgs.append(f"on worker {self.on!r}: {error}")
            return
        missing_keys.extend(prefix + key for key in missing)
        unexpected_keys.extend(prefix + key for key in unexpected)

    def extra_repr(self) -> str:
        return f"{self.on}/{self.device}"


def _rebuild(
    kind: type[RemoteModule], module_rref: RRef[nn.Module], device: str, training: bool
) -> RemoteModule:
    remote_module = kind.__new__(kind)
    remote_module._set_up(module_rref, device)
    remote_module.training = training
    return remote_module


def _parse_remote_device(remote_device: str | torch.device) -> tuple[str | int, str]:
    """Return the worker (its name or rank) and the device that `remote_device` names."""
    if isinstance(remote_device, torch.device):
        return current.runtime().info.name, str(remote_device)
    if not isinstance(remote_device, str):
        raise TypeError(f"remote_device must be a str, not a {type(remote_device).__name__}")
    worker, slash, device = remote_device.partition("/")
    if not slash and _is_device(worker):
        return current.runtime().info.name, worker
    device = device if slash else "cpu"
    if not worker or not _is_device(device):
        raise ValueError(
            f"remote_device {remote_device!r} names no worker and device: write 'worker1', "
            "'worker1/cuda:0', 'rank:1', 'rank:1/cpu', or 'cpu' for this worker"
        )
    word, _, rank = worker.partition(":")
    return int(rank) if word == "rank" and rank.isdecimal() else worker, device


def _is_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True


# -- methods of local modules that would have no effect on the remote module

#: Maps a piece of advice for the caller to the methods that raise an error with this advice.
_REFUSED_METHODS = {
    "use remote_parameters()": ["parameters", "named_parameters"],
    "remote_device sets where the module is, and module_cls can choose its dtype": [
        *("to", "cuda", "cpu", "ipu", "xpu", "float", "double", "half", "bfloat16", "type"),
    ],
    "call a function on that worker that does it, with module_rref as an argument": [
        *("buffers", "named_buffers", "zero_grad", "share_memory", "apply", "add_module"),
        *("register_buffer", "register_parameter", "register_backward_hook"),
        *("register_forward_hook", "register_forward_pre_hook"),
    ],
}


def _refusing(name: str, advice: str) -> Callable[..., NoReturn]:
    def refuse(self: RemoteModule, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise ValueError(
            f"{name}() cannot be called on a RemoteModule. Its module is on worker {self.on!r}: "
            f"{advice}"
        )

    return refuse


for _advice, _names in _REFUSED_METHODS.items():
    for _name in _names:
        setattr(RemoteModule, _name, _refusing(_name, _advice))


# -- on the worker that has the module


def _make_module(
    module_cls: Callable[..., nn.Module],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: str,
) -> nn.Module:
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"{module_cls} must return an nn.Module, but returned a {type(module).__name__}"
        )
    return module.to(device)


def _run_forward(
    module_rref: RRef[nn.Module], device: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    module = module_rref.local_value()
    if device == "cpu":
        return module(*args, **kwargs)
    args, kwargs = _move((args, kwargs), device)
    return _move(module(*args, **kwargs), "cpu")


def _move(tree: Any, device: str) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), tree)


def _parameter_rrefs(module_rref: RRef[nn.Module], recurse: bool) -> list[RRef[nn.Parameter]]:
    return [RRef(parameter) for parameter in module_rref.local_value().parameters(recurse)]


def _call_method(module_rref: RRef[nn.Module], method: str, value: bool) -> None:
    getattr(module_rref.local_value(), method)(value)


def _copy_state(module_rref: RRef[nn.Module]) -> tuple[dict[str, Any], dict[str, Any]]:
    # An optimizer holds `versions.lock` while it changes parameters. `state_dict` is called without
    # this lock, because it calls other workers if the module contains remote modules. The result
    # holds the tensors of the module themselves. They are copied with the lock held, so that no
    # optimizer changes them meanwhile.
    state = module_rref.local_value().state_dict(keep_vars=True)
    with current.runtime().versions.lock:
        return copy_to_cpu(dict(state)), dict(getattr(state, "_metadata", {}))


def _load_state(
    module_rref: RRef[nn.Module],
    state: dict[str, Any],
    metadata: dict[str, Any] | None,
    assign: bool,
) -> tuple[list[str], list[str]]:
    module = module_rref.local_value()
    ordered: Any = OrderedDict(state)
    if metadata is not None:
        ordered._metadata = metadata
    # Remote modules inside this module are loaded only after `changing` has released its lock.
    # Loading a remote module takes the lock of that module's worker. That worker may be this one,
    # and the load would then wait forever for the lock that is held here.
    deferred: list[Callable[[list[str]], None]] = []
    token = _deferred_loads.set(deferred)
    try:
        with changing([*module.parameters(), *module.buffers()]):
            result = module.load_state_dict(ordered, strict=False, assign=assign)
    finally:
        _deferred_loads.reset(token)
    errors: list[str] = []
    for load in deferred:
        load(errors)
    if errors:
        raise RuntimeError("\n\t".join(errors))
    return list(result.missing_keys), list(result.unexpected_keys)
