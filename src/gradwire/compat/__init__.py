"""gradwire in the place of torch's own RPC, for programs that are not changed.

    gradwire run --torch -n 4 train.py

or, as the first lines of a program that imports `torch.distributed.rpc`:

    import gradwire.compat
    gradwire.compat.install()

What torch has and gradwire does not want in its own API, private names and exact wording among
it, lives here and nowhere else. The modules are named after those they stand in for.
"""

from __future__ import annotations

from gradwire.compat.installing import install, is_installed, uninstall

__all__ = ["install", "is_installed", "uninstall"]
