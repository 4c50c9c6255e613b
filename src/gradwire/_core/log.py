"""The log of gradwire on standard error, if the variable GRADWIRE_LOG_LEVEL asks for it.

Without the variable, the program alone configures the logger ``gradwire`` and those below it.
"""

from __future__ import annotations

import logging
import os

from gradwire._core import current
from gradwire.errors import SetupError
from gradwire.options import LOG_LEVEL_VARIABLE, LOG_LEVELS


def set_up(name: str) -> None:
    """Set the level of gradwire's loggers to $GRADWIRE_LOG_LEVEL and print their lines. `name` is
    the name of the worker that this process makes."""
    level = os.environ.get(LOG_LEVEL_VARIABLE, "").upper()
    if not level:
        return
    if level not in LOG_LEVELS:
        raise SetupError(
            f"the variable {LOG_LEVEL_VARIABLE} must be one of {', '.join(LOG_LEVELS)}; it is "
            f"{os.environ[LOG_LEVEL_VARIABLE]!r}"
        )
    logger = logging.getLogger("gradwire")
    logger.setLevel(level)
    if not any(isinstance(handler, _Handler) for handler in logger.handlers):
        logger.addHandler(_Handler(name))


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]  # generic since Python 3.11
    """Prints the lines of gradwire's log with the name of the worker."""

    def __init__(self, name: str):
        super().__init__()
        #: This name stands in the lines of threads that act for no worker.
        self._worker = name
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(worker)s: %(message)s"))

    def filter(self, record: logging.LogRecord) -> bool:
        # If the program has configured logging itself, its own handlers print the line.
        return not logging.getLogger().handlers and bool(super().filter(record))

    def format(self, record: logging.LogRecord) -> str:
        record.worker = current.worker_name() or self._worker
        return super().format(record)
