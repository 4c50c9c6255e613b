"""Workers on several simulated hosts: network namespaces joined by a virtual cable."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator

import pytest
import torch

from gradwire import rpc
from gradwire._core import current
from tests.processes import processes, rendezvous_file

_CLONE_NEWNET = 0x40000000


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def enter_namespace(name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "cannot enter the namespace")
    finally:
        os.close(descriptor)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two namespaces, 10.213.0.1 and 10.213.0.2."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs root and iproute2 to make network namespaces")
    tag = uuid.uuid4().hex[:6]
    names = [f"gw{tag}a", f"gw{tag}b"]
    try:
        for name in names:
            ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"cannot make network namespaces here: {error.stderr.decode().strip()}")
    try:
        ip(
            "link",
            "add",
            names[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            names[1],
            "netns",
            names[1],
        )
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.213.0.{number}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


def echo(value: torch.Tensor) -> torch.Tensor:
    return value


def connection_types() -> set[str]:
    channels = current.runtime().agent.peers.channels()
    return {type(channel.connection).__name__ for channel in channels}


def on_host(name: str, rank: int, place: str) -> Callable[[], tuple[bool, set[str]]]:
    def run() -> tuple[bool, set[str]]:
        enter_namespace(name)
        options = rpc.Options(
            init_method=place, host=f"10.213.0.{rank + 1}", token="shared by both hosts"
        )
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
        sent = torch.arange(2_000_000.0)
        got = rpc.rpc_sync(f"worker{1 - rank}", echo, args=(sent,))
        types = connection_types()
        rpc.shutdown()
        return torch.equal(sent, got), types

    return run


def test_workers_on_two_hosts_use_tcp(hosts: list[str]) -> None:
    """The workers share files and the name of the machine, so only a connection attempt tells that
    they are on different hosts."""
    with rendezvous_file() as place:
        with processes(*(on_host(name, n, place) for n, name in enumerate(hosts))) as started:
            for process in started:
                equal, types = process.result()
                assert equal
                assert types == {"StreamConnection"}


def test_workers_on_one_host_use_shared_memory() -> None:
    def worker(rank: int, place: str) -> Callable[[], set[str]]:
        def run() -> set[str]:
            options = rpc.Options(init_method=place)
            rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
            rpc.rpc_sync(f"worker{1 - rank}", echo, args=(torch.ones(3),))
            types = connection_types()
            rpc.shutdown()
            return types

        return run

    with rendezvous_file() as place:
        with processes(worker(0, place), worker(1, place)) as started:
            assert [p.result() for p in started] == [{"UnixConnection"}] * 2
