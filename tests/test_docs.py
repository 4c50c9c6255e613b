"""The code in the documentation runs, and its links are valid.

A ``python`` block whose first line is ``# runs`` is run. The blocks of a page run in order in one
namespace, like a program.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
TOP_PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
PAGES = [*TOP_PAGES, *sorted((ROOT / "docs").glob("*.md"))]
MARK = "# runs\n"


def blocks(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the Python blocks of a page, each with the number of its first line."""
    text = page.read_text()
    for match in re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield text.count("\n", 0, match.start(1)) + 1, match[1]


def with_runnable_blocks() -> list[Path]:
    return [page for page in PAGES if any(code.startswith(MARK) for _, code in blocks(page))]


@pytest.mark.parametrize("page", with_runnable_blocks(), ids=lambda page: page.name)
def test_the_blocks_marked_as_running_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Workers import the functions of a page by name, like those of a program.
    program = ModuleType("page_" + page.stem)
    monkeypatch.setitem(sys.modules, program.__name__, program)
    for line, code in blocks(page):
        if code.startswith(MARK):
            padded = "\n" * (line - 1) + code  # so that a traceback shows the line in the page
            exec(compile(padded, str(page), "exec"), program.__dict__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_python(page: Path) -> None:
    for line, code in blocks(page):
        compile("\n" * (line - 1) + code, str(page), "exec")


def test_the_readme_shows_the_first_example_unchanged() -> None:
    shown = [code for _, code in blocks(ROOT / "README.md")]
    assert (ROOT / "examples" / "first_gradient.py").read_text() in shown


def links_to_files(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())


def links_to_headings(page: Path) -> list[tuple[str, str]]:
    return re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", page.read_text())


def test_links_are_recognized() -> None:
    assert any("://" not in target for page in PAGES for target in links_to_files(page))
    assert any("://" not in target for page in PAGES for target, _ in links_to_headings(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_are_valid(page: Path) -> None:
    for target in links_to_files(page):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_a_heading_find_one(page: Path) -> None:
    for target, anchor in links_to_headings(page):
        if "://" not in target:
            linked = page.parent / target if target else page
            assert anchor in anchors_of(linked), f"{page.name} links to {target}#{anchor}"


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 130
    assert [line for line in lines if len(line) > 100] == []


# -- the glossary: its last column names modules, its other columns what they define

GLOSSARY = ROOT / "docs" / "glossary.md"
SOURCE = ROOT / "src" / "gradwire"
DEFINED_NAME = re.compile(r"[A-Z]\w*(?:\.\w+)?")


def glossary_rows() -> list[tuple[int, str, list[str]]]:
    """Return the line number, the description and the module paths of each row."""
    rows = []
    for number, line in enumerate(GLOSSARY.read_text().splitlines(), 1):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[-1] not in ("module", "---"):
            rows.append((number, cells[1], re.findall(r"`([^`]+)`", cells[-1])))
    return rows


def module_path(name: str) -> Path:
    return ROOT / "src" / name if name.startswith("gradwire/") else SOURCE / "_core" / name


def names_defined_in(path: Path) -> set[str]:
    """Return the global names of a module, and the members of its classes as "Class.member"."""
    names: set[str] = set()
    for statement in ast.parse(path.read_text()).body:
        names.update(names_bound_by(statement))
        if isinstance(statement, ast.ClassDef):
            members = {name for part in statement.body for name in names_bound_by(part)}
            for node in ast.walk(statement):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    members.add(node.attr)
            names.update(f"{statement.name}.{member}" for member in members)
    return names


def names_bound_by(statement: ast.stmt) -> set[str]:
    if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return {statement.name}
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def test_the_glossary_names_modules_that_exist() -> None:
    rows = glossary_rows()
    assert len(rows) > 50
    missing = [
        f"line {number}: {name}"
        for number, _, modules in rows
        for name in modules
        if not module_path(name).is_file()
    ]
    assert missing == []


def test_the_glossary_names_classes_that_their_modules_define() -> None:
    missing = []
    checked = 0
    for number, description, modules in glossary_rows():
        paths = [module_path(name) for name in modules]
        defined = {name for path in paths if path.is_file() for name in names_defined_in(path)}
        for name in re.findall(r"`([^`]+)`", description):
            if paths and DEFINED_NAME.fullmatch(name):
                checked += 1
                if name not in defined:
                    missing.append(f"line {number}: {name} is not in {', '.join(modules)}")
    assert missing == []
    assert checked > 60
