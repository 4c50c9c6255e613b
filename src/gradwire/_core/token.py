"""The group's token: where a process gets it from, and which tokens are accepted.

No text of an error shows a token, because errors are logged.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from gradwire.errors import SetupError

#: The environment variable that gives the group's token if the options do not.
TOKEN_VARIABLE = "GRADWIRE_TOKEN"
#: The environment variable that names a file with the token, if nothing else gives the token.
TOKEN_FILE_VARIABLE = "GRADWIRE_TOKEN_FILE"
#: An eavesdropper can try out short tokens. The command in `_ADVICE` makes 64 characters.
MIN_TOKEN_LENGTH = 16

_ADVICE = 'This makes a good one: python -c "import secrets; print(secrets.token_hex(32))"'
_MAX_FILE_BYTES = 4096

#: The value that GRADWIRE_TOKEN had before this process removed the variable from its environment.
#: None if the variable was never set.
_taken: str | None = None


def check_token(token: str, source: str) -> str:
    """Return `token`. Raise SetupError if it is too easy to guess; `source` says where it comes
    from."""
    if not isinstance(token, str):
        raise SetupError(f"{source} must be a string, not {type(token).__name__}")
    try:
        token.encode()
    except UnicodeEncodeError:
        raise SetupError(f"{source} is not valid text. {_ADVICE}") from None
    if len(token) < MIN_TOKEN_LENGTH:
        found = f"has only {len(token)}" if token else "is empty"
        raise SetupError(
            f"{source} {found}; a token has at least {MIN_TOKEN_LENGTH} characters. {_ADVICE}"
        )
    return token


def token_from_environment() -> str | None:
    """Return the token that the environment gives, or None.

    The variable GRADWIRE_TOKEN is removed from the environment, so that the programs that this
    process starts do not inherit it. This process, and forked ones, remember the token."""
    global _taken
    token = os.environ.get(TOKEN_VARIABLE)
    if token is not None:
        # Remember the token before the variable is removed: another thread may do the same now.
        _taken = check_token(token, f"the variable {TOKEN_VARIABLE}")
        with suppress(KeyError):
            del os.environ[TOKEN_VARIABLE]
    if _taken is not None:
        return _taken
    path = os.environ.get(TOKEN_FILE_VARIABLE)
    return None if path is None else token_from_file(path, f"the variable {TOKEN_FILE_VARIABLE}")


def token_from_file(path: str | os.PathLike[str], source: str) -> str:
    """Return the token in a file that nobody but its owner can read. `source` is for error
    messages: it says which option or variable, for example, gives the path of the file."""
    what = f"the token file {os.fspath(path)!r} ({source})"
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            check_private_file(os.fstat(file.fileno()), what)
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SetupError(f"{what} cannot be read: {error.strerror}") from None
    if len(content) > _MAX_FILE_BYTES:
        raise SetupError(f"{what} has more than {_MAX_FILE_BYTES} bytes, so it holds no token")
    try:
        token = content.decode().strip()
    except UnicodeDecodeError:
        raise SetupError(f"{what} is no text, so it holds no token") from None
    return check_token(token, f"the token in {what}")


def _open_at_once(path: str, flags: int) -> int:
    """Open a file. If the file is a named pipe, do not wait until a process writes to it."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def check_private_file(status: os.stat_result, what: str) -> None:
    """Raise SetupError if other users can read or write a file. `what` names the file."""
    if not stat.S_ISREG(status.st_mode):
        raise SetupError(f"{what} is not a regular file")
    if os.name != "posix":
        return  # On Windows, the mode does not tell who can read the file.
    if status.st_mode & 0o077:
        raise SetupError(
            f"{what} is open to other users: its mode is {stat.S_IMODE(status.st_mode):03o}. Run "
            "chmod 600 on it, and make a new token if others may have read this one"
        )
    if status.st_uid not in (os.geteuid(), 0):
        raise SetupError(
            f"{what} belongs to user {status.st_uid}. It must belong to the user of this process, "
            f"{os.geteuid()}, or to root"
        )
