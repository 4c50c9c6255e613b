"""Nothing may be left behind: no thread, no descriptor, no shared memory, no child."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import pytest
import torch

from gradwire import current
from gradwire.testing import cluster, transports_named
from gradwire.testing.pairs import open_descriptors, shared_memory
from gradwire.worker import Worker

# Tests fork workers. A forked process hangs in OpenMP when its parent has used its threads.
torch.set_num_threads(1)


def _has_child() -> bool:
    if not hasattr(os, "waitid"):
        return False  # nobody can tell without reaping it
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    gc.freeze()  # only what this test makes is collected: all that was imported takes 0.1 s
    threads, descriptors, memory = set(threading.enumerate()), open_descriptors(), shared_memory()
    children = _has_child()
    yield
    gc.collect()
    assert not set(threading.enumerate()) - threads
    assert not open_descriptors() - descriptors
    assert not shared_memory() - memory
    assert children or not _has_child()


@pytest.fixture
def memory_pair() -> Iterator[list[Worker]]:
    """Two workers in this process."""
    with cluster(2) as workers:
        yield workers


@pytest.fixture(params=["memory", "unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[list[Worker]]:
    """Two workers in this process, over each of the transports."""
    with cluster(2, transports=transports_named(request.param)) as workers:
        yield workers


@pytest.fixture
def trio() -> Iterator[list[Worker]]:
    """Three workers in this process, the first of them the current one."""
    with cluster(3) as workers:
        token = current.enter(workers[0])
        yield workers
        current.exit(token)
