"""Run programs on gradwire that were written for torch's RPC.

Such a program needs no changes if it is started like this:

    gradwire run --torch -n 4 train.py

Otherwise, the program must begin with these lines, before it imports `torch.distributed.rpc`:

    import gradwire.compat
    gradwire.compat.install()

This package holds everything that only such programs need, for example torch's private names and
the exact texts of torch's errors. Each module is named after the torch module it replaces.
"""

from __future__ import annotations

from gradwire.compat.installation import install, is_installed, uninstall

__all__ = ["install", "is_installed", "uninstall"]
