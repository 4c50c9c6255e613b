"""One way down: a file imports only from its own room and from rooms below."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import gradwire

PACKAGE = Path(next(iter(gradwire.__path__)))

# From top to bottom; names of files and folders of the package.
ROOMS = [
    {"__main__", "cli"},
    {"compat"},
    {"launch", "bench", "testing"},
    {"__init__", "rpc", "autograd", "optim", "nn"},
    {"worker"},
    {"gradients"},
    {"refs"},
    {"agent"},
    {"transport"},
    {"wire"},
    {"current", "config", "ids", "errors", "_version"},
]


def level(room: str) -> int:
    found = [index for index, names in enumerate(ROOMS) if room in names]
    assert found, f"{room} has no place among the rooms: add it where it belongs"
    return found[0]


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative imports hide where things come from"
            if node.module == "gradwire":
                modules = [f"gradwire.{alias.name}" for alias in node.names]
            else:
                modules = [node.module or ""]
        for module in modules:
            parts = module.split(".")
            if parts[0] == "gradwire":
                rooms.add(parts[1] if len(parts) > 1 else "__init__")
    return rooms


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.name))
def test_imports_go_down(path: Path) -> None:
    here = level(room_of(path))
    for room in imported_rooms(path):
        if (PACKAGE / room).is_dir() or (PACKAGE / f"{room}.py").exists():
            assert level(room) >= here, f"{path.name} imports {room}, which is above it"


def test_the_wire_is_pure() -> None:
    """No sockets, threads to start, or clocks: encoding depends on values alone."""
    for path in (PACKAGE / "wire").glob("*.py"):
        tree = ast.parse(path.read_text())
        names = {
            alias.name.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        assert not names & {"socket", "time", "select", "os", "subprocess", "asyncio"}, path.name
