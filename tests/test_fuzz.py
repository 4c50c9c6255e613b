"""Random programs have the same gradients as in one process, and the fuzzer detects errors."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from gradwire import autograd
from gradwire.testing import acting_as, fuzz, open_contexts
from gradwire.testing.fuzz import operations
from gradwire.testing.fuzz.command import main
from gradwire.testing.fuzz.comparing import differences, shrink
from gradwire.testing.fuzz.local import Outcome, run_locally
from gradwire.testing.fuzz.programs import CallStyle
from tests.processes import until

# -- random programs


@pytest.mark.parametrize(
    ("workers", "transport", "seeds"),
    [
        (2, "in_process", range(300)),
        (3, "in_process", range(300, 600)),
        (3, "unix", range(600, 800)),
        (4, "tcp", range(800, 1000)),
    ],
)
def test_random_programs_have_the_same_gradients_as_in_one_process(
    workers: int, transport: str, seeds: range
) -> None:
    with fuzz.in_this_process(workers, transport) as started:
        verdicts = Counter(fuzz.check(seed, workers) for seed in seeds)
        until(
            lambda: not open_contexts(started),
            "all contexts are released",
        )
    assert verdicts["equal"] > 0.7 * len(seeds), verdicts
    assert verdicts["no meaning"] < 0.1 * len(seeds), verdicts


def test_random_programs_have_the_same_gradients_across_processes() -> None:
    summary = fuzz.run_groups([fuzz.Task(range(2000, 2100), processes=True, transport="unix")])
    assert not summary.failures, summary.failures[0]
    assert summary.programs == 100


def test_sixty_concurrent_programs_do_not_mix() -> None:
    failures: list[BaseException] = []

    def trainer(seed: int) -> None:
        with acting_as(started[0]):
            try:
                fuzz.check(seed, 2)
            except BaseException as error:
                failures.append(error)

    with fuzz.in_this_process(2, "in_process") as started:
        threads = [threading.Thread(target=trainer, args=(seed,)) for seed in range(3000, 3060)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
    if failures:
        raise failures[0]


# -- the programs


def test_a_seed_always_gives_the_same_program() -> None:
    for seed in range(20):
        assert fuzz.make_program(seed, 3) == fuzz.make_program(seed, 3)


def test_programs_use_every_feature() -> None:
    programs = [fuzz.make_program(seed, 3) for seed in range(500)]
    steps = [step for program in programs for step in program.steps()]
    actions = {"call", "quiet call", "start", "wait", "branch", "inner"}
    actions |= {"parameter", "leaf", "hook"}
    assert {step.action for step in steps} == actions | operations.OPERATIONS.keys()
    assert {step.style for step in steps} == set(get_args(CallStyle))
    assert {p.precision for p in programs} == {"float64", "float32", "bfloat16"}
    assert {e.order for p in programs for e in p.episodes} == {"first", "penalty", "create"}
    assert any(len(p.episodes) > 1 for p in programs)
    assert any(p.into_grad for p in programs)
    assert any(e.at_once for p in programs for e in p.episodes)
    assert all(str(p.seed) in str(p) for p in programs)


# -- the fuzzer detects errors


def seed_with_gradients() -> int:
    for seed in range(100):
        program = fuzz.make_program(seed, 2)
        (report, *_), *_ = run_locally(program).reports
        if program.precision == "float64" and any(map(is_large, report.gradients.values())):
            return seed
    raise AssertionError("no program has gradients")


def is_large(gradient: Tensor | None) -> bool:
    return gradient is not None and bool((gradient.abs() > 0.1).any())


def test_a_wrong_gradient_is_reported_with_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = autograd.get_gradients

    def wrong(context_id: int) -> dict[Tensor, Tensor]:
        return {leaf: gradient * 1.001 for leaf, gradient in right(context_id).items()}

    monkeypatch.setattr(autograd, "get_gradients", wrong)
    seed = seed_with_gradients()
    with fuzz.in_this_process(2, "in_process"):
        with pytest.raises(fuzz.Mismatch, match=f"(?s)seed {seed}.*gradient of.*program {seed}"):
            fuzz.check(seed, 2)


def outcome_with_hook() -> tuple[fuzz.Program, Outcome, Outcome, str]:
    for seed in range(100):
        program = fuzz.make_program(seed, 2)
        one, other = run_locally(program), run_locally(program)
        for name, (_, total) in one.reports[0][0].hooks.items():
            (*_, last) = program.episodes
            if total.numel() and last is program.episodes[0] and last.order == "first":
                return program, one, other, name
    raise AssertionError("no program has hooks")


def test_a_program_gives_the_same_results_twice() -> None:
    program, one, other, _ = outcome_with_hook()
    assert not list(differences(program, one, other))


def test_hooks_that_run_too_often_are_noticed() -> None:
    program, one, other, name = outcome_with_hook()
    count, total = other.reports[0][0].hooks[name]
    other.reports[0][0].hooks[name] = (count + 1, total)
    (difference,) = differences(program, one, other)
    assert f"{name} was called {count + 1} times instead of {count}" in difference


def test_hooks_that_see_part_of_the_gradient_are_noticed() -> None:
    program, one, other, name = outcome_with_hook()
    count, total = other.reports[0][0].hooks[name]
    other.reports[0][0].hooks[name] = (count, total + 1)
    (difference,) = differences(program, one, other)
    assert f"the gradients that {name} saw" in difference


def test_a_result_of_the_wrong_dtype_is_noticed() -> None:
    program, one, other, _ = outcome_with_hook()
    other.results[0][0] = other.results[0][0].to(torch.complex64)
    assert "result 0 is torch.complex64" in next(differences(program, one, other))


def test_a_failing_program_is_shrunk() -> None:
    """Only the step that the failure needs remains."""

    def fails(program: fuzz.Program) -> bool:
        return any(step.action == "wave" for step in program.steps())

    program = next(p for p in map(make_large, range(100)) if fails(p))
    smaller = shrink(program, fails)
    remaining = Counter(step.action for step in smaller.steps() if not step.bodies)
    assert remaining.keys() <= {"wave", "constant"}
    assert remaining["wave"] == 1


def make_large(seed: int) -> fuzz.Program:
    program = fuzz.make_program(seed, 2)
    return replace(program, episodes=program.episodes * 2)


def test_a_hang_is_reported_with_the_stacks_of_all_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add, *rest = operations.OPERATIONS["add"]

    def block_on_workers(inputs: list[Tensor], number: int) -> list[Tensor]:
        if threading.current_thread() is not threading.main_thread():
            threading.Event().wait()
        return add(inputs, number)

    monkeypatch.setitem(operations.OPERATIONS, "add", (block_on_workers, *rest))
    task = fuzz.Task(range(30), 2, processes=True, transport="unix", timeout=2)
    (failure,) = fuzz.run_groups([task]).failures
    assert "it hangs: not done after 2 s" in failure
    assert "process 0:" in failure
    assert "process 1:" in failure
    assert "block_on_workers" in failure
    assert "program " in failure


# -- the command


def test_the_command_runs_groups_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--programs", "20", "--workers", "2", "--load", "2"]) == 0
    assert "20 programs" in capsys.readouterr().out


def test_the_command_shows_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--programs", "1", "--seed", "7", "--show"]) == 0
    assert "program 7: 3 workers" in capsys.readouterr().out
