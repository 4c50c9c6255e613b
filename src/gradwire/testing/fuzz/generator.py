"""Make random programs. The same seed and number of workers give the same program."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import get_args

from gradwire.testing.fuzz.operations import OPERATIONS
from gradwire.testing.fuzz.programs import (
    Body,
    CallStyle,
    Episode,
    Order,
    Pass,
    Precision,
    Program,
    Step,
)
from gradwire.testing.fuzz.running import parameters_of

#: The relative probability of each action of a step (see `programs.Step`).
_WEIGHTS = {
    "parameter": 8, "leaf": 1, "hook": 4, "call": 24, "start": 8, "trunk": 1, "branch": 3,
    "inner": 1, "quiet call": 1,
    "add": 6, "multiply": 6, "wave": 4, "total": 2, "outer": 2, "join": 3, "convert": 3, "view": 5,
    "expand": 2, "change": 7, "change copy": 2, "detach": 2, "no_grad": 1, "integers": 2, "pick": 2,
    "lookup": 2, "own function": 3, "own function of many": 2, "checkpoint": 2, "constant": 1,
}  # fmt: skip

#: The actions that cannot be differentiated twice.
_FIRST_ORDER_ONLY = {"lookup", "inner"}
_DTYPES_OF: dict[Precision, list[int]] = {
    "float64": [0, 3],
    "float32": [0, 1, 3],
    "bfloat16": [0, 1, 2, 3],
}


def make_program(seed: int, workers: int) -> Program:
    """Return the program that belongs to a seed."""
    return _Generator(seed, workers).program()


class _Generator:
    def __init__(self, seed: int, workers: int):
        self._seed = seed
        self._workers = workers
        self._random = random.Random(seed)
        self._key = 0
        precisions: list[Precision] = ["float64", "float32", "bfloat16"]
        self._precision = self._random.choices(precisions, [80, 15, 5])[0]
        self._parameters = parameters_of(self._precision)
        self._styles: list[CallStyle] = list(get_args(CallStyle))
        #: How many more calls to generate. Most programs are small; a few are large.
        self._calls = self._random.choice([2, 4, 4, 8, 8, 16])
        #: Whether a body may start a call and never wait for it.
        self._may_abandon = True
        self._set_actions(set())

    def _set_actions(self, excluded: set[str]) -> None:
        weights = {action: weight for action, weight in _WEIGHTS.items() if action not in excluded}
        self._actions, self._weights = list(weights), list(weights.values())

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability

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
            # Both "penalty" and "create" compute second-order gradients. In "create", a backward
            # pass with create_graph makes the first gradients, so they are part of an autograd
            # graph. Adding to them in place would break the graph. So "create" is not chosen if
            # gradients are accumulated into `.grad`. Torch has this limit too.
            order = "penalty" if into_grad else self._random.choice(["penalty", "create"])
        passes, between = [self._pass()], None
        if order == "first" and self._chance(0.3):
            passes.append(self._pass())
        self._set_actions(set() if order == "first" else _FIRST_ORDER_ONLY)
        body = self._body(0, 0, depth=3, least=1)
        if self._chance(0.5):
            if len(passes) > 1:
                between = self._body(0, len(body.returns), depth=1, least=1)
            elif order != "first":
                between = self._body(0, 1, depth=1, least=1)
        at_once = len(passes) > 1 and between is None and self._chance(0.5)
        return Episode(body, tuple(passes), between, order, at_once)

    def _pass(self) -> Pass:
        worker = self._random.randrange(self._workers) if self._chance(0.1) else 0
        roots = "results" if self._chance(0.3) else "loss"
        return Pass(roots, self._random.randrange(4), worker)  # type: ignore[arg-type]

    def _body(
        self, worker: int, arguments: int, depth: int, least: int = 0, returns: int | None = None
    ) -> Body:
        builder = _BodyBuilder(arguments)
        if not arguments or self._chance(0.5):
            self._append_action("parameter", builder, worker, depth)
        for _ in range(self._random.randint(1, 8)):
            self._append_action(
                self._random.choices(self._actions, self._weights)[0], builder, worker, depth
            )
            if builder.started and self._chance(0.4):
                self._wait(builder)
        while builder.started and (not self._may_abandon or self._chance(0.85)):
            self._wait(builder)
        if returns is None:
            returns = self._random.randint(least, 3)
        chosen = tuple(self._pick(builder) for _ in range(returns))
        return Body(worker, arguments, tuple(builder.steps), chosen)

    def _append_action(self, action: str, builder: _BodyBuilder, worker: int, depth: int) -> None:
        if action in ("call", "start"):
            self._append_call(action, builder, worker, depth)
        elif action == "quiet call":
            self._append_quiet_call(builder, worker, depth)
        elif action == "trunk":
            self._append_trunk(builder, depth)
        elif action == "branch":
            self._append_branch(builder, worker, depth)
        elif action == "inner":
            self._append_inner(builder, worker, depth)
        elif action == "parameter":
            self._append(builder, Step("parameter", number=self._random.choice(self._parameters)))
        elif action in ("leaf", "hook"):
            inputs = self._inputs(builder, 1)
            self._append(builder, Step(action, inputs))
            if action == "hook":
                builder.shares_storage(inputs[0])
        else:
            self._append_operation(action, builder)

    def _append_operation(self, action: str, builder: _BodyBuilder) -> None:
        _, variants, results = OPERATIONS[action]
        inputs = self._inputs(builder, 2)
        number = self._random.randrange(variants)
        if action == "convert":
            number = self._random.choice(_DTYPES_OF[self._precision])
        if action == "change":
            # Backward may need the tensors that an operation has used, and torch rejects a program
            # that changes them. So change a tensor that no operation has used.
            unused = builder.unused()
            if not unused:
                return
            inputs = (self._random.choice(unused), *inputs[1:])
        self._append(builder, Step(action, inputs, results, number))
        if action in ("view", "detach", "change"):
            builder.shares_storage(inputs[0])
        else:
            builder.use(inputs)
        if action == "expand":
            # An expanded tensor cannot be changed in place. Mark it as used, because only unused
            # tensors are changed.
            builder.use([builder.count - 1])

    def _append_call(self, action: str, builder: _BodyBuilder, worker: int, depth: int) -> None:
        if not depth or self._calls <= 0:
            return
        self._calls -= 1
        inputs = self._inputs(builder, 3) if builder.count and self._chance(0.9) else ()
        to = self._random.randrange(self._workers)
        style = self._random.choice(self._styles)
        bodies: tuple[Body, ...] = (self._body(to, len(inputs), depth - 1),)
        if style == "then":
            bodies += (self._body(worker, len(bodies[0].returns), min(1, depth - 1)),)
        results = 0 if action == "start" else len(bodies[-1].returns)
        helper = self._random.randrange(self._workers)
        step = Step(action, inputs, results, bodies=bodies, style=style, helper=helper)
        key = self._append(builder, step)
        if action == "start":
            builder.started[key] = len(bodies[-1].returns)

    def _append_quiet_call(self, builder: _BodyBuilder, worker: int, depth: int) -> None:
        # Exclude callbacks, and calls that no step waits for. On workers they may run after the
        # no_grad block has ended. In one process they always run inside it, so the two runs would
        # differ.
        styles, may_abandon = self._styles, self._may_abandon
        self._styles, self._may_abandon = ["sync", "async", "remote"], False
        self._append_call("quiet call", builder, worker, depth)
        self._styles, self._may_abandon = styles, may_abandon

    def _wait(self, builder: _BodyBuilder) -> None:
        key = self._random.choice(list(builder.started))
        self._append(builder, Step("wait", (), builder.started.pop(key), number=key))

    def _append_trunk(self, builder: _BodyBuilder, depth: int) -> None:
        """Append a chain of layers. Each layer makes a call and adds its result to its argument."""
        if depth < 2 or self._calls <= 0:
            return
        self._calls -= 4
        trunk = self._pick(builder)
        for _ in range(self._random.randint(3, 10)):
            to = self._random.randrange(self._workers)
            layer = self._body(to, 1, depth=0, returns=1)
            self._append(builder, Step("call", (trunk,), bodies=(layer,)))
            self._append(builder, Step("add", (trunk, builder.count - 1)))
            trunk = builder.count - 1

    def _append_branch(self, builder: _BodyBuilder, worker: int, depth: int) -> None:
        inputs = self._inputs(builder, 2)
        returns = self._random.randint(1, 2)
        bodies = tuple(
            self._body(worker, len(inputs), max(0, depth - 1), returns=returns) for _ in range(2)
        )
        self._append(builder, Step("branch", inputs, returns, bodies=bodies))
        builder.use(inputs)

    def _append_inner(self, builder: _BodyBuilder, worker: int, depth: int) -> None:
        if not depth or self._calls <= 0:
            return
        inputs = self._inputs(builder, 2)
        # The inner context ends with this step. A call that is still open then would fail, so the
        # body must wait for all its calls.
        outer, self._may_abandon = self._may_abandon, False
        body = self._body(worker, len(inputs), depth - 1, least=1)
        self._may_abandon = outer
        self._append(
            builder, Step("inner", inputs, len(inputs), self._random.randrange(2), (body,))
        )

    def _append(self, builder: _BodyBuilder, step: Step) -> int:
        self._key += 1
        builder.add(step, self._key)
        return self._key

    def _pick(self, builder: _BodyBuilder) -> int:
        if not builder.count:
            self._append(builder, Step("constant"))
        # Taking the larger of two numbers prefers the variables of late steps. This makes programs
        # deep.
        return max(self._random.randrange(builder.count), self._random.randrange(builder.count))

    def _inputs(self, builder: _BodyBuilder, most: int) -> tuple[int, ...]:
        return tuple(self._pick(builder) for _ in range(self._random.randint(1, most)))


class _BodyBuilder:
    """Collects the steps of a body."""

    def __init__(self, arguments: int):
        self.count = arguments
        self.steps: list[Step] = []
        #: The started calls for which the body has no "wait" step yet. Maps the key of the step
        #: that starts the call to the number of results of the call.
        self.started: dict[int, int] = {}
        #: For each variable, the number of the first variable that has the same storage.
        self._storage = list(range(arguments))
        self._used: set[int] = set()

    def add(self, step: Step, key: int) -> None:
        self._storage += range(self.count, self.count + step.results)
        self.count += step.results
        self.steps.append(_with_key(step, key))

    def shares_storage(self, position: int) -> None:
        """Record that the last variable shares its storage with the variable at `position`."""
        self._storage[-1] = self._storage[position]

    def use(self, positions: Collection[int]) -> None:
        self._used.update(self._storage[position] for position in positions)

    def unused(self) -> list[int]:
        return [n for n in range(self.count) if self._storage[n] not in self._used]


def _with_key(step: Step, key: int) -> Step:
    return Step(
        step.action,
        step.inputs,
        step.results,
        step.number,
        step.bodies,
        step.style,
        step.helper,
        key,
    )
