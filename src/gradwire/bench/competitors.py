"""Other libraries that call functions in other processes: ``gradwire bench rpc --competitors``.

These libraries, Ray and Monarch, are measured in the cases that they support: calls to an actor
that runs any function it is given. Both start processes that this program cannot suspend while
another library is measured, so they are started anew for each of their turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from gradwire.bench.cases import Contestant, Suite
from gradwire.bench.rpc import Caller


@dataclass(frozen=True)
class Competitor:
    contestant: Contestant
    #: The name of the module to import. `package` is the name to install with pip.
    module: str
    package: str


def add_competitors(suite: Suite) -> tuple[Suite, list[str]]:
    """Add the installed competitors to the suite. Return the new suite, and a line for each
    competitor that is not installed, which says how to install it."""
    installed = [competitor for competitor in COMPETITORS if find_spec(competitor.module)]
    names = tuple(competitor.contestant.name for competitor in installed)
    cases = [
        replace(case, contestants=case.contestants + names) if case.open_to_competitors else case
        for case in suite.cases
    ]
    contestants = [*suite.contestants, *(competitor.contestant for competitor in installed)]
    missing = [
        f"{competitor.contestant.name} is not installed: pip install {competitor.package}"
        for competitor in COMPETITORS
        if competitor not in installed
    ]
    return replace(suite, contestants=tuple(contestants), cases=tuple(cases)), missing


class Runner:
    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return function(*args)


@contextmanager
def ray_actor(_rank: int) -> Iterator[Caller]:
    import ray

    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="error")
    runner = ray.remote(Runner).remote()

    def start(function: Callable[..., Any], args: tuple[Any, ...] = ()) -> Any:
        return runner.run.remote(function, args)

    yield Caller(lambda *call, **args: ray.get(start(*call, **args)), start, ray.get)
    ray.shutdown()


@contextmanager
def monarch_actor(_rank: int) -> Iterator[Caller]:
    from monarch.actor import Actor, endpoint, this_host

    class MonarchRunner(Actor):  # type: ignore[misc]
        run = endpoint(Runner.run)

    processes = this_host().spawn_procs(per_host={"gpus": 1})
    runner = processes.spawn("runner", MonarchRunner)

    def start(function: Callable[..., Any], args: tuple[Any, ...] = ()) -> Any:
        return runner.run.call_one(function, args)

    def wait_all(futures: list[Any]) -> None:
        for future in futures:
            future.get()

    yield Caller(lambda *call, **args: start(*call, **args).get(), start, wait_all)
    processes.stop().get()


COMPETITORS = (
    Competitor(
        Contestant("Ray", ray_actor, processes=1, restart_each_turn=True),
        module="ray",
        package="ray",
    ),
    Competitor(
        Contestant("Monarch", monarch_actor, processes=1, restart_each_turn=True),
        module="monarch",
        package="torchmonarch",
    ),
)
