"""Calls between workers of one process, over every transport."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gradwire import rpc
from gradwire._core.transport.in_process import InProcessTransport
from gradwire.errors import (
    CallTimeout,
    EncodingError,
    NotInitializedError,
    RemoteError,
    RemoteTraceback,
    ShutDownError,
    UnknownWorkerError,
    WorkerLost,
)
from gradwire.testing import acting_as, cluster, transports_named
from gradwire.worker import Worker

TIMEOUT = 30.0


# -- callables


class Counter:
    def __init__(self, start: int = 0):
        self.count = start

    def add(self, amount: int) -> int:
        self.count += amount
        return self.count

    @staticmethod
    def double(x: int) -> int:
        return 2 * x

    @classmethod
    def create(cls, start: int) -> Counter:
        return cls(start)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counter) and other.count == self.count

    def __hash__(self) -> int:
        return hash(self.count)


def keywords(a: int, *, b: int = 2, **rest: int) -> tuple[int, int, dict[str, int]]:
    return a, b, rest


def test_functions_classes_methods_and_operators_can_be_called(pair: list[Worker]) -> None:
    worker = pair[0]
    x = torch.arange(4.0)
    assert worker.rpc_sync("worker1", keywords, (1,), {"b": 3, "c": 4}) == (1, 3, {"c": 4})
    assert worker.rpc_sync("worker1", Counter, (5,)) == Counter(5)
    assert worker.rpc_sync("worker1", Counter(1).add, (2,)) == 3
    assert worker.rpc_sync("worker1", Counter.double, (4,)) == 8
    assert worker.rpc_sync("worker1", Counter.create, (7,)) == Counter(7)
    assert torch.equal(worker.rpc_sync("worker1", torch.add, (x, x)), x + x)
    assert torch.equal(worker.rpc_sync("worker1", torch.ops.aten.mul.Tensor, (x, x)), x * x)
    assert torch.equal(worker.rpc_sync("worker1", torch.Tensor.sum, (x,)), x.sum())
    assert worker.rpc_sync("worker1", max, (1, 2)) == 2


def test_workers_are_addressed_by_name_id_or_info(memory_pair: list[Worker]) -> None:
    worker = memory_pair[0]
    for to in ("worker1", 1, worker.worker_info("worker1")):
        assert worker.rpc_sync(to, whoami) == "worker1"
    assert worker.worker_info() == worker.info
    assert [info.id for info in worker.worker_infos()] == [0, 1]


def whoami() -> str:
    return rpc.get_worker_info().name


def test_a_worker_can_call_itself(pair: list[Worker]) -> None:
    assert pair[0].rpc_sync("worker0", whoami) == "worker0"
    assert pair[0].rpc_async(0, whoami).wait() == "worker0"
    mine = torch.zeros(3)
    pair[0].rpc_sync("worker0", torch.Tensor.add_, (mine, 1))
    assert torch.equal(mine, torch.zeros(3)), "arguments are copies, also in a call to itself"


def test_an_unknown_worker_error_lists_the_known_workers(memory_pair: list[Worker]) -> None:
    with pytest.raises(UnknownWorkerError, match=r"'nobody'.*worker0, worker1"):
        memory_pair[0].rpc_sync("nobody", whoami)


def test_a_call_without_a_worker_names_init_rpc() -> None:
    with pytest.raises(NotInitializedError, match="init_rpc"):
        rpc.rpc_sync("worker1", whoami)


def test_functions_of_rpc_use_the_current_worker() -> None:
    with cluster(2) as (_, b):
        with acting_as(b):
            assert rpc.rpc_sync("worker0", whoami) == "worker0"
            assert rpc.get_worker_info() == b.info


# -- large and small values


def echo(value: Any) -> Any:
    return value


@pytest.mark.parametrize("size", [0, 1, 2000, 9000, 40_000, 300_000, 3_000_000])
def test_tensors_of_any_size_survive_a_round_trip(pair: list[Worker], size: int) -> None:
    sent = torch.arange(size, dtype=torch.float32)
    for _ in range(3):
        got = pair[0].rpc_sync("worker1", echo, (sent,))
        assert torch.equal(got, sent)
    got += 1
    assert torch.equal(sent, torch.arange(size, dtype=torch.float32))


def test_large_values_of_any_kind_survive_a_round_trip(pair: list[Worker]) -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(300_000.0)
    sent = [b"bytes" * 100_000, "text" * 50_000, array, list(range(50_000)), torch.ones(70_000)]
    sent += [
        bytearray(100_000),
        numpy.frombuffer(bytes(800_000)),
        numpy.ones((300, 400), order="F"),
    ]
    kept = []
    for number in range(4):  # later messages must not change received values
        array[0] = number
        kept.append(pair[0].rpc_sync("worker1", echo, (sent,)))
    for number, arrived in enumerate(kept):
        array[0] = number
        assert [*map(str, arrived)] == [*map(str, sent)]
        assert numpy.array_equal(arrived[2], array)
        arrived[2][:] = 0  # the receiver may write to it


def test_many_tensors_in_one_call(pair: list[Worker]) -> None:
    sent = [torch.full((n,), float(n)) for n in range(0, 40_000, 500)]
    got = pair[0].rpc_sync("worker1", echo, (sent,))
    assert all(torch.equal(a, b) for a, b in zip(sent, got, strict=True))


def test_a_result_is_not_changed_by_later_results(pair: list[Worker]) -> None:
    kept = [pair[0].rpc_sync("worker1", torch.full, ((50_000,), float(n))) for n in range(20)]
    assert [t[0].item() for t in kept] == [float(n) for n in range(20)]
    assert all(bool((t == t[0]).all()) for t in kept)


def test_a_call_that_cannot_be_sent_names_the_argument(memory_pair: list[Worker]) -> None:
    worker = memory_pair[0]
    with pytest.raises(EncodingError, match="argument 1 of echo"):
        worker.rpc_sync("worker1", echo, (1, lambda: 2))
    with pytest.raises(EncodingError, match=r"argument 'value' of echo.*generator"):
        worker.rpc_async("worker1", echo, (), {"value": (i for i in range(3))})
    with pytest.raises(EncodingError, match=r"the function .*lambda.*closures=True"):
        worker.remote("worker1", lambda: 1)
    assert worker.rpc_sync("worker1", echo, (3,)) == 3


def test_a_result_that_cannot_be_sent_is_the_callers_error(memory_pair: list[Worker]) -> None:
    with pytest.raises(Exception, match=r"pickle|lock") as caught:
        memory_pair[0].rpc_sync("worker1", threading.Lock)
    assert "sending the result on worker" in str(caught.value.__cause__)


# -- errors


class OddError(Exception):
    def __init__(self, code: int, *, reason: str):
        super().__init__(f"code {code}: {reason}")
        self.code = code
        self.reason = reason


def raise_odd() -> None:
    raise OddError(7, reason="odd")


def raise_local() -> None:
    class LocalError(Exception):
        pass

    raise LocalError("from within")


def raise_os_error() -> None:
    raise FileNotFoundError(2, "no such thing", "a-file")


class Unsendable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("not this one")


def raise_unsendable() -> None:
    raise Unsendable("words")


def lose_a_worker() -> None:
    raise WorkerLost("further away", worker="w", call="c", may_have_run=False)


class ReadsBadly:
    """Can be encoded but not decoded."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def return_unreadable() -> ReadsBadly:
    return ReadsBadly()


def leave_the_interpreter() -> None:
    raise SystemExit(3)


def test_the_original_exception_comes_back(pair: list[Worker]) -> None:
    with pytest.raises(OddError, match="code 7: odd") as caught:
        pair[0].rpc_sync("worker1", raise_odd)
    assert (caught.value.code, caught.value.reason) == (7, "odd")
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert "raise OddError(7" in str(cause)
    assert 'raise_odd on worker "worker1"' in str(cause)
    with pytest.raises(FileNotFoundError) as missing:
        pair[0].rpc_async("worker1", raise_os_error).wait()
    assert (missing.value.errno, missing.value.filename) == (2, "a-file")


def test_exceptions_that_the_caller_cannot_import_keep_their_text(
    memory_pair: list[Worker],
) -> None:
    with pytest.raises(RemoteError, match="LocalError: from within") as caught:
        memory_pair[0].rpc_sync("worker1", raise_local)
    assert "raise_local on worker 'worker1' raised" in str(caught.value)
    assert (caught.value.worker, caught.value.call) == ("worker1", "raise_local")


def test_exceptions_that_cannot_be_sent_keep_their_text(pair: list[Worker]) -> None:
    with pytest.raises(RemoteError, match="Unsendable: words"):
        pair[0].rpc_sync("worker1", raise_unsendable)
    assert pair[0].rpc_sync("worker1", whoami) == "worker1"


def test_the_error_of_a_nested_call_says_that_the_call_may_have_run(
    memory_pair: list[Worker],
) -> None:
    with pytest.raises(WorkerLost, match="further away") as lost:
        memory_pair[0].rpc_sync("worker1", lose_a_worker)
    assert lost.value.may_have_run
    assert (lost.value.worker, lost.value.call) == ("w", "c")


def test_a_value_that_cannot_be_decoded_is_named_on_both_sides(memory_pair: list[Worker]) -> None:
    with pytest.raises(RemoteError, match=r"result of return_unreadable on worker 'worker1'"):
        memory_pair[0].rpc_sync("worker1", return_unreadable)
    with pytest.raises(ValueError, match="no number") as caught:
        memory_pair[0].rpc_sync("worker1", echo, (ReadsBadly(),))
    assert 'reading the arguments on worker "worker1"' in str(caught.value.__cause__)
    for to in ("worker0", "worker1"):
        rref = memory_pair[0].remote(to, echo, (ReadsBadly(),))
        with pytest.raises(ValueError, match="no number"):
            rref.to_here(timeout=TIMEOUT)


def test_a_remote_exit_does_not_end_the_caller(memory_pair: list[Worker]) -> None:
    with pytest.raises(RemoteError, match="SystemExit"):
        memory_pair[0].rpc_sync("worker1", leave_the_interpreter)
    assert memory_pair[0].rpc_sync("worker1", whoami) == "worker1"


class LogCollector(logging.Handler):
    """Collects the errors that gradwire logs, and sets an event at each."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []
        self.heard = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self.heard.set()


@pytest.fixture
def log() -> Iterator[LogCollector]:
    listening = LogCollector()
    logger = logging.getLogger("gradwire")
    logger.addHandler(listening)
    yield listening
    logger.removeHandler(listening)


def test_an_error_that_is_never_retrieved_is_logged_once(
    memory_pair: list[Worker], log: LogCollector
) -> None:
    memory_pair[0].rpc_async("worker1", raise_odd)
    assert log.heard.wait(TIMEOUT)
    assert memory_pair[0].rpc_async("worker1", whoami).wait() == "worker1"
    gc.collect()
    assert len(log.messages) == 1
    assert "raise_odd on worker 'worker1' failed, and nobody looked" in log.messages[0]


def test_a_remote_value_that_failed_and_was_never_fetched_is_logged_once(
    memory_pair: list[Worker], log: LogCollector
) -> None:
    memory_pair[0].remote("worker1", raise_odd)
    assert log.heard.wait(TIMEOUT)
    assert len(log.messages) == 1


def test_a_retrieved_error_is_not_logged(memory_pair: list[Worker], log: LogCollector) -> None:
    for look in (lambda f: f.wait(), lambda f: f.value(), lambda f: torch.futures.wait_all([f])):
        future = memory_pair[0].rpc_async("worker1", raise_odd)
        until_done(future)
        with pytest.raises(OddError):
            look(future)
        del future
    gc.collect()
    assert not log.messages


def until_done(future: Any) -> None:
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    assert done.wait(TIMEOUT)


class Vanishing:
    """Can be encoded, but refers to an attribute that does not exist."""

    def __reduce__(self) -> Any:
        return getattr, (Worker, "nothing_of_that_name")


def test_a_value_that_is_unknown_to_the_callee_is_explained(memory_pair: Any) -> None:
    with pytest.raises(EncodingError, match="pickler does not serialize"):
        memory_pair[0].rpc_sync("worker1", repr, args=(Vanishing(),))


# -- deadlines


def wait_for_event(name: str) -> bool:
    return EVENTS[name].wait(TIMEOUT)


EVENTS: dict[str, threading.Event] = {}


def test_a_call_ends_at_its_deadline(pair: list[Worker]) -> None:
    EVENTS["deadline"] = threading.Event()
    try:
        with pytest.raises(CallTimeout, match=r"wait_for_event on worker 'worker1'.*50 ms") as late:
            pair[0].rpc_sync("worker1", wait_for_event, ("deadline",), timeout=0.05)
        assert late.value.may_have_run
        assert isinstance(late.value, TimeoutError)
        future = pair[0].rpc_async("worker1", wait_for_event, ("deadline",), timeout=0.05)
        with pytest.raises(CallTimeout):
            future.wait()
        future = pair[0].rpc_async("worker1", wait_for_event, ("deadline",), timeout=0.05)
        until_done(future)  # its deadline applies although no thread waits in it
        assert isinstance(future.exception(), CallTimeout)
    finally:
        EVENTS["deadline"].set()


def test_timeout_zero_means_no_deadline(memory_pair: list[Worker]) -> None:
    assert memory_pair[0].rpc_sync("worker1", whoami, timeout=0) == "worker1"


@pytest.mark.parametrize("timeout", [3e6, 1e8, 1e15, float("inf")])
@pytest.mark.parametrize("transport", ["in_process", "unix"])
def test_a_timeout_may_be_arbitrarily_long(transport: str, timeout: float) -> None:
    options = rpc.Options(rpc_timeout=timeout, heartbeat_limit=timeout)
    with cluster(2, transports=transports_named(transport), options=options) as (a, _):
        assert a.rpc_sync("worker1", whoami) == "worker1"
        assert a.rpc_async("worker1", whoami, timeout=timeout).wait() == "worker1"


def test_a_call_after_shutdown_raises() -> None:
    with cluster(2) as (a, _):
        pass
    with pytest.raises(ShutDownError, match="has shut down and cannot call worker 'worker1'"):
        a.rpc_sync("worker1", whoami)


class SlowToConnect(InProcessTransport):
    """Every attempt to connect takes longer than its timeout."""

    def connect(self, place: str, me: Any, them: Any, timeout: float) -> Any:
        threading.Event().wait(timeout)
        raise TimeoutError("timed out")


def test_a_timeout_that_leaves_no_time_to_connect_is_a_timeout() -> None:
    with cluster(2, transports=[SlowToConnect()], graceful=False) as (a, _):
        with pytest.raises(CallTimeout, match=r"more than set timeout.*has not run there") as late:
            a.rpc_sync("worker1", max, (1, 2), timeout=0.001)
        assert not late.value.may_have_run


# -- concurrency


def bounce(depth: int) -> int:
    if depth == 0:
        return 0
    other = 1 - rpc.get_worker_info().id
    return 1 + int(rpc.rpc_sync(f"worker{other}", bounce, args=(depth - 1,)))


def test_calls_nest_200_deep(pair: list[Worker]) -> None:
    assert pair[0].rpc_sync("worker1", bounce, (200,)) == 200


def test_64_threads_with_nested_calls_finish(pair: list[Worker]) -> None:
    results: list[int] = []

    def caller() -> None:
        for depth in (1, 5, 9):
            results.append(pair[0].rpc_sync("worker1", bounce, (depth,)))

    threads = [threading.Thread(target=caller) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert sorted(results) == sorted([1, 5, 9] * 64)


def test_a_blocked_function_does_not_block_others(pair: list[Worker]) -> None:
    EVENTS["gate"] = threading.Event()
    blocked = [pair[0].rpc_async("worker1", wait_for_event, ("gate",)) for _ in range(8)]
    assert pair[0].rpc_sync("worker1", whoami) == "worker1"
    pair[0].rpc_sync("worker1", set_event, ("gate",))
    assert all(future.wait() for future in blocked)


def set_event(name: str) -> None:
    EVENTS[name].set()


def test_num_worker_threads_limits_the_running_functions() -> None:
    EVENTS["limit"] = threading.Event()
    with cluster(2, options=rpc.Options(num_worker_threads=3)) as (a, _):
        running = [a.rpc_async("worker1", wait_for_event, ("limit",)) for _ in range(3)]
        late = a.rpc_async("worker1", whoami)
        with pytest.raises(CallTimeout):
            a.rpc_sync("worker1", whoami, timeout=0.2)
        assert not late.done()
        EVENTS["limit"].set()
        assert late.wait() == "worker1"
        assert all(future.wait() for future in running)


def test_a_function_that_waits_for_a_call_does_not_count_as_running() -> None:
    with cluster(2, options=rpc.Options(num_worker_threads=1)) as (a, _):
        assert a.rpc_sync("worker1", bounce, (20,)) == 20


def test_100_workers_in_one_process_call_each_other() -> None:
    with cluster(100) as workers:
        futures = [
            worker.rpc_async((worker.id + step) % 100, whoami)
            for worker in workers
            for step in (1, 7, 50)
        ]
        names = [future.wait() for future in futures]
    expected = [f"worker{(n + step) % 100}" for n in range(100) for step in (1, 7, 50)]
    assert names == expected


# -- futures


def test_futures_chain_and_keep_exception_types(memory_pair: list[Worker]) -> None:
    worker = memory_pair[0]
    chained = worker.rpc_async("worker1", max, (1, 2)).then(lambda f: f.wait() + 1)
    assert chained.then(lambda f: f.value() * 10).wait() == 30
    failed = worker.rpc_async("worker1", raise_odd).then(lambda f: f.wait())
    with pytest.raises(OddError):
        failed.wait()


def test_futures_work_with_torchs_functions(memory_pair: list[Worker]) -> None:
    futures = [memory_pair[0].rpc_async("worker1", max, (n, 0)) for n in range(5)]
    assert torch.futures.wait_all(futures) == [0, 1, 2, 3, 4]
    with pytest.raises(OddError):
        torch.futures.wait_all([*futures, memory_pair[0].rpc_async("worker1", raise_odd)])


def test_futures_can_be_awaited(pair: list[Worker]) -> None:
    async def main() -> list[int]:
        futures = [pair[0].rpc_async("worker1", max, (n, 0)) for n in range(10)]
        with pytest.raises(OddError):
            await pair[0].rpc_async("worker1", raise_odd)
        return [await future for future in futures]

    assert asyncio.run(main()) == list(range(10))


def test_callbacks_see_the_context_they_were_added_in(memory_pair: list[Worker]) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="outside")
    variable.set("inside")
    future = memory_pair[0].rpc_async("worker1", whoami).then(lambda _: variable.get())
    variable.set("later")
    assert future.wait() == "inside"


def test_callbacks_may_call_and_wait(pair: list[Worker]) -> None:
    worker = pair[0]

    def call_again(future: rpc.Future[str]) -> str:
        return future.wait() + worker.rpc_sync("worker1", whoami)

    futures = [worker.rpc_async("worker1", whoami).then(call_again) for _ in range(20)]
    assert [future.wait() for future in futures] == ["worker1worker1"] * 20


def test_several_threads_wait_for_one_future(pair: list[Worker]) -> None:
    EVENTS["many"] = threading.Event()
    future = pair[0].rpc_async("worker1", wait_for_event, ("many",))
    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.append(future.wait())) for _ in range(8)]
    for thread in threads:
        thread.start()
    EVENTS["many"].set()
    for thread in threads:
        thread.join(TIMEOUT)
    assert results == [True] * 8


def call_back_and_wait(depth: int) -> str:
    """Wait for a future whose callback also waits for a call."""
    future = rpc.rpc_async("worker0", whoami)
    chained = future.then(lambda f: f.wait() + rpc.rpc_sync("worker0", whoami))
    future.wait()
    return str(chained.wait())


def test_callbacks_that_wait_use_up_no_threads() -> None:
    with cluster(2, options=rpc.Options(num_worker_threads=2)) as (a, _):
        for _ in range(10):
            assert a.rpc_sync("worker1", call_back_and_wait, (1,)) == "worker0worker0"


def bounce_with_wait_all(depth: int) -> int:
    if depth == 0:
        return 0
    other = 1 - rpc.get_worker_info().id
    future = rpc.rpc_async(f"worker{other}", bounce_with_wait_all, args=(depth - 1,))
    return 1 + int(torch.futures.wait_all([future])[0])


def test_a_function_that_waits_in_torch_does_not_count_as_running() -> None:
    with cluster(2, options=rpc.Options(num_worker_threads=2)) as (a, _):
        assert a.rpc_sync("worker1", bounce_with_wait_all, (12,)) == 12


def test_a_callback_may_take_a_lock_that_the_waiting_thread_holds(pair: list[Worker]) -> None:
    lock = threading.Lock()
    future = pair[0].rpc_async("worker1", whoami)
    seen = threading.Event()

    def callback(_done: object) -> None:
        with lock:
            seen.set()

    future.add_done_callback(callback)
    with lock:
        assert future.wait() == "worker1"
    assert seen.wait(TIMEOUT)


def test_a_caught_error_keeps_nothing_alive(memory_pair: list[Worker]) -> None:
    class Local:
        pass

    def catch() -> weakref.ref[Local]:
        local = Local()
        future = memory_pair[0].rpc_async("worker1", raise_odd)
        with pytest.raises(OddError):
            future.wait()
        return weakref.ref(local)

    alive = catch()
    gc.collect()
    assert alive() is None


def test_a_callback_must_be_callable(memory_pair: Any) -> None:
    future = memory_pair[0].rpc_async("worker1", max, args=(1, 2))
    with pytest.raises(TypeError, match="cannot even be called"):
        future.then(None)
    assert future.wait() == 2


# -- functions that return futures


@rpc.functions.async_execution
def add_elsewhere(to: str, x: int, y: int) -> rpc.Future[int]:
    return rpc.rpc_async(to, max, args=(x, y)).then(lambda f: f.wait() + 100)


@rpc.functions.async_execution
def fails_elsewhere(to: str) -> rpc.Future[None]:
    return rpc.rpc_async(to, raise_odd)


@rpc.functions.async_execution
def forgets_the_future() -> int:
    return 3


class AsyncMethods:
    @staticmethod
    @rpc.functions.async_execution
    def static(to: str) -> rpc.Future[str]:
        return rpc.rpc_async(to, whoami)

    @rpc.functions.async_execution
    def bound(self, to: str) -> rpc.Future[str]:
        return rpc.rpc_async(to, whoami)


def test_a_function_may_return_a_future_of_its_result(pair: list[Worker]) -> None:
    worker = pair[0]
    assert worker.rpc_sync("worker1", add_elsewhere, ("worker0", 1, 2)) == 102
    assert worker.remote("worker1", add_elsewhere, ("worker0", 1, 2)).to_here() == 102
    assert worker.rpc_sync("worker1", AsyncMethods.static, ("worker0",)) == "worker0"
    methods = worker.remote("worker1", AsyncMethods)
    assert methods.rpc_sync().bound("worker0") == "worker0"
    assert methods.rpc_async().static("worker0").wait() == "worker0"
    assert methods.remote().bound("worker0").to_here() == "worker0"
    with pytest.raises(OddError):
        worker.rpc_sync("worker1", fails_elsewhere, ("worker0",))
    with pytest.raises(TypeError, match=r"must return a .*Future.*forgets_the_future"):
        worker.rpc_sync("worker1", forgets_the_future)


class Secretive(Exception):
    """Raises when one of the attributes that gradwire reads is read."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("__notes__", "__traceback__", "__dict__"):
            raise LookupError("none of your business")
        return super().__getattribute__(name)


def raise_secretive() -> None:
    raise Secretive("told")


def test_an_exception_that_hides_its_attributes_is_answered(trio: list[Worker]) -> None:
    with pytest.raises(Exception, match="told"):
        trio[0].rpc_sync("worker1", raise_secretive, timeout=30)
    assert trio[0].rpc_sync("worker1", max, (1, 2)) == 2
