"""The lead may change hands between any two instructions, and nothing is forgotten then."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gradwire import rpc
from gradwire.agent.executor import Executor
from gradwire.testing import cluster, transports_named
from gradwire.worker import Worker
from tests.processes import until


def relieve_before_it_says_what_is_left(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> list[None]:
    """Take the lead from every leader just before it says what it would leave behind; as the watch
    does when the system has not let it run for a few milliseconds. Gives a list that grows."""
    leave_behind = executor.leave_behind
    relieved: list[None] = []

    def leave_behind_too_late(remainder: Callable[[], None] | None) -> bool:
        if remainder is not None and executor.leads() and len(relieved) < 20:
            relieved.append(None)
            executor.hand_over()
        return leave_behind(remainder)

    monkeypatch.setattr(executor, "leave_behind", leave_behind_too_late)
    return relieved


def test_calls_are_served_by_the_next_leader(
    pair: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    relieved = relieve_before_it_says_what_is_left(pair[1].agent.executor, monkeypatch)
    for number in range(50):
        assert pair[0].rpc_sync("worker1", max, (number, 2), timeout=20) == max(number, 2)
    assert relieved


def test_answers_are_handed_on_by_the_next_leader(
    pair: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    relieved = relieve_before_it_says_what_is_left(pair[0].agent.executor, monkeypatch)
    futures = [pair[0].rpc_async("worker1", max, (number, 2)) for number in range(100)]
    until(lambda: all(future.done() for future in futures), "nobody waits for them, and all come")
    assert [future.value() for future in futures] == [max(number, 2) for number in range(100)]
    assert relieved


def much() -> bytes:
    return bytes(4 << 20)


def test_a_worker_that_takes_no_answers_stops_nobody_else() -> None:
    options = rpc.Options(num_worker_threads=2)
    with cluster(3, transports=transports_named("tcp"), options=options) as (frozen, server, other):
        frozen.rpc_sync("worker1", max, (1, 2))
        link = frozen.agent.peers.find("worker1").link
        assert link is not None
        assert link.connection.begin_reading()  # and does not read
        futures = [frozen.rpc_async("worker1", much) for _ in range(8)]
        until(lambda: len(server.agent.executor.sending) == 2, "all threads for it are stuck")
        assert other.rpc_sync("worker1", max, (1, 2)) == 2
        assert not any(future.done() for future in futures)
        link.connection.end_reading()
        assert [len(future.wait()) for future in futures] == [4 << 20] * 8
        until(lambda: not server.agent.executor.sending, "nobody is stuck any more")
