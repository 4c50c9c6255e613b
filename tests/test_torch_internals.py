"""Private names of torch: one module looks them up, and a missing one is noticed at import."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import gradwire
from gradwire._core import torch_internals
from tests import matrix

PACKAGE = Path(next(iter(gradwire.__path__)))
MODULES = sorted(PACKAGE.rglob("*.py"))
#: Private names of Python's own modules.
PYTHON = {"_exit", "_current_frames", "_getframe"}


def defined_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module defines, or writes as a text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Constant) and re.fullmatch(r"_\w+", str(node.value)):
            yield node.value


def foreign_private_names(source: str, defined: set[str]) -> set[str]:
    """Return the private names that a module uses and that gradwire does not define."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names.update((node.module or "").split("."), (alias.name for alias in node.names))
    return {
        name
        for name in names
        if name.startswith("_") and not name.startswith("__") and name not in defined | PYTHON
    }


def test_one_module_looks_up_the_private_names_of_torch() -> None:
    defined = {name for path in MODULES for name in defined_names(ast.parse(path.read_text()))}
    assert foreign_private_names("torch._C._newer(x._newest)", defined) == {
        "_C",
        "_newer",
        "_newest",
    }
    assert foreign_private_names("from torch._newer import x", defined) == {"_newer"}
    for path in MODULES:
        if path.name != "torch_internals.py":
            found = foreign_private_names(path.read_text(), defined)
            assert not found, f"{path}: move {sorted(found)} to _core/torch_internals.py"


@pytest.mark.parametrize("missing", ["torch._C._current_graph_task_id", "torch._neg_view"])
def test_a_torch_without_a_needed_function_is_refused_at_import(missing: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import torch\ndel {missing}\nimport gradwire.rpc"],
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: gradwire uses "), done.stderr
    assert missing in last
    assert f"torch {torch.__version__}" in last
    assert f"from {torch_internals.CHECKED_ON[0]} to {torch_internals.CHECKED_ON[-1]}" in last


def test_a_missing_attribute_is_refused() -> None:
    tensor = torch.ones(())
    torch_internals.check_attributes(tensor, "tensors", ("_version",))
    with pytest.raises(ImportError, match="the attribute _gone of tensors, which torch"):
        torch_internals.check_attributes(tensor, "tensors", ("_version", "_gone"))


def test_the_matrix_runs_the_versions_that_the_private_names_were_checked_on() -> None:
    assert sorted(matrix.PAIRS.values()) == sorted(torch_internals.CHECKED_ON)
