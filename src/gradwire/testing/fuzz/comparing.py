"""Running a program both ways, and cutting one down that fails.

Equal means: the same results; the same leaves with gradients, None where it is None; and every hook
called as often, with gradients of the same sum. Numbers may differ by what the order of additions
makes.
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

#: The gradients were compared; there were none; torch itself refuses the program.
Verdict = Literal["equal", "no gradients", "no meaning"]


#: Takes what is compared, what is wanted and what was got; gives sentences.
Close = Callable[[str, "Tensor | None", "Tensor | None"], Iterator[str]]


class Mismatch(AssertionError):
    """A program came to different things in one process and on workers."""


def check(seed: int, workers: int) -> Verdict:
    """Run the program of a seed in this process and on the current group of workers. Raises
    `Mismatch` with the seed and the program when they differ."""
    program = make_program(seed, workers)
    complaint, verdict = judge(program)
    if complaint:
        raise Mismatch(f"seed {seed}, {workers} workers: {complaint}\n{program}")
    return verdict


def judge(program: Program) -> tuple[str, Verdict]:
    """What is wrong with a program, or an empty string."""
    try:
        expected = run_locally(program)
    except RuntimeError:
        return "", "no meaning"
    try:
        found = run_on_workers(program)
    except Exception:
        return f"raised on workers only:\n{traceback.format_exc()}", "equal"
    complaint = next(differences(program, expected, found), "")
    return complaint, "equal" if expected.differentiated else "no gradients"


def differences(program: Program, expected: Outcome, found: Outcome) -> Iterator[str]:
    """What differs, in sentences."""
    noise = 16 * torch.finfo(getattr(torch, program.precision)).eps * _largest(expected)
    close = partial(_compare_tensors, _TOLERANCES[program.precision], noise)
    for number, episode in enumerate(program.episodes):
        want, got = expected.results[number], found.results[number]
        for position, (mine, theirs) in enumerate(zip(want, got, strict=True)):
            yield from close(f"result {position}", mine, theirs)
        reports = zip(expected.reports[number], found.reports[number], strict=True)
        for worker, (wanted, given) in enumerate(reports):
            where = f"context {number}, worker {worker}: "
            for complaint in _compare(wanted, given, close):
                yield f"{where}{complaint} ({episode.order} order)"


def _largest(outcome: Outcome) -> float:
    """How large numbers become in a program. Where such are added up to something small, as many of
    its digits mean nothing."""
    gradients = [g for reports in outcome.reports for r in reports for g in r.gradients.values()]
    tensors = [tensor for results in outcome.results for tensor in results] + gradients
    return max((_size(tensor) for tensor in tensors if tensor is not None), default=0.0)


def _size(tensor: Tensor) -> float:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    dense = tensor.detach().to_dense().abs()
    finite = dense[dense.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def _compare(want: Report, got: Report, close: Close) -> Iterator[str]:
    if want.gradients.keys() != got.gradients.keys():
        yield f"has leaves {sorted(got.gradients)} instead of {sorted(want.gradients)}"
        return
    for name, gradient in want.gradients.items():
        yield from close(f"gradient of {name}", gradient, got.gradients[name])
    for name in sorted(want.hooks.keys() | got.hooks.keys()):
        count, total = want.hooks.get(name, (0, None))
        their_count, their_total = got.hooks.get(name, (0, None))
        if count == their_count:
            yield from close(f"sum of the gradients that {name} saw", total, their_total)
        else:
            yield f"{name} was called {their_count} times instead of {count}"
    # Torch calls hooks with None now and then. Less often is no fault, where it does not is.
    too_many = got.calls_with_none.keys() - want.calls_with_none.keys()
    if too_many:
        yield f"got None, which locally they do not: {sorted(too_many)}"


def _compare_tensors(
    tolerance: float, noise: float, what: str, want: Tensor | None, got: Tensor | None
) -> Iterator[str]:
    """The order of additions may differ, so only almost equal is equal."""
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


# -- cutting down


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """A smaller program that still fails: steps are replaced by ones that do nothing while that
    changes nothing about the failure."""
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
                left = episode.passes[:number] + episode.passes[number + 1 :]
                fewer = replace(episode, passes=left, between=None, at_once=False)
                yield replace(program, episodes=(*before, fewer, *after))
        for body in _smaller_bodies(episode.body):
            yield replace(program, episodes=(*before, replace(episode, body=body), *after))
        if episode.between is not None:
            for body in _smaller_bodies(episode.between):
                changed = replace(episode, between=body)
                yield replace(program, episodes=(*before, changed, *after))


def _smaller_bodies(body: Body) -> Iterator[Body]:
    """Whole calls first, then what is inside of them."""
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
