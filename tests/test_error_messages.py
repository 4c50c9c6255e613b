"""Errors, log lines and reprs as a user reads them: they name the call and the worker, and show the
user's code instead of gradwire's."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

import gradwire
from gradwire import autograd, rpc
from gradwire.errors import CallTimeout, EncodingError, RemoteError, UnknownWorkerError
from gradwire.nn import RemoteModule
from gradwire.worker import Worker
from tests.processes import run_group, until

OWN_FILES, TORCH_FILES = (str(Path(module.__file__).parent) for module in (gradwire, torch))
#: Python 3.10 prints notes only if a library such as `exceptiongroup` has patched it.
PRINTS_NOTES = hasattr(traceback.TracebackException(ValueError, None, None), "__notes__")


class Broken(Exception):
    pass


def break_down() -> None:
    raise Broken("it broke")


def pass_on(workers: list[str]) -> None:
    """Call the next worker, and the last one breaks down."""
    if not workers:
        break_down()
    rpc.rpc_sync(workers[0], pass_on, (workers[1:],))


def echo(*values: Any) -> Any:
    return values


def make_lock() -> Any:
    return threading.Lock()


class Machine:
    def break_down(self) -> None:
        break_down()

    def make_lock(self) -> Any:
        return threading.Lock()

    def use(self, *parts: Any) -> Any:
        return parts

    def wait(self, seconds: float) -> None:
        GO_ON.wait(seconds)


@rpc.functions.async_execution
def break_down_later(worker: str) -> rpc.Future[None]:
    return rpc.rpc_async(worker, break_down)


GO_ON = threading.Event()


def wait_for_go() -> int:
    assert GO_ON.wait(30)
    return 1


@pytest.fixture
def held_back() -> Iterator[None]:
    """Let `wait_for_go` run on when the test has ended."""
    GO_ON.clear()
    yield
    GO_ON.set()


def raised_by(action: Callable[[], Any]) -> BaseException:
    try:
        action()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def printed(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def frames_of_gradwire(error: BaseException) -> int:
    frames = traceback.extract_tb(error.__traceback__)
    return sum(frame.filename.startswith(OWN_FILES) for frame in frames)


def fail_in_await() -> None:
    async def program() -> None:
        await rpc.rpc_async("worker1", break_down)

    asyncio.run(program())


WAYS: dict[str, tuple[Callable[[], Any], str]] = {
    "rpc_sync": (lambda: rpc.rpc_sync("worker1", break_down), "break_down"),
    "rpc_async": (lambda: rpc.rpc_async("worker1", break_down).wait(), "break_down"),
    "await": (fail_in_await, "break_down"),
    "remote": (lambda: rpc.remote("worker1", break_down).to_here(), "break_down"),
    "method": (lambda: rpc.remote("worker1", Machine).rpc_sync().break_down(), "break_down"),
    "remote method": (
        lambda: rpc.remote("worker1", Machine).remote().break_down().to_here(),
        "break_down",
    ),
}


# -- exceptions of remote functions


@pytest.mark.parametrize("way", WAYS)
def test_an_exception_ends_with_the_call_and_the_worker(trio: list[Worker], way: str) -> None:
    action, name = WAYS[way]
    error = raised_by(action)
    assert type(error) is Broken
    place = f"in the call of {name} on worker 'worker1'"
    assert error.__notes__ == [place]  # type: ignore[attr-defined]
    if PRINTS_NOTES:
        assert printed(error).endswith(f"\n{Broken.__module__}.Broken: it broke\n{place}\n")
        assert printed(error).count(place) == 1


@pytest.mark.parametrize("way", WAYS)
def test_an_exception_shows_the_users_frames_and_few_of_gradwire(
    trio: list[Worker], way: str
) -> None:
    error = raised_by(WAYS[way][0])
    remote = str(error.__cause__)
    assert 'break_down on worker "worker1" (id 1) raised:' in remote
    assert "in break_down\n" in remote
    assert OWN_FILES not in remote
    assert " of gradwire)\n" in remote
    assert remote.count("Traceback (most recent call last)") == 1
    assert frames_of_gradwire(error) <= 3
    assert TORCH_FILES not in printed(error)


def test_a_chain_of_workers_is_shown_as_one_traceback(trio: list[Worker]) -> None:
    error = raised_by(lambda: rpc.rpc_sync("worker1", pass_on, (["worker2", "worker0"],)))
    text = printed(error)
    order = ["worker1", "worker2", "worker0"]
    places = [text.index(f'pass_on on worker "{worker}"') for worker in order]
    assert places == sorted(places)
    assert text.count("it broke") == 3  # the line of code, the remote exception, the exception here
    assert text.count("RemoteTraceback") == 1
    assert error.__notes__ == [  # type: ignore[attr-defined]
        f"in the call of pass_on on worker {worker!r}" for worker in reversed(order)
    ]


def test_a_function_that_returns_a_future_is_named_too(trio: list[Worker]) -> None:
    error = raised_by(lambda: rpc.rpc_sync("worker1", break_down_later, ("worker2",)))
    assert error.__notes__ == [  # type: ignore[attr-defined]
        "in the call of break_down on worker 'worker2'",
        "in the call of break_down_later on worker 'worker1'",
    ]


def test_all_frames_are_shown_at_the_level_debug(
    trio: list[Worker], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "gradwire"):
        error = raised_by(lambda: rpc.rpc_sync("worker1", break_down))
    assert f"{OWN_FILES}/_core/rpc/function_calls.py" in str(error.__cause__)
    assert frames_of_gradwire(error) > 3


def test_waiting_twice_for_a_failed_future_shows_the_same_frames(trio: list[Worker]) -> None:
    future = rpc.rpc_async("worker1", break_down)
    first, second = (printed(raised_by(future.wait)) for _ in range(2))
    assert first == second


def test_an_error_in_a_callback_keeps_the_frames_of_the_callback(trio: list[Worker]) -> None:
    future = rpc.rpc_async("worker1", max, (1, 2)).then(lambda _: break_down())
    error = raised_by(future.wait)
    assert "in break_down\n" in printed(error)


def raise_local() -> None:
    class LocalError(Exception):
        pass

    raise LocalError("from within")


def test_an_exception_that_cannot_be_rebuilt_names_the_call_once(trio: list[Worker]) -> None:
    error = raised_by(lambda: rpc.rpc_sync("worker1", raise_local))
    assert type(error) is RemoteError
    last = printed(error).strip().splitlines()[-1]
    assert "raise_local on worker 'worker1' raised" in last


def test_a_timeout_of_a_method_names_the_method(trio: list[Worker], held_back: None) -> None:
    machine = rpc.remote("worker1", Machine)
    error = raised_by(lambda: machine.rpc_sync(timeout=0.05).wait(30))
    assert isinstance(error, CallTimeout)
    assert str(error).startswith("wait on worker 'worker1'")
    assert error.call == "wait"
    GO_ON.set()


# -- what cannot be sent


class HasABug:
    def __reduce__(self) -> Any:
        return self.missing  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("action", "part"),
    [
        (lambda: rpc.rpc_sync("worker1", echo, (1, make_lock())), "argument 1 of echo (a lock)"),
        (
            lambda: rpc.rpc_async("worker1", max, (), {"key": lambda: 1}),
            "argument 'key' of max (a function)",
        ),
        (
            lambda: rpc.rpc_sync("worker1", echo, ([{"f": lambda: 1}],)),
            "argument 0 of echo (a list)",
        ),
        (lambda: rpc.remote("worker1", lambda: 1), "the function "),
        (
            lambda: rpc.remote("worker1", Machine).rpc_sync().use(1, make_lock()),
            "argument 1 of use (a lock)",
        ),
        (
            lambda: RemoteModule("worker1", torch.nn.Linear, (2, make_lock())),
            "argument 1 of Linear (a lock)",
        ),
        (
            lambda: RemoteModule("worker1", lambda: torch.nn.Linear(2, 2)),
            "the call to ",
        ),
        (
            lambda: RemoteModule("worker1", torch.nn.Identity)(make_lock()),
            "argument 0 of forward (a lock)",
        ),
    ],
)
def test_an_argument_that_cannot_be_sent_is_named_in_a_single_traceback(
    trio: list[Worker], action: Callable[[], Any], part: str
) -> None:
    error = raised_by(action)
    assert isinstance(error, EncodingError)
    assert str(error).startswith(part)
    assert " cannot be sent: " in str(error)
    assert ("closures=True" in str(error)) == ("lambda" in str(error))
    assert printed(error).count("Traceback (most recent call last)") == 1
    assert frames_of_gradwire(error) <= 3


def test_a_bug_in_the_users_own_pickling_is_shown(trio: list[Worker]) -> None:
    error = raised_by(lambda: rpc.rpc_sync("worker1", echo, (HasABug(),)))
    assert isinstance(error, EncodingError)
    text = printed(error)
    assert "in __reduce__\n" in text
    assert text.count("Traceback (most recent call last)") == 2


@pytest.mark.parametrize(
    ("action", "call"),
    [
        (lambda: rpc.rpc_sync("worker1", make_lock), "make_lock"),
        (lambda: rpc.rpc_async("worker1", make_lock).wait(), "make_lock"),
        (lambda: rpc.remote("worker1", make_lock).to_here(), "RRef.to_here()"),
        (lambda: rpc.remote("worker1", Machine).rpc_sync().make_lock(), "Machine.make_lock"),
    ],
)
def test_a_result_that_cannot_be_sent_is_named_with_its_type(
    trio: list[Worker], action: Callable[[], Any], call: str
) -> None:
    error = raised_by(action)
    assert isinstance(error, EncodingError)
    assert str(error).startswith(
        f"the result of {call} on worker 'worker1' (a lock) cannot be sent"
    )
    assert "rpc.remote" in str(error)
    assert OWN_FILES not in str(error.__cause__)


def test_a_function_of_a_notebook_that_the_callee_lacks_is_explained() -> None:
    def body(rank: int) -> str:
        if rank == 1:
            return ""
        main = sys.modules["__main__"]
        exec("def cell(): pass", main.__dict__)
        return str(raised_by(lambda: rpc.rpc_sync("worker1", main.cell)))

    text, _ = run_group(2, body)
    assert "cannot be decoded on worker 'worker1'" in text
    assert "'cell'" in text
    assert "closures=True" in text


# -- bad arguments


CALLS: dict[str, Callable[..., Any]] = {
    "rpc_sync": rpc.rpc_sync,
    "rpc_async": lambda *args, **kwargs: rpc.rpc_async(*args, **kwargs).wait(),
    "remote": lambda *args, **kwargs: rpc.remote(*args, **kwargs).to_here(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("args", [torch.ones(2), torch.zeros(1), 0, "abc", {"x": 1}, iter([1])])
def test_args_that_are_no_tuple_are_refused(trio: list[Worker], call: str, args: Any) -> None:
    name = type(args).__name__
    text = f"args must be a tuple or a list of the arguments of echo, not {name}.*args=\\(x,\\)"
    with pytest.raises(EncodingError, match=text):
        CALLS[call]("worker1", echo, args=args)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kwargs", [[], [1], "x", 0, torch.ones(2)])
def test_kwargs_that_are_no_dictionary_are_refused(
    trio: list[Worker], call: str, kwargs: Any
) -> None:
    with pytest.raises(EncodingError, match=r"kwargs must be a dictionary .* of echo, not"):
        CALLS[call]("worker1", echo, kwargs=kwargs)


@pytest.mark.parametrize("call", CALLS)
def test_args_may_be_any_tuple_or_list(trio: list[Worker], call: str) -> None:
    assert CALLS[call]("worker1", echo, args=[1, 2]) == (1, 2)
    assert CALLS[call]("worker1", echo, args=torch.Size((3, 4))) == (3, 4)
    assert CALLS[call]("worker1", echo, args=None) == ()
    named: Mapping[str, int] = MappingProxyType({"base": 2})
    assert CALLS[call]("worker1", int, args=["101"], kwargs=named) == 5


def test_what_is_not_callable_is_refused(trio: list[Worker]) -> None:
    with pytest.raises(EncodingError, match=r"an object of class int .*not callable"):
        rpc.rpc_sync("worker1", 3)  # type: ignore[arg-type]


def test_a_misspelt_worker_is_told_the_right_name(trio: list[Worker]) -> None:
    with pytest.raises(UnknownWorkerError, match="Did you mean 'worker1'") as caught:
        rpc.rpc_sync("wroker1", echo)
    assert frames_of_gradwire(caught.value) <= 2
    with pytest.raises(UnknownWorkerError) as caught:
        rpc.rpc_sync("server", echo)
    assert "mean" not in str(caught.value)


# -- names of calls


class CallableObject:
    def __call__(self, *args: Any) -> None:
        break_down()

    def __repr__(self) -> str:
        raise AssertionError("the repr of a callable may be long, or remote")


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (torch.add, "torch.add"),
        (torch.Tensor.add, "torch.Tensor.add"),
        (torch.linalg.norm, "torch.linalg.norm"),
        (torch.ops.aten.add.Tensor, "torch.ops.aten.add.Tensor"),
        (torch.ops.aten.add, "torch.ops.aten.add"),
        (max, "max"),
        (Machine.use, "Machine.use"),
        (functools.partial(break_down), "partial(break_down)"),
        (CallableObject(), "an object of class CallableObject"),
    ],
)
def test_a_function_is_called_by_the_name_that_users_know(
    trio: list[Worker], function: Any, name: str
) -> None:
    error = raised_by(lambda: rpc.rpc_sync("worker1", function))
    assert error.__notes__ == [  # type: ignore[attr-defined]
        f"in the call of {name} on worker 'worker1'"
    ]
    assert f'{name} on worker "worker1"' in str(error.__cause__)


class Refuses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        raise Broken("no gradient")


class Model:
    def forward(self, x: torch.Tensor) -> Any:
        return Refuses.apply(x)


def test_the_backward_of_a_method_names_the_method(trio: list[Worker]) -> None:
    model = rpc.remote("worker1", Model)
    with autograd.context() as context_id:
        loss = model.rpc_sync().forward(torch.ones(2, requires_grad=True)).sum()
        error = raised_by(lambda: autograd.backward(context_id, [loss]))
    line = Model.forward.__code__.co_firstlineno
    assert error.__notes__ == [  # type: ignore[attr-defined]
        f"in the backward pass on worker 'worker1', of Model.forward ({__file__}:{line})"
    ]


def test_a_failure_that_nobody_looked_at_is_logged_with_call_and_worker(
    trio: list[Worker], caplog: pytest.LogCaptureFixture
) -> None:
    def lines() -> list[str]:
        gc.collect()
        return [record.getMessage() for record in caplog.records]

    future = rpc.rpc_async("worker1", break_down)
    until(future.done, "the future has failed")
    del future
    until(lambda: len(lines()) == 1, "the future is dropped")
    assert lines()[0].startswith("break_down on worker 'worker1' failed, and nobody looked")
    rref = rpc.remote("worker2", break_down)
    until(rref.confirmed_by_owner, "the call has failed")
    del rref
    until(lambda: len(lines()) == 2, "the value is dropped")
    assert lines()[1].startswith(
        "break_down on worker 'worker2', which makes the value of a remote reference, failed"
    )


# -- reprs


def test_the_repr_of_a_future_shows_call_worker_and_state(
    trio: list[Worker], held_back: None
) -> None:
    future, forever = (rpc.rpc_async("worker1", wait_for_go, timeout=t) for t in (30, 0))
    child = future.then(lambda _: 2)
    assert repr(future).startswith("<Future of wait_for_go on worker 'worker1', pending for ")
    assert repr(future).endswith(" s>")
    assert repr(forever) == "<Future of wait_for_go on worker 'worker1', pending>"
    assert "a callback of wait_for_go on worker 'worker1', pending" in repr(child)
    GO_ON.set()
    assert (future.wait(), forever.wait(), child.wait()) == (1, 1, 2)
    assert repr(future) == "<Future of wait_for_go on worker 'worker1', done>"
    failed = rpc.rpc_async("worker1", break_down)
    until(failed.done, "the future has failed")
    assert repr(failed) == "<Future of break_down on worker 'worker1', failed with Broken>"
    assert isinstance(failed.exception(), Broken)
    assert repr(rpc.Future()) == "<Future of a call, pending>"


def test_the_repr_of_a_reference_shows_owner_type_and_state(
    trio: list[Worker], held_back: None
) -> None:
    here = "on this worker, 'worker0'"
    assert repr(rpc.RRef(torch.ones(2))).endswith(f" to a value of type Tensor {here}, ready>")
    local, remote = (rpc.remote(to, wait_for_go) for to in ("worker0", "worker1"))
    made_there = "to the result of wait_for_go on worker 'worker1'"
    assert repr(local).endswith(f" to the result of wait_for_go {here}, pending>")
    assert repr(remote).endswith(f" {made_there}, not confirmed yet>")
    GO_ON.set()
    assert (local.to_here(), remote.to_here()) == (1, 1)
    assert repr(local).endswith(f" to a value of type int {here}, ready>")
    assert repr(remote).endswith(f" {made_there}, confirmed>")
    failed = rpc.remote("worker0", break_down)
    raised_by(failed.to_here)
    assert repr(failed).endswith(f" to the result of break_down {here}, failed with Broken>")
    assert repr(remote.rpc_sync()) == f"<the methods of {remote!r}>"
    assert repr(rpc.RRef.__new__(rpc.RRef)) == "<RRef that refers to nothing yet>"
    assert rpc.rpc_sync("worker2", repr, (remote,)).endswith(
        " to a value on worker 'worker1', confirmed>"
    )


def test_the_repr_of_a_context_shows_what_it_has_recorded(trio: list[Worker]) -> None:
    context = autograd.context()
    assert repr(context) == "<autograd context, not entered>"
    with context as context_id:
        x = torch.ones(2, requires_grad=True)
        loss = rpc.rpc_sync("worker1", torch.neg, (x,)).sum()
        autograd.backward(context_id, [loss])
        assert repr(context) == (
            f"<autograd context {context_id} of worker 0, open on this worker, sends: 1, recvs: 1, "
            "leaves: 1>"
        )
    assert repr(context) == f"<autograd context {context_id} of worker 0, released>"
