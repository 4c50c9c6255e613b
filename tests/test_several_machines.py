"""Workers on several machines. Network namespaces stand for the machines: each has an address and a
loopback of its own, and shares nothing else of the network."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ADDRESSES = ("10.0.0.1", "10.0.0.2")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """Two network namespaces with the addresses of the documentation, joined by a cable."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need the command ip, and root")
    suffix = secrets.token_hex(3)
    names = [f"gw-{suffix}-{number}" for number in range(2)]
    ends = [f"gw{suffix}{number}" for number in range(2)]
    with ExitStack() as cleanup:
        try:
            for name in names:
                ip("netns", "add", name)
                cleanup.callback(ip, "netns", "delete", name)
            ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names


def commands_of_the_page() -> list[str]:
    page = (ROOT / "docs" / "machines.md").read_text()
    return re.findall(r"^```\n(GRADWIRE_TOKEN=.*?)^```", page, re.MULTILINE | re.DOTALL)


def test_the_commands_of_the_documentation_connect_two_machines(machines: list[str]) -> None:
    commands = commands_of_the_page()
    assert len(commands) == 2
    variables = {
        **os.environ,
        "TOKEN": secrets.token_hex(32),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
    }
    running = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, "sh", "-c", command],
            cwd=ROOT,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, command in zip(machines, commands, strict=True)
    ]
    try:
        printed = [process.communicate(timeout=60)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    # torch's store may print warnings, because it finds no host names for the addresses.
    assert printed[0].splitlines()[-1] == "gradient of x: tensor([3., 4.])", printed[0]
    assert printed[1].splitlines()[-1] == "gradient of weight: tensor([1., 2.])", printed[1]
