"""Ids that are unique in a group without asking anyone.

An id is 64 bits: the worker that made it in the high 16, a counter in the low 48.
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
#: Set in the id of an autograd context whose gradients go into `.grad`: everybody who sees the id
#: must know that.
INTO_GRAD = 1 << (COUNTER_BITS - 1)


class IdSource:
    """Hands out ids for one worker, from any thread."""

    def __init__(self, worker_id: int):
        if not 0 <= worker_id < MAX_WORKERS:
            raise ValueError(f"a worker id is between 0 and {MAX_WORKERS - 1}, not {worker_id}")
        self.next: Callable[[], int] = itertools.count(worker_id << COUNTER_BITS).__next__


def creator(id: int) -> int:
    """The worker that made this id."""
    return id >> COUNTER_BITS


def serial(id: int) -> int:
    """The count of this id at the worker that made it."""
    return id & COUNTER_MASK


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Who a worker is: its name and its id in the group."""

    name: str
    id: int

    def __post_init__(self) -> None:
        if self.name.isidentifier() and len(self.name) < MAX_NAME_LENGTH and self.name.isascii():
            return  # nearly all are, and this is quick
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
