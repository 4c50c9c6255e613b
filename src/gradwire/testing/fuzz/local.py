"""The reference: a program in one process, differentiated by torch alone.

A call runs the body on copies of its arguments and gives copies of its results, which is what
sending means. Nothing of gradwire takes part.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradwire.testing.fuzz.operations import arrived, soften, thick, thin
from gradwire.testing.fuzz.programs import Body, Episode, Program, Step
from gradwire.testing.fuzz.running import (
    Bench,
    Finish,
    Report,
    finish_second_order,
    loss_of,
    penalty_inputs,
    penalty_of,
    roots_of,
    run_body,
)


@dataclass
class Outcome:
    """What a program came to: per episode, its results and the reports of all workers."""

    results: list[list[Tensor]] = field(default_factory=list)
    #: Whether there was anything to differentiate.
    differentiated: bool = False
    reports: list[list[Report]] = field(default_factory=list)


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """What arrives when these are sent: copies, and one copy for one tensor however often."""
    made: dict[int, Tensor] = {}
    with torch.enable_grad():  # the way does not count, whatever the code at its ends is in
        for tensor in tensors:
            made.setdefault(id(tensor), tensor.clone())
    return [made[id(tensor)] for tensor in tensors]


class LocalWorld:
    """A worker that is none: the benches of all of them are here."""

    def __init__(self, benches: list[Bench], worker: int):
        self.bench = benches[worker]
        self._benches = benches
        self._worker = worker

    def begin(self, step: Step, arguments: list[Tensor]) -> Finish:
        results = self._call(step, arguments)
        return lambda: results

    def _call(self, step: Step, arguments: list[Tensor]) -> list[Tensor]:
        body = step.bodies[0]
        if "proxy" in step.how:  # the first argument travels ahead
            received = copies(arguments[:1]) + copies(arguments[1:])
        elif step.how == "sparse":
            received = [thick(x) for x in copies([thin(argument) for argument in arguments])]
        else:
            received = copies(arguments)
        there = LocalWorld(self._benches, body.worker)
        results = run_body(body, arrived(received), there)
        if step.how in ("remote", "remote proxy") and body.worker == self._worker:
            return results  # the value of an own reference is no copy
        if step.how == "deferred":
            return copies([soften(result) for result in copies(results)])
        if step.how == "shared":
            return [a + b for a, b in zip(copies(results), copies(results), strict=True)]
        if step.how == "then":
            return run_body(step.bodies[1], arrived(copies(results)), self)
        return copies(results)

    def inner_gradients(
        self, body: Body, arguments: list[Tensor], *, by_grad: bool
    ) -> list[Tensor | None]:
        loss = loss_of(run_body(body, arguments, self))
        if not loss.requires_grad:
            return [None for _ in arguments]
        if by_grad:
            return list(torch.autograd.grad(loss, arguments, allow_unused=True))
        leaves = [*arguments, *_all_leaves(self._benches)]
        return _found_by_a_pass(loss, leaves)[: len(arguments)]


def _found_by_a_pass(
    loss: Tensor, leaves: Sequence[Tensor], *, create_graph: bool = False
) -> list[Tensor | None]:
    """A pass goes everywhere, and runs the hooks on its way: also to where `torch.autograd.grad`,
    even if asked for all leaves, would not. What other passes have found does not count."""
    before = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch fears for circles, which are undone below
            torch.autograd.backward([loss], create_graph=create_graph)
        return [leaf.grad for leaf in leaves]
    finally:
        for leaf, gradient in zip(leaves, before, strict=True):
            leaf.grad = gradient


def run_locally(program: Program) -> Outcome:
    """Run it. Raises RuntimeError when torch finds that the program makes no sense, as after a
    change in place of something that backward needs."""
    benches = [Bench(program.seed, worker) for worker in range(program.workers)]
    outcome = Outcome()
    for episode in program.episodes:
        if not program.into_grad:
            for leaf in _all_leaves(benches):
                leaf.grad = None
        _run_episode(episode, benches, outcome)
        outcome.reports.append([bench.report(lambda leaf: leaf.grad) for bench in benches])
    return outcome


def _run_episode(episode: Episode, benches: list[Bench], outcome: Outcome) -> None:
    world = LocalWorld(benches, 0)
    results = run_body(episode.body, [], world)
    if episode.order != "first":
        outcome.results.append([result.detach().clone() for result in results])
        outcome.differentiated |= _run_second_order(episode, results, world, benches)
        return
    for number, found in enumerate(episode.passes):
        if number and episode.between is not None:
            results = results + run_body(episode.between, results, world)
        sent = copies(results) if found.worker else results
        roots, seeds = roots_of(sent, found)
        if roots:
            outcome.differentiated = True
            retain = episode.at_once or number + 1 < len(episode.passes)
            torch.autograd.backward(roots, seeds, retain_graph=retain)
            _part_workers(benches)
    outcome.results.append([result.detach() for result in results])


def _run_second_order(
    episode: Episode, results: list[Tensor], world: LocalWorld, benches: list[Bench]
) -> bool:
    variant = episode.passes[0].variant
    loss = loss_of(results, variant)
    if not loss.requires_grad:
        return False
    every = _all_leaves(benches)
    first: Sequence[Tensor | None] = ()
    if episode.order == "penalty":
        inputs = penalty_inputs(results, world, variant)
        if inputs:
            first = torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)
        penalty = penalty_of(first, variant)
    else:
        first = _found_by_a_pass(loss, every, create_graph=True)
        by_leaf = dict(zip(map(id, every), first, strict=True))
        penalty = torch.zeros((), dtype=torch.float64)
        for bench in benches:
            found = [by_leaf[id(leaf)] for leaf in bench.leaves().values()]
            penalty = penalty + penalty_of(found, variant)
    total = finish_second_order(episode, penalty, loss, world)
    if total.requires_grad:
        torch.autograd.backward([total])
    if episode.order == "create":
        for leaf, gradient in zip(every, first, strict=True):
            if gradient is not None:
                gradient = gradient.detach()
                leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
    return True


def _part_workers(benches: list[Bench]) -> None:
    """Torch may give the gradients of two leaves the same memory, and then adds to both whatever it
    adds to one. Workers have no memory in common."""
    for bench in benches:
        leaves = bench.leaves().values()
        gradients = copy.deepcopy([leaf.grad for leaf in leaves])
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient


def _all_leaves(benches: list[Bench]) -> list[Tensor]:
    return [leaf for bench in benches for leaf in bench.leaves().values()]
