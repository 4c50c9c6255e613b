"""Modules that live on other workers.

`RemoteModule` has the name and the arguments of the class in ``torch.distributed.nn``. Its methods
call the functions of `_owner` on the worker that has the module.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from gradwire import rpc
from gradwire._core import current
from gradwire._core.rpc.futures import Future
from gradwire._core.rref.rref import RRef
from gradwire._core.wire.codec import call_name
from gradwire._core.wire.encoding import thread_state
from gradwire.errors import GradwireError
from gradwire.nn import _owner
from gradwire.nn._turns import others_may_run

__all__ = ["RemoteModule"]


class RemoteModule(nn.Module):
    """A module that lives and runs on another worker, and is called as if it were local.

    `remote_device` names the worker and the device: ``"worker1"``, ``"worker1/cuda:0"``,
    ``"rank:1"``, ``"rank:1/cpu"``. A device alone means this worker. `module_cls` is a class of
    modules, or a function that makes one.

    The constructor waits until the module is made, and raises the error if `module_cls` fails. With
    ``wait=False``, the constructor does not wait, and the error is raised when the RemoteModule is
    first used. So large modules can be made on several workers at the same time. The modules on one
    worker are made one after the other, so `module_cls` may seed torch's random generator.

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
    #: The name of the module's class, or of the function that makes the module. None if unknown.
    module_name: str | None

    def __init__(
        self,
        remote_device: str | torch.device,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        wait: bool = True,
    ):
        worker, device = _parse_remote_device(remote_device)
        _check_constructor(remote_device, module_cls, args, kwargs)
        given = (module_cls, () if args is None else args, kwargs or {}, device)
        if wait:
            with others_may_run():
                module_rref, name = rpc.rpc_sync(worker, _owner.make_module, given)
        else:
            module_rref = rpc.remote(worker, _owner.make_module_later, given)
            name = call_name(module_cls)
        self._set_up(module_rref, device, name)

    def _set_up(self, module_rref: RRef[nn.Module], device: str, name: str | None) -> None:
        super().__init__()
        self.module_name = name
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
        return _rebuild(cls, module_rref, _parse_remote_device(remote_device)[1], None, True)

    def __reduce__(self) -> Any:
        if thread_state.encoding is None:
            raise RuntimeError(
                "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled "
                "when using RPC, because its parameters are on another worker. To save or copy "
                "them, use state_dict()"
            )
        state = self.module_rref, self.device, self.module_name, self.training
        return _rebuild, (type(self), *state)

    # -- calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the module for these arguments.

        >>> encoder(torch.ones(784))                        # doctest: +SKIP
        """
        return rpc.rpc_sync(self.on, _owner.forward, (self.module_rref, self.device, args, kwargs))

    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call the module without waiting, and return a future of its result.

        >>> futures = [encoder.forward_async(x) for x in batches]                # doctest: +SKIP
        """
        return rpc.rpc_async(self.on, _owner.forward, (self.module_rref, self.device, args, kwargs))

    def get_module_rref(self) -> RRef[nn.Module]:
        """Return the reference to the module.

        >>> encoder.get_module_rref().owner_name()          # doctest: +SKIP
        'worker1'
        """
        return self.module_rref

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """Return references to the parameters of the module, for a `DistributedOptimizer`. The
        parameters of remote modules inside the module are included, unless `recurse` is False.

        >>> DistributedOptimizer(SGD, encoder.remote_parameters(), lr=0.1)       # doctest: +SKIP
        """
        rrefs: list[RRef[nn.Parameter]] = rpc.rpc_sync(
            self.on, _owner.parameters, (self.module_rref, recurse)
        )
        return rrefs

    # -- modes

    def train(self, mode: bool = True) -> RemoteModule:
        """Put the module into training mode, or with False into evaluation mode, as `eval` does.

        >>> encoder.eval()                                  # doctest: +SKIP
        RemoteModule(Linear on worker1/cpu)
        """
        rpc.rpc_sync(self.on, _owner.call_method, (self.module_rref, "train", mode))
        self.training = mode
        return self

    def requires_grad_(self, requires_grad: bool = True) -> RemoteModule:
        """Set whether the parameters of the module get gradients.

        >>> encoder.requires_grad_(False)                   # doctest: +SKIP
        RemoteModule(Linear on worker1/cpu)
        """
        rpc.rpc_sync(
            self.on, _owner.call_method, (self.module_rref, "requires_grad_", requires_grad)
        )
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the `.grad` of the parameters of the module.

        >>> encoder.zero_grad()                             # doctest: +SKIP
        """
        rpc.rpc_sync(self.on, _owner.call_method, (self.module_rref, "zero_grad", set_to_none))

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Return an iterator with this module and its name only. The modules inside the module on
        the other worker are not included.

        >>> list(encoder.named_modules())                   # doctest: +SKIP
        [('', RemoteModule(Linear on worker1/cpu))]
        """
        # A program may call `requires_grad_` or `zero_grad` on a local module that contains this
        # remote module. Torch then loops over all parameters. It does not call `requires_grad_` or
        # `zero_grad` of this remote module, but it calls `named_modules`. So `named_modules` looks
        # on the stack for one of the two methods, and calls that method of this remote module.
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename == _TORCH_FILE:
            if frame.f_code in _LOOPS_OVER_PARAMETERS:
                name, argument = _LOOPS_OVER_PARAMETERS[frame.f_code]
                getattr(self, name)(frame.f_locals[argument])
                break
            frame = frame.f_back  # type: ignore[assignment]
        iterator: Iterator[tuple[str, nn.Module]] = super().named_modules(*args, **kwargs)
        return iterator

    # -- changes of all parameters

    def apply(self, fn: Callable[[nn.Module], Any]) -> RemoteModule:
        """Call a function with each part of the module, and then with the module itself, on its
        worker. The worker must be able to import the function.

            >>> encoder.apply(init_weights)                 # doctest: +SKIP
            RemoteModule(Linear on worker1/cpu)
        """
        if not self._put_off(lambda: self.apply(fn)):
            self._change(_owner.apply, fn)
        return self

    def dtypes(self) -> set[torch.dtype]:
        """Return the dtypes of the parameters and buffers of the module, on its worker.

        >>> encoder.dtypes()                                # doctest: +SKIP
        {torch.float32}
        """
        found: set[torch.dtype] = rpc.rpc_sync(self.on, _owner.dtypes, (self.module_rref,))
        return found

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RemoteModule:  # noqa: ARG002
        """Change the dtypes of parameters and buffers as `fn` does. Torch's `to`, `double` and
        similar methods call this method, if they are called on this module or on a local module
        that contains it."""
        if not self._put_off(lambda: self._apply(fn)):
            changes = self._changes_of_dtype(fn)
            if changes:
                self._change(_owner.change_dtypes, changes)
        return self

    def _changes_of_dtype(self, fn: Callable[[Tensor], Tensor]) -> dict[torch.dtype, torch.dtype]:
        """Find out to which dtypes `fn` converts the tensors of the module. Raise an error if it
        does anything else with them. `fn` itself cannot be sent, because torch defines it inside of
        a method."""
        changes = {}
        device = "cpu" if self.device == "cpu" else "meta"
        for dtype in self.dtypes():
            # The probe needs four dimensions to show whether `fn` changes the memory format. Torch
            # does not change the memory format of tensors with fewer dimensions.
            probe = torch.empty((2, 2, 2, 2), dtype=dtype, device=device)
            try:
                result = fn(probe)
            except (NotImplementedError, AssertionError, RuntimeError):
                # `fn` moves tensors to a device. That fails for meta tensors, and where torch does
                # not have such devices.
                result = None
            if result is probe and (device == "meta" or not probe.untyped_storage().is_shared()):
                continue
            if result is None or result.device != probe.device or result.dtype is dtype:
                raise ValueError(
                    f"only the dtype of {self!r} can be changed from here. Its module stays on "
                    f"device {self.device!r} of worker {self.on!r}, as remote_device says: call "
                    "the method on the other parts of your model one by one"
                )
            changes[dtype] = result.dtype
        return changes

    def _change(self, change: Callable[[nn.Module, Any], None], argument: Any) -> None:
        rpc.rpc_sync(self.on, _owner.change_module, (self.module_rref, change, argument))

    def _put_off(self, change: Callable[[], Any]) -> bool:
        """If this module must not change yet, arrange that `change` is called later, and return
        True. Otherwise return False. See `_owner.put_off`."""
        deferred = _owner.put_off.get()
        if deferred is not None:
            deferred.append(lambda _errors: change())
        return deferred is not None

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
        state, metadata = rpc.rpc_sync(self.on, _owner.copy_state, (self.module_rref,))
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
        deferred = _owner.put_off.get()
        if deferred is not None:
            given = (state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys)
            deferred.append(partial(self._load_from_state_dict, *given))
            return
        state = {key[len(prefix) :]: v for key, v in state_dict.items() if key.startswith(prefix)}
        assign = local_metadata.get("assign_to_params_buffers", False)
        arguments = (self.module_rref, state, local_metadata.get("parts"), assign)
        try:
            missing, unexpected = rpc.rpc_sync(self.on, _owner.load_state, arguments)
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
        place = f"{self.on}/{self.device}"
        return place if self.module_name is None else f"{self.module_name} on {place}"


#: The file with the methods of `nn.Module`.
_TORCH_FILE = nn.Module.requires_grad_.__code__.co_filename
#: Methods of `nn.Module` that loop over all parameters, and do not call the same method of each
#: part: the name of each method, and the name of its argument.
_LOOPS_OVER_PARAMETERS = {
    nn.Module.requires_grad_.__code__: ("requires_grad_", "requires_grad"),
    nn.Module.zero_grad.__code__: ("zero_grad", "set_to_none"),
}


def _rebuild(
    kind: type[RemoteModule],
    module_rref: RRef[nn.Module],
    device: str,
    name: str | None,
    training: bool,
) -> RemoteModule:
    remote_module = kind.__new__(kind)
    remote_module._set_up(module_rref, device, name)
    remote_module.training = training
    return remote_module


def _check_constructor(remote_device: Any, module_cls: Any, args: Any, kwargs: Any) -> None:
    """Raise an error if these arguments of a RemoteModule cannot make a module."""
    if isinstance(module_cls, nn.Module):
        name = type(module_cls).__qualname__
        raise TypeError(
            f"module_cls must be a class or a function, not a module: the module is made on its "
            f"worker. Write RemoteModule({str(remote_device)!r}, {name}, args=(...)), as in "
            'RemoteModule("worker1", nn.Linear, args=(4, 2)). To give it the parameters of a '
            "module that you have, call load_state_dict(module.state_dict()) afterwards"
        )
    if not callable(module_cls):
        raise TypeError(
            f"module_cls must be a class or a function, not a {type(module_cls).__name__}"
        )
    if isinstance(module_cls, type) and not issubclass(module_cls, nn.Module):
        raise ValueError(f"module_cls must be a class of nn.Modules; {module_cls} is not")
    name = call_name(module_cls)
    if args is not None and not isinstance(args, tuple | list):
        raise TypeError(
            f"args must be a tuple or a list of the arguments of {name}, not a "
            f"{type(args).__name__}: for one argument, write args=(x,)"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(
            f"kwargs must be a dict of the keyword arguments of {name}, not a "
            f"{type(kwargs).__name__}"
        )


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
    "use remote_parameters(), or give the model to DistributedOptimizer": [
        "parameters",
        "named_parameters",
    ],
    "remote_device sets where the module is": ["cuda", "ipu", "xpu", "to_empty"],
    "call a function on that worker that does it, with module_rref as an argument": [
        *("buffers", "named_buffers", "share_memory", "add_module"),
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
