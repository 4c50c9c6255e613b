"""When a thread spins, and when it sleeps at once."""

from __future__ import annotations

import pytest

from gradwire._core.transport import spin
from gradwire._core.transport.spin import MAX_FAILED_SPINS, SPIN_SECONDS, SpinThenSleep

SHORT, LONG = SPIN_SECONDS / 2, SPIN_SECONDS * 10


class SimulatedClock:
    """A clock that advances when `poll` is called, and an event at a given time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.event_at = 0.0
        self.slept = False
        self.polls = 0

    def poll(self, timeout: float | None) -> bool:
        self.polls += 1
        self.now += SPIN_SECONDS / 100
        if timeout is None and self.now < self.event_at:
            self.slept = True
            self.now = self.event_at
        return self.now >= self.event_at

    def wait(self, waiting: SpinThenSleep, seconds: float) -> bool:
        """Wait for an event that happens after some seconds. Return whether the thread slept."""
        self.event_at, self.slept = self.now + seconds, False
        assert waiting.wait(self.poll, None)
        return self.slept


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimulatedClock:
    clock = SimulatedClock()
    monkeypatch.setattr(spin, "perf_counter", lambda: clock.now)
    return clock


def test_a_short_wait_makes_the_next_one_spin(clock: SimulatedClock) -> None:
    waiting = SpinThenSleep()
    assert clock.wait(waiting, SHORT)
    assert not clock.wait(waiting, SHORT)


def test_a_thread_does_not_spin_before_a_wait_was_short(clock: SimulatedClock) -> None:
    waiting = SpinThenSleep()
    for _ in range(3):
        assert clock.wait(waiting, LONG)
    assert clock.polls == 3


def test_a_single_long_wait_does_not_end_the_spinning(clock: SimulatedClock) -> None:
    waiting = SpinThenSleep()
    clock.wait(waiting, SHORT)
    for _ in range(5):
        assert clock.wait(waiting, LONG)
        assert not clock.wait(waiting, SHORT)


def test_a_few_long_waits_in_a_row_end_the_spinning(clock: SimulatedClock) -> None:
    waiting = SpinThenSleep()
    clock.wait(waiting, SHORT)
    for _ in range(MAX_FAILED_SPINS):
        assert clock.wait(waiting, LONG)
    assert clock.wait(waiting, SHORT)
    assert not clock.wait(waiting, SHORT)  # the wait before was short, although it slept


def test_a_timeout_of_zero_polls_once(clock: SimulatedClock) -> None:
    waiting = SpinThenSleep()
    clock.wait(waiting, SHORT)
    clock.event_at = clock.now + SHORT
    assert not waiting.wait(clock.poll, 0)
    assert clock.now < clock.event_at


def test_a_poll_without_result_is_no_short_wait(clock: SimulatedClock) -> None:
    waiting = SpinThenSleep()
    clock.event_at = clock.now + SHORT
    assert not waiting.wait(clock.poll, 0)
    assert clock.wait(waiting, SHORT)
