"""Conversion of tensors to descriptions and buffers, and back.

The description of a dense tensor contains its dtype, shape, flags and strides, and the bytes of its
elements if the tensor is small. The elements of a large tensor are not copied here. They become a
buffer, which the transport copies once, to its destination. A sparse tensor is sent as the dense
tensors that it consists of.

A tensor that is not contiguous is sent as its elements in order, or as the span of memory from its
first to its last element, whichever is smaller. So a slice of a huge tensor costs only as much as
the slice, and an expanded tensor costs only as much as the tensor before the expansion, unless it
is tiny. A transposed tensor keeps its strides. A small view keeps its strides too: its elements are
sent in order, and the receiver spreads them out again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# The position of a name in this tuple is part of the wire format. So only append names.
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

#: The dtypes of tensors that can be sent.
DTYPES = tuple(_CODES)

# These flags are part of the description of a tensor. SPREAD means that the elements were sent
# without the gaps between them in memory. The receiver must restore the gaps from the strides.
REQUIRES_GRAD = 1
PARAMETER = 2
SPREAD = 4
#: The elements of a view may lie in memory with gaps between them. They are sent without the gaps.
#: If the memory from the first to the last element has room for at most this many elements, the
#: receiver restores the gaps (flag SPREAD). Otherwise it makes a contiguous tensor.
_MAX_SPREAD_SPAN = 256
#: In an expanded tensor, a stride is 0, so several elements share the same memory. This memory is
#: usually sent only once. But if the `nbytes` of the tensor, which counts every element, is at most
#: this number, all elements are sent, because that is faster for so few bytes.
_MAX_EXPANDED_BYTES = 1024
#: The elements of tensors of at most this many bytes travel inside the encoded value, not as a
#: separate buffer.
INLINE_BYTES = 8192

_strided = torch.strided
_Parameter = torch.nn.Parameter
_frombuffer = torch.frombuffer

#: The description of a dense tensor: its elements, or None if they are a buffer; the code of its
#: dtype; its shape; its flags; and, unless it is contiguous, its strides.
Description = tuple[Any, ...]

_COMPRESSED = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


def describe_dense(tensor: Tensor, buffers: list[Tensor]) -> Description | None:
    """Return the description of a dense tensor in main memory, or None for any other tensor. If the
    tensor is large, append its elements to `buffers`. If it is a Parameter, the caller must add the
    flag PARAMETER."""
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


def _describe_view(tensor: Tensor, code: int, flags: int, buffers: list[Tensor]) -> Description:
    """Return the description of a dense tensor that is not contiguous. If it is large, append its
    elements to `buffers`."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    size = tensor.nbytes
    if 0 in strides and 0 < size <= _MAX_EXPANDED_BYTES:
        if any(strides):
            return _elements(tensor, buffers), code, shape, flags
        # All strides are 0, so all elements are equal. The gradient of a sum is such a tensor.
        element = _arrays_at[tensor.element_size()](tensor.data_ptr()).raw
        return element * tensor.numel(), code, shape, flags
    span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if 0 < span <= tensor.numel():
        part = tensor.detach().as_strided((span,), (1,))
        return _elements(part, buffers), code, shape, flags, strides
    if 0 < span <= _MAX_SPREAD_SPAN and 0 not in strides:
        return _elements(tensor, buffers), code, shape, flags | SPREAD, strides
    return _elements(tensor, buffers), code, shape, flags


def _elements(tensor: Tensor, buffers: list[Tensor]) -> bytes | None:
    """Return the elements of a small tensor in order, as bytes. For a large tensor, append the
    elements to `buffers` and return None."""
    size = tensor.nbytes
    if size > INLINE_BYTES:
        buffers.append(tensor.detach())
        return None
    # `contiguous` may make a copy. The variable `tensor` keeps the copy alive until its bytes are
    # read by address.
    tensor = tensor.contiguous()
    elements: bytes = _arrays_at[size](tensor.data_ptr()).raw
    return elements


class _ArraysAt(dict[int, Callable[[int], Any]]):
    """Maps each size in bytes to a constructor. The constructor takes an address and returns a
    ctypes array of that size there; its attribute `raw` is a copy of the bytes.

    Use this only for sizes up to INLINE_BYTES, because each size stays in this dictionary, and the
    interpreter lock is held during the copy.
    """

    def __missing__(self, size: int) -> Callable[[int], Any]:
        constructor = self[size] = (ctypes.c_char * size).from_address
        return constructor


_arrays_at = _ArraysAt()


def memory_of(tensor: Tensor) -> memoryview:
    """Return a view of the memory of a contiguous tensor. The view keeps the tensor alive."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(bytearray())
    memory: Any = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    memory.owner = tensor
    return memoryview(memory).cast("B")


def bytes_tensor(memory: memoryview) -> Tensor:
    """Return a tensor of bytes that uses this writable memory, without a copy."""
    return _frombuffer(memory, dtype=torch.uint8)


def rebuild_dense(
    elements: bytes | Tensor,
    code: int,
    shape: tuple[int, ...],
    flags: int,
    strides: tuple[int, ...] | None = None,
) -> Tensor:
    """Return the tensor with this description. Elements given as bytes are copied. If the elements
    are given as a tensor, the result uses its memory, so no other code may write to it."""
    dtype = _DTYPES[code]
    if dtype is None:
        raise ValueError(f"this torch has no dtype {_DTYPE_NAMES[code]}")
    # The code below must not return a view of another tensor, because autograd restricts in-place
    # operations on views.
    if not len(elements):
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
    elif strides is None and type(elements) is bytes:
        tensor = _frombuffer(bytearray(elements), dtype=dtype)
        if len(shape) != 1:
            tensor.resize_(shape)
    else:
        flat = (
            elements
            if isinstance(elements, Tensor)
            else _frombuffer(bytearray(elements), dtype=dtype)
        )
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


def describe_sparse_or_meta(tensor: Tensor) -> tuple[Any, ...] | None:
    """Return the kind of a sparse or meta tensor, and the values needed to rebuild the tensor.
    Return None for any other tensor."""
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
            compressed, uncompressed = tensor.crow_indices(), tensor.col_indices()
        else:
            compressed, uncompressed = tensor.ccol_indices(), tensor.row_indices()
        return (
            "compressed",
            compressed,
            uncompressed,
            tensor.values(),
            shape,
            tensor.layout,
            requires_grad,
        )
    return None


def rebuild_sparse_or_meta(kind: str, *arguments: Any) -> Tensor:
    """Return the sparse or meta tensor that `describe_sparse_or_meta` described."""
    *arguments_, requires_grad = arguments
    if kind == "meta":
        shape, strides, dtype = arguments_
        tensor = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    elif kind == "coo":
        indices, values, shape, coalesced = arguments_
        # Torch would have to sort the indices to find out whether the tensor is coalesced. This is
        # not necessary, because the sender told whether it is.
        tensor = torch.sparse_coo_tensor(
            indices,
            values,
            shape,
            is_coalesced=coalesced,
            check_invariants=False,
            device="cpu",
        )
    else:
        compressed, uncompressed, values, shape, layout = arguments_
        tensor = torch.sparse_compressed_tensor(
            compressed,
            uncompressed,
            values,
            shape,
            layout=layout,
            check_invariants=False,
            device="cpu",
        )
    return tensor.requires_grad_(requires_grad)
