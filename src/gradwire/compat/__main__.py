"""Run a program on gradwire instead of torch's RPC: ``python -m gradwire.compat train.py``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from gradwire.compat import install


def main() -> None:
    """Install gradwire, then run the script or module named by the command line."""
    command = sys.argv[1:]
    if not command or command == ["-m"]:
        sys.exit("usage: python -m gradwire.compat (script.py | -m module) [arguments...]")
    install()
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path.insert(0, "")
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    script = command[0]
    sys.argv = command
    sys.path[0] = str(Path(script).resolve().parent)
    code = compile(Path(script).read_bytes(), script, "exec")
    # The program must run in the real module `__main__`, because its functions are sent to other
    # workers under that module name. `runpy` would use a temporary module instead. It would clear
    # that module at the end of the script, although threads of the program may still run.
    program = sys.modules["__main__"].__dict__
    for name in [name for name in program if not name.startswith("__")]:
        del program[name]
    program.update(__file__=script, __doc__=None, __spec__=None, __package__=None)
    exec(code, program)


if __name__ == "__main__":
    main()
