"""The data types of random programs, and how programs are printed.

A body is a list of steps that run on one worker. Its variables are numbered: the arguments come
first, and every step appends its results. A body returns some of its variables. A step contains
everything that it needs, so programs can be sent, printed and shrunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

#: How a step calls a body on a worker. A style with "proxy" in its name uses the object that
#: `rref.rpc_sync()`, `rref.rpc_async()` or `rref.remote()` returns.
CallStyle = Literal[
    "sync",  # The caller uses rpc_sync.
    "async",  # The caller uses rpc_async.
    "remote",  # The caller uses rpc.remote, and fetches the results with to_here.
    "relay",  # The caller uses rpc.remote. A third worker gets the RRef and fetches the results.
    "shared",  # The caller uses rpc.remote. Both the caller and a third worker fetch the results.
    # The caller first makes an object on the other worker. The object holds the body (the list of
    # steps to run there) and the body's first argument. The caller then uses `rref.rpc_sync()` to
    # call a method of this object, and the method runs the body.
    "proxy",
    "async proxy",  # This style is like "proxy", but uses rref.rpc_async().
    "remote proxy",  # This style is like "proxy", but uses rref.remote().
    # The caller calls a third worker. A function there, marked with async_execution, calls the
    # body.
    "deferred",
    "sparse",  # The caller uses rpc_sync, and sends the arguments as sparse tensors.
    "then",  # The caller uses rpc_async. A callback then runs a second body on the caller.
]

Precision = Literal["float64", "float32", "bfloat16"]


@dataclass(frozen=True)
class Step:
    """An action on variables, which are given by their numbers.

    A body is a list of steps that run on one worker. "call" calls a body and waits for the results.
    "start" starts a call, and "wait" waits for a started call. "quiet call" is a "call" under
    no_grad. "branch" runs one of two bodies on the same worker. "inner" differentiates a body in a
    context of its own, with `backward` (if the field `number` is 0) or `grad` (if it is 1).
    "parameter" gets a parameter of the worker, "leaf" makes a leaf tensor, and "hook" adds a hook
    to a tensor. All other actions are in `operations`.
    """

    action: str
    inputs: tuple[int, ...] = ()
    #: The number of variables that the step appends.
    results: int = 1
    #: For "parameter", the number of the parameter. For "wait", the key of the step that started
    #: the call. For other actions, the number of the variant.
    number: int = 0
    bodies: tuple[Body, ...] = ()
    style: CallStyle = "sync"
    #: The number of the third worker, for the call styles that need a third worker.
    helper: int = 0
    #: A number that identifies the step in the program.
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
    """A backward pass that begins with one loss, or with all results and a gradient for each."""

    roots: Literal["loss", "results"] = "loss"
    #: A number that changes the loss or the gradients of the results, so that passes differ.
    variant: int = 0
    #: The worker that calls `backward`. The results are sent to it.
    worker: int = 0


#: What an episode differentiates in the end. With "first", it differentiates the results of its
#: body. With "penalty" and "create", it first computes gradients of these results, and then
#: differentiates a function of the gradients. "penalty" computes the gradients with
#: `autograd.grad`, for the leaves of worker 0. "create" computes the gradients with a backward pass
#: with create_graph, for the leaves of every worker.
Order = Literal["first", "penalty", "create"]


@dataclass(frozen=True)
class Episode:
    """The use of one context. First, `body` runs on worker 0. Then backward passes over its results
    run. If `at_once` is set, they run at the same time. Otherwise they run one after the other, and
    the body `between` runs between two of them. The arguments of `between` are the results of
    `body`. With second-order gradients, `between` has only one argument, a value that is computed
    from the first gradients."""

    body: Body
    passes: tuple[Pass, ...]
    between: Body | None = None
    order: Order = "first"
    at_once: bool = False


@dataclass(frozen=True)
class Program:
    """Episodes that run one after the other and use the same parameters."""

    seed: int
    workers: int
    episodes: tuple[Episode, ...]
    #: The least precise dtype in the program.
    precision: Precision = "float64"
    #: Whether gradients are stored in `.grad` instead of in the contexts.
    into_grad: bool = False

    def steps(self) -> Iterator[Step]:
        """Yield all steps of the program, including the steps of nested bodies."""
        for episode in self.episodes:
            yield from _steps(episode.body)
            if episode.between is not None:
                yield from _steps(episode.between)

    def __str__(self) -> str:
        where = ", gradients into .grad" if self.into_grad else ""
        lines = [f"program {self.seed}: {self.workers} workers, {self.precision}{where}"]
        for episode in self.episodes:
            lines.append(f"context ({episode.order} order), on worker 0:")
            lines += _printed(episode.body, "  ")
            for number, backward_pass in enumerate(episode.passes):
                if episode.between is not None and (number or episode.order != "first"):
                    lines.append("  between the passes:")
                    lines += _printed(episode.between, "    ")
                lines.append(
                    f"  backward from the {backward_pass.roots}, variant {backward_pass.variant}, "
                    f"called by worker {backward_pass.worker}"
                    + (", at the same time" if episode.at_once and number else "")
                )
        return "\n".join(lines)


def _steps(body: Body) -> Iterator[Step]:
    for step in body.steps:
        yield step
        for inner in step.bodies:
            yield from _steps(inner)


# -- printing

_BLANK = "constant"


def blank(step: Step) -> Step:
    """Return a step that only appends constants: one for each variable that `step` appends."""
    return Step(_BLANK, (), step.results)


def _printed(body: Body, indent: str) -> list[str]:
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
        note = "" if step.action != "start" or step.key in waited else "  (without a wait)"
        lines.append(f"{indent}{target}{_phrase(step)}{note}")
        for inner in step.bodies:
            lines.append(f"{indent}  on worker {inner.worker}:")
            lines += _printed(inner, indent + "    ")
    lines.append(f"{indent}return {_names(body.returns) or 'nothing'}")
    return lines


def _phrase(step: Step) -> str:
    arguments = _names(step.inputs)
    if step.action in ("call", "quiet call", "start"):
        third = f" by worker {step.helper}" if step.style in ("relay", "shared", "deferred") else ""
        label = f"#{step.key} = " if step.action == "start" else ""
        return f"{label}{step.action} {step.style}{third} with ({arguments}):"
    if step.action == "wait":
        return f"wait for #{step.number}"
    return f"{step.action} {step.number}({arguments})"


def _names(positions: range | tuple[int, ...]) -> str:
    return ", ".join(f"v{position}" for position in positions)
