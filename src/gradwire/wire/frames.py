"""Frames: what connections move."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

Bytes = bytes | bytearray | memoryview


class Frame:
    """A head and buffers. A long head may leave in pieces, with all but the first in `rest`, and
    arrives as a whole. On arrival the buffers are flat tensors of bytes, owned by the receiver."""

    __slots__ = ("buffers", "head", "rest")

    def __init__(self, head: Bytes, buffers: Sequence[Tensor] = (), rest: Sequence[Bytes] = ()):
        self.head = head
        self.buffers = buffers
        self.rest = rest

    def whole_head(self) -> bytes:
        return b"".join((self.head, *self.rest))
