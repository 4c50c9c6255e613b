"""Tensors arrive equal, take few bytes on the wire, and belong to the receiver."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire._core.transport.in_process import InProcessTransport
from gradwire._core.transport.poller import EpollPoller
from gradwire._core.transport.unix import UnixTransport
from gradwire._core.wire.codec import Codec
from gradwire._core.wire.frames import Frame
from gradwire._core.wire.tensors import DTYPES, INLINE_BYTES
from gradwire.errors import EncodingError
from gradwire.testing.connection_pairs import Background, open_pair, take

LARGE = 3 * INLINE_BYTES


def cross(value: Any, codec: Codec | None = None) -> Any:
    """Encode a value, carry its buffers as a transport would, and decode it."""
    codec = codec or Codec()
    encoded = codec.encode(value)
    buffers = []
    for buffer in encoded.buffers:
        buffers.append(bits(buffer).clone())
    return codec.decode(encoded.whole_payload(), buffers)[0]


def bits(tensor: Tensor) -> Tensor:
    """Return the elements as bytes, which can be compared for every dtype and for NaN."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    flat = torch.empty(tensor.nbytes, dtype=torch.uint8)
    if len(flat):
        flat.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return flat


def assert_same(arrived: Tensor, sent: Tensor) -> None:
    assert type(arrived) is type(sent)
    assert (arrived.dtype, arrived.shape) == (sent.dtype, sent.shape)
    assert arrived.requires_grad == sent.requires_grad
    assert arrived.is_leaf
    assert torch.equal(bits(arrived), bits(sent))


def bytes_sent(tensor: Tensor) -> int:
    """Return how many bytes the elements take, in the payload or in buffers."""
    encoded = Codec().encode(tensor)
    if encoded.buffers:
        return sum(buffer.nbytes for buffer in encoded.buffers)
    return len(encoded.whole_payload()) - 200  # 200: less than the size of any description


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4), (LARGE,), (0, 5)], ids=str)
def test_every_dtype_arrives(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.arange(size).remainder(2 if dtype is torch.bool else 251).to(torch.uint8)
    tensor = raw.view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)
    assert_same(cross(tensor), tensor)


@pytest.mark.parametrize("size", [6, 200])
def test_views_arrive_equal(size: int) -> None:
    base = torch.randn(size, size, dtype=torch.complex128)
    for view in (
        base[1:-1, ::2],
        base[2],
        base[:, 3],
        base.t(),
        base[:1].expand(size, size),
        base.unfold(0, 4, 1),
        base.as_strided((size, size), (1, 1)),
        base.flip(0),
        base.conj(),
        base.t().conj(),
        base.imag,
        base.conj().imag,  # a negative view
        base.conj().imag.t(),
        base[:0],
    ):
        assert_same(cross(view), view)


def test_a_transposed_tensor_keeps_its_strides() -> None:
    for tensor in (
        torch.randn(3, 5).t(),
        torch.randn(2, 3, 50, 50).to(memory_format=torch.channels_last),
    ):
        assert cross(tensor).stride() == tensor.stride()


def test_a_view_sends_only_its_own_elements() -> None:
    base = torch.zeros(1000, 1000)
    assert bytes_sent(base[7]) <= 4000
    assert bytes_sent(base[:, 7]) <= 4000
    assert bytes_sent(base[5:105, 5:105]) == 40_000
    assert bytes_sent(base[:1, :1].expand(1000, 1000)) <= 4
    assert bytes_sent(base[:1].expand(1000, 1000)) <= 4000
    assert bytes_sent(base.as_strided((900, 900), (1, 1))) <= 4 * 1799


def _views(draw: st.DrawFn) -> Tensor:
    base = torch.arange(4096, dtype=draw(st.sampled_from([torch.int16, torch.float64])))
    view = base
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["strided", "slice", "transpose", "expand", "index", "flip"]))
        dims = view.dim()
        if kind == "strided":
            shape = draw(st.lists(st.integers(0, 6), max_size=4))
            strides = [draw(st.integers(0, 40)) for _ in shape]
            view = base.as_strided(shape, strides, draw(st.integers(0, 500)))
        elif kind == "expand" and dims < 5:
            view = view.unsqueeze(0).expand(draw(st.integers(1, 5)), *view.shape)
        elif dims:
            dim = draw(st.integers(0, dims - 1))
            size = view.shape[dim]
            if kind == "slice":
                start = draw(st.integers(0, size))
                length = draw(st.integers(0, size - start))
                view = view.narrow(dim, start, length)
                if length:
                    picked = [slice(None)] * dims
                    picked[dim] = slice(None, None, draw(st.integers(1, 4)))
                    view = view[tuple(picked)]
            elif kind == "transpose":
                view = view.transpose(dim, draw(st.integers(0, dims - 1)))
            elif kind == "index" and size:
                view = view.select(dim, draw(st.integers(0, size - 1)))
            elif kind == "flip":
                view = view.flip(dim)
    return view


def _span(view: Tensor) -> int:
    """Return how many elements the storage has from the first to the last element of the view."""
    if not view.numel():
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(view.shape, view.stride(), strict=True))


@settings(max_examples=300, deadline=None)
@given(st.composite(_views)())
def test_any_view_arrives_equal_and_sends_no_unneeded_bytes(view: Tensor) -> None:
    assert_same(cross(view), view)
    span = min(view.numel(), _span(view)) if view.nbytes > 1024 else view.numel()
    assert bytes_sent(view) <= view.element_size() * span


@pytest.mark.parametrize("size", [10, LARGE])
def test_requires_grad_is_kept_and_history_is_not(size: int) -> None:
    leaf = torch.ones(size, requires_grad=True)
    assert_same(cross(leaf), leaf)
    arrived = cross(leaf * 2)
    assert arrived.requires_grad
    assert arrived.is_leaf


@pytest.mark.parametrize("size", [10, LARGE])
def test_parameters_stay_parameters(size: int) -> None:
    for parameter in (
        torch.nn.Parameter(torch.ones(size)),
        torch.nn.Parameter(torch.ones(size), requires_grad=False),
        torch.nn.Parameter(torch.ones(size).expand(3, size)),
        torch.nn.Parameter(torch.ones(3, size).to_sparse()),
    ):
        arrived = cross(parameter)
        assert type(arrived) is torch.nn.Parameter
        assert arrived.requires_grad == parameter.requires_grad
        assert torch.equal(arrived.to_dense(), parameter.to_dense())


def test_attributes_of_parameters_are_kept() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.group = "slow"
    assert cross(parameter).group == "slow"
    assert_same(cross(parameter), parameter)


@pytest.mark.parametrize("size", [1, 100])
@pytest.mark.parametrize("coalesced", [True, False])
def test_sparse_coo_tensors_arrive(size: int, coalesced: bool) -> None:
    indices = torch.tensor([[0, 1, 1], [2, 0, 0]])
    values = torch.randn(3, size * size)
    tensor = torch.sparse_coo_tensor(indices, values, (2, 3, size * size), check_invariants=True)
    tensor = (tensor.coalesce() if coalesced else tensor).requires_grad_()
    arrived = cross(tensor)
    assert arrived.is_coalesced() == coalesced
    assert arrived.requires_grad
    assert arrived._nnz() == tensor._nnz()
    assert torch.equal(arrived.to_dense(), tensor.to_dense())


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize("size", [4, 200])
@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "bsc"])
def test_compressed_sparse_tensors_arrive(layout: str, size: int) -> None:
    dense = torch.randn(size, size).relu()
    blocks = ((2, 2),) if layout in ("bsr", "bsc") else ()
    tensor = getattr(dense, f"to_sparse_{layout}")(*blocks)
    arrived = cross(tensor)
    assert arrived.layout == tensor.layout
    assert torch.equal(arrived.to_dense(), dense)


def test_meta_tensors_arrive_as_meta_tensors() -> None:
    tensor = torch.empty(3, 1 << 40, device="meta", dtype=torch.bfloat16).t().requires_grad_()
    arrived = cross(tensor)
    assert arrived.is_meta
    assert (arrived.shape, arrived.stride(), arrived.dtype) == (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )
    assert arrived.requires_grad


def test_modules_on_the_meta_device_keep_their_parameters() -> None:
    arrived = cross(torch.nn.Linear(3, 4, device="meta"))
    assert [(name, p.shape) for name, p in arrived.named_parameters()] == [
        ("weight", (4, 3)),
        ("bias", (4,)),
    ]
    assert all(p.is_meta for p in arrived.parameters())


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:TypedStorage")
def test_rare_kinds_of_tensors_arrive_as_torch_pickles_them() -> None:
    quantized = torch.quantize_per_tensor(torch.randn(5), 0.1, 10, torch.quint8)
    assert torch.equal(cross(quantized).int_repr(), quantized.int_repr())


class Tagged(Tensor):
    pass


@pytest.mark.parametrize("size", [10, LARGE])
def test_subclasses_of_tensor_keep_their_type(size: int) -> None:
    tensor = torch.ones(size).as_subclass(Tagged)
    tensor.tag = "mine"
    arrived = cross(tensor)
    assert type(arrived) is Tagged
    assert arrived.tag == "mine"
    assert bool((arrived == 1).all())


@pytest.mark.parametrize("size", [10, LARGE])
def test_the_same_tensor_twice_is_sent_once_and_arrives_as_one(size: int) -> None:
    tensor = torch.ones(size, requires_grad=True)
    encoded = Codec().encode([tensor, {"again": tensor}])
    assert len(encoded.differentiable) == 1
    assert len(encoded.whole_payload()) + sum(map(len, encoded.buffers)) < 2 * tensor.nbytes + 500
    first, again = cross([tensor, {"again": tensor}])
    assert first is again["again"]


@pytest.mark.parametrize("size", [10, LARGE])
def test_arrived_tensors_can_be_written_to(size: int) -> None:
    sent = torch.ones(size)
    arrived = cross(sent).fill_(2)
    assert bool((arrived == 2).all())
    assert bool((sent == 1).all())


def test_both_sides_visit_differentiable_tensors_in_the_same_order() -> None:
    tensors = [torch.ones(size, requires_grad=size != 5) for size in (3, LARGE, 5, LARGE + 1, 0)]
    tensors.insert(2, torch.ones(7, 2).to_sparse().requires_grad_())
    tensors.append(torch.nn.Parameter(torch.ones(9)))
    tensors[-1].group = "slow"
    tensors[-1].attached = torch.ones(10, requires_grad=True)
    codec = Codec()
    encoded = codec.encode({"a": tensors[:2], "b": (tensors[2], {"c": tensors[3:]})})
    buffers = [buffer.view(torch.uint8) for buffer in encoded.buffers]
    met: list[torch.Tensor] = []

    def arrive(tensor: torch.Tensor) -> torch.Tensor:
        met.append(tensor)
        return tensor.detach()

    value, _ = codec.decode(encoded.whole_payload(), buffers, arrive)
    sizes = [3, LARGE, 7, LARGE + 1, 0, 9, 10]
    assert [len(tensor) for tensor in encoded.differentiable] == sizes
    assert [len(tensor) for tensor in met] == sizes
    assert not value["a"][0].requires_grad  # the tensor that `arrive` returned
    assert value["b"][1]["c"][-1].group == "slow"


@pytest.mark.parametrize("size", [10, LARGE])
def test_the_modes_of_the_decoding_thread_do_not_matter(size: int) -> None:
    value = [torch.ones(size, requires_grad=True), torch.ones(3, size).to_sparse()]
    codec = Codec()
    encoded = codec.encode(value)
    buffers = [buffer.clone().view(-1).view(torch.uint8) for buffer in encoded.buffers]
    with torch.inference_mode(), torch.device("meta"):
        arrived = codec.decode(encoded.whole_payload(), buffers)[0]
    for tensor, sent in zip(arrived, value, strict=True):
        assert not tensor.is_inference()
        assert torch.equal(tensor.to_dense(), sent.to_dense())


@pytest.mark.parametrize("size", [10, LARGE])
def test_the_modes_of_the_encoding_thread_do_not_matter(size: int) -> None:
    with torch.inference_mode():
        sent = [torch.ones(size), torch.ones(size, 2).t(), torch.ones(2, size).to_sparse()]
        arrived = cross(sent)
    assert all(map(torch.equal, [t.to_dense() for t in arrived], [t.to_dense() for t in sent]))


def test_a_tensor_on_an_accelerator_is_refused_with_advice() -> None:
    class Accelerated(Tensor):
        @property
        def is_cpu(self) -> bool:  # type: ignore[override]
            return False

    with pytest.raises(EncodingError, match=r"tensor\.cpu\(\)"):
        Codec().encode(torch.ones(1).as_subclass(Accelerated))


def test_more_than_two_gigabytes_in_one_tensor_arrive() -> None:
    size = (1 << 31) + (1 << 20)
    codec = Codec()
    with open_pair(UnixTransport(b"token"), EpollPoller) as pair:
        sent = torch.empty(size, dtype=torch.uint8)
        sent[0], sent[size // 2], sent[-1] = 1, 2, 3
        encoded = codec.encode(sent)
        with Background(lambda: pair.client.send(Frame(encoded.whole_payload(), encoded.buffers))):
            (frame,) = take(pair.listener, 1)
        arrived, _ = codec.decode(memoryview(frame.head), frame.buffers)
        assert len(arrived) == size
        assert (int(arrived[0]), int(arrived[size // 2]), int(arrived[-1])) == (1, 2, 3)
        del arrived, frame


def test_a_marshalled_value_and_its_tensors_arrive_equal() -> None:
    sparse = torch.eye(3).to_sparse().requires_grad_()
    tensors = [
        torch.arange(5.0, requires_grad=True),
        torch.arange(100_000.0),  # travels as a buffer
        sparse,  # pickled
        torch.arange(50_000.0).view(250, 200).t().requires_grad_(),
        torch.nn.Parameter(torch.ones(2)),
        torch.empty(0),
        torch.ones(3).expand(2, 3),
    ]
    sent_value = (1 << 60, [("a", None, True)], {(1, 2)}, {"x": 1.5}, b"bytes")
    codec = Codec()
    encoded = codec.encode_with_tensors(sent_value, tensors)
    met = [tensor for tensor in tensors if tensor.requires_grad]
    assert [id(tensor) for tensor in encoded.differentiable] == [id(tensor) for tensor in met]
    buffers = [buffer.clone().view(-1).view(torch.uint8) for buffer in encoded.buffers]
    arrived: list[torch.Tensor] = []

    def arrive(tensor: torch.Tensor) -> torch.Tensor:
        arrived.append(tensor)
        return tensor

    (value, got_tensors), _ = codec.decode(encoded.whole_payload(), buffers, arrive)
    assert value == sent_value
    for got, sent in zip([*got_tensors, *arrived], [*tensors, *met], strict=True):
        assert got.requires_grad == sent.requires_grad
        assert torch.equal(got.detach().to_dense(), sent.detach().to_dense())


def test_a_value_that_cannot_be_marshalled_is_refused() -> None:
    with pytest.raises(ValueError, match="unmarshallable"):
        Codec().encode_with_tensors(object(), ())


def test_threads_encode_and_decode_at_the_same_time() -> None:
    codec, failures = Codec(), []

    def work(number: int) -> None:
        for size in (3, LARGE) * 20:
            if not bool((cross(torch.full((size,), number), codec) == number).all()):
                failures.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_tensor_crosses_a_real_connection() -> None:
    codec = Codec()
    value = {
        "small": torch.arange(3),
        "large": torch.randn(100, 100).t(),
        "sparse": torch.eye(9).to_sparse(),
    }
    with open_pair(InProcessTransport(), EpollPoller) as pair:
        encoded = codec.encode(value)
        pair.client.send(Frame(encoded.whole_payload(), encoded.buffers))
        (frame,) = take(pair.listener, 1)
        arrived, _ = codec.decode(frame.head, frame.buffers)
    assert all(torch.equal(arrived[name].to_dense(), value[name].to_dense()) for name in value)


def test_a_small_view_keeps_its_strides() -> None:
    view = torch.arange(25.0).view(5, 5).narrow(1, 2, 2)
    encoded = Codec().encode(view)
    arrived, _ = Codec().decode(encoded.whole_payload(), encoded.buffers)
    assert arrived.stride() == view.stride()
    assert arrived.equal(view)
