"""Large copies of memory, with the help of a second thread."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire._core.transport import memcopy


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memcopy, "_TWO_THREADS_BYTES", 1 << 16)
    monkeypatch.setattr(memcopy, "_PIECE_BYTES", 1 << 12)


def copied(sent: Tensor) -> Tensor:
    target = torch.zeros_like(sent)
    memcopy.copy(target.data_ptr(), sent.data_ptr(), sent.nbytes)
    return target


@pytest.fixture
def sent() -> Tensor:
    return torch.randint(256, (1_000_003,), dtype=torch.uint8)


def test_a_large_copy_is_complete(sent: Tensor) -> None:
    assert torch.equal(copied(sent), sent)


def test_a_copy_succeeds_without_a_helper_thread(
    sent: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(memcopy, "start_new_thread", refuse)
    assert torch.equal(copied(sent), sent)


class InterruptedOnce:
    """A lock whose first `acquire` is interrupted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_error: object) -> None:
        self._lock.release()

    def acquire(self) -> None:
        if not INTERRUPTED.is_set():
            INTERRUPTED.set()
            raise KeyboardInterrupt
        self._lock.acquire()


INTERRUPTED = threading.Event()


def test_an_interrupted_copy_waits_for_its_helper_thread(
    sent: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    INTERRUPTED.clear()
    copy, main = ctypes.memmove, threading.get_ident()
    helps, done = threading.Event(), []

    def copy_slowly(*arguments: Any) -> None:
        if threading.get_ident() == main:
            assert helps.wait(30)
        elif not helps.is_set():
            helps.set()
            assert INTERRUPTED.wait(30)
            done.append(arguments)
        copy(*arguments)

    monkeypatch.setattr(ctypes, "memmove", copy_slowly)
    monkeypatch.setattr(memcopy, "threading", SimpleNamespace(Lock=InterruptedOnce))
    with pytest.raises(KeyboardInterrupt):
        copied(sent)
    assert done
