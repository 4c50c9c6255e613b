"""Interceptors: how higher layers take part in the calls of user functions."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from gradwire._core.rpc.interceptors import Interceptor
from gradwire.testing import runtime_of
from gradwire.worker import Worker
from tests.processes import until


class NamingInterceptor(Interceptor):
    """Tags every call with the sender's name, and doubles received tensors."""

    def __init__(self, name: str, log: list[str]):
        self.name = name
        self.log = log

    def leaving(self, to: Any, what: Any, tensors: Any, tags: dict[str, Any]) -> None:
        tags["from"] = self.name
        self.log.append(f"{self.name} sends {len(tensors)} to {to.name} for {what.__name__}")

    def arriving(self, sender: int, tags: dict[str, Any]) -> Any:
        self.log.append(f"{self.name} gets a message of {tags['from']}")
        return self.double

    def double(self, tensor: torch.Tensor) -> torch.Tensor:
        self.log.append(f"{self.name} gets a tensor")
        return tensor * 2

    def serving(self, request: Any) -> Any:
        self.log.append(f"{self.name} serves {request.subject.__name__}")
        return contextlib.closing(self)

    def close(self) -> None:
        self.log.append(f"{self.name} has served")

    def answering(self, request: Any, tensors: Any, tags: dict[str, Any]) -> None:
        tags["from"] = self.name
        self.log.append(f"{self.name} answers {request.subject.__name__} with {len(tensors)}")


def test_interceptors_see_the_calls_on_both_sides(memory_pair: list[Worker]) -> None:
    log: list[str] = []
    for worker in memory_pair:
        runtime_of(worker).agent.interceptors.append(NamingInterceptor(worker.name, log))
    x = torch.ones(2, requires_grad=True)
    result = memory_pair[0].rpc_sync("worker1", torch.add, (x, torch.ones(5000).sum()))
    assert result.tolist() == [10004, 10004]
    # The entries of the two workers may be mixed in any order.
    assert [entry for entry in log if entry.startswith("worker0")] == [
        "worker0 sends 1 to worker1 for add",
        "worker0 gets a message of worker1",
        "worker0 gets a tensor",
    ]
    assert [entry for entry in log if entry.startswith("worker1")][:4] == [
        "worker1 gets a message of worker0",
        "worker1 gets a tensor",
        "worker1 serves add",
        "worker1 answers add with 1",
    ]
    until(lambda: "worker1 has served" in log, "the served function has ended")
