"""Measure and format times."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def seconds_each(call: Callable[[], Any], count: int, warm_up: int) -> list[float]:
    """Call a function `warm_up` times, and then `count` times. Return the seconds of each of the
    `count` calls."""
    for _ in range(warm_up):
        call()
    clock = time.perf_counter
    samples = []
    for _ in range(count):
        begin = clock()
        call()
        samples.append(clock() - begin)
    return samples


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
