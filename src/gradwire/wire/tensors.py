"""Tensors as a description and buffers.

A dense tensor becomes its elements and a description (dtype, shape, flags, strides); a sparse one
becomes the dense tensors it is made of. Few elements are copied at once, as bytes. Many are not
copied here: whoever moves them copies them once, to where they have to go.

What is sent of a view is the smaller of two things: its elements in order, or the span of memory
between its first and its last element. So a slice of a huge tensor costs the slice, an expanded
tensor, unless it is tiny, what it was expanded from, and a transposed one keeps its strides. The
elements of a small view are spread out again where they arrive, so that it keeps its strides too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# The order is the wire format: append only.
_DTYPE_NAMES = (
    "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
    "complex64", "complex128", "complex32", "uint16", "uint32", "uint64", "float8_e4m3fn",
    "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip
_DTYPES = [getattr(torch, name, None) for name in _DTYPE_NAMES]
_CODES: dict[torch.dtype, int] = {
    dtype: code for code, dtype in enumerate(_DTYPES) if dtype is not None
}

_COMPLEX = frozenset(code for dtype, code in _CODES.items() if dtype.is_complex)

#: The dtypes that travel as they are.
DTYPES = tuple(_CODES)

REQUIRES_GRAD = 1
PARAMETER = 2
SPREAD = 4
_SMALL_SPAN = 256
#: An expanded tensor this small is not worth the trouble of sending what it was expanded from.
_SMALL_BYTES = 1024
#: Tensors of up to this many bytes travel inside the payload.
INLINE_BYTES = 8192

_strided = torch.strided
_Parameter = torch.nn.Parameter
_frombuffer = torch.frombuffer

# The elements, or None if there are many; dtype code; shape; REQUIRES_GRAD, PARAMETER and SPREAD,
# as far as they are true; and unless the tensor is contiguous its strides.
Described = tuple[Any, ...]

_COMPRESSED = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


def describe(tensor: Tensor, buffers: list[Tensor]) -> Described | None:
    """Describe a dense tensor in main memory, None for others. The elements, if they are many, are
    put among the `buffers`. (That it is a parameter is for others to add.)"""
    code = _CODES.get(tensor.dtype)
    if code is None or tensor.layout is not _strided or not tensor.is_cpu:
        return None
    flags = REQUIRES_GRAD if tensor.requires_grad else 0
    if tensor.is_neg() or (code in _COMPLEX and tensor.is_conj()):
        tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        size = tensor.nbytes
        if size <= INLINE_BYTES:
            elements = _arrays_at[size](tensor.data_ptr()).raw
            return elements, code, tuple(tensor.shape), flags
        buffers.append(tensor.detach())
        return None, code, tuple(tensor.shape), flags
    return _describe_view(tensor, code, flags, buffers)


def _describe_view(tensor: Tensor, code: int, flags: int, buffers: list[Tensor]) -> Described:
    """Describe a tensor whose elements are not in order."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    size = tensor.nbytes
    if 0 in strides and 0 < size <= _SMALL_BYTES:
        if any(strides):
            return _elements(tensor, buffers), code, shape, flags
        element = _arrays_at[tensor.element_size()](tensor.data_ptr()).raw  # the gradient of a sum
        return element * tensor.numel(), code, shape, flags
    span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if 0 < span <= tensor.numel():
        part = tensor.detach().as_strided((span,), (1,))
        return _elements(part, buffers), code, shape, flags, strides
    if 0 < span <= _SMALL_SPAN and 0 not in strides:
        return _elements(tensor, buffers), code, shape, flags | SPREAD, strides
    return _elements(tensor, buffers), code, shape, flags


def _elements(tensor: Tensor, buffers: list[Tensor]) -> bytes | None:
    """The elements in order, if they are few."""
    size = tensor.nbytes
    if size > INLINE_BYTES:
        buffers.append(tensor.detach())
        return None
    tensor = tensor.contiguous()  # it must live until it is copied
    elements: bytes = _arrays_at[size](tensor.data_ptr()).raw
    return elements


class _ArraysAt(dict[int, Callable[[int], Any]]):
    """What gives arrays over memory, by size: of no more sizes than small tensors have. Their `raw`
    is a copy, for which the interpreter waits; so it must be little."""

    def __missing__(self, size: int) -> Callable[[int], Any]:
        found = self[size] = (ctypes.c_char * size).from_address
        return found


_arrays_at = _ArraysAt()


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, in place. Whatever uses them keeps the tensor alive."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(bytearray())
    memory: Any = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    memory.owner = tensor
    return memoryview(memory).cast("B")


def over(memory: memoryview) -> Tensor:
    """A tensor of bytes in memory that can be written to, in place."""
    return _frombuffer(memory, dtype=torch.uint8)


def rebuild(
    memory: bytes | Tensor,
    code: int,
    shape: tuple[int, ...],
    flags: int,
    strides: tuple[int, ...] | None = None,
) -> Tensor:
    """The tensor again, over a copy of few bytes; or over `memory` itself, flat bytes that nobody
    else will write to."""
    dtype = _DTYPES[code]
    if dtype is None:
        raise ValueError(f"this torch has no dtype {_DTYPE_NAMES[code]}")
    # Whatever it is made from, it must be no view: autograd restricts what may be done with those.
    if not len(memory):
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
    elif strides is None and type(memory) is bytes:
        tensor = _frombuffer(bytearray(memory), dtype=dtype)
        if len(shape) != 1:
            tensor.resize_(shape)
    else:
        flat = memory if isinstance(memory, Tensor) else _frombuffer(bytearray(memory), dtype=dtype)
        if flat.dtype is not dtype:
            flat = flat.view(dtype)
        if strides is None:
            tensor = flat if len(shape) == 1 else flat.view(shape)
            if tensor._is_view():
                tensor = tensor.detach()
        elif flags & SPREAD:
            tensor = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
            tensor.copy_(flat.view(shape))
        else:
            tensor = flat.as_strided(shape, strides).detach()
    if flags & PARAMETER:
        return _Parameter(tensor, requires_grad=bool(flags & REQUIRES_GRAD))
    return tensor.requires_grad_() if flags & REQUIRES_GRAD else tensor


def take_apart(tensor: Tensor) -> tuple[Any, ...] | None:
    """A sparse or meta tensor as (kind, its constructor's arguments); None for other layouts."""
    requires_grad = tensor.requires_grad
    tensor = tensor.detach()
    if tensor.is_meta:
        return "meta", tuple(tensor.shape), tensor.stride(), tensor.dtype, requires_grad
    if not tensor.is_cpu:
        return None
    shape = tuple(tensor.shape)
    if tensor.layout is torch.sparse_coo:
        indices, values = tensor._indices(), tensor._values()
        return "coo", indices, values, shape, tensor.is_coalesced(), requires_grad
    if tensor.layout in _COMPRESSED:
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            compressed, plain = tensor.crow_indices(), tensor.col_indices()
        else:
            compressed, plain = tensor.ccol_indices(), tensor.row_indices()
        return "compressed", compressed, plain, tensor.values(), shape, tensor.layout, requires_grad
    return None


def put_together(kind: str, *parts: Any) -> Tensor:
    """Undo `take_apart`."""
    *parts_, requires_grad = parts
    if kind == "meta":
        shape, strides, dtype = parts_
        tensor = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    elif kind == "coo":
        indices, values, shape, coalesced = parts_
        # A coalesced tensor is taken at its word; checking it again would cost a sort.
        tensor = torch.sparse_coo_tensor(
            indices,
            values,
            shape,
            is_coalesced=coalesced,
            check_invariants=False,
            device="cpu",
        )
    else:
        compressed, plain, values, shape, layout = parts_
        tensor = torch.sparse_compressed_tensor(
            compressed,
            plain,
            values,
            shape,
            layout=layout,
            check_invariants=False,
            device="cpu",
        )
    return tensor.requires_grad_(requires_grad)
