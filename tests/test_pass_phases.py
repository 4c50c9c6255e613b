"""The phases of a pass: passes make exactly the transitions of the table."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire import autograd, rpc
from gradwire._core.autograd.backward_pass import BackwardPass
from gradwire._core.autograd.pass_messages import PassOptions
from gradwire._core.autograd.pass_phase import NEXT_PHASES, PassPhase
from gradwire.errors import GradwireError
from gradwire.testing import fuzz, runtime_of
from gradwire.testing.fuzz.distributed import run_on_workers
from gradwire.worker import Worker
from tests.processes import until

Transition = tuple[PassPhase, PassPhase]
TABLE = {(phase, after) for phase, all_after in NEXT_PHASES.items() for after in all_after}


@pytest.fixture
def transitions(monkeypatch: pytest.MonkeyPatch) -> set[Transition]:
    """Record the transitions of all passes in this process."""
    seen: set[Transition] = set()

    def record(self: BackwardPass, name: str, value: Any) -> None:
        if name == "phase" and hasattr(self, name):
            seen.add((self.phase, value))
        object.__setattr__(self, name, value)

    monkeypatch.setattr(BackwardPass, "__setattr__", record)
    return seen


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        raise ZeroDivisionError


def fail(x: Tensor) -> Tensor:
    return Fails.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def test_passes_make_the_transitions_of_the_table(
    trio: list[Worker], transitions: set[Transition]
) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", torch.mul, args=(x, 2)).sum()
        autograd.backward(context_id, [loss])
        rpc.rpc_sync("worker1", autograd.get_gradients, args=(context_id,))
        loss = rpc.rpc_sync("worker1", fail, args=(x,)).sum()
        with pytest.raises(ZeroDivisionError):
            autograd.backward(context_id, [loss])
        runtime = runtime_of(trio[0])
        context = runtime.contexts.get(context_id)
        not_begun = BackwardPass(runtime.engine, context, 1 << 48 | 99, PassOptions(), parent=1)
        not_begun.fail(GradwireError("before it could begin"))
    until(lambda: transitions == TABLE, "the passes have made all transitions")


def test_every_phase_is_in_the_table() -> None:
    assert list(NEXT_PHASES) == list(PassPhase)


def test_passes_of_random_programs_make_no_other_transitions(
    trio: list[Worker], transitions: set[Transition]
) -> None:
    """Some of these passes fail, and some of them run at the same time."""
    for seed in range(40):
        program = fuzz.make_program(seed, 3)
        with contextlib.suppress(Exception):
            run_on_workers(program)
    assert transitions
    assert transitions <= TABLE


def test_a_pass_that_is_over_ignores_failures(trio: list[Worker]) -> None:
    x = torch.ones(2, requires_grad=True)
    passes: list[BackwardPass] = []
    succeed = BackwardPass.succeed
    with pytest.MonkeyPatch.context() as patch, autograd.context() as context_id:
        patch.setattr(BackwardPass, "succeed", lambda done: passes.append(done) or succeed(done))
        loss = rpc.rpc_sync("worker1", torch.mul, args=(x, 2)).sum()
        autograd.backward(context_id, [loss])
        [done] = passes
        done.fail(GradwireError("too late"))
        assert done.phase is PassPhase.SUCCEEDED
        assert done.error is None
        assert autograd.get_gradients(context_id)[x].tolist() == [2.0, 2.0]
