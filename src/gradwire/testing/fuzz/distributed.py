"""Run a random program on workers. Worker 0 runs the program as a whole. Each call runs a body on
some worker. The function `run_body` runs the bodies, as it does when a program runs in one process.
But here the bodies make their calls through `RemoteBackend`, which uses RPC.

The state of a program is kept per run and worker, because several workers can be in one process,
and several programs can run at the same time.
"""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import torch
from torch import Tensor

from gradwire import autograd, rpc
from gradwire.testing.fuzz.local import Outcome
from gradwire.testing.fuzz.operations import halve, to_dense, to_sparse, without_overlap
from gradwire.testing.fuzz.programs import Body, Episode, Pass, Program, Step
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

#: Identifies a run of a program: the seed, and a number that is unique in this process.
Run = tuple[int, int]

_run_numbers = itertools.count()
_lock = threading.Lock()
_states: dict[tuple[Run, int], WorkerState] = {}


class RemoteBackend:
    """A backend that makes the calls of a body through RPC, from the current worker. It holds the
    state that the program has on this worker."""

    def __init__(self, run: Run):
        self._run = run
        worker = rpc.get_worker_info().id
        with _lock:
            self.state = _states.setdefault((run, worker), WorkerState(run[0], worker))

    def begin(self, step: Step, arguments: list[Tensor]) -> GetResults:
        body, style = step.bodies[0], step.style
        to, call = body.worker, (self._run, body, arguments)
        if style == "sync":
            results = rpc.rpc_sync(to, run_body_here, args=call)
            return lambda: results
        if style == "sparse":
            call = (self._run, body, [to_sparse(argument) for argument in arguments])
            results = rpc.rpc_sync(to, run_body_here, args=call)
            return lambda: results
        if style == "async":
            return rpc.rpc_async(to, run_body_here, args=call).wait
        if style == "then":
            future = rpc.rpc_async(to, run_body_here, args=call)
            return future.then(lambda done: self._go_on(step.bodies[1], done.wait())).wait
        if style == "deferred":
            return rpc.rpc_async(step.helper, run_body_elsewhere, args=call).wait
        if "proxy" in style:
            return self._begin_by_proxy(step, arguments)
        rref = rpc.remote(to, run_body_here, args=call)
        if style == "remote":
            return rref.to_here
        relayed = rpc.rpc_async(step.helper, fetch, args=(rref,))
        if style == "relay":
            return relayed.wait
        return lambda: [a + b for a, b in zip(relayed.wait(), rref.to_here(), strict=True)]

    def _begin_by_proxy(self, step: Step, arguments: list[Tensor]) -> GetResults:
        body = step.bodies[0]
        partial_body = rpc.remote(body.worker, PartialBody, args=(self._run, body, arguments[:1]))
        if step.style == "proxy":
            results = partial_body.rpc_sync().run(arguments[1:])
            return lambda: results
        if step.style == "async proxy":
            return partial_body.rpc_async().run(arguments[1:]).wait  # type: ignore[no-any-return]
        return partial_body.remote().run(arguments[1:]).to_here  # type: ignore[no-any-return]

    def _go_on(self, body: Body, results: list[Tensor]) -> list[Tensor]:
        return run_body(body, without_overlap(results), self)

    def inner_gradients(
        self, body: Body, arguments: list[Tensor], *, by_grad: bool
    ) -> list[Tensor | None]:
        with autograd.context() as context_id:
            loss = loss_of(run_body(body, arguments, self))
            if not loss.requires_grad:
                return [None for _ in arguments]
            if by_grad:
                return list(autograd.grad(context_id, loss, arguments, allow_unused=True))
            autograd.backward(context_id, [loss])
            gradients = autograd.get_gradients(context_id)
            return [gradients.get(argument) for argument in arguments]


# -- functions that workers call on each other


def run_body_here(run: Run, body: Body, arguments: list[Tensor]) -> list[Tensor]:
    arguments = [to_dense(argument) for argument in arguments]
    return run_body(body, without_overlap(arguments), RemoteBackend(run))


@rpc.functions.async_execution
def run_body_elsewhere(run: Run, body: Body, arguments: list[Tensor]) -> Any:
    future = rpc.rpc_async(body.worker, run_body_here, args=(run, body, arguments))
    return future.then(lambda done: [halve(result) for result in done.wait()])


def fetch(rref: Any) -> Any:
    return rref.to_here()


class PartialBody:
    """A remote object that holds a body and its first argument. The method `run` receives the other
    arguments and runs the body."""

    def __init__(self, run: Run, body: Body, arguments: list[Tensor]):
        self._run = run
        self._body = body
        self._arguments = arguments

    def run(self, others: list[Tensor]) -> list[Tensor]:
        return run_body_here(self._run, self._body, self._arguments + others)


def start_pass(
    context_id: int, results: list[Tensor], backward_pass: Pass, retain_graph: bool
) -> bool:
    """Run a backward pass. Return False if there was nothing to differentiate."""
    roots, seeds = roots_of(results, backward_pass)
    if roots:
        autograd.backward(context_id, roots, retain_graph, grad_tensors=seeds)
    return bool(roots)


def penalty_here(run: Run, context_id: int, variant: int) -> Tensor:
    gradients = autograd.get_gradients(context_id)
    leaves = RemoteBackend(run).state.leaves().values()
    return penalty_of([gradients.get(leaf) for leaf in leaves], variant)


def finish_abandoned(run: Run) -> int:
    """Wait for the calls that this worker has started, but that the program does not wait for.
    Return the number of these calls."""
    state = RemoteBackend(run).state
    count = 0
    while state.abandoned:
        state.abandoned.pop()()
        count += 1
    return count


def report(run: Run, context_id: int, into_grad: bool) -> Report:
    state = RemoteBackend(run).state
    if into_grad:
        return state.report(lambda leaf: leaf.grad)
    return state.report(autograd.get_gradients(context_id).get)


def drop_state(run: Run) -> None:
    with _lock:
        _states.pop((run, rpc.get_worker_info().id), None)


# -- the whole program


def run_on_workers(program: Program) -> Outcome:
    """Run a program from the current worker, which must be worker 0."""
    run = (program.seed, next(_run_numbers))
    outcome = Outcome()
    try:
        for episode in program.episodes:
            _run_episode(program, episode, run, outcome)
    finally:
        for worker in range(program.workers):
            rpc.rpc_sync(worker, drop_state, args=(run,))
    return outcome


def _run_episode(program: Program, episode: Episode, run: Run, outcome: Outcome) -> None:
    with autograd.context(program.into_grad) as context_id:
        backend = RemoteBackend(run)
        results = run_body(episode.body, [], backend)
        if episode.order != "first":
            outcome.results.append([result.detach().clone() for result in results])
            outcome.differentiated |= _run_second_order(
                program, episode, results, backend, context_id, run
            )
        elif episode.at_once:
            outcome.differentiated |= _run_at_once(episode, context_id, results)
            outcome.results.append([result.detach() for result in results])
        else:
            for number, backward_pass in enumerate(episode.passes):
                if number and episode.between is not None:
                    results = results + run_body(episode.between, results, backend)
                retain = number + 1 < len(episode.passes)
                outcome.differentiated |= _run_pass(context_id, results, backward_pass, retain)
            outcome.results.append([result.detach() for result in results])
        _finish_abandoned(program, run)
        reports = _call_all(program.workers, report, run, context_id, program.into_grad)
        outcome.reports.append(reports)


def _run_pass(
    context_id: int, results: list[Tensor], backward_pass: Pass, retain_graph: bool
) -> bool:
    call = (context_id, results, backward_pass, retain_graph)
    if backward_pass.worker:
        return bool(rpc.rpc_sync(backward_pass.worker, start_pass, args=call))
    return start_pass(*call)


def _run_at_once(episode: Episode, context_id: int, results: list[Tensor]) -> bool:
    """Run the backward passes of an episode (the use of one context) at the same time, each in a
    thread of its own."""
    with ThreadPoolExecutor(len(episode.passes)) as threads:
        running = [
            threads.submit(copy_context().run, _run_pass, context_id, results, backward_pass, True)
            for backward_pass in episode.passes
        ]
        outcomes = [future.result() for future in running]
    return any(outcomes)


def _finish_abandoned(program: Program, run: Run) -> None:
    if any(step.action == "start" for step in program.steps()):
        # The calls that one worker has finished may have started new calls on workers that were
        # asked before. So ask all workers again, until no worker had a call to finish.
        while any(_call_all(program.workers, finish_abandoned, run)):
            pass


def _call_all(workers: int, function: Any, *arguments: Any) -> list[Any]:
    futures = [rpc.rpc_async(worker, function, args=arguments) for worker in range(workers)]
    return [future.wait() for future in futures]


def _run_second_order(
    program: Program,
    episode: Episode,
    results: list[Tensor],
    backend: RemoteBackend,
    context_id: int,
    run: Run,
) -> bool:
    variant = episode.passes[0].variant
    loss = loss_of(results, variant)
    if not loss.requires_grad:
        return False
    if episode.order == "penalty":
        inputs = penalty_inputs(results, backend, variant)
        gradients: tuple[Tensor | None, ...] = ()
        if inputs:
            gradients = autograd.grad(
                context_id, [loss], inputs, create_graph=True, allow_unused=True
            )
        penalty = penalty_of(gradients, variant)
    else:
        autograd.backward(context_id, [loss], retain_graph=True, create_graph=True)
        parts = _call_all(program.workers, penalty_here, run, context_id, variant)
        penalty = sum(parts, torch.zeros((), dtype=torch.float64))
    total = finish_second_order(episode, penalty, loss, backend)
    if total.requires_grad:
        autograd.backward(context_id, [total])
    return True
