"""Passing a made-up token to the other workers of one machine and one user.

The first worker of a group makes up a token if the program gives none. It must not put the token
into one of torch's TCP stores, because every process that can connect to the store can read the
store. So it writes the token to a temporary file that only its user can read, and puts the path of
the file into the store. A worker on another machine, or of another user, cannot read the file.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref

from gradwire._core.token import check_private_file, token_from_file
from gradwire.errors import SetupError

_PREFIX = "gradwire-token-"
_ADVICE = "Give all workers the same secret with the option token or the variable GRADWIRE_TOKEN"


class MadeUpTokenFile:
    """A temporary file with the token of a group. Only the user of this process can read it."""

    def __init__(self, token: str):
        descriptor, self.path = tempfile.mkstemp(prefix=_PREFIX)  # mkstemp sets the mode 0600.
        self._remove = weakref.finalize(self, _remove, self.path, os.getpid())
        with open(descriptor, "w") as file:
            file.write(token)

    def close(self) -> None:
        """Delete the file. This also happens when the process exits."""
        self._remove()


def _remove(path: str, owner: int) -> None:
    if os.getpid() == owner:  # A forked child must not delete the file of its parent.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def read_made_up_token(path: str) -> str:
    """Return the token in the file of a `MadeUpTokenFile`. Raise SetupError if the file is not
    there, or if another user could have written the file. The path comes from the store, where
    anybody may have put the path of another file."""
    try:
        if not os.path.basename(path).startswith(_PREFIX):
            raise SetupError(f"{path!r} is not the name of such a file")
        return token_from_file(path, "named by the rendezvous store")
    except SetupError as error:
        raise SetupError(
            "this worker cannot read the token that the first worker of the group has made up: "
            f"{error}. A made-up token reaches workers of the same user on the same machine only. "
            + _ADVICE
        ) from error


def check_store_file(path: str) -> None:
    """Raise SetupError if other users can read or write the file of a `file://` store. A made-up
    token is written to the store, so that file must be private."""
    try:
        check_private_file(os.stat(path), f"the file {path!r} of the rendezvous store")
    except SetupError as error:
        raise SetupError(
            f"no token may be made up and written to a file that others can read: {error}. Or name "
            f"a file that does not exist yet. Or: {_ADVICE}"
        ) from error
