"""Values arrive equal. If an argument cannot be sent, the error names it."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import operator
import os
import pickle
import subprocess
import sys
import threading
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire._core.wire.codec import Codec
from gradwire._core.wire.encoding import current_decoding
from gradwire._core.wire.messages import Kind, pack, peek, unpack
from gradwire.errors import EncodingError


def cross(value: Any, codec: Codec | None = None) -> Any:
    codec = codec or Codec()
    encoded = codec.encode(value)
    buffers = [buffer.contiguous().clone().view(-1).view(torch.uint8) for buffer in encoded.buffers]
    return codec.decode(encoded.whole_payload(), buffers)[0]


@dataclasses.dataclass
class Point:
    x: int
    weights: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    name: str


class Colour(enum.Enum):
    RED = 1


class Named(NamedTuple):
    first: int
    second: str


class Node:
    """Refers to itself, and to a tensor from several places."""

    def __init__(self) -> None:
        self.me = self
        self.tensor = torch.arange(4)
        self.again = [self.tensor]

    def method(self, number: int) -> int:
        return number + int(self.tensor.sum())

    @staticmethod
    def static(number: int) -> int:
        return number + 1

    @classmethod
    def of_class(cls) -> str:
        return cls.__name__


VALUES = [
    None,
    True,
    (1 << 100, -1.5, 2j, float("inf")),
    "täxt \0 \U0001f600",
    b"bytes",
    bytearray(b"more"),
    [1, [2, [3, ()]]],
    {"a": {1: {(2, 3): {4}}}, None: frozenset({5})},
    range(3, 10, 2),
    slice(1, None, 2),
    collections.OrderedDict(b=1, a=2),
    collections.deque([1, 2], maxlen=5),
    collections.Counter("hello"),
    Named(1, "two"),
    Fixed("name"),
    Colour.RED,
    Kind.HEARTBEAT,
    ValueError("an error", 7),
    Node,
    len,
    operator.add,
    Node.static,
    torch.Size([2, 3]),
    torch.float16,
    torch.device("cuda", 1),
    torch.strided,
    torch.channels_last,
    torch.add,
    torch.nn.functional.relu,
    torch.Tensor.add,
    torch.ops.aten.add.Tensor,
    torch.ops.aten.add,
    torch.ops.aten.relu.default,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:40])
def test_values_arrive_equal(value: Any) -> None:
    arrived = cross(value)
    assert type(arrived) is type(value)
    if isinstance(value, Exception):
        assert arrived.args == value.args
    else:
        assert arrived == value


def test_a_counted_default_dict_keeps_its_factory() -> None:
    arrived = cross(collections.defaultdict(list, a=[1]))
    assert arrived["new"] == []


def test_operators_arrive_as_the_same_objects() -> None:
    assert cross(torch.ops.aten.add.Tensor) is torch.ops.aten.add.Tensor
    assert cross(torch.ops.aten.add) is torch.ops.aten.add
    assert cross(torch.add) is torch.add


@pytest.mark.parametrize("size", [3, 5000])
def test_dataclasses_with_tensors_arrive(size: int) -> None:
    sent = Point(3, torch.randn(size))
    arrived = cross(sent)
    assert type(arrived) is Point
    assert arrived.x == 3
    assert torch.equal(arrived.weights, sent.weights)


def test_objects_that_refer_to_themselves_keep_their_shape() -> None:
    arrived = cross(Node())
    assert arrived.me is arrived
    assert arrived.again[0] is arrived.tensor


def test_bound_methods_bring_their_object() -> None:
    assert cross(Node().method)(1) == 7
    assert cross(Node.of_class)() == "Node"
    assert cross(torch.arange(3).add)(1).tolist() == [1, 2, 3]
    assert cross(functools.partial(operator.add, 1))(2) == 3


@pytest.mark.parametrize("width", [2, 100])
def test_modules_arrive_complete(width: int) -> None:
    module = torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout()
    ).eval()
    arrived = cross(module)
    assert type(arrived[0].weight) is torch.nn.Parameter
    assert [name for name, _ in arrived.named_parameters()] == [
        name for name, _ in module.named_parameters()
    ]
    data = torch.randn(4, width)
    assert torch.equal(arrived(data), module(data))


def test_tied_parameters_stay_tied() -> None:
    module = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)])
    module[1].weight = module[0].weight
    arrived = cross(module)
    assert arrived[0].weight is arrived[1].weight


@pytest.mark.parametrize("size", [3, 50_000])
def test_numpy_arrays_arrive(size: int) -> None:
    numpy = pytest.importorskip("numpy")
    sent = {
        "plain": numpy.arange(size, dtype="float32"),
        "fortran": numpy.asfortranarray(numpy.ones((size, 2))),
        "strided": numpy.arange(size)[::2],
        "records": numpy.zeros(size, dtype=[("a", "i4"), ("b", "f8")]),
        "objects": numpy.array([{1: 2}, "three"], dtype=object),
        "scalar": numpy.float64(1.5),
    }
    arrived = cross([sent, torch.ones(size)])[0]
    for name, array in sent.items():
        assert numpy.array_equal(arrived[name], array)
        assert arrived[name].dtype == array.dtype
    arrived["plain"][0] = 7  # the receiver's own memory
    assert sent["plain"][0] == 0


def test_numpy_arrays_are_not_copied_into_the_payload() -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.ones(100_000)
    encoded = Codec().encode({"array": array, "tensor": torch.zeros(100_000), "same": array})
    assert len(encoded.whole_payload()) < 1000
    addresses = [buffer.data_ptr() for buffer in encoded.buffers]
    assert len(addresses) == 2
    assert addresses[0] == array.ctypes.data


@pytest.mark.parametrize("size", [100, 100_000])
def test_read_only_arrays_arrive_read_only(size: int) -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(size)
    array.flags.writeable = False
    [arrived] = cross([array])
    assert numpy.array_equal(arrived, array)
    assert not arrived.flags.writeable


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("tabn"), st.sampled_from([0, 3, 5_000, 70_000]))))
def test_large_values_arrive_in_their_order(things: list[tuple[str, int]]) -> None:
    """Tensors, arrays and bytes next to, and inside of, each other."""
    numpy = pytest.importorskip("numpy")

    def make(kind: str, size: int, number: int) -> Any:
        if kind == "b":
            return bytes([number]) * size
        array = numpy.full(size, number, dtype="float32")
        if kind == "a":
            return array
        tensor = torch.full((size,), float(number))
        if kind == "t":
            return tensor
        parameter = torch.nn.Parameter(tensor)
        parameter.attached = array, tensor + 1  # type: ignore[attr-defined]
        return parameter

    def as_text(thing: Any) -> str:
        inside = [as_text(part) for part in getattr(thing, "attached", ())]
        content = thing if isinstance(thing, bytes) else thing.tolist()
        return f"{type(thing)} {content} {inside}"

    sent = [make(kind, size, number % 100) for number, (kind, size) in enumerate(things)]
    arrived = cross(sent)
    assert [*map(as_text, arrived)] == [*map(as_text, sent)]
    assert [*map(as_text, cross(arrived))] == [*map(as_text, sent)]


def test_long_immutable_bytes_are_not_copied() -> None:
    long = b"x" * 200_000
    encoded = Codec().encode([1, long, "and", long])
    assert [piece is long for piece in encoded.rest].count(True) == 1
    assert cross([1, long, "and", long]) == [1, long, "and", long]


def test_long_mutable_bytes_are_copied() -> None:
    long = bytearray(b"x" * 200_000)
    encoded = Codec().encode([long])
    long += b"more"  # raises BufferError if the encoded value still refers to it
    assert Codec().decode(encoded.whole_payload())[0] == [b"x" * 200_000]


@pytest.mark.parametrize("size", [10, 10_000, 200_000])
def test_pickle_buffers_of_users_arrive(size: int) -> None:
    assert cross(pickle.PickleBuffer(b"x" * size)) == b"x" * size
    arrived = cross(cross(pickle.PickleBuffer(bytearray(size))))
    assert type(arrived) is bytearray
    assert arrived == bytearray(size)


# -- values that cannot be sent


def called(*args: Any, **kwargs: Any) -> None:
    """The function in the encoded calls. It never runs."""


def generator() -> Any:
    yield


class Stubborn:
    def __reduce__(self) -> Any:
        raise RuntimeError("not me")


class Evasive:
    """Its `__name__` and `__qualname__` are no strings."""

    def __getattr__(self, name: str) -> Any:
        if name in ("__name__", "__qualname__"):
            return 5
        raise AttributeError(name)

    def __reduce__(self) -> Any:
        raise RuntimeError("not me")


@pytest.mark.parametrize(
    "culprit",
    [
        lambda: None,
        generator(),
        threading.Lock(),
        Stubborn(),
        Evasive(),
        [1, {"deep": generator()}],
    ],
    ids=["lambda", "generator", "lock", "stubborn", "evasive", "nested"],
)
def test_an_argument_that_cannot_be_sent_is_named(culprit: Any) -> None:
    kind = type(culprit).__name__
    with pytest.raises(EncodingError, match=rf"argument 1 of called \(a {kind}\)"):
        Codec().encode_call(called, (torch.ones(2), culprit, 3), {"fine": 1})
    with pytest.raises(EncodingError, match=rf"argument 'bad' of called \(a {kind}\)"):
        Codec().encode_call(called, (torch.ones(2),), {"fine": 1, "bad": culprit})


def test_an_open_file_cannot_be_sent() -> None:
    with open(__file__) as file, pytest.raises(EncodingError, match="argument 0 of called"):
        Codec().encode_call(called, (file,), {})


def test_a_function_that_cannot_be_sent_is_named_with_advice() -> None:
    def local() -> None:
        pass

    for func, name in ((lambda: None, "<lambda>"), (local, "local")):
        with pytest.raises(EncodingError, match=rf"the function .*{name}.*closures=True"):
            Codec().encode_call(func, (), {})


def test_a_failure_that_no_argument_repeats_is_blamed_on_the_call() -> None:
    class Once:
        times = 0

        def __reduce__(self) -> Any:
            self.times += 1
            if self.times == 1:
                raise RuntimeError("not the first time")
            return str, ("sent",)

    with pytest.raises(EncodingError, match="the call to called cannot be sent: not the first"):
        Codec().encode_call(called, (Once(),), {})


# -- closures


@pytest.mark.parametrize("size", [3, 5000])
def test_closures_are_sent_by_value_with_the_option(size: int) -> None:
    pytest.importorskip("cloudpickle")
    codec, weights = Codec(closures=True), torch.ones(size, requires_grad=True)

    def local(number: int) -> int:
        return number * int(weights.sum())

    class Local:
        value = weights

    encoded = codec.encode_call(lambda x: local(x) + 1, (Local(),), {})
    assert len(encoded.differentiable) == 1  # the function and the class share it
    buffers = [buffer.clone().view(torch.uint8) for buffer in encoded.buffers]
    (func, args, _kwargs, *_), _ = codec.decode(encoded.whole_payload(), buffers)
    assert func(2) == 2 * size + 1
    assert torch.equal(args[0].value, weights)


def test_closures_can_be_decoded_without_the_option() -> None:
    pytest.importorskip("cloudpickle")
    encoded = Codec(closures=True).encode(lambda: 42)
    assert Codec().decode(encoded.whole_payload())[0]() == 42


# -- types that higher layers register


@pytest.mark.parametrize("key", ["marshalled", 1], ids=["marshalled", "pickled"])
def test_a_registered_type_is_rebuilt_by_the_codec_that_decodes(key: Any) -> None:
    sender, receiver = Codec(), Codec()

    def rebuild(parts: Any) -> str:
        current_decoding().unconfirmed.append(parts)
        return f"rebuilt {parts}"

    sender.register_type(Stubborn, "stubborn", lambda _: "parts", lambda _: "never called here")
    receiver.register_type(Stubborn, "stubborn", lambda _: "never called here", rebuild)
    value, unconfirmed = receiver.decode(sender.encode({key: Stubborn()}).whole_payload())
    assert value == {key: "rebuilt parts"}
    assert unconfirmed == ["parts"]
    one = Stubborn()
    (first, second), _ = receiver.decode(sender.encode((one, one)).whole_payload())
    assert first is second
    with pytest.raises(EncodingError, match="decoded by a worker"):
        current_decoding()
    with pytest.raises(EncodingError, match="decoded by a worker"):
        pickle.loads(sender.encode({1: Stubborn()}).whole_payload())


# -- messages


@pytest.mark.parametrize("tags", [None, {}, {"autograd": (1, 2), "profile": "key"}])
@pytest.mark.parametrize("payload", [b"", b"payload", memoryview(b"a view")])
def test_messages_arrive_as_they_were_packed(tags: Any, payload: bytes | memoryview) -> None:
    head = pack(Kind.PYTHON_CALL, (1 << 64) - 1, payload, tags)
    for received in (head, bytearray(head), memoryview(head)):
        kind, call_id, got_tags, got = unpack(received)
        assert (kind, call_id) == peek(received) == (Kind.PYTHON_CALL, (1 << 64) - 1)
        assert got_tags == (tags or None)
        assert bytes(got) == bytes(payload)


_COLLECTS_GARBAGE_WHILE_ITS_PARTS_ARE_FREED = """
import gc
from gradwire._core.wire.codec import Codec

gc.freeze()  # keeps each collection short: the imported modules are left out

class Dying:
    def __del__(self):
        gc.collect()

class Part:
    def __init__(self, *kept):
        self.kept = kept
    def __getstate__(self):
        return {"value": [1]}

class Whole:
    def __reduce__(self):
        return list, ([Part() for _ in range(50)] + [Part(Dying())],)

codec = Codec()
for _ in range(20):
    codec.encode([Whole() for _ in range(20)])
print("alive")
"""


def test_garbage_may_be_collected_while_the_parts_of_a_sent_value_are_freed() -> None:
    """Another thread may collect at that moment: freeing a tensor releases the interpreter lock."""
    ran = subprocess.run(
        [sys.executable, "-c", _COLLECTS_GARBAGE_WHILE_ITS_PARTS_ARE_FREED],
        env={
            **os.environ,
            "PYTHONMALLOC": "debug",
        },  # overwrites freed memory, so that any use of it crashes
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.stdout == "alive\n", f"{ran.returncode}: {ran.stderr}"
