"""Fixtures. A test must leave no thread, descriptor, shared memory or child process behind."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator

import pytest
import torch

from gradwire._core.transport import strangers
from gradwire.testing import acting_as, cluster, hide_gpus, transports_named
from gradwire.testing.connection_pairs import open_descriptors, shared_memory
from gradwire.worker import Worker

# Tests fork workers. A forked process hangs in OpenMP when its parent has used its threads.
torch.set_num_threads(1)
hide_gpus()
# A shell that starts the tests in the background may let them ignore Ctrl-C, and the programs that
# the tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _has_child() -> bool:
    if not hasattr(os, "waitid"):
        return False  # Without waitid, looking for a child would reap it.
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    gc.freeze()  # Later collections skip the objects that exist already, which would take 0.1 s.
    threads, descriptors, memory = set(threading.enumerate()), open_descriptors(), shared_memory()
    children = _has_child()
    yield
    gc.collect()
    assert not set(threading.enumerate()) - threads
    assert not open_descriptors() - descriptors
    assert not shared_memory() - memory
    assert children or not _has_child()


@pytest.fixture
def older_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an option that no kernel knows, as SO_PASSRIGHTS is unknown before Linux 6.16."""
    monkeypatch.setattr(strangers, "PASSRIGHTS", 0x7FFFFFFF)


@pytest.fixture
def memory_pair() -> Iterator[list[Worker]]:
    """Two workers in this process."""
    with cluster(2) as workers:
        yield workers


@pytest.fixture(params=["in_process", "unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[list[Worker]]:
    """Two workers in this process, over each of the transports."""
    with cluster(2, transports=transports_named(request.param)) as workers:
        yield workers


@pytest.fixture
def trio() -> Iterator[list[Worker]]:
    """Three workers in this process. The first one is the current worker."""
    with cluster(3) as workers:
        with acting_as(workers[0]):
            yield workers
