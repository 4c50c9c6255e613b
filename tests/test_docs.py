"""The documentation tells the truth where a program can check it.

A ``python`` block whose first line is ``# runs`` is run. The blocks of a page run in order and
share their names, like one program read from top to bottom.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MARK = "# runs\n"


def blocks(page: Path) -> Iterator[tuple[int, str]]:
    """The Python blocks of a page, each with the number of its first line."""
    text = page.read_text()
    for found in re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield text.count("\n", 0, found.start(1)) + 1, found[1]


def with_runnable_blocks() -> list[Path]:
    return [page for page in PAGES if any(code.startswith(MARK) for _, code in blocks(page))]


@pytest.mark.parametrize("page", with_runnable_blocks(), ids=lambda page: page.name)
def test_what_is_said_to_run_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Workers find the functions of a page by name, as they would those of a program.
    program = ModuleType("page_" + page.stem)
    monkeypatch.setitem(sys.modules, program.__name__, program)
    for line, code in blocks(page):
        if code.startswith(MARK):
            padded = "\n" * (line - 1) + code  # so that a traceback names the page's own line
            exec(compile(padded, str(page), "exec"), program.__dict__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_python(page: Path) -> None:
    for line, code in blocks(page):
        compile("\n" * (line - 1) + code, str(page), "exec")


def test_the_readme_shows_the_example_as_it_is() -> None:
    shown = [code for _, code in blocks(ROOT / "README.md")]
    assert (ROOT / "examples" / "hello.py").read_text() in shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
