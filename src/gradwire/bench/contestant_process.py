"""The program of one process of a contestant, which is a library that is measured:
``python contestant_process.py DESCRIPTOR``.

The process talks to the measuring process (`side_by_side`) over the socket with the number
DESCRIPTOR, which it inherits.

Two versions of gradwire can be compared, each in processes of its own. So this program is told the
folder to import gradwire from. It is a plain script without imports of gradwire, because these
would choose a version too early. The package `gradwire.bench` always comes from the folder of this
file, so that the same code measures both versions. This code must work with either version, so
suites that compare versions use only public functions of gradwire.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import traceback
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType


def main() -> None:
    # Ignore Ctrl-C here: it also reaches the measuring process, which then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    sys.path[:], source = connection.recv()
    import_gradwire(source)
    contestant, rank = connection.recv()
    with contestant.join(rank) as tools:
        connection.send([])
        with contextlib.suppress(EOFError):
            while True:
                case, count = connection.recv()
                try:
                    connection.send(case.measure(tools, count))
                except Exception:
                    connection.send(traceback.format_exc())


def import_gradwire(source: str | None) -> None:
    """Import gradwire from the folder `source`, or from `sys.path` if `source` is None. Make the
    folder of this file the package `gradwire.bench`."""
    if source is not None:
        sys.path.insert(0, source)
    package = import_module("gradwire")
    if source is not None and Path(source) not in Path(package.__file__ or "").parents:
        raise ImportError(f"imported gradwire from {package.__file__}, not from {source}")
    # Make `gradwire.bench` an empty module whose path is the folder of this file. Then Python finds
    # the submodules there, but does not run `gradwire/bench/__init__.py`, which only the measuring
    # process needs.
    bench = ModuleType("gradwire.bench")
    bench.__path__ = [str(Path(__file__).parent)]
    sys.modules["gradwire.bench"] = package.__dict__["bench"] = bench


if __name__ == "__main__":
    main()
