"""Others that call functions in other processes, where they are installed: ``--peers``.

They are asked for what they can do too, calls, with an actor that runs whatever function it is
given. Both start processes of their own, so they are started for each turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from gradwire.bench.contest import Contestant, Suite
from gradwire.bench.rpc import Caller


@dataclass(frozen=True)
class Peer:
    contestant: Contestant
    #: What it is called in Python, and by pip.
    module: str
    package: str


def invite(suite: Suite) -> tuple[Suite, list[str]]:
    """The suite with the peers that are installed; and for the others, how to install them."""
    here = [peer for peer in PEERS if find_spec(peer.module)]
    names = tuple(peer.contestant.name for peer in here)
    cases = [
        replace(case, contestants=case.contestants + names) if case.peers else case
        for case in suite.cases
    ]
    contestants = [*suite.contestants, *(peer.contestant for peer in here)]
    missing = [
        f"{peer.contestant.name} is not installed: pip install {peer.package}"
        for peer in PEERS
        if peer not in here
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


PEERS = (
    Peer(Contestant("Ray", ray_actor, processes=1, lasting=False), "ray", "ray"),
    Peer(
        Contestant("Monarch", monarch_actor, processes=1, lasting=False), "monarch", "torchmonarch"
    ),
)
