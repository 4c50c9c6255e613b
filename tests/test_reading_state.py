"""The state machine that decides who reads answers: its table, its use, and its races."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from gradwire._core.ids import WorkerInfo
from gradwire._core.rpc import client
from gradwire._core.rpc.client import ClientChannel
from gradwire._core.rpc.futures import Future
from gradwire._core.rpc.open_call import OpenCall
from gradwire._core.rpc.reading_state import TABLE, Action, Event, State
from gradwire._core.wire.encoding import Encoded
from gradwire._core.wire.frames import Frame
from gradwire._core.wire.messages import Kind, pack, peek

PAIRS = [(state, event) for state in State for event in Event]

# -- the table

EXPECTED = """
            ANSWER_EXPECTED  NOTHING_EXPECTED  CALLER_READS  NOTIFIED  CONNECTION_ENDED
IDLE        ARMED/arm        IDLE              IDLE          NOTIFIED  ENDED
ARMED       ARMED            ARMED             IDLE/disarm   NOTIFIED  ENDED
NOTIFIED    ARMED/arm        IDLE/disarm       NOTIFIED      NOTIFIED  ENDED
ENDED       ENDED            ENDED             ENDED         ENDED     ENDED
"""


def test_the_table() -> None:
    head, *rows = (line.split() for line in EXPECTED.strip().splitlines())
    assert head == [event.name for event in Event]
    for name, *cells in rows:
        for event, cell in zip(Event, cells, strict=True):
            state, _, action = cell.partition("/")
            assert TABLE[State[name]][event] == (State[state], Action(action or "none"))
    assert [row[0] for row in rows] == [state.name for state in State]


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_the_poller_is_armed_exactly_when_the_state_becomes_armed(
    state: State, event: Event
) -> None:
    following, action = TABLE[state][event]
    assert (action is Action.ARM) == (following is State.ARMED and state is not State.ARMED)
    if action is Action.DISARM:
        assert following is State.IDLE


# -- the channel


class FakeConnection:
    """Takes note of the calls that a channel makes."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.frames: list[Frame] = []
        self.has_token = True
        self.is_sending = False
        self.last_taken = 0.0
        self.channel: ClientChannel | None = None
        self.peer = SimpleNamespace(name="worker1", worker_id=1)

    def attach(self, *_args: object) -> None:
        pass

    def arm(self) -> None:
        self.done.append("arm")

    def disarm(self) -> None:
        self.done.append("disarm")

    def begin_reading(self) -> bool:
        return self.has_token

    def end_reading(self) -> None:
        self.done.append("end_reading")

    def wait(self, _timeout: float | None) -> bool:
        assert self.channel is not None
        assert self.channel._caller_reads
        return True

    def receive(self) -> list[Frame]:
        frames, self.frames = self.frames, []
        return frames

    def send(self, frame: Frame, _blocked: object, _deadline: float) -> None:
        self.frames.append(Frame(pack(Kind.PYTHON_RET, peek(frame.head)[1], b"")))

    def withdraw(self, _is_wanted: object) -> bool:
        return False

    def flush(self, _blocked: object, _deadline: float) -> None:
        pass

    def try_send(self, _frame: Frame) -> bool:
        return not self.is_sending

    def close(self) -> None:
        pass


class FakePort:
    """A worker that has one thread, which is the leader."""

    def __init__(self) -> None:
        self.poller = None
        self.executor = SimpleNamespace(
            begin_blocked_send=lambda: None,
            blocked_senders=(),
            begin_blocking=lambda: False,
            is_leader=lambda: True,
            set_successor_work=lambda _work: True,
            post=lambda callback: callback(),
            stopped=False,
        )

    def complete(self, call: OpenCall) -> None:
        assert call.future is not None
        call.future.complete(None, call.error)

    def discard(self, frame: Frame) -> None:
        pass

    def wake_at(self, deadline: float) -> None:
        pass

    def channel_ended(self, channel: ClientChannel) -> None:
        pass


def make_channel(state: State, *, caller_reads: bool = False) -> tuple[Any, FakeConnection]:
    connection, port = FakeConnection(), FakePort()
    slot = SimpleNamespace(info=WorkerInfo("worker1", 1), channel=None)
    channel: Any = ClientChannel(slot, connection, port)  # type: ignore[arg-type]
    connection.channel = channel
    channel._state, channel._caller_reads = state, caller_reads
    return channel, connection


def send_call(channel: Any, *, waits: bool = False) -> OpenCall:
    call = OpenCall(Kind.PYTHON_CALL, "a call", channel.peer, 60.0)
    if not waits:
        call.future = Future(call, call)
        call.future.expect_failure()
    channel.send(call, Encoded(), None)
    return call


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_a_channel_moves_as_the_table_says(state: State, event: Event) -> None:
    channel, connection = make_channel(state)
    channel._move(event)
    following, action = TABLE[state][event]
    assert channel._state is following
    assert connection.done == ([] if action is Action.NONE else [action.value])


def test_the_state_is_written_in_one_place_each() -> None:
    """`_state` in `_move`, and `_caller_reads` by the caller that has the read token."""
    writes: set[tuple[str, str]] = set()
    for function in ast.walk(ast.parse(inspect.getsource(client))):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    writes.add((node.attr, function.name))
    about_reading = {write for write in writes if write[0] in ("_state", "_caller_reads")}
    assert about_reading == {
        ("_state", "__init__"),
        ("_state", "_move"),
        ("_caller_reads", "__init__"),
        ("_caller_reads", "_read_answer_of"),
    }


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("caller_reads", [False, True])
@pytest.mark.parametrize("how", ["send", "heartbeat", "deadline"])
def test_an_expected_answer_arms_the_poller_unless_it_will_be_read(
    state: State, caller_reads: bool, how: str
) -> None:
    channel, connection = make_channel(state, caller_reads=caller_reads)
    if how == "send":
        send_call(channel)
    elif how == "heartbeat":
        channel.send_heartbeat()
    else:
        channel._expire(send_call(channel, waits=True))
    following = state if caller_reads else TABLE[state][Event.ANSWER_EXPECTED][0]
    assert channel._state is following
    armed = following is State.ARMED and state is not State.ARMED
    assert connection.done == (["arm"] if armed else [])


@pytest.mark.parametrize("state", State)
def test_a_waiting_thread_reads_without_the_poller(state: State) -> None:
    """And nothing is expected afterwards."""
    channel, connection = make_channel(state)
    call = send_call(channel, waits=True)
    channel.wait(call)
    assert call.finished
    assert not channel._caller_reads
    before = ["disarm"] if state is State.ARMED else []
    after = ["disarm"] if state is State.NOTIFIED else []
    assert connection.done == [*before, "end_reading", *after]
    assert channel._state is (State.ENDED if state is State.ENDED else State.IDLE)


@pytest.mark.parametrize("state", State)
def test_a_caller_that_leaves_others_without_answers_arms_the_poller(state: State) -> None:
    channel, connection = make_channel(state)
    send_call(channel)
    connection.frames.clear()  # it is not answered yet
    channel._state = state
    connection.done.clear()
    channel.wait(send_call(channel, waits=True))
    assert connection.done[-1] == ("end_reading" if state is State.ENDED else "arm")
    assert channel._state is (State.ENDED if state is State.ENDED else State.ARMED)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("answered", [True, False])
def test_the_leader_arms_or_disarms_the_poller_after_its_turn(state: State, answered: bool) -> None:
    channel, connection = make_channel(state)
    call = send_call(channel)
    if not answered:
        connection.frames.clear()
    channel._state = state
    connection.done.clear()
    channel._on_readable()
    assert call.finished == answered
    action = [] if state is State.ENDED else ["disarm"] if answered else ["arm"]
    assert connection.done == ["end_reading", *action]


@pytest.mark.parametrize("state", State)
def test_a_leader_that_is_refused_the_token_leaves_it_to_the_reader(state: State) -> None:
    channel, connection = make_channel(state, caller_reads=True)
    connection.has_token = False
    channel._on_readable()
    assert connection.done == []
    assert channel._state is TABLE[state][Event.NOTIFIED][0]


@pytest.mark.parametrize("state", State)
def test_a_connection_that_has_ended_is_never_armed(state: State) -> None:
    channel, connection = make_channel(state)
    channel.end("a test")
    send_call(channel)
    channel.send_heartbeat()
    channel._on_readable()
    channel._look()
    assert channel._state is State.ENDED
    assert "arm" not in connection.done


def test_a_heartbeat_that_is_left_out_counts_unless_the_peer_takes_data() -> None:
    channel, connection = make_channel(State.IDLE)
    connection.is_sending = True
    channel.send_heartbeat()
    first = channel.heartbeat_sent_at
    assert first is not None
    channel.send_heartbeat()
    assert channel.heartbeat_sent_at == first
    connection.last_taken = first + 1.0
    channel.send_heartbeat()
    assert channel.heartbeat_sent_at is None
    assert channel.last_heard == first + 1.0


# -- all races, in a model


@dataclass
class Model:
    """What the threads of a worker share, and the connection."""

    state: State = State.IDLE
    caller_reads: bool = False
    locked: bool = False
    #: The move that a thread is making: the next state, and the action.
    moving: tuple[State, Action] = (State.IDLE, Action.NONE)
    token_free: bool = True
    open: frozenset[int] = frozenset()
    #: Calls the peer will answer, and answers that can be read.
    sent: frozenset[int] = frozenset()
    readable: frozenset[int] = frozenset()
    armed: bool = False
    notifications: int = 0


#: Does one step that no other thread can divide. Returns the label to go on at; None for the next
#: step, `BLOCKED` if the thread cannot go on now.
Step = Callable[[Model], "str | None"]
Program = list["Step | str"]
BLOCKED = "(blocked)"
END = "(end)"


def poll(model: Model) -> None:
    if model.armed and model.readable:
        model.armed = False
        model.notifications += 1


def move(event: Event) -> Program:
    """`ClientChannel._move`."""

    def lock(model: Model) -> str | None:
        if model.locked:
            return BLOCKED
        model.locked = True
        return None

    def first(model: Model) -> None:
        state, action = TABLE[model.state][event]
        model.moving = (state, action)
        if action is Action.ARM:
            model.armed = True
            poll(model)
        else:
            model.state = state

    def then(model: Model) -> None:
        state, action = model.moving
        model.state = state
        if action is Action.DISARM:
            model.armed = False
        model.locked, model.moving = False, (State.IDLE, Action.NONE)

    return [lock, first, then]


def expect_answer(done: str) -> Program:
    """`ClientChannel._expect_answer`."""
    return [
        lambda model: done if model.state is State.ARMED else None,
        lambda model: done if model.caller_reads else None,
        *move(Event.ANSWER_EXPECTED),
        lambda _model: done,
    ]


def look(done: str) -> Program:
    """`ClientChannel._look`."""
    return [
        lambda model: None if model.open else "nothing",
        *expect_answer(done),
        "nothing",
        lambda model: None if model.state is State.NOTIFIED else done,
        *move(Event.NOTHING_EXPECTED),
        lambda _model: done,
    ]


def send(call: int) -> Program:
    def expect(model: Model) -> None:
        model.open |= {call}

    def leave(model: Model) -> None:
        model.sent |= {call}

    return [expect, leave]


def take_token(model: Model, refused: str) -> str | None:
    if not model.token_free:
        return refused
    model.token_free = False
    return None


def receive(model: Model) -> None:
    model.open -= model.readable
    model.readable = frozenset()


def free_token(model: Model) -> None:
    model.token_free = True


def set_caller_reads(value: bool) -> Step:
    def write(model: Model) -> None:
        model.caller_reads = value

    return write


def asynchronous(call: int) -> Program:
    """A thread that sends a call and does not wait for it."""
    return [*send(call), *expect_answer(END)]


def synchronous(call: int) -> Program:
    """`ClientChannel.wait`."""
    return [
        *send(call),
        lambda model: take_token(model, "latch"),
        set_caller_reads(True),
        lambda model: None if model.state is State.ARMED else "read",
        *move(Event.CALLER_READS),
        "read",
        lambda model: None if call in model.open else "leave",
        lambda model: None if model.readable or call not in model.open else BLOCKED,
        receive,  # type: ignore[list-item]
        lambda _model: "read",
        "leave",
        set_caller_reads(False),
        free_token,  # type: ignore[list-item]
        *look(END),
        "latch",
        lambda model: BLOCKED if call in model.open else END,
    ]


def leader() -> Program:
    """`ClientChannel._on_readable`, whenever the poller notifies."""

    def begin(model: Model) -> str | None:
        if not model.notifications:
            return BLOCKED
        model.notifications -= 1
        return None

    return [
        "poll",
        begin,
        *move(Event.NOTIFIED),
        lambda model: take_token(model, "poll"),
        receive,  # type: ignore[list-item]
        free_token,  # type: ignore[list-item]
        *look("poll"),
    ]


def peer() -> Program:
    def answer(model: Model) -> str | None:
        if not model.sent:
            return BLOCKED
        call = min(model.sent)
        model.sent -= {call}
        model.readable |= {call}
        poll(model)
        return "answer"

    return ["answer", answer]


class Thread:
    def __init__(self, program: Program):
        self.steps: list[Step] = []
        self.labels: dict[str, int] = {}
        for item in program:
            if isinstance(item, str):
                self.labels[item] = len(self.steps)
            else:
                self.steps.append(item)
        self.labels[END] = len(self.steps)

    def go_on(self, model: Model, at: int) -> int | None:
        """Do one step; the position of the next one, None if that cannot be done now."""
        if at == len(self.steps):
            return None
        label = self.steps[at](model)
        if label == BLOCKED:
            return None
        return at + 1 if label is None else self.labels[label]


def is_truthful(model: Model) -> bool:
    """Whether the poller, at rest, is as the state says, and would notice that the peer closes."""
    return model.state is not State.NOTIFIED and (model.armed or model.state is not State.ARMED)


def bad_ends(*programs: Program) -> list[Model]:
    """Try every order of the steps of these threads, the leader's and the peer's. Return the ends,
    where no thread can go on, at which a call is still open or the state is not true."""
    threads = [Thread(program) for program in (*programs, leader(), peer())]
    start = (Model(), (0,) * len(threads))
    seen, left, stuck = set(), [start], []
    while left:
        model, places = left.pop()
        moved = False
        for index, thread in enumerate(threads):
            changed = Model(*vars(model).values())
            at = thread.go_on(changed, places[index])
            if at is None:
                continue
            moved = True
            following = (*places[:index], at, *places[index + 1 :])
            key = (*vars(changed).values(), following)
            if key not in seen:
                seen.add(key)
                left.append((changed, following))
        if not moved and (model.open or not is_truthful(model)):
            stuck.append(model)
    return stuck


@pytest.mark.parametrize(
    "programs",
    [
        (asynchronous(1), asynchronous(2)),
        (asynchronous(1), synchronous(2)),
        (synchronous(1), synchronous(2)),
        ([*send(1), *send(2), *asynchronous(3)], synchronous(4)),
    ],
    ids=["two asynchronous", "one of each", "two synchronous", "four calls"],
)
def test_no_order_of_events_leaves_an_answer_unread(programs: tuple[Program, ...]) -> None:
    assert not bad_ends(*programs)


@pytest.mark.parametrize(
    "programs",
    [
        (asynchronous(1), asynchronous(2), synchronous(3)),
        (asynchronous(1), synchronous(2), synchronous(3)),
    ],
    ids=["two asynchronous", "two synchronous"],
)
def test_no_order_of_events_of_three_threads_leaves_an_answer_unread(
    programs: tuple[Program, ...],
) -> None:
    assert not bad_ends(*programs)


def without_lock(program: Program) -> Program:
    return [step for step in program if getattr(step, "__name__", "") != "lock"]


def looks_too_early(call: int) -> Program:
    """A caller that looks before it gives back the read token."""
    program = synchronous(call)
    leaves, gives_back = program.index("leave"), program.index(free_token)  # type: ignore[arg-type]
    return [
        *program[:leaves],
        "leave",
        set_caller_reads(False),
        *look("looked"),
        "looked",
        program[gives_back],
        lambda _model: END,
        *program[program.index("latch") :],
    ]


def never_looks(call: int) -> Program:
    program = synchronous(call)
    gives_back = program.index(free_token)  # type: ignore[arg-type]
    return [*program[: gives_back + 1], lambda _model: END, *program[program.index("latch") :]]


def expects_too_late(call: int) -> Program:
    """A thread that reads the state before it makes its call visible."""
    return [*expect_answer("send"), "send", *send(call)]


@pytest.mark.parametrize(
    "programs",
    [
        (asynchronous(1), looks_too_early(2)),
        (asynchronous(1), never_looks(2)),
        (expects_too_late(1), synchronous(2)),
        (without_lock(asynchronous(1)), without_lock(synchronous(2)), asynchronous(3)),
    ],
    ids=["looks too early", "never looks", "expects too late", "moves without the lock"],
)
def test_the_model_notices_a_broken_rule(programs: tuple[Program, ...]) -> None:
    assert bad_ends(*programs)
