"""Calls and references when another thread acts, or an interrupt strikes, at the worst moment.

Most tests patch a method so that the other thread acts in the middle of it.
"""

from __future__ import annotations

import asyncio
import dis
import gc
import itertools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
import torch

from gradwire import RRef, rpc
from gradwire._core.rpc import client as client_module
from gradwire._core.rpc import server
from gradwire._core.rpc.client import ClientChannel
from gradwire._core.rpc.reading_state import Event
from gradwire._core.rref.owner_table import OwnedValue, OwnerTable
from gradwire._core.wire.messages import Kind
from gradwire.errors import CallError, CallTimeout, ShutDownError, WorkerLost
from gradwire.testing import Fault, FaultyTransport, cluster, runtime_of
from gradwire.testing.cluster import transports_named
from gradwire.worker import Worker
from tests.processes import until

HELD: list[Any] = []
GATE = threading.Event()


@pytest.fixture
def trio() -> Iterator[list[Worker]]:
    """Three workers, connected by sockets."""
    with cluster(3, transports=transports_named("unix")) as workers:
        yield workers
        HELD.clear()


def in_another_thread(action: Any) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


def nothing(*_args: Any) -> None:
    pass


def hold(value: Any) -> None:
    HELD.append(value)


def give() -> Any:
    return HELD[0]


def make() -> Any:
    return RRef("a value")


def wait_at_gate() -> bool:
    return GATE.wait(30)


def held_by(worker: Worker) -> int:
    gc.collect()
    return sum(runtime_of(worker).rrefs.debug_info().values())


# -- futures


def test_callbacks_wait_until_a_result_may_be_used(trio: list[Worker]) -> None:
    """It holds a reference of a third worker, whose owner must know of it first."""
    mine = trio[2].rref("value")
    trio[2].rpc_sync("worker1", hold, (mine,))
    seen: list[bool] = []
    future = trio[0].rpc_async("worker1", give)
    future.add_done_callback(lambda f: seen.append(f.done()))
    assert future.then(lambda f: f.done()).wait()
    until(lambda: bool(seen), "the callback has run")
    assert seen == [True]


@pytest.mark.parametrize("waits", [True, False])
def test_a_result_that_may_not_be_used_in_time_is_late(waits: bool) -> None:
    """The owner of a value that it refers to does not answer."""
    transport = FaultyTransport(transports_named("unix")[0], [])
    options = rpc.Options(heartbeat_interval=0.2, heartbeat_limit=0.5)  # it is asked again then
    with cluster(3, transports=[transport], options=options) as (caller, called, owner):
        owner.rpc_sync("worker1", hold, (owner.rref("value"),))
        transport.add(Fault("drop", kind=Kind.RREF_FORK_REQUEST, times=1))
        with pytest.raises(CallTimeout, match="have not answered: RREF_FORK_REQUEST to worker"):
            if waits:
                caller.rpc_sync("worker1", give, timeout=0.2)
            else:
                caller.rpc_async("worker1", give, timeout=0.2).wait()
        assert caller.rpc_sync("worker1", max, (1, 2)) == 2
        HELD.clear()
    assert not any(map(held_by, (caller, called, owner)))


def give_with_tensor() -> Any:
    return HELD[0], torch.ones(2)


def test_a_result_that_refers_to_third_workers_is_not_kept(trio: list[Worker]) -> None:
    """Not even by what would tell that it is late."""
    trio[2].rpc_sync("worker1", hold, (trio[2].rref("value"),))
    future = trio[0].rpc_async("worker1", give_with_tensor)
    tensor = weakref.ref(future.wait()[1])
    del future
    HELD.clear()
    until(lambda: not held_by(trio[2]) and tensor() is None, "all of it is gone")


def test_a_callback_that_exits_does_not_keep_others_from_theirs(trio: list[Worker]) -> None:
    exited = threading.Event()

    def exit_loop(_future: Any) -> None:
        exited.set()
        raise asyncio.CancelledError

    GATE.clear()
    waiting = trio[0].rpc_async("worker1", wait_at_gate)
    trio[0].rpc_async("worker1", nothing).add_done_callback(exit_loop)
    assert exited.wait(30)
    GATE.set()
    until(waiting.done, "nobody waits for it, and it comes")


def test_a_future_is_completed_once() -> None:
    future: rpc.Future[int] = rpc.Future()
    future.set_result(42)
    with pytest.raises(RuntimeError, match="done already"):
        future.set_exception(ValueError("late"))
    assert future.exception() is None
    assert future.wait() == 42


def test_a_shutdown_ends_what_is_tried_again_and_again(trio: list[Worker]) -> None:
    mine = trio[2].rref("value")
    trio[2].rpc_sync("worker1", hold, (mine,))
    trio[2].shutdown(graceful=False)

    def call() -> None:
        with pytest.raises(CallError):
            trio[0].rpc_sync("worker1", give)

    thread = threading.Thread(target=call)
    thread.start()
    until(
        lambda: bool(runtime_of(trio[0]).agent.sender.retries.open),
        "the reference waits for its owner",
    )
    trio[0].shutdown(graceful=False)
    thread.join(30)
    assert not thread.is_alive()
    trio[1].shutdown(graceful=False)


def test_what_is_tried_again_says_whom_it_was_for(memory_pair: list[Worker]) -> None:
    here, there = memory_pair
    there.shutdown(graceful=False)
    outcome = runtime_of(here).agent.sender.send_until_answered(
        there.info, Kind.RREF_USER_DELETE, None
    )
    here.shutdown(graceful=False)
    error = outcome.exception()
    assert isinstance(error, ShutDownError)
    assert (error.worker, error.call) == ("worker1", "RREF_USER_DELETE")
    assert "before worker 'worker1' had answered RREF_USER_DELETE" in str(error)


# -- sending


def test_an_answer_that_was_held_back_is_sent_once(
    trio: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    user, owner, _ = trio
    user.rpc_sync("worker1", nothing)
    monkeypatch.setattr(server, "_HOLD_SECONDS", 60.0)
    (connection,) = (
        s.connection for s in runtime_of(owner).agent._server_channels if s.peer.id == 0
    )

    class Held(deque[bytes]):
        def append(self, frame: bytes) -> None:
            super().append(frame)
            in_another_thread(connection.flush)

    connection._held = Held()  # type: ignore[attr-defined]
    rrefs = [future.wait() for future in [user.rpc_async("worker1", make) for _ in range(40)]]
    assert [rref.to_here() for rref in rrefs] == ["a value"] * 40


def test_a_call_that_is_lost_while_it_leaves_lets_its_references_go(trio: list[Worker]) -> None:
    user, receiver, owner = trio
    user.rpc_sync("worker1", nothing)
    for rref in (user.rref("mine"), user.remote("worker2", dict)):
        rref.to_here()
        channel = runtime_of(user).agent.peers.find("worker1").channel
        assert channel is not None
        send = channel.connection.send

        def end_and_send(*args: Any, channel: Any = channel, send: Any = send) -> None:
            in_another_thread(lambda: channel.end("the peer closed the connection"))
            send(*args)

        channel.connection.send = end_and_send  # type: ignore[method-assign]
        with pytest.raises(CallError):
            user.rpc_async("worker1", nothing, (rref,)).wait()
        user.rpc_sync("worker1", nothing)
    runtime_of(user).agent.liveness.declare_gone(receiver.info)
    del rref
    until(lambda: not held_by(user) and not held_by(owner), "nothing is held for it")


def test_a_reference_sent_to_a_worker_that_is_gone_by_then_is_let_go(trio: list[Worker]) -> None:
    user, receiver, owner = trio
    user.rpc_sync("worker1", nothing)
    theirs = user.remote("worker2", dict)
    theirs.to_here()
    channel = runtime_of(user).agent.peers.find("worker1").channel
    assert channel is not None
    send = channel.connection.send

    def send_and_leave(*args: Any) -> None:
        send(*args)
        receiver.shutdown(graceful=False)
        until(
            lambda: runtime_of(user).agent.liveness.is_gone(receiver.id), "it is known to be gone"
        )

    channel.connection.send = send_and_leave  # type: ignore[method-assign]
    with pytest.raises(CallError):
        user.rpc_sync("worker1", nothing, (theirs,))
    del theirs
    until(lambda: not held_by(user) and not held_by(owner), "nothing is held for it")
    user.shutdown(graceful=False)
    owner.shutdown(graceful=False)


# -- connections


def test_two_threads_may_clear_up_after_a_connection(trio: list[Worker]) -> None:
    GATE.clear()
    with pytest.raises(CallTimeout):
        trio[0].rpc_sync("worker1", wait_at_gate, timeout=0.05)
    channel = runtime_of(trio[0]).agent.peers.find("worker1").channel
    assert channel is not None
    others: list[None] = []

    class Late(dict[int, Any]):
        def popitem(self) -> tuple[int, Any]:
            if not others:
                others.append(None)
                in_another_thread(lambda: channel._fail_all("another thread has noticed"))
            return super().popitem()

    channel._late = Late(channel._late)
    channel.end("the peer died")
    assert others
    GATE.set()


def test_a_late_answer_is_read_though_nothing_was_expected_a_moment_before(
    trio: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call times out after the leader has looked and before it reports that nothing is
    expected."""
    trio[0].rpc_sync("worker1", nothing)
    channel = runtime_of(trio[0]).agent.peers.find("worker1").channel
    assert channel is not None
    move = channel._move
    timed_out = threading.Event()
    GATE.clear()

    def time_out() -> None:
        with pytest.raises(CallTimeout):
            trio[0].rpc_sync("worker1", wait_at_gate, timeout=0.005)
        timed_out.set()

    def move_too_late(event: Event) -> None:
        if event is Event.NOTHING_EXPECTED:
            monkeypatch.setattr(channel, "_move", move)
            in_another_thread(time_out)
        move(event)

    monkeypatch.setattr(channel, "_move", move_too_late)
    trio[0].rpc_async("worker1", nothing)
    assert timed_out.wait(30), "the leader completes the future and looks"
    GATE.set()
    until(lambda: not channel._late, "the late answer was read")
    until(trio[0].rpc_async("worker1", nothing).done, "nobody waits for it, and it comes")


@pytest.mark.parametrize("how", ["rpc_sync", "rpc_async"])
def test_a_channel_that_ends_while_a_call_picks_it_is_a_lost_worker(
    trio: list[Worker], how: str
) -> None:
    trio[0].rpc_sync("worker1", nothing)
    peer: Any = runtime_of(trio[0]).agent.peers.find("worker1")
    ended: list[ClientChannel] = []

    class Ending(type(peer)):  # type: ignore[misc]
        """Its channel ends as soon as a call has picked it."""

        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name == "channel" and value is not None and not ended:
                ended.append(value)
                in_another_thread(lambda: value.end("the peer died"))
            return value

    peer.__class__ = Ending
    with pytest.raises(CallError):
        future = getattr(trio[0], how)("worker1", nothing)
        assert future is not None
        future.wait()
    assert trio[0].rpc_sync("worker1", max, (1, 2)) == 2
    ended.clear()
    assert None not in runtime_of(trio[0]).agent.peers.channels()


def test_without_a_thread_to_be_had_the_leader_goes_on(
    trio: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    trio[0].rpc_sync("worker1", nothing)
    start, refused = threading.Thread.start, []

    def refuse_some(self: threading.Thread) -> None:
        if "gradwire-worker1" in self.name and len(refused) < 3:
            refused.append(None)
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse_some)
    GATE.clear()
    waiting = trio[0].rpc_async("worker1", wait_at_gate)
    until(lambda: len(refused) == 3, "the watch has tried again")
    assert trio[0].rpc_sync("worker1", max, (1, 2)) == 2
    GATE.set()
    assert waiting.wait()


def test_the_garbage_collector_may_send_references_while_the_table_is_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table, made = OwnerTable(), OwnedValue.__init__

    def make_and_collect(self: OwnedValue, rref_id: int) -> None:
        made(self, rref_id)
        if rref_id < 3:
            table.add_fork(rref_id + 1, rref_id + 100, None)

    monkeypatch.setattr(OwnedValue, "__init__", make_and_collect)
    assert table.get(0) is table.get(0)
    assert table.counts()[0] == 3


# -- interrupts


class Interrupt(BaseException):
    """Like Ctrl-C, at a chosen moment."""


@contextmanager
def interrupt_at(moment: int) -> Iterator[None]:
    """Raise `Interrupt` in this thread, after the given number of calls made by methods of
    `ClientChannel`: Python delivers signals after calls."""
    left = itertools.count(moment, -1)
    #: The frames of these methods whose last instruction was a call.
    after_call: set[FrameType] = set()

    def step(frame: FrameType) -> None:
        if frame in after_call:
            after_call.remove(frame)
            if next(left) == 0:
                raise Interrupt
        if dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("CALL"):
            after_call.add(frame)

    with each_instruction(step):
        yield


if sys.version_info >= (3, 12):

    @contextmanager
    def each_instruction(step: Callable[[FrameType], None]) -> Iterator[None]:
        """Call `step` at each instruction that this thread runs in a method of `ClientChannel`.
        (`sys.settrace` misses some of them on Python 3.13.)"""
        monitoring, me = sys.monitoring, threading.get_ident()
        members = [getattr(member, "fget", member) for member in vars(ClientChannel).values()]
        functions = [member for member in members if isinstance(member, FunctionType)]
        codes = [code for function in functions for code in codes_in(function.__code__)]

        def on_instruction(_code: CodeType, _offset: int) -> None:
            if threading.get_ident() == me:
                step(sys._getframe(1))

        tool, event = monitoring.DEBUGGER_ID, monitoring.events.INSTRUCTION
        monitoring.use_tool_id(tool, "interrupts")
        monitoring.register_callback(tool, event, on_instruction)
        try:
            for code in codes:
                monitoring.set_local_events(tool, code, event)
            yield
        finally:
            for code in codes:
                monitoring.set_local_events(tool, code, monitoring.events.NO_EVENTS)
            monitoring.register_callback(tool, event, None)
            monitoring.free_tool_id(tool)

else:

    @contextmanager
    def each_instruction(step: Callable[[FrameType], None]) -> Iterator[None]:
        """Call `step` at each instruction that this thread runs in a method of `ClientChannel`."""

        def trace(frame: FrameType, _event: str, _arg: object) -> Any:
            if frame.f_code.co_filename != client_module.__file__:
                return None
            frame.f_trace_opcodes = True
            return trace_frame

        def trace_frame(frame: FrameType, event: str, _arg: object) -> Any:
            if event == "opcode":
                step(frame)
            return trace_frame

        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(None)


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of the functions defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


@pytest.mark.parametrize("transport", ["in_process", "unix"])
def test_an_interrupt_of_a_waiting_thread_leaves_no_call_open(transport: str) -> None:
    """Wherever it strikes, other calls finish, the next call works, and no reference is held."""
    # A heartbeat would end a connection that nobody reads, and so hide that nobody reads it.
    options = rpc.Options(heartbeat_interval=1000, heartbeat_limit=2000)
    transports = transports_named(transport)
    with cluster(2, transports=transports, options=options, graceful=False) as (caller, _):
        interrupts = 0
        for moment in itertools.count():
            others = [caller.rpc_async("worker1", max, (number, 1)) for number in range(3)]
            rref = caller.rref("held")
            try:
                with interrupt_at(moment):
                    caller.rpc_sync("worker1", type(rref).owner_name, (rref,))
                    others[1].wait()
            except Interrupt:
                interrupts += 1
            except WorkerLost:
                pass  # the interrupt struck where it becomes the loss of a connection
            else:
                break
            until(lambda others=others: all(f.done() for f in others), "the others have ended")
            for future in others:
                future.exception()
            assert caller.rpc_sync("worker1", max, (1, 2)) == 2
            del rref
        assert interrupts > 10
        until(lambda: not runtime_of(caller).agent.metrics.open_calls(), "no call is open")
        until(lambda: not any(runtime_of(caller).rrefs.debug_info().values()), "nothing is held")
