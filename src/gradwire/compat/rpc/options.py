"""torch's option objects. A program may change an option object until it makes a worker with that
object."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence

import torch

from gradwire.compat.rpc import constants
from gradwire.options import Options, seconds

__all__ = ["RpcBackendOptions", "TensorPipeRpcBackendOptions"]

Device = int | str | torch.device
DeviceMap = dict[torch.device, torch.device]
_is_tensorpipe_available = True

#: The ignored options for which this process has already issued a warning.
_warned: set[str] = set()


class RpcBackendOptions:
    """The options that every backend has."""

    rpc_timeout: float
    init_method: str

    def __init__(
        self,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
    ):
        self.rpc_timeout = seconds(rpc_timeout)
        self.init_method = init_method


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """The options of TensorPipe, torch's only RPC backend. gradwire's own backend accepts these
    options.

    >>> TensorPipeRpcBackendOptions(num_worker_threads=8).rpc_timeout
    60.0
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[Device, Device]] | None = None,
        devices: Sequence[Device] | None = None,
        _transports: Sequence[str] | None = None,
        _channels: Sequence[str] | None = None,
    ):
        if not isinstance(rpc_timeout, (int, float)):
            raise TypeError(
                "incompatible constructor arguments: rpc_timeout is a number of seconds, not "
                f"{rpc_timeout!r}"
            )
        super().__init__(rpc_timeout, init_method)
        self.num_worker_threads = num_worker_threads
        self.device_maps: dict[str, DeviceMap] = {}
        self.devices: list[torch.device] = []
        self._transports = _transports
        self._channels = _channels
        for to, device_map in (device_maps or {}).items():
            self.set_device_map(to, device_map)
        self.set_devices(devices or [])

    def set_device_map(self, to: str, device_map: Mapping[Device, Device]) -> None:
        """Map devices of this worker to devices of the worker `to`. In torch, tensors that are sent
        to that worker move to the mapped devices. gradwire checks the map, but cannot send tensors
        on accelerators yet."""
        new = {_device(ours): _device(theirs) for ours, theirs in device_map.items()}
        known = self.device_maps.get(to, {})
        for ours, theirs in new.items():
            if known.get(ours, theirs) != theirs:
                raise ValueError(
                    f"`set_device_map` only supports 1-to-1 mapping: {ours} is mapped to "
                    f"{known[ours]} of {to!r} already and cannot be mapped to {theirs} too"
                )
        merged = {**known, **new}
        if len(set(merged.values())) < len(merged):
            raise ValueError(
                "`device_map` only supports 1-to-1 mapping: two devices are mapped to one of "
                f"{to!r}, {device_map}"
            )
        self.device_maps[to] = merged

    def set_devices(self, devices: Sequence[Device]) -> None:
        """Set the devices that this worker uses."""
        converted = [_device(device) for device in devices]
        for device in converted:
            if device.type != "cuda":
                raise ValueError(f"`set_devices` expect a list of CUDA devices, not {device}")
        self.devices = converted

    def to_gradwire(self) -> Options:
        """Return the same options as a gradwire `Options` object. Issue a warning for each option
        that gradwire ignores."""
        for name in ("_transports", "_channels"):
            if getattr(self, name):
                _warn_once(name, "gradwire has transports of its own")
        if self.device_maps or self.devices:
            _warn_once("device_maps", "tensors on accelerators cannot be sent yet")
        return Options(
            num_worker_threads=self.num_worker_threads,
            rpc_timeout=self.rpc_timeout,
            init_method=self.init_method,
            device_maps=self.device_maps or None,
            devices=self.devices or None,
        )


#: In torch, `TensorPipeRpcBackendOptions` derives from this class. In gradwire, both names mean the
#: same class.
_TensorPipeRpcBackendOptionsBase = TensorPipeRpcBackendOptions


def _device(device: Device) -> torch.device:
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def _warn_once(option: str, reason: str) -> None:
    if option not in _warned:
        _warned.add(option)
        message = f"the option {option} is ignored: {reason}"
        warnings.warn(message, stacklevel=_levels_below_program() + 1)


def _levels_below_program() -> int:
    """Return how many nested calls of gradwire's functions lead from the program's own function to
    the caller of this one. A warning needs this number for its `stacklevel`, so that it shows a
    line of the program."""
    levels, frame = 0, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("gradwire."):
        levels, frame = levels + 1, frame.f_back
    return levels
