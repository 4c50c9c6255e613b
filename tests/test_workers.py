"""Workers in processes of their own: starting, shutting down, dying and freezing."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import Pipe
from typing import Any

import pytest
import torch

import gradwire
from gradwire import rpc
from gradwire._core import current, runtime
from gradwire._core.ids import WorkerInfo
from gradwire._core.rpc import shutdown_barrier
from gradwire._core.rpc.shutdown_barrier import ShutdownBarrier
from gradwire.errors import (
    CallError,
    NotInitializedError,
    SetupError,
    ShutDownError,
    WorkerLost,
)
from gradwire.testing import cluster
from gradwire.testing.connection_pairs import open_descriptors
from gradwire.worker import Worker
from tests.processes import Process, freeze, group, processes, rendezvous_file, run_group, until

TIMEOUT = 30.0


def pid() -> int:
    return os.getpid()


def echo(value: Any) -> Any:
    return value


def forever() -> None:
    threading.Event().wait(TIMEOUT)


def linger() -> None:
    """Keep the main program of a worker running that only serves calls."""
    threading.Event().wait(TIMEOUT)


def whoami() -> str:
    return rpc.get_worker_info().name


# -- starting


def test_workers_of_two_processes_call_each_other() -> None:
    def body(rank: int) -> tuple[int, float]:
        other = f"worker{1 - rank}"
        tensor = torch.full((100_000,), float(rank))
        back = rpc.rpc_sync(other, echo, args=(tensor,))
        assert torch.equal(back, tensor)
        return rpc.rpc_sync(other, pid), rpc.rpc_async(other, max, args=(1, 2)).wait()

    with group(2, body) as started:
        assert [p.result() for p in started] == [(started[1].pid, 2), (started[0].pid, 2)]


def test_24_processes_call_all_to_all() -> None:
    def body(rank: int) -> int:
        futures = [rpc.rpc_async(f"worker{n}", pid) for n in range(24)]
        return len({future.wait() for future in futures})

    assert run_group(24, body) == [24] * 24


def test_init_rpc_works_twice_in_a_process() -> None:
    with rendezvous_file() as place:

        def worker(rank: int) -> Callable[[], list[str]]:
            def run() -> list[str]:
                answers = []
                for name in ("first", "second"):
                    options = rpc.Options(init_method=place)
                    rpc.init_rpc(f"{name}{rank}", None, rank, 2, options)
                    with pytest.raises(SetupError, match=f"is worker '{name}{rank}' already"):
                        rpc.init_rpc("again", None, rank, 2, options)
                    answers.append(rpc.rpc_sync(f"{name}{1 - rank}", whoami))
                    rpc.shutdown()
                return answers

            return run

        with processes(worker(0), worker(1)) as started:
            assert [p.result() for p in started] == [["first1", "second1"], ["first0", "second0"]]


def test_option_objects_of_torch_are_accepted() -> None:
    from torch.distributed.rpc import TensorPipeRpcBackendOptions

    theirs = TensorPipeRpcBackendOptions(
        num_worker_threads=3, rpc_timeout=7, init_method="file:///x"
    )
    ours = gradwire.Options.of(theirs)
    assert (ours.num_worker_threads, ours.rpc_seconds) == (3, 7.0)
    assert ours.init_method == "file:///x"


@pytest.mark.parametrize(
    "option", ["rpc_timeout", "init_timeout", "heartbeat_interval", "heartbeat_limit"]
)
def test_options_with_invalid_durations_are_refused(option: str) -> None:
    for value in (math.nan, -1):
        with pytest.raises(SetupError, match=r"negative|positive"):
            rpc.Options(**{option: value})


def test_a_timeout_of_nan_is_refused(memory_pair: list[Worker]) -> None:
    with pytest.raises(SetupError, match="it is nan"):
        memory_pair[0].rpc_sync("worker1", pid, timeout=math.nan)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("", "non-empty"),
        ("x" * 128, "shorter than 128"),
        ("a b", "must match"),
        ("é", "must match"),
    ],
)
def test_names_are_checked(name: str, complaint: str) -> None:
    with pytest.raises(SetupError, match=complaint):
        gradwire.Worker(name, 0, 1, rpc.Options(init_method="file:///nowhere"))


# -- dying and freezing


def test_the_death_of_a_worker_fails_its_calls_at_once() -> None:
    def body(rank: int) -> list[Any] | None:
        if rank == 1:
            linger()
            return None
        victim = rpc.rpc_sync("worker1", pid)
        future = rpc.rpc_async("worker1", forever)
        waiting: list[BaseException] = []

        def wait() -> None:
            try:
                rpc.rpc_sync("worker1", forever)
            except WorkerLost as error:
                waiting.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: rpc.rpc_sync("worker1", running) == 2, "both calls run")
        os.kill(victim, signal.SIGKILL)
        thread.join(TIMEOUT)
        with pytest.raises(WorkerLost) as lost:
            future.wait()
        with pytest.raises(WorkerLost) as unreachable:
            rpc.rpc_sync("worker1", pid)
        rpc.shutdown(graceful=False)
        return [
            (str(waiting[0]), waiting[0].may_have_run),  # type: ignore[attr-defined]
            (str(lost.value), lost.value.may_have_run),
            (str(unreachable.value), unreachable.value.may_have_run),
        ]

    with group(2, body, shut_down=False) as started:
        pending, future, later = started[0].result()
    for text, may_have_run in (pending, future):
        assert "'worker1' was lost while forever was running there" in text
        assert "may have run" in text
        assert may_have_run
    assert "cannot be reached for pid" in later[0]
    assert not later[1]


def running() -> int:
    """Return how many calls of `forever` run on this worker."""
    return sum(
        any(frame.f_code is forever.__code__ for frame in _frames(top))
        for top in sys._current_frames().values()
    )


def is_in_shutdown_barrier() -> bool:
    """Return whether the main program of this worker waits in the shutdown barrier."""
    main = sys._current_frames()[threading.main_thread().ident or 0]
    barrier = ShutdownBarrier.wait.__code__
    return any(frame.f_code is barrier for frame in _frames(main))


def _frames(frame: Any) -> list[Any]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def test_a_frozen_worker_is_detected_by_missing_heartbeats() -> None:
    def body(rank: int) -> str | None:
        if rank == 1:
            linger()
            return None
        victim = rpc.rpc_sync("worker1", pid)
        freeze(victim)
        with pytest.raises(WorkerLost) as lost:
            rpc.rpc_sync("worker1", pid, timeout=TIMEOUT)
        rpc.shutdown(graceful=False)
        return str(lost.value)

    with group(2, body, shut_down=False, heartbeat_interval=0.1, heartbeat_limit=0.5) as started:
        text = started[0].result()
        started[1].signal(signal.SIGCONT)
    assert "no heartbeat" in text
    assert "'worker1'" in text


def busy(seconds: float) -> str:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return "done"


def test_a_busy_worker_is_not_considered_frozen() -> None:
    def body(rank: int) -> str:
        return str(rpc.rpc_sync(f"worker{1 - rank}", busy, args=(1.2,)))

    assert run_group(2, body, heartbeat_interval=0.1, heartbeat_limit=0.6) == ["done", "done"]


def test_segments_of_a_killed_worker_are_freed() -> None:
    def body(rank: int) -> None:
        if rank == 1:
            linger()
            return
        kept = rpc.rpc_sync("worker1", torch.full, args=((1_000_000,), 7.0))
        assert maps_a_segment()
        os.kill(rpc.rpc_sync("worker1", pid), signal.SIGKILL)
        with pytest.raises(CallError):
            rpc.rpc_sync("worker1", pid)
        assert bool((kept == 7).all()), "received tensors stay valid"
        rpc.shutdown(graceful=False)
        del kept
        assert not maps_a_segment()

    def maps_a_segment() -> bool:
        with open("/proc/self/maps") as maps:
            return "memfd:gradwire" in maps.read()

    with group(2, body, shut_down=False) as started:
        started[0].result()


def test_references_of_a_dead_worker_are_dropped() -> None:
    def body(rank: int) -> None:
        if rank == 1:
            linger()
        else:
            mine = rpc.RRef(torch.ones(3))
            rpc.rpc_sync("worker1", keep, args=(mine,))
            rrefs = current.runtime().rrefs
            assert rrefs.debug_info()["num_forks"] == 1
            os.kill(rpc.rpc_sync("worker1", pid), signal.SIGKILL)
            until(lambda: rrefs.debug_info()["num_forks"] == 0, "the fork is dropped")
            rpc.shutdown(graceful=False)

    with group(2, body, shut_down=False) as started:
        started[0].result()


def test_the_death_of_an_idle_worker_is_detected() -> None:
    def body(rank: int) -> None:
        if rank == 1:
            linger()
            return
        gone = threading.Event()
        current.runtime().agent.on_gone.append(lambda _info: gone.set())
        victim = rpc.rpc_async("worker1", pid).then(lambda f: f.wait()).wait()
        os.kill(victim, signal.SIGKILL)
        assert gone.wait(TIMEOUT)
        rpc.shutdown(graceful=False)

    with group(2, body, shut_down=False) as started:
        started[0].result()


def test_a_forked_child_does_not_return_segments_of_its_parent() -> None:
    def body(rank: int) -> bool:
        if rank == 1:
            return True
        held = rpc.rpc_sync("worker1", torch.full, args=((100_000,), 1.0))
        child = os.fork()
        if child == 0:
            del held
            os._exit(0)
        os.waitpid(child, 0)
        more = [rpc.rpc_sync("worker1", torch.full, args=((100_000,), 2.0)) for _ in range(3)]
        return bool((held == 1).all()) and all(bool((m == 2).all()) for m in more)

    assert run_group(2, body) == [True, True]


def test_a_forked_child_has_no_worker_but_may_become_one() -> None:
    def in_child(rref: rpc.RRef[int], place: str) -> list[Any]:
        answers: list[Any] = []
        for ask in (lambda: rpc.rpc_sync("worker1", echo, args=(1,)), rref.to_here):
            with pytest.raises(NotInitializedError):
                ask()
        with pytest.raises(NotInitializedError, match="was forked from worker 'worker0'"):
            rref.rpc_sync().bit_length()
        rpc.init_rpc(
            "alone", rank=0, world_size=1, rpc_backend_options=rpc.Options(init_method=place)
        )
        answers.append(rpc.rpc_sync("alone", echo, args=(5,)))
        rpc.shutdown()
        return answers

    def body(rank: int) -> Any:
        if rank == 1:
            return None
        rref = rpc.remote("worker1", echo, args=(7,))
        assert rref.to_here() == 7
        with rendezvous_file() as place:
            token = current.enter(current.runtime())  # as inside `with Worker(...)`
            child = Process(lambda: in_child(rref, place))
            current.leave(token)
            answers = child.result()
            child.close()
        assert rref.to_here() == 7
        return answers

    assert run_group(2, body)[0] == [5]


def start_a_child() -> int:
    child = os.fork()
    if not child:
        signal.pause()
    return child


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_death_of_a_worker_with_a_child_process_is_detected() -> None:
    def body(rank: int) -> Any:
        if rank == 1:
            linger()
        child = rpc.rpc_sync("worker1", start_a_child)
        try:
            # At once, not by missing heartbeats, although the child keeps copies of the sockets.
            with pytest.raises(WorkerLost, match="closed the connection"):
                rpc.rpc_sync("worker1", die)
            with pytest.raises(WorkerLost, match="refused"):
                rpc.rpc_sync("worker1", pid)
        finally:
            os.kill(child, signal.SIGKILL)
        rpc.shutdown(graceful=False)

    with group(2, body, shut_down=False) as started:
        started[0].result()


KEPT: list[Any] = []


def keep(value: Any) -> None:
    KEPT.append(value)


# -- shutting down


def chain(hops: int) -> None:
    """Call on around the group, also after the main program of the caller is done."""
    if hops:
        me = rpc.get_worker_info().id
        rpc.rpc_async(f"worker{(me + 1) % 3}", chain, args=(hops - 1,))
    else:
        KEPT.append("arrived")


def test_a_graceful_shutdown_waits_for_the_work_of_all_workers() -> None:
    def body(rank: int) -> list[Any]:
        if rank == 0:
            rpc.rpc_async("worker1", chain, args=(50,))
        rpc.shutdown(timeout=TIMEOUT)
        return KEPT

    with group(3, body, shut_down=False) as started:
        assert [p.result() for p in started] == [["arrived"], [], []]


def test_a_graceful_shutdown_does_not_wait_for_killed_workers() -> None:
    def body(rank: int) -> bool:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        rpc.shutdown(timeout=TIMEOUT)
        return True

    with group(3, body, shut_down=False) as started:
        assert started[0].result()
        assert started[2].result()


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_graceful_shutdown_does_not_wait_for_frozen_workers(frozen: int) -> None:
    def body(rank: int) -> bool:
        if rank == frozen:
            os.kill(os.getpid(), signal.SIGSTOP)
        rpc.shutdown(timeout=TIMEOUT)
        return True

    options = {"heartbeat_interval": 0.1, "heartbeat_limit": 0.4}
    with group(3, body, shut_down=False, **options) as started:
        for rank in {0, 1, 2} - {frozen}:
            assert started[rank].result()


def test_a_graceful_shutdown_waits_for_a_resumed_worker() -> None:
    def body(rank: int) -> str:
        if rank == 1:
            until(
                lambda: bool(rpc.rpc_sync("worker0", is_in_shutdown_barrier)),
                "worker0 waits in the shutdown barrier",
            )
            for _ in range(1000):
                rpc.rpc_sync("worker0", echo, args=(1,))
            rpc.shutdown(timeout=TIMEOUT)
            return "all was done"
        gone = threading.Event()
        current.runtime().agent.on_gone.append(lambda _info: gone.set())
        other = rpc.rpc_sync("worker1", pid)
        freeze(other)
        with pytest.raises(WorkerLost, match="no heartbeat"):
            rpc.rpc_sync("worker1", pid, timeout=TIMEOUT)
        assert gone.wait(TIMEOUT)
        os.kill(other, signal.SIGCONT)
        rpc.shutdown(timeout=TIMEOUT)
        return "all was done"

    options = {"heartbeat_interval": 0.1, "heartbeat_limit": 0.4}
    with group(2, body, shut_down=False, **options) as started:
        assert [process.result() for process in started] == ["all was done"] * 2


def test_a_graceful_shutdown_ends_at_its_timeout() -> None:
    def body(rank: int) -> str:
        if rank == 1:
            linger()
        try:
            rpc.shutdown(timeout=0.5)
        except SetupError as error:
            return str(error)
        return "no worker was missing"

    with group(2, body, shut_down=False) as started:
        assert "the others were not done after 0.5 s" in started[0].result()


def warn_soon(idle_seconds: float = 60.0) -> None:
    """Shorten the times of the shutdown barrier in this process."""
    for name in ("_NOTICE_SECONDS", "_FIRST_LOOK_SECONDS", "_MAX_LOOK_SECONDS"):
        setattr(shutdown_barrier, name, 0.2)
    # Workers that ask each other so often use more of the processor.
    shutdown_barrier._BUSY_SHARE = 0.2
    runtime.IDLE_SECONDS = idle_seconds


def shut_down_and_collect_warnings() -> tuple[str, list[str]]:
    """Shut down without a timeout. Return the error and the warnings."""
    logging.getLogger("gradwire").addHandler(handler := Collector())
    try:
        rpc.shutdown()
    except SetupError as error:
        return str(error), handler.warnings
    return "", handler.warnings


class Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())


@pytest.mark.parametrize("late", [0, 2])
def test_a_shutdown_that_waits_says_for_whom_and_gives_up_if_nothing_happens(late: int) -> None:
    def body(rank: int) -> tuple[str, list[str]] | None:
        warn_soon(idle_seconds=1)
        if rank == late:
            may_end.recv()
            return None
        return shut_down_and_collect_warnings()

    may_end, end = Pipe(duplex=False)
    with may_end, end, group(3, body, shut_down=False) as started:
        for rank in {0, 1, 2} - {late}:
            error, warnings = started[rank].result()
            assert "the others were not done after 1 s without any work" in error
            assert error.endswith(f"It waited for worker{late}")
            assert f"worker worker{rank} has waited" in warnings[0]
            assert f"for worker{late} to call shutdown()" in warnings[0]
        end.send(True)
        started[late].result()


def test_a_shutdown_waits_for_workers_that_only_compute() -> None:
    def body(rank: int) -> tuple[str, list[str]] | None:
        warn_soon(idle_seconds=1)
        if rank == 1:
            busy(2.5)
            rpc.shutdown(timeout=TIMEOUT)
            return None
        return shut_down_and_collect_warnings()

    with group(2, body, shut_down=False) as started:
        error, warnings = started[0].result()
        assert not error
        assert warnings
        started[1].result()


def test_a_shutdown_says_that_it_waits_for_a_call_of_its_own_worker() -> None:
    def body(rank: int) -> tuple[str, list[str]] | None:
        warn_soon()
        if rank == 0:
            rpc.rpc_async("worker1", wait_for_the_end)
            return shut_down_and_collect_warnings()
        until(lambda: bool(rpc.rpc_sync("worker0", has_warned)), "worker0 has warned")
        THE_END.set()
        rpc.shutdown(timeout=TIMEOUT)
        return None

    with group(2, body, shut_down=False) as started:
        error, warnings = started[0].result()
    assert not error
    assert "for worker0 to call shutdown() or to finish calls" in warnings[0]


THE_END = threading.Event()


def wait_for_the_end() -> None:
    THE_END.wait(TIMEOUT)


def has_warned() -> bool:
    handlers = logging.getLogger("gradwire").handlers
    return any(handler.warnings for handler in handlers if isinstance(handler, Collector))


def test_a_shutdown_that_is_not_graceful_fails_open_calls() -> None:
    def body(rank: int) -> str:
        if rank == 1:
            future = rpc.rpc_async("worker0", forever)
            until(lambda: rpc.rpc_sync("worker0", running) == 1, "the call runs")
            rpc.shutdown(graceful=False)
            with pytest.raises(ShutDownError) as ended:
                future.wait()
            return str(ended.value)
        linger()
        return ""

    with group(2, body, shut_down=False) as started:
        assert "forever on worker 'worker0' was still running" in started[1].result()


def test_shutdown_leaves_no_thread_and_no_descriptor() -> None:
    def body(rank: int) -> None:
        for n in range(3):
            rpc.rpc_sync(f"worker{n}", echo, args=(torch.ones(100_000),))
        assert len(threading.enumerate()) > 1
        assert not sockets() <= before
        rpc.shutdown()
        assert threading.enumerate() == [threading.main_thread()]
        assert sockets() <= before

    def sockets() -> set[str]:
        return {d for d in open_descriptors() if "socket:" in d or "anon_inode:" in d}

    before = open_descriptors()
    with group(3, body, shut_down=False) as started:
        for process in started:
            process.result()


def test_a_duplicate_name_ends_the_rendezvous_for_all_workers() -> None:
    with rendezvous_file() as place:

        def join(rank: int) -> str:
            options = rpc.Options(init_method=place)
            with pytest.raises(SetupError, match="not unique") as refused:
                gradwire.Worker("same" if rank else "other", rank, 3, options)
            return str(refused.value)

        with processes(*(partial(join, rank) for rank in range(3))) as started:
            assert all("'same' is not unique" in process.result() for process in started)


@pytest.mark.parametrize(
    ("name", "why"), [("", "non-empty"), ("a b", "must match"), ("a" * 128, "shorter than 128")]
)
def test_worker_info_checks_the_name(name: str, why: str) -> None:
    with pytest.raises(SetupError, match=why):
        WorkerInfo(name, 0)


# -- `with worker:`


def test_inside_cluster_the_block_of_a_worker_makes_it_current_and_does_not_end_it() -> None:
    def body() -> None:
        with cluster(2) as (a, b):
            for _ in range(2):
                with a:
                    assert rpc.rpc_sync("worker1", whoami) == "worker1"
                    with b:
                        assert whoami() == "worker1"
                    assert whoami() == "worker0"
                with pytest.raises(NotInitializedError):
                    whoami()
            assert a.rpc_sync("worker1", whoami) == "worker1"

    with processes(body) as (process,):  # A worker that waits for the other one would never return.
        process.result()


def test_the_last_block_of_a_worker_ends_it() -> None:
    def use() -> None:
        with worker:
            names.append(whoami())

    names: list[str] = []
    with rendezvous_file() as place:
        worker = Worker("alone", 0, 1, rpc.Options(init_method=place))
        with worker:
            thread = threading.Thread(target=use)
            thread.start()
            thread.join()
            with worker:
                pass
            assert worker.rpc_sync("alone", whoami) == "alone"
        assert names == ["alone"]
        with pytest.raises(ShutDownError):
            worker.rpc_sync("alone", whoami)
