"""Passing a made-up token to the other workers of one machine and one user.

The first worker of a group makes up a token if the program gives none. Every process that can
connect to one of torch's TCP stores can read it, so the token must not go there. The worker writes
the token to a temporary file that only its user can read, and the store gets the path of the file.
A worker on another machine, or of another user, cannot read the file.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import weakref

from gradwire.errors import SetupError

_PREFIX = "gradwire-token-"
_GIVE_A_TOKEN = (
    "Give all workers the same secret with the option token or the variable GRADWIRE_TOKEN"
)


class TokenFile:
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


def read_token_file(path: str) -> str:
    """Return the token in a file that another worker has written. Raise SetupError if the file is
    not there, or if another user could have written it."""
    try:
        if not os.path.basename(path).startswith(_PREFIX):
            raise PermissionError(f"{path!r} is not a token file")
        # Anybody may have written the path into the store. So the path must not lead to something
        # that blocks, and the file must be one that only this user can write.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor) as file:
            if not _is_private(os.fstat(descriptor)):
                raise PermissionError(f"other users can use the file {path!r}")
            return file.read()
    except OSError as error:
        raise SetupError(
            "this worker cannot read the token that the first worker of the group has made up: "
            f"{error}. A made-up token reaches workers of the same user on the same machine only. "
            + _GIVE_A_TOKEN
        ) from error


def check_file_store(path: str) -> None:
    """Raise SetupError if other users can read or write the file of a `file://` store, so that a
    made-up token must not be written there."""
    if not _is_private(os.stat(path)):
        raise SetupError(
            f"the file {path!r} of the rendezvous store belongs to another user, or its mode lets "
            "other users read it, so the group's token must not be made up and written there. Name "
            "a file that does not exist yet, or take the permissions away (chmod 600). Or: "
            + _GIVE_A_TOKEN
        )


def _is_private(status: os.stat_result) -> bool:
    """Return whether this is a file that only the user of this process can read and write."""
    if not hasattr(os, "geteuid"):
        return True  # Windows has no such modes; a temporary folder belongs to one user there.
    return (
        stat.S_ISREG(status.st_mode)
        and status.st_uid == os.geteuid()
        and not stat.S_IMODE(status.st_mode) & 0o077
    )
