"""Gathering a value of every worker on all of them, with calls.

The worker whose name comes first in the alphabet leads. The others bring it their values, it
waits until it has all of them, and takes them to everybody.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from gradwire.worker import SHUTDOWN_SECONDS


@dataclass
class AllGatherStates:
    """One gathering, on one worker."""

    gathered_objects: dict[str, Any] = field(default_factory=dict)
    proceed_signal: threading.Event = field(default_factory=threading.Event)


class Gatherings:
    """The gatherings of one worker, numbered by those who take part."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, ...]] = Counter()
        self._states: defaultdict[str, AllGatherStates] = defaultdict(AllGatherStates)

    def begin(self, names: set[str]) -> str:
        """The id of the next gathering of these workers, the same on all of them."""
        key = tuple(sorted(names))
        with self._lock:
            number = self._counts[key]
            self._counts[key] += 1
        return f"{'|'.join(key)}#{number}"

    def add(self, id: str, name: str, value: Any, names: set[str]) -> None:
        """On the leader: a value has come."""
        with self._lock:
            state = self._states[id]
            if name not in names or name in state.gathered_objects:
                raise RuntimeError(f"worker {name!r} is not expected in the gathering {id}")
            state.gathered_objects[name] = value
            if state.gathered_objects.keys() == names:
                state.proceed_signal.set()

    def conclude(self, id: str, values: dict[str, Any]) -> None:
        """On the others: all values have come."""
        with self._lock:
            state = self._states[id]
        state.gathered_objects = values
        state.proceed_signal.set()

    def wait(self, id: str, timeout: float) -> dict[str, Any]:
        """The values, when they are there, or what there is of them at the timeout."""
        with self._lock:
            state = self._states[id]
        state.proceed_signal.wait(timeout or SHUTDOWN_SECONDS)
        with self._lock:  # some may still come
            return dict(state.gathered_objects)

    def end(self, id: str) -> None:
        with self._lock:
            self._states.pop(id, None)

    def forget(self) -> None:
        """The group has parted; the next one counts from the beginning."""
        with self._lock:
            self._counts.clear()
            self._states.clear()
