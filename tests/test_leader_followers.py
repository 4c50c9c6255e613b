"""The leadership may change between any two instructions, and no work is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gradwire import rpc
from gradwire._core.rpc.executor import Executor
from gradwire.testing import cluster, runtime_of, transports_named
from gradwire.worker import Worker
from tests.processes import until


def promote_a_follower_too_early(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Take the leadership from each leader just before it sets the work of its successor, as
    happens when the system does not let it run for some milliseconds. Return a list that grows."""
    set_successor_work = executor.set_successor_work
    promoted: list[None] = []

    def set_too_late(remainder: Callable[[], None] | None) -> bool:
        if remainder is not None and executor.is_leader() and len(promoted) < 20:
            promoted.append(None)
            executor.begin_blocked_send()
        return set_successor_work(remainder)

    monkeypatch.setattr(executor, "set_successor_work", set_too_late)
    return promoted


def test_calls_are_served_by_the_next_leader(
    pair: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    promoted = promote_a_follower_too_early(runtime_of(pair[1]).agent.executor, monkeypatch)
    for number in range(50):
        assert pair[0].rpc_sync("worker1", max, (number, 2), timeout=20) == max(number, 2)
    assert promoted


def test_answers_are_handed_on_by_the_next_leader(
    pair: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    promoted = promote_a_follower_too_early(runtime_of(pair[0]).agent.executor, monkeypatch)
    futures = [pair[0].rpc_async("worker1", max, (number, 2)) for number in range(100)]
    until(lambda: all(future.done() for future in futures), "nobody waits for them, and all come")
    assert [future.value() for future in futures] == [max(number, 2) for number in range(100)]
    assert promoted


def much() -> bytes:
    return bytes(4 << 20)


def test_a_worker_that_takes_no_answers_stops_nobody_else() -> None:
    options = rpc.Options(num_worker_threads=2)
    with cluster(3, transports=transports_named("tcp"), options=options) as (frozen, server, other):
        frozen.rpc_sync("worker1", max, (1, 2))
        channel = runtime_of(frozen).agent.peers.find("worker1").channel
        assert channel is not None
        assert channel.connection.begin_reading()  # and does not read
        futures = [frozen.rpc_async("worker1", much) for _ in range(8)]
        until(
            lambda: len(runtime_of(server).agent.executor.blocked_senders) == 2,
            "all its threads are blocked",
        )
        assert other.rpc_sync("worker1", max, (1, 2)) == 2
        assert not any(future.done() for future in futures)
        channel.connection.end_reading()
        assert [len(future.wait()) for future in futures] == [4 << 20] * 8
        until(
            lambda: not runtime_of(server).agent.executor.blocked_senders,
            "no thread is blocked",
        )
