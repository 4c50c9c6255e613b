"""Tracebacks as a user of gradwire reads them: with the user's frames, and few of gradwire's own.

Frames of gradwire are *folded*: one line takes the place of several that follow each other. At the
level DEBUG of the logger `gradwire`, all frames are shown.
"""

from __future__ import annotations

import logging
import os
import traceback
from itertools import groupby
from traceback import FrameSummary, StackSummary, TracebackException
from types import TracebackType
from typing import Any, TypeVar

import torch

from gradwire import errors
from gradwire.errors import GradwireError, RemoteTraceback

E = TypeVar("E", bound=BaseException)

_logger = logging.getLogger("gradwire")

#: The files whose frames are folded. `torch.futures` is among them because gradwire's futures call
#: it and it calls gradwire back, so its frames lie between frames of gradwire.
_OWN_FILES = (os.path.join(os.path.dirname(errors.__file__), ""), str(torch.futures.__file__))
#: The packages with code that encodes and decodes values. A frame of any other package is a frame
#: of the user's code, for example of a `__reduce__` method.
_MACHINERY = {"gradwire", "pickle", "copyreg", "importlib", "cloudpickle", "torch"}


def format_error(error: BaseException) -> str:
    """Return the text of an exception with its traceback and its notes. Frames of gradwire are
    folded. (Python 3.10 does not format notes by itself, so this function appends them.)"""
    try:
        formatted = TracebackException(type(error), error, error.__traceback__)
        _fold(formatted)
        lines = list(formatted.format())
        if not hasattr(formatted, "__notes__"):
            lines += [f"{note}\n" for note in getattr(error, "__notes__", ())]
    except Exception as trouble:
        return f"{type(error).__qualname__}, whose traceback cannot be formatted: {trouble!r}\n"
    return "".join(lines)


def format_frames(trace: TracebackType | None) -> str:
    """Return the text of the frames of a traceback. Frames of gradwire are folded."""
    return "".join(_FoldedStack(traceback.extract_tb(trace)).format())


def trimmed(error: E) -> E:
    """Remove the traceback of an exception, and return the exception. The function that called
    gradwire is still shown, because Python adds its frame when the exception is raised.

    Only exceptions from other workers and errors of gradwire are changed, since their text says
    enough. The traceback of any other exception may show a bug."""
    expected = isinstance(error, GradwireError) or isinstance(error.__cause__, RemoteTraceback)
    if expected and not _keeps_all_frames():
        error.__traceback__ = None
    return error


def worth_showing(cause: BaseException) -> BaseException | None:
    """Return `cause` if its traceback tells the user something, otherwise None. The result becomes
    the cause of a new error, and the text of that error already contains the text of `cause`. A
    traceback tells something if it has a frame of the user's code, or comes with a traceback from
    another worker."""
    adds_something = (
        isinstance(cause.__cause__, RemoteTraceback)
        or _has_user_frames(cause)
        or _keeps_all_frames()
    )
    return cause if adds_something else None


def _has_user_frames(error: BaseException) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    packages = (str(frame.f_globals.get("__name__")).partition(".")[0] for frame, _ in frames)
    return any(package not in _MACHINERY for package in packages)


def _keeps_all_frames() -> bool:
    return _logger.isEnabledFor(logging.DEBUG)


class _FoldedStack(StackSummary):
    """The frames of a traceback. If several frames of gradwire follow each other, its text has one
    line for all of them."""

    def format(self, **options: Any) -> list[str]:
        lines = []
        for is_own, frames in groupby(self, _is_own):
            group = list(frames)
            if is_own:
                lines.append(f"  ({len(group)} frame{'s' * (len(group) > 1)} of gradwire)\n")
            else:
                lines += StackSummary.from_list(group).format(**options)
        return lines


def _is_own(frame: FrameSummary) -> bool:
    return frame.filename.startswith(_OWN_FILES) and not _keeps_all_frames()


def _fold(formatted: TracebackException | None) -> None:
    """Fold the frames of gradwire in the traceback of an exception, of its cause and of its
    context, and so on."""
    while formatted is not None:
        formatted.stack = _FoldedStack(formatted.stack)
        # Only an exception group has inner exceptions.
        for inner in getattr(formatted, "exceptions", None) or ():
            _fold(inner)
        _fold(formatted.__context__)
        formatted = formatted.__cause__
