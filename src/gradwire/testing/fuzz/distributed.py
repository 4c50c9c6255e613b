"""A program on workers. What they run is the same `run_body` as in one process; here is what calls
mean between workers, and who looks after a program.

State is kept by run and worker, so workers of one process do not mix and many programs can run at
the same time.
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
from gradwire.testing.fuzz.operations import arrived, soften, thick, thin
from gradwire.testing.fuzz.programs import Body, Episode, Pass, Program, Step
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

#: A program's seed, and which of its runs it is.
Run = tuple[int, int]

_serials = itertools.count()
_lock = threading.Lock()
_benches: dict[tuple[Run, int], Bench] = {}


class RemoteWorld:
    """The worker that the code runs on."""

    def __init__(self, run: Run):
        self._run = run
        worker = rpc.get_worker_info().id
        with _lock:
            self.bench = _benches.setdefault((run, worker), Bench(run[0], worker))

    def begin(self, step: Step, arguments: list[Tensor]) -> Finish:
        body, how = step.bodies[0], step.how
        to, call = body.worker, (self._run, body, arguments)
        if how == "sync":
            results = rpc.rpc_sync(to, run_here, args=call)
            return lambda: results
        if how == "sparse":
            call = (self._run, body, [thin(argument) for argument in arguments])
            results = rpc.rpc_sync(to, run_here, args=call)
            return lambda: results
        if how == "async":
            return rpc.rpc_async(to, run_here, args=call).wait
        if how == "then":
            future = rpc.rpc_async(to, run_here, args=call)
            return future.then(lambda done: self._go_on(step.bodies[1], done.wait())).wait
        if how == "deferred":
            return rpc.rpc_async(step.helper, run_elsewhere, args=call).wait
        if "proxy" in how:
            return self._begin_by_proxy(step, arguments)
        rref = rpc.remote(to, run_here, args=call)
        if how == "remote":
            return rref.to_here
        relayed = rpc.rpc_async(step.helper, fetch, args=(rref,))
        if how == "relay":
            return relayed.wait
        return lambda: [a + b for a, b in zip(relayed.wait(), rref.to_here(), strict=True)]

    def _begin_by_proxy(self, step: Step, arguments: list[Tensor]) -> Finish:
        body = step.bodies[0]
        keeper = rpc.remote(body.worker, Keeper, args=(self._run, body, arguments[:1]))
        if step.how == "proxy":
            results = keeper.rpc_sync().run(arguments[1:])
            return lambda: results
        if step.how == "async proxy":
            return keeper.rpc_async().run(arguments[1:]).wait  # type: ignore[no-any-return]
        return keeper.remote().run(arguments[1:]).to_here  # type: ignore[no-any-return]

    def _go_on(self, body: Body, results: list[Tensor]) -> list[Tensor]:
        return run_body(body, arrived(results), self)

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
            found = autograd.get_gradients(context_id)
            return [found.get(argument) for argument in arguments]


# -- what workers are asked to do


def run_here(run: Run, body: Body, arguments: list[Tensor]) -> list[Tensor]:
    arguments = [thick(argument) for argument in arguments]
    return run_body(body, arrived(arguments), RemoteWorld(run))


@rpc.functions.async_execution
def run_elsewhere(run: Run, body: Body, arguments: list[Tensor]) -> Any:
    future = rpc.rpc_async(body.worker, run_here, args=(run, body, arguments))
    return future.then(lambda done: [soften(result) for result in done.wait()])


def fetch(rref: Any) -> Any:
    return rref.to_here()


class Keeper:
    """Has the first argument of a body already."""

    def __init__(self, run: Run, body: Body, arguments: list[Tensor]):
        self._run = run
        self._body = body
        self._arguments = arguments

    def run(self, others: list[Tensor]) -> list[Tensor]:
        return run_here(self._run, self._body, self._arguments + others)


def start_pass(context_id: int, results: list[Tensor], found: Pass, retain_graph: bool) -> bool:
    """Whether there was anything to differentiate."""
    roots, seeds = roots_of(results, found)
    if roots:
        autograd.backward(context_id, roots, retain_graph, grad_tensors=seeds)
    return bool(roots)


def penalty_here(run: Run, context_id: int, variant: int) -> Tensor:
    found = autograd.get_gradients(context_id)
    leaves = RemoteWorld(run).bench.leaves().values()
    return penalty_of([found.get(leaf) for leaf in leaves], variant)


def finish_abandoned(run: Run) -> int:
    """Wait for calls that nobody waits for; returns how many there were."""
    bench = RemoteWorld(run).bench
    count = 0
    while bench.abandoned:
        bench.abandoned.pop()()
        count += 1
    return count


def report(run: Run, context_id: int, into_grad: bool) -> Report:
    bench = RemoteWorld(run).bench
    if into_grad:
        return bench.report(lambda leaf: leaf.grad)
    return bench.report(autograd.get_gradients(context_id).get)


def forget(run: Run) -> None:
    with _lock:
        _benches.pop((run, rpc.get_worker_info().id), None)


# -- the whole program


def run_on_workers(program: Program) -> Outcome:
    """Run it, from the current worker, which must be worker 0."""
    run = (program.seed, next(_serials))
    outcome = Outcome()
    try:
        for episode in program.episodes:
            _run_episode(program, episode, run, outcome)
    finally:
        for worker in range(program.workers):
            rpc.rpc_sync(worker, forget, args=(run,))
    return outcome


def _run_episode(program: Program, episode: Episode, run: Run, outcome: Outcome) -> None:
    with autograd.context(program.into_grad) as context_id:
        world = RemoteWorld(run)
        results = run_body(episode.body, [], world)
        if episode.order != "first":
            outcome.results.append([result.detach().clone() for result in results])
            outcome.differentiated |= _run_second_order(
                program, episode, results, world, context_id, run
            )
        elif episode.at_once:
            outcome.differentiated |= _run_at_once(episode, context_id, results)
            outcome.results.append([result.detach() for result in results])
        else:
            for number, found in enumerate(episode.passes):
                if number and episode.between is not None:
                    results = results + run_body(episode.between, results, world)
                retain = number + 1 < len(episode.passes)
                outcome.differentiated |= _run_pass(context_id, results, found, retain)
            outcome.results.append([result.detach() for result in results])
        _finish_abandoned(program, run)
        found_there = _ask_all(program.workers, report, run, context_id, program.into_grad)
        outcome.reports.append(found_there)


def _run_pass(context_id: int, results: list[Tensor], found: Pass, retain_graph: bool) -> bool:
    call = (context_id, results, found, retain_graph)
    if found.worker:
        return bool(rpc.rpc_sync(found.worker, start_pass, args=call))
    return start_pass(*call)


def _run_at_once(episode: Episode, context_id: int, results: list[Tensor]) -> bool:
    """Each pass in a thread of its own."""
    with ThreadPoolExecutor(len(episode.passes)) as threads:
        running = [
            threads.submit(copy_context().run, _run_pass, context_id, results, found, True)
            for found in episode.passes
        ]
        outcomes = [future.result() for future in running]
    return any(outcomes)


def _finish_abandoned(program: Program, run: Run) -> None:
    if any(step.action == "start" for step in program.steps()):
        # A call that has ended may have left others behind, on workers asked before.
        while any(_ask_all(program.workers, finish_abandoned, run)):
            pass


def _ask_all(workers: int, function: Any, *arguments: Any) -> list[Any]:
    futures = [rpc.rpc_async(worker, function, args=arguments) for worker in range(workers)]
    return [future.wait() for future in futures]


def _run_second_order(
    program: Program,
    episode: Episode,
    results: list[Tensor],
    world: RemoteWorld,
    context_id: int,
    run: Run,
) -> bool:
    variant = episode.passes[0].variant
    loss = loss_of(results, variant)
    if not loss.requires_grad:
        return False
    if episode.order == "penalty":
        inputs = penalty_inputs(results, world, variant)
        found: tuple[Tensor | None, ...] = ()
        if inputs:
            found = autograd.grad(context_id, [loss], inputs, create_graph=True, allow_unused=True)
        penalty = penalty_of(found, variant)
    else:
        autograd.backward(context_id, [loss], retain_graph=True, create_graph=True)
        parts = _ask_all(program.workers, penalty_here, run, context_id, variant)
        penalty = sum(parts, torch.zeros((), dtype=torch.float64))
    total = finish_second_order(episode, penalty, loss, world)
    if total.requires_grad:
        autograd.backward(context_id, [total])
    return True
