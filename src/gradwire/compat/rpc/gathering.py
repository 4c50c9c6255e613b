"""Gatherings. In a gathering, several workers exchange values by calls, so that each of them gets
the values of all.

The worker whose name is first in alphabetical order is the leader of a gathering. The other
workers, the followers, send their values to the leader. When the leader has all values, it sends
them to the followers.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

#: If the program gives no timeout, a gathering waits at most this long for the values of the other
#: workers, even if they are still busy. A graceful shutdown is such a gathering.
LONGEST_WAIT_SECONDS = 3600.0


@dataclass
class AllGatherStates:
    """The values that one worker has received in one gathering (an exchange of values between
    workers), and the event that tells that these values are complete."""

    gathered_objects: dict[str, Any] = field(default_factory=dict)
    proceed_signal: threading.Event = field(default_factory=threading.Event)


class Gatherings:
    """Takes part in gatherings for one worker. In a gathering, several workers exchange values."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Maps the names of some workers to the number of gatherings (exchanges of values) that
        #: these workers have begun so far.
        self._counts: Counter[tuple[str, ...]] = Counter()
        self._states: defaultdict[str, AllGatherStates] = defaultdict(AllGatherStates)

    def begin(self, names: set[str]) -> str:
        """Return an id for the next gathering (exchange of values) of these workers. All of them
        compute the same id, because it consists of their names and the number of their gatherings
        so far."""
        key = tuple(sorted(names))
        with self._lock:
            number = self._counts[key]
            self._counts[key] += 1
        return f"{'|'.join(key)}#{number}"

    def add(self, gathering_id: str, name: str, value: Any, names: set[str]) -> None:
        """Store the value of one worker in a gathering (an exchange of values) that this worker
        leads."""
        with self._lock:
            state = self._states[gathering_id]
            if name not in names or name in state.gathered_objects:
                raise RuntimeError(
                    f"worker {name!r} is not expected in the gathering {gathering_id}"
                )
            state.gathered_objects[name] = value
            if state.gathered_objects.keys() == names:
                state.proceed_signal.set()

    def conclude(self, gathering_id: str, values: dict[str, Any]) -> None:
        """Store the values of all workers in a gathering (an exchange of values). The worker that
        leads the gathering has sent them to this worker."""
        with self._lock:
            state = self._states[gathering_id]
        state.gathered_objects = values
        state.proceed_signal.set()

    def wait(self, gathering_id: str, timeout: float) -> dict[str, Any]:
        """Wait for the values of all workers and return them. If the timeout expires, return only
        the values that have arrived so far."""
        with self._lock:
            state = self._states[gathering_id]
        state.proceed_signal.wait(timeout or LONGEST_WAIT_SECONDS)
        with self._lock:  # Return a copy, because more values can arrive after a timeout.
            return dict(state.gathered_objects)

    def end(self, gathering_id: str) -> None:
        """Remove what is stored for a gathering (an exchange of values) that is over on this
        worker."""
        with self._lock:
            self._states.pop(gathering_id, None)

    def reset(self) -> None:
        """Remove what is stored for all gatherings (exchanges of values). The next gathering gets
        the number 0 again, because all workers of the next group begin with that number."""
        with self._lock:
            self._counts.clear()
            self._states.clear()
