"""Programs as data: what they say, and how they are written down for a reader.

A body runs on one worker. Its arguments are its first variables, every step adds the variables it
results in, and it returns some of them. Everything a step needs is in it, so a program can be sent,
printed and cut down.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

#: How a body is called on a worker; `how` of a step that calls.
Way = Literal[
    "sync",  # rpc_sync
    "async",  # rpc_async
    "remote",  # remote, then to_here
    "relay",  # remote; another worker gets the reference and fetches the value
    "shared",  # as relay, and the caller fetches it too
    "proxy",  # a method of an object that keeps some of the arguments: rref.rpc_sync()
    "async proxy",  # the same through rref.rpc_async()
    "remote proxy",  # the same through rref.remote()
    "deferred",  # an async_execution function of another worker calls, and computes when it has it
    "sparse",  # rpc_sync, with arguments that travel as sparse tensors
    "then",  # rpc_async with a callback that runs a body where the caller is
]

Precision = Literal["float64", "float32", "bfloat16"]


@dataclass(frozen=True)
class Step:
    """An action on variables, given by their positions.

    The actions "call", "start" and "wait" call a body, "quiet call" one under `no_grad`; "branch"
    runs one of two where it is, "inner" differentiates one in a context of its own (1: by `grad`);
    "parameter", "leaf" and "hook" concern the worker. All others are operations (see `operations`).
    """

    action: str
    inputs: tuple[int, ...] = ()
    #: How many variables it adds.
    results: int = 1
    #: Which parameter, which variant of an operation, which started call is waited for.
    number: int = 0
    bodies: tuple[Body, ...] = ()
    how: Way = "sync"
    #: A third worker that takes part in a call.
    helper: int = 0
    #: Unique in the program.
    key: int = 0


@dataclass(frozen=True)
class Body:
    """Steps that run on a worker."""

    worker: int
    arguments: int
    steps: tuple[Step, ...]
    returns: tuple[int, ...]


@dataclass(frozen=True)
class Pass:
    """A backward pass: from one loss, or from all results, each with a gradient of its own."""

    roots: Literal["loss", "results"] = "loss"
    #: Lets passes over the same results differ.
    variant: int = 0
    #: The worker that calls `backward`; the results are sent there.
    worker: int = 0


#: What is differentiated:
#:   first     the results
#:   penalty   a function of the gradients that `autograd.grad` gives for leaves of worker 0
#:   create    a function of the gradients that a pass with create_graph left on every worker
Order = Literal["first", "penalty", "create"]


@dataclass(frozen=True)
class Episode:
    """What happens in one context: a body on worker 0 and passes over its results, one after the
    other or at the same time. Between two passes `between` goes on with the results, in the second
    order with the function of the gradients."""

    body: Body
    passes: tuple[Pass, ...]
    between: Body | None = None
    order: Order = "first"
    at_once: bool = False


@dataclass(frozen=True)
class Program:
    """Episodes with the same parameters, one after the other."""

    seed: int
    workers: int
    episodes: tuple[Episode, ...]
    #: The coarsest dtype that occurs.
    precision: Precision = "float64"
    #: Whether gradients go to `.grad` instead of into the contexts.
    into_grad: bool = False

    def steps(self) -> Iterator[Step]:
        """All steps, however deep."""
        for episode in self.episodes:
            yield from _steps(episode.body)
            if episode.between is not None:
                yield from _steps(episode.between)

    def __str__(self) -> str:
        where = ", gradients into .grad" if self.into_grad else ""
        lines = [f"program {self.seed}: {self.workers} workers, {self.precision}{where}"]
        for episode in self.episodes:
            lines.append(f"context ({episode.order} order), on worker 0:")
            lines += _written(episode.body, "  ")
            for number, found in enumerate(episode.passes):
                if episode.between is not None and (number or episode.order != "first"):
                    lines.append("  between the passes:")
                    lines += _written(episode.between, "    ")
                lines.append(
                    f"  backward from the {found.roots}, variant {found.variant}, "
                    f"called by worker {found.worker}"
                    + (", at the same time" if episode.at_once and number else "")
                )
        return "\n".join(lines)


def _steps(body: Body) -> Iterator[Step]:
    for step in body.steps:
        yield step
        for inner in step.bodies:
            yield from _steps(inner)


# -- writing

_BLANK = "constant"


def blank(step: Step) -> Step:
    """A step that results in as many variables, and does nothing."""
    return Step(_BLANK, (), step.results)


def _written(body: Body, indent: str) -> list[str]:
    lines = []
    if body.arguments:
        lines.append(f"{indent}given {_names(range(body.arguments))}")
    used = {position for step in body.steps for position in step.inputs} | set(body.returns)
    waited = {step.number for step in body.steps if step.action == "wait"}
    count = body.arguments
    for step in body.steps:
        made = range(count, count + step.results)
        count += step.results
        if step.action == _BLANK and not used.intersection(made):
            continue
        target = f"{_names(made)} = " if made else ""
        note = "" if step.action != "start" or step.key in waited else "  (nobody waits for it)"
        lines.append(f"{indent}{target}{_phrase(step)}{note}")
        for inner in step.bodies:
            lines.append(f"{indent}  on worker {inner.worker}:")
            lines += _written(inner, indent + "    ")
    lines.append(f"{indent}return {_names(body.returns) or 'nothing'}")
    return lines


def _phrase(step: Step) -> str:
    arguments = _names(step.inputs)
    if step.action in ("call", "quiet call", "start"):
        third = f" by worker {step.helper}" if step.how in ("relay", "shared", "deferred") else ""
        label = f"#{step.key} = " if step.action == "start" else ""
        return f"{label}{step.action} {step.how}{third} with ({arguments}):"
    if step.action == "wait":
        return f"wait for #{step.number}"
    return f"{step.action} {step.number}({arguments})"


def _names(positions: range | tuple[int, ...]) -> str:
    return ", ".join(f"v{position}" for position in positions)
