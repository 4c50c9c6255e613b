"""Options as torch has them: objects that can be changed until a worker is made from them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch

from gradwire.compat.rpc import constants
from gradwire.config import Options, seconds

__all__ = ["RpcBackendOptions", "TensorPipeRpcBackendOptions"]

Device = int | str | torch.device
DeviceMap = dict[torch.device, torch.device]

_told: set[str] = set()


class RpcBackendOptions:
    """What every backend wants to know."""

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
    """The options of torch's only backend, which gradwire takes for its own.

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
        """Say on which of its devices worker `to` gets the tensors of ours."""
        new = {_device(ours): _device(theirs) for ours, theirs in device_map.items()}
        known = self.device_maps.get(to, {})
        for ours, theirs in new.items():
            if known.get(ours, theirs) != theirs:
                raise ValueError(
                    f"`set_device_map` only supports 1-to-1 mapping: {ours} goes to {known[ours]} "
                    f"of {to!r} already and cannot go to {theirs} too"
                )
        merged = {**known, **new}
        if len(set(merged.values())) < len(merged):
            raise ValueError(
                f"`device_map` only supports 1-to-1 mapping: two devices go to one of {to!r}, "
                f"{device_map}"
            )
        self.device_maps[to] = merged

    def set_devices(self, devices: Sequence[Device]) -> None:
        """Say which devices are used."""
        listed = [_device(device) for device in devices]
        for device in listed:
            if device.type != "cuda":
                raise ValueError(f"`set_devices` expect a list of CUDA devices, not {device}")
        self.devices = listed

    def for_gradwire(self) -> Options:
        """The same for a worker of gradwire."""
        for name in ("_transports", "_channels"):
            if getattr(self, name):
                _tell_once(name, "gradwire has its own ways between workers")
        if self.device_maps or self.devices:
            _tell_once("device_maps", "tensors on accelerators cannot be sent yet")
        return Options(
            num_worker_threads=self.num_worker_threads,
            rpc_timeout=self.rpc_timeout,
            init_method=self.init_method,
            device_maps=self.device_maps or None,
            devices=self.devices or None,
        )


def _device(device: Device) -> torch.device:
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def _tell_once(option: str, reason: str) -> None:
    if option not in _told:
        _told.add(option)
        warnings.warn(f"the option {option} is ignored: {reason}", stacklevel=5)
