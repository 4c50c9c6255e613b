"""Run the test suite on several versions of Python and torch: ``make matrix``.

Each pair has a virtual environment in the user's cache folder (`GRADWIRE_MATRIX` names another
one), so that a second run starts at once. Pairs without an interpreter on this machine are listed
and left out. The exit code is 0 if the suite passed on all others.

    python -m tests.matrix                    # all pairs
    python -m tests.matrix 3.10 3.13 -k rref  # two of them, and options for pytest
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
#: The oldest Python with the oldest torch, the newest with the newest, and two in the middle.
PAIRS = {"3.10": "2.6.0", "3.11": "2.13.0", "3.12": "2.11.0", "3.13": "2.15.0"}
#: The suite runs without these packages. (Each torch asks for a setuptools that it works with.)
_NOT_NEEDED = ("mypy", "ruff", "setuptools")


class Row(NamedTuple):
    """One line of the table."""

    python: str
    torch: str
    outcome: str
    seconds: float
    succeeded: bool


def main(arguments: list[str]) -> int:
    chosen = [argument for argument in arguments if argument in PAIRS] or list(PAIRS)
    options = [argument for argument in arguments if argument not in PAIRS]
    rows = [_run(python, PAIRS[python], options) for python in chosen]
    print("\nPython  torch   outcome")
    for row in rows:
        print(f"{row.python:6}  {row.torch:6}  {row.outcome} ({row.seconds:.0f} s)")
    return 0 if all(row.succeeded for row in rows) else 1


def _run(python: str, torch: str, options: list[str]) -> Row:
    interpreter = _find_interpreter(python)
    if interpreter is None:
        return Row(python, torch, f"left out: this machine has no Python {python}", 0.0, True)
    environment = _prepare(interpreter, python, torch)
    log = environment / "tests.log"
    print(
        f"Python {python}, torch {torch}: running the suite; its output goes to {log}", flush=True
    )
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [environment / "bin" / "python", "-m", "pytest", "-p", "no:cacheprovider", *options]
    start = time.monotonic()
    with log.open("wb") as output:
        done = subprocess.run(
            command, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT, check=False
        )
    lines = log.read_text(errors="replace").splitlines()
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            print(f"  {line}")
    # Libraries may print more lines when the interpreter ends.
    summaries = [line.strip("= ") for line in lines if re.search(r"\d+ (passed|failed)", line)]
    outcome = summaries[-1] if summaries else f"no result, exit code {done.returncode}"
    succeeded = done.returncode == 0 and "passed" in outcome
    return Row(python, torch, outcome, time.monotonic() - start, succeeded)


def _find_interpreter(python: str) -> str | None:
    """Return the path of an interpreter of this version: from the search path, or from pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    installed = sorted(pyenv.glob(f"{python}.*/bin/python"), reverse=True)
    for candidate in (shutil.which(f"python{python}"), *map(str, installed)):
        if candidate is not None and _version_of(candidate) == python:
            return candidate
    return None


def _version_of(interpreter: str) -> str | None:
    """Return the version of an interpreter, or None if it cannot make virtual environments."""
    code = "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _prepare(interpreter: str, python: str, torch: str) -> Path:
    """Return the virtual environment of a pair. Make it if there is none, or if the packages that
    it needs have changed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gradwire" / "matrix"
    folder = Path(os.environ.get("GRADWIRE_MATRIX", cache)) / f"python{python}-torch{torch}"
    pins = [pin for pin in _pins() if not pin.startswith(("torch==", *_NOT_NEEDED))]
    packages = "\n".join([f"torch=={torch}", *pins])
    digest = hashlib.sha256(f"{interpreter}\n{packages}".encode()).hexdigest()
    stamp = folder / "packages.sha256"
    if stamp.exists() and stamp.read_text() == digest:
        return folder
    print(f"Python {python}, torch {torch}: installing into {folder}", flush=True)
    subprocess.run([interpreter, "-m", "venv", "--clear", folder], check=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    # torch comes first and alone: with an open range beside it, pip might choose another version.
    subprocess.run([*pip, f"torch=={torch}"], check=True)
    subprocess.run([*pip, f"torch=={torch}", *pins], check=True)
    stamp.write_text(digest)
    return folder


def _pins() -> list[str]:
    """Return the lines of constraints.txt: the pinned version of each package."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
