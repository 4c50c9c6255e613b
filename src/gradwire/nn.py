"""Modules that live on other workers.

`RemoteModule` has the name and the arguments of the one in ``torch.distributed.nn``.
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

from gradwire import current, rpc
from gradwire.agent.futures import Future
from gradwire.errors import GradwireError
from gradwire.optim.owner import changing, copied
from gradwire.refs.rref import RRef

__all__ = ["RemoteModule"]

#: What modules elsewhere have to load as soon as parameters here are no longer being changed; it is
#: given a list for complaints. None: they are loaded at once.
_later: ContextVar[list[Callable[[list[str]], None]] | None] = ContextVar("_later", default=None)


class RemoteModule(nn.Module):
    """A module that is made, kept and run on another worker, and called as if it were here.

    `remote_device` says where: ``"worker1"``, ``"worker1/cuda:0"``, ``"rank:1"``, ``"rank:1/cpu"``;
    a device alone means this worker. `module_cls` is a class of modules or a function that makes
    one; what it raises comes to light when the module is first used.

        >>> encoder = RemoteModule("worker1", nn.Linear, args=(784, 64))         # doctest: +SKIP
        >>> model = nn.Sequential(encoder, nn.ReLU(), nn.Linear(64, 10))         # doctest: +SKIP
        >>> model(batch)                                                         # doctest: +SKIP

    It can be a part of local modules, and can be sent to other workers, which then share it.
    Gradients flow through it in the contexts of `gradwire.autograd`.
    """

    #: The worker that has the module, and the device it has it on.
    on: str
    device: str
    module_rref: RRef[nn.Module]

    def __init__(
        self,
        remote_device: str | torch.device,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ):
        worker, device = _place(remote_device)
        if isinstance(module_cls, type) and not issubclass(module_cls, nn.Module):
            raise ValueError(f"module_cls must be a class of nn.Modules; {module_cls} is not")
        module_rref = rpc.remote(worker, _make, (module_cls, args or (), kwargs or {}, device))
        self._refer_to(module_rref, device)

    def _refer_to(self, module_rref: RRef[nn.Module], device: str) -> None:
        super().__init__()
        self.on = module_rref.owner_name()
        self.device = device
        self.module_rref = module_rref

    @classmethod
    def init_from_module_rref(
        cls, remote_device: str | torch.device, module_rref: RRef[nn.Module]
    ) -> RemoteModule:
        """A remote module for a module that exists already. The reference says on which worker it
        is; of `remote_device` only the device counts.

            >>> rref = rpc.remote("worker1", nn.Linear, args=(20, 30))           # doctest: +SKIP
            >>> RemoteModule.init_from_module_rref("worker1/cpu", rref)          # doctest: +SKIP
            RemoteModule(worker1/cpu)
        """
        return _rebuild(cls, module_rref, _place(remote_device)[1], True)

    def __reduce__(self) -> Any:
        return _rebuild, (type(self), self.module_rref, self.device, self.training)

    # -- calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module makes of the arguments.

        >>> encoder(torch.ones(784))                        # doctest: +SKIP
        """
        return rpc.rpc_sync(self.on, _call, (self.module_rref, self.device, args, kwargs))

    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """A future of what the module makes of the arguments.

        >>> futures = [encoder.forward_async(x) for x in batches]                # doctest: +SKIP
        """
        return rpc.rpc_async(self.on, _call, (self.module_rref, self.device, args, kwargs))

    def get_module_rref(self) -> RRef[nn.Module]:
        """The reference to the module.

        >>> encoder.get_module_rref().owner_name()          # doctest: +SKIP
        'worker1'
        """
        return self.module_rref

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """References to the parameters of the module, for a `gradwire.optim.DistributedOptimizer`.

        >>> DistributedOptimizer(SGD, encoder.remote_parameters(), lr=0.1)       # doctest: +SKIP
        """
        rrefs: list[RRef[nn.Parameter]] = rpc.rpc_sync(
            self.on, _parameters, (self.module_rref, recurse)
        )
        return rrefs

    # -- what the module is told

    def train(self, mode: bool = True) -> RemoteModule:
        """Put the module into training mode, or out of it (so does `eval`).

        >>> encoder.eval()                                  # doctest: +SKIP
        RemoteModule(worker1/cpu)
        """
        rpc.rpc_sync(self.on, _tell, (self.module_rref, "train", mode))
        self.training = mode
        return self

    def requires_grad_(self, requires_grad: bool = True) -> RemoteModule:
        """Say whether the parameters of the module get gradients.

        >>> encoder.requires_grad_(False)                   # doctest: +SKIP
        RemoteModule(worker1/cpu)
        """
        rpc.rpc_sync(self.on, _tell, (self.module_rref, "requires_grad_", requires_grad))
        return self

    # -- its state

    def state_dict(  # type: ignore[override]
        self,
        *,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,  # noqa: ARG002
    ) -> dict[str, Any]:
        """A copy of the module's state, on the CPU; it is part of the state of local modules that
        contain this one, as if the module were here. `keep_vars` has no meaning for copies.

            >>> torch.save(model.state_dict(), "model.pt")               # doctest: +SKIP
            >>> model.load_state_dict(torch.load("model.pt"))            # doctest: +SKIP
        """
        state, metadata = rpc.rpc_sync(self.on, _state_of, (self.module_rref,))
        if destination is None:
            destination = OrderedDict()
            destination._metadata = OrderedDict()
        destination.update({prefix + key: value for key, value in state.items()})
        if hasattr(destination, "_metadata"):
            # Versions of the parts: for local modules where they look for them, for us in one.
            for part, entry in metadata.items():
                destination._metadata[(prefix + part).rstrip(".")] = entry
            destination._metadata[prefix[:-1]] = {**metadata.get("", {}), "parts": metadata}
        found: dict[str, Any] = destination
        return found

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
        """What `load_state_dict` calls for each module, here or on a module that contains us."""
        later = _later.get()
        if later is not None:
            given = (state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys)
            later.append(partial(self._load_from_state_dict, *given))
            return
        state = {key[len(prefix) :]: v for key, v in state_dict.items() if key.startswith(prefix)}
        assign = local_metadata.get("assign_to_params_buffers", False)
        arguments = (self.module_rref, state, local_metadata.get("parts"), assign)
        try:
            missing, unexpected = rpc.rpc_sync(self.on, _load, arguments)
        except GradwireError:
            raise
        except RuntimeError as error:  # what does not fit; torch collects such complaints
            error_msgs.append(f"on worker {self.on!r}: {error}")
            return
        missing_keys.extend(prefix + key for key in missing)
        unexpected_keys.extend(prefix + key for key in unexpected)

    def extra_repr(self) -> str:
        return f"{self.on}/{self.device}"


def _rebuild(
    kind: type[RemoteModule], module_rref: RRef[nn.Module], device: str, training: bool
) -> RemoteModule:
    made = kind.__new__(kind)
    made._refer_to(module_rref, device)
    made.training = training
    return made


def _place(remote_device: str | torch.device) -> tuple[str | int, str]:
    """The worker, by name or rank, and the device on it."""
    if isinstance(remote_device, torch.device):
        return current.worker().name, str(remote_device)
    if not isinstance(remote_device, str):
        raise TypeError(f"remote_device is a str, not a {type(remote_device).__name__}")
    worker, slash, device = remote_device.partition("/")
    if not slash and _is_device(worker):
        return current.worker().name, worker
    device = device if slash else "cpu"
    if not worker or not _is_device(device):
        raise ValueError(
            f"{remote_device!r} says neither where a module is to be nor on which device: write "
            "'worker1', 'worker1/cuda:0', 'rank:1', 'rank:1/cpu', or 'cpu' for this worker"
        )
    word, _, rank = worker.partition(":")
    return int(rank) if word == "rank" and rank.isdecimal() else worker, device


def _is_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True


# -- methods of local modules that would not reach the remote one

_UNSUITABLE = {
    "use remote_parameters()": ["parameters", "named_parameters"],
    "remote_device says where the module is, and module_cls can choose its dtype": [
        *("to", "cuda", "cpu", "ipu", "xpu", "float", "double", "half", "bfloat16", "type"),
    ],
    "do it in a function that you call on that worker, with module_rref as an argument": [
        *("buffers", "named_buffers", "zero_grad", "share_memory", "apply", "add_module"),
        *("register_buffer", "register_parameter", "register_backward_hook"),
        *("register_forward_hook", "register_forward_pre_hook"),
    ],
}


def _refusal(name: str, advice: str) -> Callable[..., NoReturn]:
    def refuse(self: RemoteModule, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise ValueError(
            f"{name}() cannot be called on a RemoteModule, whose module is on worker {self.on!r}: "
            f"{advice}"
        )

    return refuse


for _advice, _names in _UNSUITABLE.items():
    for _name in _names:
        setattr(RemoteModule, _name, _refusal(_name, _advice))


# -- on the worker that has the module


def _make(
    module_cls: Callable[..., nn.Module],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: str,
) -> nn.Module:
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(f"{module_cls} must make an nn.Module, but made a {type(module).__name__}")
    return module.to(device)


def _call(
    module_rref: RRef[nn.Module], device: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    module = module_rref.local_value()
    if device == "cpu":
        return module(*args, **kwargs)
    args, kwargs = _moved((args, kwargs), device)
    return _moved(module(*args, **kwargs), "cpu")


def _moved(tree: Any, device: str) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), tree)


def _parameters(module_rref: RRef[nn.Module], recurse: bool) -> list[RRef[nn.Parameter]]:
    return [RRef(parameter) for parameter in module_rref.local_value().parameters(recurse)]


def _tell(module_rref: RRef[nn.Module], method: str, value: bool) -> None:
    getattr(module_rref.local_value(), method)(value)


def _state_of(module_rref: RRef[nn.Module]) -> tuple[dict[str, Any], dict[str, Any]]:
    # The tensors themselves; and not under the lock, for a module inside may be on any worker.
    state = module_rref.local_value().state_dict(keep_vars=True)
    with current.worker().versions.lock:
        return copied(dict(state)), dict(getattr(state, "_metadata", {}))


def _load(
    module_rref: RRef[nn.Module],
    state: dict[str, Any],
    metadata: dict[str, Any] | None,
    assign: bool,
) -> tuple[list[str], list[str]]:
    module = module_rref.local_value()
    ordered: Any = OrderedDict(state)
    if metadata is not None:
        ordered._metadata = metadata
    # Remote modules inside come when the lock is free again: they may be on any worker, this one
    # too, and loading them takes the lock there.
    later: list[Callable[[list[str]], None]] = []
    token = _later.set(later)
    try:
        with changing([*module.parameters(), *module.buffers()]):
            result = module.load_state_dict(ordered, strict=False, assign=assign)
    finally:
        _later.reset(token)
    complaints: list[str] = []
    for load in later:
        load(complaints)
    if complaints:
        raise RuntimeError("\n\t".join(complaints))
    return list(result.missing_keys), list(result.unexpected_keys)
