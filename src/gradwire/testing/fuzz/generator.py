"""Making random programs: the same seed, number of workers and features, the same program."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import get_args

from gradwire.testing.fuzz.operations import OPERATIONS
from gradwire.testing.fuzz.programs import (
    Body,
    Episode,
    Order,
    Pass,
    Precision,
    Program,
    Step,
    Way,
)
from gradwire.testing.fuzz.running import parameters_of

#: How likely each action is, in parts of the whole.
_WEIGHTS = {
    "parameter": 8, "leaf": 1, "hook": 4, "call": 24, "start": 8, "trunk": 1, "branch": 3,
    "inner": 1, "quiet call": 1,
    "add": 6, "multiply": 6, "wave": 4, "total": 2, "outer": 2, "join": 3, "convert": 3, "view": 5,
    "expand": 2, "change": 7, "change copy": 2, "detach": 2, "no_grad": 1, "integers": 2, "pick": 2,
    "lookup": 2, "own function": 3, "own function of many": 2, "checkpoint": 2, "constant": 1,
}  # fmt: skip

#: What needs no gradients of gradients, or cannot have them.
_FIRST_ORDER_ONLY = {"lookup", "inner"}
_DTYPES_OF: dict[Precision, list[int]] = {
    "float64": [0, 3],
    "float32": [0, 1, 3],
    "bfloat16": [0, 1, 2, 3],
}


def make_program(seed: int, workers: int) -> Program:
    """The program of a seed."""
    return _Maker(seed, workers).program()


class _Maker:
    def __init__(self, seed: int, workers: int):
        self._seed = seed
        self._workers = workers
        self._dice = random.Random(seed)
        self._key = 0
        precisions: list[Precision] = ["float64", "float32", "bfloat16"]
        self._precision = self._dice.choices(precisions, [80, 15, 5])[0]
        self._parameters = parameters_of(self._precision)
        self._ways: list[Way] = list(get_args(Way))
        #: How many calls there may still be: most programs are small, a few are large.
        self._calls = self._dice.choice([2, 4, 4, 8, 8, 16])
        #: Whether calls may be left that nobody waits for.
        self._may_abandon = True
        self._leave_out(set())

    def _leave_out(self, actions: set[str]) -> None:
        left = {action: weight for action, weight in _WEIGHTS.items() if action not in actions}
        self._actions, self._chances = list(left), list(left.values())

    def _chance(self, probability: float) -> bool:
        return self._dice.random() < probability

    def program(self) -> Program:
        into_grad = self._chance(0.2)
        episodes = [self._episode(into_grad)]
        if self._chance(0.1):
            episodes.append(self._episode(into_grad))
        return Program(
            self._seed,
            self._workers,
            tuple(episodes),
            self._precision,
            into_grad,
        )

    def _episode(self, into_grad: bool) -> Episode:
        order: Order = "first"
        if self._chance(0.25):
            # What accumulates in place in `.grad` spoils the graph of gradients, locally too.
            order = "penalty" if into_grad else self._dice.choice(["penalty", "create"])
        passes, between = [self._pass()], None
        if order == "first" and self._chance(0.3):
            passes.append(self._pass())
        self._leave_out(set() if order == "first" else _FIRST_ORDER_ONLY)
        body = self._body(0, 0, depth=3, least=1)
        if self._chance(0.5):
            if len(passes) > 1:
                between = self._body(0, len(body.returns), depth=1, least=1)
            elif order != "first":
                between = self._body(0, 1, depth=1, least=1)
        at_once = len(passes) > 1 and between is None and self._chance(0.5)
        return Episode(body, tuple(passes), between, order, at_once)

    def _pass(self) -> Pass:
        worker = self._dice.randrange(self._workers) if self._chance(0.1) else 0
        roots = "results" if self._chance(0.3) else "loss"
        return Pass(roots, self._dice.randrange(4), worker)  # type: ignore[arg-type]

    def _body(
        self, worker: int, arguments: int, depth: int, least: int = 0, returns: int | None = None
    ) -> Body:
        writing = _Writing(arguments)
        if not arguments or self._chance(0.5):
            self._write("parameter", writing, worker, depth)
        for _ in range(self._dice.randint(1, 8)):
            self._write(self._dice.choices(self._actions, self._chances)[0], writing, worker, depth)
            if writing.started and self._chance(0.4):
                self._wait(writing)
        while writing.started and (not self._may_abandon or self._chance(0.85)):
            self._wait(writing)
        if returns is None:
            returns = self._dice.randint(least, 3)
        chosen = tuple(self._pick(writing) for _ in range(returns))
        return Body(worker, arguments, tuple(writing.steps), chosen)

    def _write(self, action: str, writing: _Writing, worker: int, depth: int) -> None:
        if action in ("call", "start"):
            self._write_call(action, writing, worker, depth)
        elif action == "quiet call":
            self._write_quiet_call(writing, worker, depth)
        elif action == "trunk":
            self._write_trunk(writing, depth)
        elif action == "branch":
            self._write_branch(writing, worker, depth)
        elif action == "inner":
            self._write_inner(writing, worker, depth)
        elif action == "parameter":
            self._add(writing, Step("parameter", number=self._dice.choice(self._parameters)))
        elif action in ("leaf", "hook"):
            inputs = self._inputs(writing, 1)
            self._add(writing, Step(action, inputs))
            if action == "hook":
                writing.same_memory(inputs[0])
        else:
            self._write_operation(action, writing)

    def _write_operation(self, action: str, writing: _Writing) -> None:
        _, variants, results = OPERATIONS[action]
        inputs = self._inputs(writing, 2)
        number = self._dice.randrange(variants)
        if action == "convert":
            number = self._dice.choice(_DTYPES_OF[self._precision])
        if action == "change":
            # What others have saved for backward must not change: take what was not used yet.
            fresh = writing.unused()
            if not fresh:
                return
            inputs = (self._dice.choice(fresh), *inputs[1:])
        self._add(writing, Step(action, inputs, results, number))
        if action in ("view", "detach", "change"):
            writing.same_memory(inputs[0])
        else:
            writing.use(inputs)
        if action == "expand":
            writing.use([writing.count - 1])  # nobody can write to it

    def _write_call(self, action: str, writing: _Writing, worker: int, depth: int) -> None:
        if not depth or self._calls <= 0:
            return
        self._calls -= 1
        inputs = self._inputs(writing, 3) if writing.count and self._chance(0.9) else ()
        to = self._dice.randrange(self._workers)
        how = self._dice.choice(self._ways)
        bodies: tuple[Body, ...] = (self._body(to, len(inputs), depth - 1),)
        if how == "then":
            bodies += (self._body(worker, len(bodies[0].returns), min(1, depth - 1)),)
        results = 0 if action == "start" else len(bodies[-1].returns)
        helper = self._dice.randrange(self._workers)
        step = Step(action, inputs, results, bodies=bodies, how=how, helper=helper)
        key = self._add(writing, step)
        if action == "start":
            writing.started[key] = len(bodies[-1].returns)

    def _write_quiet_call(self, writing: _Writing, worker: int, depth: int) -> None:
        # Callbacks, and calls that nobody waits for, may run when the mode is another one again.
        ways, may_abandon = self._ways, self._may_abandon
        self._ways, self._may_abandon = ["sync", "async", "remote"], False
        self._write_call("quiet call", writing, worker, depth)
        self._ways, self._may_abandon = ways, may_abandon

    def _wait(self, writing: _Writing) -> None:
        key = self._dice.choice(list(writing.started))
        self._add(writing, Step("wait", (), writing.started.pop(key), number=key))

    def _write_trunk(self, writing: _Writing, depth: int) -> None:
        """Layer upon layer, each with a remote part and a way around it."""
        if depth < 2 or self._calls <= 0:
            return
        self._calls -= 4
        trunk = self._pick(writing)
        for _ in range(self._dice.randint(3, 10)):
            to = self._dice.randrange(self._workers)
            layer = self._body(to, 1, depth=0, returns=1)
            self._add(writing, Step("call", (trunk,), bodies=(layer,)))
            self._add(writing, Step("add", (trunk, writing.count - 1)))
            trunk = writing.count - 1

    def _write_branch(self, writing: _Writing, worker: int, depth: int) -> None:
        inputs = self._inputs(writing, 2)
        returns = self._dice.randint(1, 2)
        bodies = tuple(
            self._body(worker, len(inputs), max(0, depth - 1), returns=returns) for _ in range(2)
        )
        self._add(writing, Step("branch", inputs, returns, bodies=bodies))
        writing.use(inputs)

    def _write_inner(self, writing: _Writing, worker: int, depth: int) -> None:
        if not depth or self._calls <= 0:
            return
        inputs = self._inputs(writing, 2)
        # Its context ends with it, and a call under way in it would fail.
        outer, self._may_abandon = self._may_abandon, False
        body = self._body(worker, len(inputs), depth - 1, least=1)
        self._may_abandon = outer
        self._add(writing, Step("inner", inputs, len(inputs), self._dice.randrange(2), (body,)))

    def _add(self, writing: _Writing, step: Step) -> int:
        self._key += 1
        writing.add(step, self._key)
        return self._key

    def _pick(self, writing: _Writing) -> int:
        # Variables of late steps more often, so that programs have depth.
        if not writing.count:
            self._add(writing, Step("constant"))
        return max(self._dice.randrange(writing.count), self._dice.randrange(writing.count))

    def _inputs(self, writing: _Writing, most: int) -> tuple[int, ...]:
        return tuple(self._pick(writing) for _ in range(self._dice.randint(1, most)))


class _Writing:
    """A body that is being written."""

    def __init__(self, arguments: int):
        self.count = arguments
        self.steps: list[Step] = []
        #: Calls that nobody waits for yet, by key, with the number of their results.
        self.started: dict[int, int] = {}
        #: Per variable, the first one that has the same memory.
        self._memory = list(range(arguments))
        self._used: set[int] = set()

    def add(self, step: Step, key: int) -> None:
        self._memory += range(self.count, self.count + step.results)
        self.count += step.results
        self.steps.append(_with_key(step, key))

    def same_memory(self, position: int) -> None:
        """The variable added last is a view of another."""
        self._memory[-1] = self._memory[position]

    def use(self, positions: Collection[int]) -> None:
        self._used.update(self._memory[position] for position in positions)

    def unused(self) -> list[int]:
        return [n for n in range(self.count) if self._memory[n] not in self._used]


def _with_key(step: Step, key: int) -> Step:
    return Step(
        step.action, step.inputs, step.results, step.number, step.bodies, step.how, step.helper, key
    )
