"""Large copies, with the help of a second thread."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.transport import segments


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_MUCH", 1 << 16)
    monkeypatch.setattr(segments, "_PIECE", 1 << 12)


def copied(sent: Tensor) -> Tensor:
    got = torch.zeros_like(sent)
    segments._copy(got.data_ptr(), sent.data_ptr(), sent.nbytes)
    return got


@pytest.fixture
def sent() -> Tensor:
    return torch.randint(256, (1_000_003,), dtype=torch.uint8)


def test_much_is_copied_in_pieces(sent: Tensor) -> None:
    assert torch.equal(copied(sent), sent)


def test_there_may_be_no_thread_to_help(sent: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_what: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(segments, "start_new_thread", refuse)
    assert torch.equal(copied(sent), sent)


class InterruptedOnce:
    """A lock; who waits for it is interrupted the first time."""

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


def test_an_interrupt_does_not_leave_a_helper_behind(
    sent: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    INTERRUPTED.clear()
    copy, main = ctypes.memmove, threading.get_ident()
    helps, done = threading.Event(), []

    def copy_slowly(*what: Any) -> None:
        if threading.get_ident() == main:
            assert helps.wait(30)
        elif not helps.is_set():
            helps.set()
            assert INTERRUPTED.wait(30)
            done.append(what)
        copy(*what)

    monkeypatch.setattr(ctypes, "memmove", copy_slowly)
    monkeypatch.setattr(segments, "threading", SimpleNamespace(Lock=InterruptedOnce))
    with pytest.raises(KeyboardInterrupt):
        copied(sent)
    assert done
