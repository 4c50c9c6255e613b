"""When a thread looks for something again, and when it goes to sleep."""

from __future__ import annotations

import pytest

from gradwire.transport import eager
from gradwire.transport.eager import LOOK_SECONDS, PATIENCE, Eager

SOON, LATE = LOOK_SECONDS / 2, LOOK_SECONDS * 10


class World:
    """Where time passes when somebody looks, and something comes at a given time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.comes = 0.0
        self.slept = False
        self.looks = 0

    def look(self, timeout: float | None) -> bool:
        self.looks += 1
        self.now += LOOK_SECONDS / 100
        if timeout is None and self.now < self.comes:
            self.slept = True
            self.now = self.comes
        return self.now >= self.comes

    def wait(self, waiting: Eager, seconds: float) -> bool:
        """Whether who waits for what comes after that time sleeps over it."""
        self.comes, self.slept = self.now + seconds, False
        assert waiting.wait(self.look, None)
        return self.slept


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(eager, "perf_counter", lambda: world.now)
    return world


def test_what_came_soon_is_looked_for_the_next_time(world: World) -> None:
    waiting = Eager()
    assert world.wait(waiting, SOON)
    assert not world.wait(waiting, SOON)


def test_nobody_looks_for_what_never_came_soon(world: World) -> None:
    waiting = Eager()
    for _ in range(3):
        assert world.wait(waiting, LATE)
    assert world.looks == 3


def test_one_late_answer_does_not_make_the_next_one_late(world: World) -> None:
    waiting = Eager()
    world.wait(waiting, SOON)
    for _ in range(5):
        assert world.wait(waiting, LATE)
        assert not world.wait(waiting, SOON)


def test_who_looked_in_vain_a_few_times_in_a_row_sleeps_at_once(world: World) -> None:
    waiting = Eager()
    world.wait(waiting, SOON)
    for _ in range(PATIENCE):
        assert world.wait(waiting, LATE)
    assert world.wait(waiting, SOON)
    assert not world.wait(waiting, SOON)  # it came soon, if only to one who slept


def test_who_must_not_wait_looks_once(world: World) -> None:
    waiting = Eager()
    world.wait(waiting, SOON)
    world.comes = world.now + SOON
    assert not waiting.wait(world.look, 0)
    assert world.now < world.comes  # it is still to come


def test_to_find_nothing_at_once_is_not_to_find_something_soon(world: World) -> None:
    waiting = Eager()
    world.comes = world.now + SOON
    assert not waiting.wait(world.look, 0)
    assert world.wait(waiting, SOON)
