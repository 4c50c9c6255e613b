"""Gradient edges, and aliases of tensors that have an edge of their own.

A gradient edge is a place in torch's autograd graph where a gradient can enter: a node, and which
of the node's outputs the gradient belongs to.

An alias is a tensor that is equal to another and made from it by one node. A small alias is a copy.
A large alias shares the storage of the other tensor, as a view does, but autograd does not treat it
as a view. So an in-place change of one does not touch the autograd history of the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gradwire._core.torch_internals import share_storage

_strided = torch.strided
_is_grad_enabled = torch.is_grad_enabled
#: Up to this size it is faster to copy a tensor than to share its storage.
SMALL_BYTES = 4096


def is_large(tensor: Tensor) -> bool:
    """Return whether copying a tensor takes longer than letting an alias share its storage."""
    return tensor.layout is _strided and tensor.nbytes > SMALL_BYTES


def make_alias(tensor: Tensor, large: bool) -> Tensor:
    """Return an alias: a tensor with the same elements, and an autograd node that leads to the
    tensor. If `large` is True, the alias shares the storage of the tensor; otherwise it is a
    copy."""
    if _is_grad_enabled():
        alias: Tensor = share_storage(tensor, tensor.shape) if large else tensor.clone()
        return alias
    # The caller may be under `no_grad` or `inference_mode`, but the alias always needs a node.
    with torch.inference_mode(False), torch.enable_grad():
        return make_alias(tensor, large)


def drop_elements(tensor: Tensor) -> None:
    """Free the elements of a tensor. The tensor keeps its shape and its autograd node."""
    tensor.data = tensor.data.new_empty(()).expand(tensor.shape)


def edge_at(node: Any, output: int = 0) -> GradientEdge:
    """Return the edge at which gradients enter a node."""
    return _make_edge((node, output) + _MORE_FIELDS)  # noqa: RUF005 (it is faster)


def next_edge(node: Any) -> GradientEdge:
    """Return the edge that follows a node. The node must have only one such edge, as the node of an
    alias does."""
    next_node, output = node.next_functions[0]
    return edge_at(next_node, output)


def edge_of_leaf(leaf: Tensor) -> GradientEdge:
    """Return the edge at which gradients of a leaf enter the node that accumulates them.

    Torch shows the accumulating node only as the next node of another node. So this function makes
    an alias of the leaf, and takes the next node of the alias's node. If the leaf is a view made
    under `no_grad`, the node of the edge is None, though the leaf's `requires_grad` is True.
    """
    alias_node: Any = make_alias(leaf, is_large(leaf)).grad_fn
    # The edge keeps the node of the alias alive, and that node keeps the accumulating node alive.
    # If only Python referred to the accumulating node, two threads could deadlock. One thread would
    # hold torch's lock for the node and wait for the interpreter lock. The other would hold the
    # interpreter lock and wait for torch's lock.
    more = (alias_node, *_MORE_FIELDS[1:]) if _MORE_FIELDS else ()
    return _make_edge((*alias_node.next_functions[0], *more))


#: Makes an edge from a tuple of its fields. This is faster than the class's own `__new__`, which is
#: a Python function.
_make_edge: Callable[[tuple[Any, ...]], GradientEdge] = partial(tuple.__new__, GradientEdge)
#: In some versions of torch, `GradientEdge` has more fields than the node and the number of its
#: output. These are the values of those fields. The first of them may be an object that must live
#: as long as the edge.
_MORE_FIELDS = (None,) * (len(GradientEdge._fields) - 2)
