"""Run a library's own tests of torch's RPC on torch and on gradwire, and compare the results.

    python -m conformance.libraries path/to/test_rpc.py -k some_words

All arguments go to pytest. Use the Python of an environment in which the library, pytest and
gradwire are installed. A test has the same result if it ends in the same way and if the processes
that it starts end in the same way, for a test may not look at these.
"""

from __future__ import annotations

import json
import multiprocessing.process
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

#: The environment variables that tell the process of pytest on which library to run, and where to
#: write the results.
_LIBRARY, _RESULTS = "CONFORMANCE_LIBRARY", "CONFORMANCE_RESULTS"
_ROOT = Path(__file__).parents[1]


def main() -> int:
    arguments = sys.argv[1:]
    if not arguments:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours = (_run(library, folder, arguments) for library in ("torch", "gradwire"))
    different = [name for name in theirs if ours.get(name) != theirs[name]]
    different += [name for name in ours if name not in theirs]
    for name in different:
        print(f"{name}: {theirs.get(name)} on torch, {ours.get(name)} on gradwire")
    ran = [name for name, result in theirs.items() if result != "skipped"]
    passed = sum(theirs[name] == "passed" for name in ran)
    same = len(set(ran) - set(different))
    print(f"{len(ran)} tests, {passed} pass on torch, {same} have the same result on gradwire")
    return 1 if different or not ran else 0


def _run(library: str, folder: str, arguments: list[str]) -> dict[str, str]:
    """Run the tests on a library, and return the results by the names of the tests."""
    results = Path(folder) / library
    paths = [str(_ROOT), str(_ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        _LIBRARY: library,
        _RESULTS: str(results),
    }
    command = [sys.executable, "-m", "pytest", "-p", __spec__.name, "-p", "no:cacheprovider"]
    subprocess.run([*command, *arguments], env=environment, check=False)
    if not results.exists():
        sys.exit(f"pytest wrote no results of the tests on {library}")
    loaded: dict[str, str] = json.loads(results.read_text())
    return loaded


# -- in the process of pytest, which loads this module as a plugin

_results: dict[str, str] = {}
#: Maps the ids of the processes that a test has started, and that have failed, to their exit codes.
_failed_processes: dict[int, int] = {}


def pytest_configure() -> None:
    join = multiprocessing.process.BaseProcess.join

    def join_and_note(self: Any, timeout: float | None = None) -> None:
        join(self, timeout)
        # Programs end idle processes with SIGTERM.
        if self.exitcode not in (None, 0, -signal.SIGTERM):
            _failed_processes[self.pid] = self.exitcode

    multiprocessing.process.BaseProcess.join = join_and_note  # type: ignore[method-assign]


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        result = report.outcome
        if _failed_processes:
            result += f", processes ended with {sorted(_failed_processes.values())}"
            _failed_processes.clear()
        _results[report.nodeid] = result


def pytest_unconfigure() -> None:
    Path(os.environ[_RESULTS]).write_text(json.dumps(_results))


if os.environ.get(_LIBRARY) == "gradwire":
    # Before pytest imports the library.
    import gradwire.compat

    gradwire.compat.install()

if __name__ == "__main__":
    sys.exit(main())
