"""A module imports only from its own layer and from lower layers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import gradwire

PACKAGE = Path(next(iter(gradwire.__path__)))

# From top to bottom: modules and packages, by their names below `gradwire`.
LAYERS = [
    {"__main__", "cli"},
    {"compat"},
    {"launch", "bench", "testing"},
    {"__init__", "rpc", "autograd", "optim", "nn"},
    {"worker"},
    {"_core.runtime"},
    {"_core.autograd"},
    {"_core.rref"},
    {"_core.rpc"},
    {"_core.group"},
    {"_core.transport"},
    {"_core.wire"},
    {
        "_core",
        "_core.current",
        "_core.gpus",
        "_core.ids",
        "_core.log",
        "_core.token",
        "_core.torch_internals",
        "_core.tracebacks",
        "options",
        "errors",
        "_version",
    },
]


def level(layer: str) -> int:
    levels = [index for index, names in enumerate(LAYERS) if layer in names]
    assert levels, f"{layer} is in none of the layers: add it to LAYERS"
    return levels[0]


def layer_of(parts: tuple[str, ...]) -> str:
    """Return the layer of a module, given by the parts of its name below `gradwire`."""
    if not parts:
        return "__init__"
    return ".".join(parts[:2]) if parts[0] == "_core" else parts[0]


def layer_of_file(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return layer_of(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(parts: tuple[str, ...]) -> bool:
    place = PACKAGE.joinpath(*parts)
    return place.is_dir() or place.with_suffix(".py").exists()


def imported_layers(path: Path) -> set[str]:
    layers = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"{path.name}: relative imports hide the layer of the imported module"
            )
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            package, *parts = name.split(".")
            if package == "gradwire":
                while not is_module(tuple(parts)):
                    parts.pop()
                layers.add(layer_of(tuple(parts)))
    return layers


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.name))
def test_a_module_imports_only_from_its_own_and_lower_layers(path: Path) -> None:
    here = level(layer_of_file(path))
    for layer in imported_layers(path):
        assert level(layer) >= here, f"{path.name} imports {layer}, which is above it"


def test_the_wire_layer_does_no_input_or_output() -> None:
    """Encoding depends on values alone, so these modules use no sockets and no clocks."""
    for path in (PACKAGE / "_core" / "wire").glob("*.py"):
        assert not imported_packages(path) & IMPURE, path.name
    transports = (PACKAGE / "_core" / "transport").glob("*.py")
    assert IMPURE & set().union(*map(imported_packages, transports)) >= {"socket", "os"}


IMPURE = {"socket", "time", "select", "os", "subprocess", "asyncio"}


def imported_packages(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module.split(".")[0])
    return names
