"""Ids that are unique in a group without any communication.

An id has 64 bits. The high 16 bits are the id of the worker that made it. The low 48 bits are a
counter of that worker.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass

from gradwire.errors import SetupError

COUNTER_BITS = 48
COUNTER_MASK = (1 << COUNTER_BITS) - 1
MAX_WORKERS = 1 << 16
MAX_NAME_LENGTH = 128
#: This bit is set in the id of an autograd context whose gradients go into `.grad`. So a worker
#: that gets the id knows where to put the gradients.
INTO_GRAD = 1 << (COUNTER_BITS - 1)


class IdSource:
    """Makes the ids of one worker. Any thread may call `next` to get a new id."""

    def __init__(self, worker_id: int):
        if not 0 <= worker_id < MAX_WORKERS:
            raise ValueError(f"a worker id is between 0 and {MAX_WORKERS - 1}, not {worker_id}")
        self.next: Callable[[], int] = itertools.count(worker_id << COUNTER_BITS).__next__


def creator(unique_id: int) -> int:
    """Return the id of the worker that made `unique_id`."""
    return unique_id >> COUNTER_BITS


def serial(unique_id: int) -> int:
    """Return the low 48 bits of `unique_id`, a counter of the worker that made this id."""
    return unique_id & COUNTER_MASK


def max_id(worker_id: int) -> int:
    """Return the highest id that a worker can make."""
    return worker_id << COUNTER_BITS | COUNTER_MASK


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """The name of a worker, and its id in the group.

    >>> WorkerInfo("trainer", 0)
    WorkerInfo(id=0, name=trainer)
    """

    name: str
    id: int

    def __post_init__(self) -> None:
        if self.name.isidentifier() and len(self.name) < MAX_NAME_LENGTH and self.name.isascii():
            return  # Most names pass this quick check, and need no regular expression.
        if not self.name:
            raise SetupError("Worker name must be non-empty")
        if len(self.name) >= MAX_NAME_LENGTH:
            raise SetupError(
                f"Worker name must be shorter than {MAX_NAME_LENGTH} characters, not "
                f"{len(self.name)}"
            )
        if not re.fullmatch("[A-Za-z0-9-_:]*", self.name):
            raise SetupError(f"Worker name must match ^[A-Za-z0-9-_:]*$, {self.name!r} does not")

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


#: The worker to call, given by its name, by its id or as a WorkerInfo.
To = str | int | WorkerInfo
