"""Run a random program in one process, differentiated by torch without gradwire. Runs on workers
are compared with this reference.

A call runs its body on copies of the arguments and returns copies of the results, because sending a
tensor copies it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradwire.testing.fuzz.operations import halve, to_dense, to_sparse, without_overlap
from gradwire.testing.fuzz.programs import Body, Episode, Program, Step
from gradwire.testing.fuzz.running import (
    GetResults,
    Report,
    WorkerState,
    finish_second_order,
    loss_of,
    penalty_inputs,
    penalty_of,
    roots_of,
    run_body,
)


@dataclass
class Outcome:
    """The outcome of a program: the results and the reports of all workers, for each episode (the
    use of one context)."""

    results: list[list[Tensor]] = field(default_factory=list)
    #: Whether any backward pass had something to differentiate.
    differentiated: bool = False
    reports: list[list[Report]] = field(default_factory=list)


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of the tensors, as a worker would receive them. A tensor that appears several
    times is copied only once."""
    made: dict[int, Tensor] = {}
    # Sending a tensor to a worker is differentiable even under no_grad, so copying must be too.
    with torch.enable_grad():
        for tensor in tensors:
            made.setdefault(id(tensor), tensor.clone())
    return [made[id(tensor)] for tensor in tensors]


class LocalBackend:
    """A backend that makes the calls of a body in this process. The body acts as one worker, and
    the bodies that it calls act as others, so the backend holds the states of all workers."""

    def __init__(self, states: list[WorkerState], worker: int):
        self.state = states[worker]
        self._states = states
        self._worker = worker

    def begin(self, step: Step, arguments: list[Tensor]) -> GetResults:
        results = self._call(step, arguments)
        return lambda: results

    def _call(self, step: Step, arguments: list[Tensor]) -> list[Tensor]:
        body = step.bodies[0]
        # On workers, a call through `rref.rpc_sync()` (the style "proxy") sends the first argument
        # and the others in two messages. Tensors that share memory share it only within a message.
        # So copy the first argument and the others one after the other here.
        if "proxy" in step.style:
            received = copies(arguments[:1]) + copies(arguments[1:])
        elif step.style == "sparse":
            received = [
                to_dense(x) for x in copies([to_sparse(argument) for argument in arguments])
            ]
        else:
            received = copies(arguments)
        callee = LocalBackend(self._states, body.worker)
        results = run_body(body, without_overlap(received), callee)
        if step.style in ("remote", "remote proxy") and body.worker == self._worker:
            # The calling worker owns the RRef, so it gets the value itself and not a copy.
            return results
        if step.style == "deferred":
            return copies([halve(result) for result in copies(results)])
        if step.style == "shared":
            return [a + b for a, b in zip(copies(results), copies(results), strict=True)]
        if step.style == "then":
            return run_body(step.bodies[1], without_overlap(copies(results)), self)
        return copies(results)

    def inner_gradients(
        self, body: Body, arguments: list[Tensor], *, by_grad: bool
    ) -> list[Tensor | None]:
        loss = loss_of(run_body(body, arguments, self))
        if not loss.requires_grad:
            return [None for _ in arguments]
        if by_grad:
            return list(torch.autograd.grad(loss, arguments, allow_unused=True))
        leaves = [*arguments, *_all_leaves(self._states)]
        return _gradients_of_a_pass(loss, leaves)[: len(arguments)]


def _gradients_of_a_pass(
    loss: Tensor, leaves: Sequence[Tensor], *, create_graph: bool = False
) -> list[Tensor | None]:
    """Return the gradients of one backward pass, without those of earlier passes. The pass runs all
    hooks in the graph; `torch.autograd.grad` would skip some of the hooks."""
    before = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        with warnings.catch_warnings():
            # Ignore torch's warning that create_graph makes reference cycles through `grad`. This
            # function breaks these cycles when it sets `grad` again at its end.
            warnings.simplefilter("ignore")
            torch.autograd.backward([loss], create_graph=create_graph)
        return [leaf.grad for leaf in leaves]
    finally:
        for leaf, gradient in zip(leaves, before, strict=True):
            leaf.grad = gradient


def run_locally(program: Program) -> Outcome:
    """Run a program. Raise RuntimeError if torch rejects the program: for example, because a tensor
    that backward needs was changed in place."""
    states = [WorkerState(program.seed, worker) for worker in range(program.workers)]
    outcome = Outcome()
    for episode in program.episodes:
        if not program.into_grad:
            for leaf in _all_leaves(states):
                leaf.grad = None
        _run_episode(episode, states, outcome)
        outcome.reports.append([state.report(lambda leaf: leaf.grad) for state in states])
    return outcome


def _run_episode(episode: Episode, states: list[WorkerState], outcome: Outcome) -> None:
    backend = LocalBackend(states, 0)
    results = run_body(episode.body, [], backend)
    if episode.order != "first":
        outcome.results.append([result.detach().clone() for result in results])
        outcome.differentiated |= _run_second_order(episode, results, backend, states)
        return
    for number, backward_pass in enumerate(episode.passes):
        if number and episode.between is not None:
            results = results + run_body(episode.between, results, backend)
        sent = copies(results) if backward_pass.worker else results
        roots, seeds = roots_of(sent, backward_pass)
        if roots:
            outcome.differentiated = True
            retain = episode.at_once or number + 1 < len(episode.passes)
            torch.autograd.backward(roots, seeds, retain_graph=retain)
            _separate_gradients(states)
    outcome.results.append([result.detach() for result in results])


def _run_second_order(
    episode: Episode, results: list[Tensor], backend: LocalBackend, states: list[WorkerState]
) -> bool:
    variant = episode.passes[0].variant
    loss = loss_of(results, variant)
    if not loss.requires_grad:
        return False
    leaves = _all_leaves(states)
    first: Sequence[Tensor | None] = ()
    if episode.order == "penalty":
        inputs = penalty_inputs(results, backend, variant)
        if inputs:
            first = torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)
        penalty = penalty_of(first, variant)
    else:
        first = _gradients_of_a_pass(loss, leaves, create_graph=True)
        by_leaf = dict(zip(map(id, leaves), first, strict=True))
        penalty = torch.zeros((), dtype=torch.float64)
        for state in states:
            gradients = [by_leaf[id(leaf)] for leaf in state.leaves().values()]
            penalty = penalty + penalty_of(gradients, variant)
    total = finish_second_order(episode, penalty, loss, backend)
    if total.requires_grad:
        torch.autograd.backward([total])
    if episode.order == "create":
        for leaf, gradient in zip(leaves, first, strict=True):
            if gradient is not None:
                gradient = gradient.detach()
                leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
    return True


def _separate_gradients(states: list[WorkerState]) -> None:
    """Copy the gradients of each worker to storage of its own, as on real workers. Torch may let
    the gradients of two leaves share storage; then adding to one of them changes the other."""
    for state in states:
        leaves = state.leaves().values()
        gradients = copy.deepcopy([leaf.grad for leaf in leaves])
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient


def _all_leaves(states: list[WorkerState]) -> list[Tensor]:
    return [leaf for state in states for leaf in state.leaves().values()]
