"""Run a program in one process and on workers, compare the two runs, and shrink programs that fail.

Two runs are equal if their results are equal, if the same leaves have equal gradients (or both have
none), and if every hook was called equally often, with gradients of equal sum. Numbers may differ
by rounding errors, because the order of additions may differ.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from gradwire.testing.fuzz.distributed import run_on_workers
from gradwire.testing.fuzz.generator import make_program
from gradwire.testing.fuzz.local import Outcome, run_locally
from gradwire.testing.fuzz.programs import Body, Precision, Program, Step, blank
from gradwire.testing.fuzz.running import Report

_TOLERANCES: dict[Precision, float] = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.1}
_SHRINKING_SECONDS = 20.0

#: What came of a comparison. "equal" means that the gradients were compared. "no gradients" means
#: that the program has no gradients, and "no meaning" that torch itself rejects the program.
Verdict = Literal["equal", "no gradients", "no meaning"]

#: A function that compares two tensors. It takes a name for the tensor, the expected tensor and the
#: actual tensor, and yields a sentence for each difference.
CompareTensors = Callable[[str, "Tensor | None", "Tensor | None"], Iterator[str]]


class Mismatch(AssertionError):
    """A program gave different results or gradients in one process and on workers."""


def check(seed: int, workers: int) -> Verdict:
    """Make the program that belongs to a seed. Run it in this process alone, and on the current
    group of workers. Raise `Mismatch` with the seed and the program if the two runs differ."""
    program = make_program(seed, workers)
    difference, verdict = run_both_ways(program)
    if difference:
        raise Mismatch(f"seed {seed}, {workers} workers: {difference}\n{program}")
    return verdict


def run_both_ways(program: Program) -> tuple[str, Verdict]:
    """Run a program in one process and on workers. Return the first difference between the two
    runs (an empty string if there is none), and a `Verdict`, which says what was compared."""
    try:
        expected = run_locally(program)
    except RuntimeError:
        return "", "no meaning"
    try:
        actual = run_on_workers(program)
    except Exception:
        return f"raised on workers only:\n{traceback.format_exc()}", "equal"
    difference = next(differences(program, expected, actual), "")
    return difference, "equal" if expected.differentiated else "no gradients"


def differences(program: Program, expected: Outcome, actual: Outcome) -> Iterator[str]:
    """Yield a sentence for each difference between the expected and the actual outcome."""
    noise = 16 * torch.finfo(getattr(torch, program.precision)).eps * _largest(expected)
    compare = partial(_compare_tensors, _TOLERANCES[program.precision], noise)
    for number, episode in enumerate(program.episodes):
        results = zip(expected.results[number], actual.results[number], strict=True)
        for position, (want, got) in enumerate(results):
            yield from compare(f"result {position}", want, got)
        reports = zip(expected.reports[number], actual.reports[number], strict=True)
        for worker, (wanted, given) in enumerate(reports):
            where = f"context {number}, worker {worker}: "
            for difference in _compare_reports(wanted, given, compare):
                yield f"{where}{difference} ({episode.order} order)"


def _largest(outcome: Outcome) -> float:
    """Return the largest absolute value among the results and gradients of a program. The
    tolerance of the comparison grows with this value: a small number may be the sum of large
    numbers, and then its rounding error is in proportion to the large numbers."""
    gradients = [g for reports in outcome.reports for r in reports for g in r.gradients.values()]
    tensors = [tensor for results in outcome.results for tensor in results] + gradients
    return max((_size(tensor) for tensor in tensors if tensor is not None), default=0.0)


def _size(tensor: Tensor) -> float:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    dense = tensor.detach().to_dense().abs()
    finite = dense[dense.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def _compare_reports(want: Report, got: Report, compare: CompareTensors) -> Iterator[str]:
    if want.gradients.keys() != got.gradients.keys():
        yield f"has leaves {sorted(got.gradients)} instead of {sorted(want.gradients)}"
        return
    for name, gradient in want.gradients.items():
        yield from compare(f"gradient of {name}", gradient, got.gradients[name])
    for name in sorted(want.hooks.keys() | got.hooks.keys()):
        count, total = want.hooks.get(name, (0, None))
        their_count, their_total = got.hooks.get(name, (0, None))
        if count == their_count:
            yield from compare(f"sum of the gradients that {name} saw", total, their_total)
        else:
            yield f"{name} was called {their_count} times instead of {count}"
    # Torch calls some hooks with None in the place of a gradient. It may do so more often on
    # workers than in one process. But a hook that never gets None in one process must not get it on
    # workers.
    too_many = got.calls_with_none.keys() - want.calls_with_none.keys()
    if too_many:
        yield f"hooks were called with None on workers only: {sorted(too_many)}"


def _compare_tensors(
    tolerance: float, noise: float, what: str, want: Tensor | None, got: Tensor | None
) -> Iterator[str]:
    """Yield a difference unless the tensors are almost equal. Rounding errors depend on the order
    of additions, which may differ between the two runs."""
    if want is None or got is None:
        if want is not got:
            yield f"{what} is {got} instead of {want}"
    elif want.dtype != got.dtype or want.shape != got.shape:
        yield (
            f"{what} is {got.dtype} of shape {tuple(got.shape)} instead of {want.dtype} of "
            f"shape {tuple(want.shape)}"
        )
    elif want.numel():
        if not (want.is_floating_point() or want.is_complex()):
            want, got = want.to(torch.float64), got.to(torch.float64)
        atol = tolerance * (float(want.abs().nan_to_num().max()) + 1) + noise
        if not torch.allclose(got, want, rtol=0, atol=atol, equal_nan=True):
            yield f"{what} is {got} instead of {want}"


# -- shrinking


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """Return a smaller program that still fails. To make it smaller, leave out passes, and replace
    steps by steps that do nothing, as long as the program still fails."""
    deadline = time.monotonic() + _SHRINKING_SECONDS
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(program):
            if time.monotonic() > deadline:
                return program
            if fails(candidate):
                program, smaller = candidate, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    for position, episode in enumerate(program.episodes):
        before, after = program.episodes[:position], program.episodes[position + 1 :]
        if before or after:
            yield replace(program, episodes=before + after)
        for number in range(len(episode.passes) - 1, -1, -1):
            if len(episode.passes) > 1:
                remaining = episode.passes[:number] + episode.passes[number + 1 :]
                fewer = replace(episode, passes=remaining, between=None, at_once=False)
                yield replace(program, episodes=(*before, fewer, *after))
        for body in _smaller_bodies(episode.body):
            yield replace(program, episodes=(*before, replace(episode, body=body), *after))
        if episode.between is not None:
            for body in _smaller_bodies(episode.between):
                changed = replace(episode, between=body)
                yield replace(program, episodes=(*before, changed, *after))


def _smaller_bodies(body: Body) -> Iterator[Body]:
    """Yield smaller versions of a body. For each step, first replace the whole step by one that
    does nothing, then shrink the bodies that the step calls."""
    for position in range(len(body.steps) - 1, -1, -1):
        for step in _smaller_steps(body.steps[position]):
            steps = (*body.steps[:position], step, *body.steps[position + 1 :])
            yield replace(body, steps=steps)


def _smaller_steps(step: Step) -> Iterator[Step]:
    if step.action != "constant":
        yield blank(step)
    for number, inner in enumerate(step.bodies):
        for smaller in _smaller_bodies(inner):
            yield replace(step, bodies=(*step.bodies[:number], smaller, *step.bodies[number + 1 :]))
