"""Marshalled values arrive exactly as pickled values would."""

from __future__ import annotations

import builtins
import enum
import functools
import importlib
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire._core.wire.codec import Codec
from gradwire._core.wire.encoding import Encoded
from gradwire._core.wire.messages import Kind
from gradwire.errors import EncodingError
from tests.processes import until


def cross(value: Any) -> Any:
    codec = Codec()
    return arrived(codec, codec.encode(value))


def arrived(codec: Codec, encoded: Encoded) -> Any:
    buffers = [buffer.contiguous().clone().view(-1).view(torch.uint8) for buffer in encoded.buffers]
    return codec.decode(encoded.whole_payload(), buffers)[0]


def called(*args: Any, **kwargs: Any) -> None:
    """The function in the encoded calls. It never runs."""


class Node:
    @staticmethod
    def static(number: int) -> int:
        return number + 1


class Colour(enum.Enum):
    RED = 1


class Text(str):
    __slots__ = ()


ARGUMENTS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((1 << 70, -0.5, 2j, True, None, "\ud800 \0", b"\xff"), {}),
    ((torch.arange(3.0), 2, torch.ones(2, 2, dtype=torch.bool)), {}),
    ((torch.arange(5000.0), torch.arange(6000.0)), {"third": torch.zeros(0), "n": 1}),
    ((), {"b": 1, "a": torch.tensor(2.0)}),
    ((..., torch.ones(1)), {"b": ...}),
    ((torch.ones(1), Text("of a class of its own"), Kind.HEARTBEAT, Colour.RED), {}),
    (((1, [2.5, {"k": (), "l": b"3"}]), [None] * 17, {None: 1}, {2}), {"d": {}, "e": [True]}),
    (((True, Text("again")), [Colour.RED], {"k": {1: 2}}), {}),
    (([{"k": [number, ()]} for number in range(5)], torch.ones(1)), {}),
    ((torch.nn.Parameter(torch.ones(2)), torch.eye(3).to_sparse(), torch.ones(4)[::2]), {}),
]


@pytest.mark.parametrize(("args", "kwargs"), ARGUMENTS)
def test_calls_arrive_with_their_arguments(args: Any, kwargs: Any) -> None:
    codec = Codec()
    func, got_args, got_kwargs = arrived(codec, codec.encode_call(called, args, kwargs))
    assert func is called
    assert type(got_args) is tuple
    assert list(got_kwargs) == list(kwargs)
    for sent, got in zip([*args, *kwargs.values()], [*got_args, *got_kwargs.values()], strict=True):
        assert type(got) is type(sent)
        if isinstance(sent, torch.Tensor):
            assert torch.equal(got.to_dense(), sent.to_dense())
            assert got.dtype is sent.dtype
        else:
            assert got == sent


@pytest.mark.parametrize("size", [3, 5000])
def test_tensors_arrive_from_within_small_containers(size: int) -> None:
    codec, (a, b, c) = Codec(), torch.rand(3, size)
    sent = ((a, [b, {"c": c}]), 1)
    _, ((first, [second, third]), one), kwargs = arrived(
        codec, codec.encode_call(called, sent, {"x": (None, {"y": 2})})
    )
    got = [first, second, third["c"]]
    assert all(torch.equal(x, y) for x, y in zip(got, [a, b, c], strict=True))
    assert (one, kwargs) == (1, {"x": (None, {"y": 2})})
    (first, [second]), rest = cross(((a, [b]), {"c": c}))
    got = [first, second, rest["c"]]
    assert all(torch.equal(x, y) for x, y in zip(got, [a, b, c], strict=True))


def test_a_dictionary_that_changes_while_it_is_sent_arrives_as_it_was_once() -> None:
    """The encoder reads keys and values in one step."""
    changing, stopped = {key: key for key in "abcd"}, threading.Event()

    def change() -> None:
        while not stopped.is_set():
            for key in "abcd":
                del changing[key]
                changing[key] = key

    thread = threading.Thread(target=change)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(3000):
            got = cross(changing)
            assert all(key == value for key, value in got.items())
    finally:
        stopped.set()
        thread.join()
        sys.setswitchinterval(interval)


_SLOW_TO_IMPORT = """
import threading
IMPORTING.set()
def early():
    return later()
assert GO_ON.wait(30)
def later():
    return "here"
"""


@pytest.mark.parametrize("name", ["early", "later"])
def test_a_function_is_not_called_before_its_module_is_imported(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread has begun to import the module while another decodes a call of its function."""
    importing, go_on, codec = threading.Event(), threading.Event(), Codec()
    monkeypatch.setattr(builtins, "IMPORTING", importing, raising=False)
    monkeypatch.setattr(builtins, "GO_ON", go_on, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "slow_to_import.py").write_text(_SLOW_TO_IMPORT)
    go_on.set()
    module = importlib.import_module("slow_to_import")
    encoded = codec.encode_call(getattr(module, name), (), {})
    del sys.modules["slow_to_import"]
    importing.clear()
    go_on.clear()

    results = []
    threads = [
        threading.Thread(target=lambda: results.append(arrived(codec, encoded)[0]()))
        for _ in range(2)
    ]
    threads[0].start()
    assert importing.wait(30)
    threads[1].start()
    until(
        lambda: not threads[1].is_alive() or _waits_for_an_import(threads[1]),
        "the second thread waits for the import",
    )
    go_on.set()
    for thread in threads:
        thread.join(30)
    monkeypatch.delitem(sys.modules, "slow_to_import")
    assert results == ["here", "here"]


def _waits_for_an_import(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and "importlib" in frame.f_code.co_filename


@pytest.mark.parametrize("length", [2**10 + 1, 2**20])
@pytest.mark.parametrize("text", ["x", b"x"])
def test_a_long_text_is_sent_once(text: Any, length: int) -> None:
    long = text * length
    assert len(Codec().encode([long] * 16).whole_payload()) < 2 * length
    assert cross([long] * 16) == [long] * 16


def test_a_tuple_shared_at_many_levels_is_sent_once() -> None:
    deep: Any = ()
    for _ in range(60):
        deep = (deep, deep)
    assert len(Codec().encode(deep).whole_payload()) < 1000
    nested: Any = 1
    for _ in range(200):
        nested = [nested]
    assert cross(nested) == nested


def test_a_list_given_twice_arrives_as_one() -> None:
    codec, one, itself = Codec(), [1], []
    itself.append(itself)
    _, (first, (second,)), kwargs = arrived(
        codec, codec.encode_call(called, (one, (one,)), {"it": itself})
    )
    assert first is second
    assert kwargs["it"][0] is kwargs["it"]


@pytest.mark.parametrize("length", [3, 5000])
def test_a_tensor_given_twice_arrives_as_one(length: int) -> None:
    codec, tensor = Codec(), torch.arange(length)
    _, (first, second), kwargs = arrived(
        codec, codec.encode_call(called, (tensor, tensor), {"third": tensor})
    )
    assert first is second is kwargs["third"]


def test_a_function_is_sent_by_name_only_if_the_name_leads_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codec, before = Codec(), called
    assert arrived(codec, codec.encode_call(Node.static, (1,), {})) == (Node.static, (1,), {})
    encoded = codec.encode_call(before, (), {})
    monkeypatch.setattr(sys.modules[__name__], "called", functools.partial(before))
    with pytest.raises(EncodingError, match=r"not the same object as .*called"):
        codec.encode_call(before, (), {})
    assert arrived(codec, encoded)[0] is called
    monkeypatch.delattr(sys.modules[__name__], "called")
    with pytest.raises(AttributeError, match="called"):
        arrived(codec, encoded)
    static = codec.encode_call(Node.static, (1,), {})
    monkeypatch.delattr(sys.modules[__name__], "Node")
    with pytest.raises(AttributeError, match="Node"):
        arrived(codec, static)
    monkeypatch.setattr(before, "__module__", "no_such_module")
    with pytest.raises(EncodingError, match="no_such_module"):
        codec.encode_call(before, (), {})
