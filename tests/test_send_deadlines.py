"""The timeout of a call holds while the call is being sent to a worker that takes no data."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from gradwire import autograd, rpc
from gradwire._core import current
from gradwire.errors import CallTimeout, WorkerLost
from tests.processes import PATIENCE, freeze, group, until

#: The timeout of calls that must fail.
SHORT = 0.3
#: If a call with a short timeout takes this long, it hangs. It is far below `heartbeat_limit`, when
#: the connection ends.
HANGS = 15.0

RAN: Counter[Any] = Counter()
GREATEST: list[float] = []
KEPT: list[Any] = []
Key = tuple[str, int]


def pid() -> int:
    return os.getpid()


def note(key: Any, load: Any = None) -> None:
    if isinstance(load, torch.Tensor):
        GREATEST.append(float(load.max()))
    RAN[key] += 1


def greatest() -> float:
    return max(GREATEST)


def runs() -> Counter[Any]:
    return RAN


@contextmanager
def no_hang() -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < HANGS, "a call has outlived its timeout"


class Calls:
    """Calls to worker1, which is frozen, and their errors."""

    def __init__(self) -> None:
        self.errors: dict[Key, CallTimeout] = {}

    def until_one_is_withdrawn(self, name: str, make: Callable[[Key], Any]) -> None:
        """Call `make` again and again, until a call could not be sent. `make` makes a call. It
        raises the error of the call, or returns the future of the call."""
        open_calls: dict[Key, rpc.Future[Any]] = {}
        is_withdrawn = False
        while not is_withdrawn:
            key = name, len(open_calls)
            with no_hang():
                open_calls[key] = future = make(key)
            is_withdrawn = future.done() and not _timeout_of(future).may_have_run
        for key, future in open_calls.items():
            with no_hang(), pytest.raises(CallTimeout):
                future.wait()
            self.errors[key] = _timeout_of(future)

    def check_runs(self) -> None:
        """Check that no withdrawn call has run, and that each other call runs once."""
        withdrawn = [error for error in self.errors.values() if not error.may_have_run]
        for error in withdrawn:
            assert (error.worker, error.call) == ("worker1", "note")
            assert "was not sent" in str(error)
            assert "has not run there" in str(error)
        sent = {key for key, error in self.errors.items() if error.may_have_run}
        assert sent
        assert withdrawn
        until(lambda: set(get_runs()) >= sent, "the calls that were sent have run")
        assert get_runs() == dict.fromkeys(sent, 1)


def _timeout_of(future: rpc.Future[Any]) -> CallTimeout:
    error = future.exception()
    assert isinstance(error, CallTimeout)
    return error


def get_runs() -> Counter[Any]:
    counts: Counter[Any] = rpc.rpc_sync("worker1", runs, timeout=PATIENCE / 2)
    return counts


def call_async(load: Any) -> Callable[[Key], rpc.Future[Any]]:
    return lambda key: rpc.rpc_async("worker1", note, args=(key, load), timeout=SHORT)


def call_sync(load: Any) -> Callable[[Key], rpc.Future[Any]]:
    def make(key: Key) -> rpc.Future[Any]:
        future: rpc.Future[Any] = rpc.Future()
        try:
            rpc.rpc_sync("worker1", note, args=(key, load), timeout=SHORT)
        except CallTimeout as error:
            future.set_exception(error)
        return future

    return make


def with_a_frozen_worker(transport: str, body: Callable[[int], None], **options: Any) -> None:
    """Run `body` on worker0. It freezes and wakes worker1, whose process id is its argument."""

    def run(rank: int) -> None:
        if rank:
            until(lambda: RAN["end"] == 1, "worker0 has ended")
            return
        body(rpc.rpc_sync("worker1", pid))
        rpc.rpc_sync("worker1", note, args=("end",), timeout=PATIENCE / 2)

    with group(2, run, transports=(transport,), **options) as started:
        for process in started:
            process.result()


@pytest.mark.parametrize(
    ("transport", "size"), [("unix", 0), ("unix", 30_000), ("tcp", 3_000), ("tcp", 60_000)]
)
def test_calls_to_a_frozen_worker_end_at_their_timeouts(transport: str, size: int) -> None:
    def body(victim: int) -> None:
        calls = Calls()
        number = rpc.remote("worker1", max, args=(1, 2))
        assert number.to_here() == 2
        freeze(victim)
        calls.until_one_is_withdrawn("async", call_async(bytes(size)))
        # Small calls may still fit into the pipe or the socket, and each takes its whole timeout.
        calls.until_one_is_withdrawn("sync", call_sync(bytes(60_000)))
        with no_hang():
            late = rpc.remote("worker1", max, args=(1, 2), timeout=SHORT)
        for use in (
            partial(late.to_here, SHORT),
            partial(number.to_here, SHORT),
            number.rpc_sync(SHORT).bit_length,
        ):
            with no_hang(), pytest.raises(CallTimeout):
                use()
        os.kill(victim, signal.SIGCONT)
        calls.check_runs()

    with_a_frozen_worker(transport, body)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_threads_that_wait_for_their_turn_to_send_end_at_their_timeouts(transport: str) -> None:
    def body(victim: int) -> None:
        calls, load = Calls(), torch.zeros(1000)
        freeze(victim)
        calls.until_one_is_withdrawn("first", call_async(load))
        # This call has a long timeout. It waits while others give up, and is sent at the end.
        patient = threading.Thread(
            target=rpc.rpc_sync, args=("worker1", note, (("patient", 0), load), None, PATIENCE)
        )
        patient.start()
        threads = [
            threading.Thread(
                target=calls.until_one_is_withdrawn, args=(f"{number} {make.__name__}", make(load))
            )
            for number in range(4)
            for make in (call_sync, call_async)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        assert patient.is_alive()
        os.kill(victim, signal.SIGCONT)
        patient.join(PATIENCE)
        assert not patient.is_alive()
        assert get_runs()["patient", 0] == 1
        rpc.rpc_sync("worker1", forget, args=(("patient", 0),))
        assert len({name for name, _ in calls.errors}) == 9
        calls.check_runs()

    with_a_frozen_worker(transport, body)


def forget(key: Key) -> None:
    del RAN[key]


def test_a_call_that_was_sent_in_part_is_sent_to_its_end() -> None:
    def body(victim: int) -> None:
        calls, load = Calls(), torch.zeros(10 << 20)
        freeze(victim)
        for name, argument in (("large", load), ("small", None)):
            with no_hang():
                calls.errors[name, 0] = _timeout_of(call_sync(argument)((name, 0)))
        assert calls.errors["large", 0].may_have_run
        load.fill_(1.0)  # The worker still gets the zeros.
        os.kill(victim, signal.SIGCONT)
        calls.check_runs()
        assert rpc.rpc_sync("worker1", greatest) == 0.0

    with_a_frozen_worker("tcp", body)


def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def test_a_backward_pass_through_a_frozen_worker_ends_at_its_timeout() -> None:
    def body(victim: int) -> None:
        calls, x = Calls(), torch.ones(2, requires_grad=True)
        with autograd.context() as context_id:
            y = rpc.rpc_sync("worker1", twice, args=(x,))
            freeze(victim)
            calls.until_one_is_withdrawn("first", call_async(bytes(30_000)))
            with no_hang(), pytest.raises(CallTimeout):
                autograd.backward(context_id, [y.sum()], timeout=SHORT)
            start = time.monotonic()
        assert time.monotonic() - start < HANGS, "the end of the context waits for worker1"
        os.kill(victim, signal.SIGCONT)
        calls.check_runs()
        with autograd.context() as context_id:
            y = rpc.rpc_sync("worker1", twice, args=(x,))
            autograd.backward(context_id, [y.sum()])
            assert autograd.get_gradients(context_id)[x].tolist() == [2.0, 2.0]

    with_a_frozen_worker("unix", body)


def test_references_in_withdrawn_calls_are_released() -> None:
    def body(victim: int) -> None:
        calls, reference = Calls(), rpc.RRef(7)
        freeze(victim)
        calls.until_one_is_withdrawn("reference", call_async(reference))
        os.kill(victim, signal.SIGCONT)
        calls.check_runs()
        rrefs = current.runtime().rrefs
        until(lambda: rrefs.debug_info()["num_forks"] == 0, "worker1 has no reference")
        # The positive control: a reference that worker1 keeps is counted.
        rpc.rpc_sync("worker1", keep, args=(reference,))
        assert rrefs.debug_info()["num_forks"] == 1

    with_a_frozen_worker("unix", body)


def keep(value: Any) -> None:
    KEPT.append(value)


def test_a_frozen_worker_is_lost_though_threads_keep_sending_to_it() -> None:
    def body(victim: int) -> None:
        freeze(victim)
        owed = rpc.rpc_async("worker1", note, args=(("owed", 0),), timeout=PATIENCE)
        losses: list[WorkerLost] = []

        def send() -> None:
            for number in range(10_000):
                try:
                    rpc.rpc_sync("worker1", note, args=(number, bytes(60_000)), timeout=0.05)
                except CallTimeout:
                    continue
                except WorkerLost as error:
                    losses.append(error)
                    return

        threads = [threading.Thread(target=send) for _ in range(4)]
        for thread in threads:
            thread.start()
        with pytest.raises(WorkerLost):
            owed.wait()
        os.kill(victim, signal.SIGCONT)
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()

    with_a_frozen_worker("unix", body, heartbeat_interval=0.2, heartbeat_limit=1.0)
