"""Passing a made-up token to the other workers of one machine and one user.

The first worker of a group makes up a token if the program gives none. It must not put the token
into one of torch's TCP stores, because every process that can connect to the store can read the
store, and write to it. So it writes the token to a file in a folder that only its user can use, and
puts the random name of the file into the store. A worker on another machine, or of another user,
cannot read the file. And whatever a stranger puts into the store, it can only name a file of that
folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import tempfile
import weakref

from gradwire._core.token import check_private_file
from gradwire.errors import SetupError

_NAME = re.compile("[0-9a-f]{32}")
_TOKEN = re.compile(b"[0-9a-f]{64}")
_ADVICE = "Give all workers the same secret with the option token or the variable GRADWIRE_TOKEN"
#: A symbolic link, which could lead out of the folder, is not followed.
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


def make_up_token() -> str:
    """Return a new random token."""
    return secrets.token_hex(32)


class MadeUpTokenFile:
    """A file with the made-up token of a group. Only the user of this process can read it."""

    def __init__(self, token: str):
        #: The name of the file in the folder of the user, which goes into the store.
        self.name = secrets.token_hex(16)
        try:
            path = os.path.join(_private_folder(), self.name)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK
            descriptor = os.open(path, flags, 0o600)
        except (OSError, SetupError) as error:
            raise SetupError(
                f"this worker cannot pass a made-up token to the other workers: {error}. {_ADVICE}"
            ) from error
        self._remove = weakref.finalize(self, _remove, path, os.getpid())
        with open(descriptor, "w") as file:
            file.write(token)

    def close(self) -> None:
        """Delete the file. This also happens when the process exits."""
        self._remove()


def _remove(path: str, owner: int) -> None:
    if os.getpid() == owner:  # A forked child must not delete the file of its parent.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _private_folder() -> str:
    """Return the folder for the token files of this user, and create it if it is missing. Raise
    SetupError if other users could have put files there."""
    user = f"-{os.geteuid()}" if os.name == "posix" else ""
    path = os.path.join(tempfile.gettempdir(), f"gradwire{user}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise SetupError(f"{path!r} is not a folder")
    # On Windows, each user has a temporary folder, and the mode does not tell who can use it.
    if os.name == "posix":
        if status.st_uid != os.geteuid():
            raise SetupError(f"the folder {path!r} belongs to another user, {status.st_uid}")
        if status.st_mode & 0o077:
            raise SetupError(f"the folder {path!r} is open to other users")
    return path


def read_made_up_token(name: str) -> str:
    """Return the token in the file of a `MadeUpTokenFile`. Raise SetupError if the file is not
    there, or if another user could have written the file. The name comes from the store, where
    anybody may have put any text."""
    try:
        return _read(name)
    except (OSError, SetupError) as error:
        raise SetupError(
            "this worker cannot read the token that the first worker of the group has made up: "
            f"{error}. A made-up token reaches workers of the same user on the same machine only. "
            + _ADVICE
        ) from error


def _read(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise SetupError(
            f"the rendezvous store has {name!r}, which is not the name of a token file"
        )
    path = os.path.join(_private_folder(), name)
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _NO_LINK
    with open(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        check_private_file(status, f"the token file {path!r}")
        if os.name == "posix" and status.st_uid != os.geteuid():
            raise SetupError(f"the token file {path!r} belongs to another user, {status.st_uid}")
        content = file.read(100)
    if not _TOKEN.fullmatch(content):
        raise SetupError(f"the file {path!r} does not hold a made-up token")
    return content.decode()


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
