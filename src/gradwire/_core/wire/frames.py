"""Frames: the units in which connections transport messages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

Bytes = bytes | bytearray | memoryview


class Frame:
    """A message as a connection transports it: a head (bytes) and buffers (tensors).

    A sender may split a long head into pieces: `head` then has the first piece and `rest` the
    others. The receiver gets the head in one piece. The received buffers are flat tensors of bytes,
    whose memory belongs to the receiver.
    """

    __slots__ = ("buffers", "head", "rest")

    def __init__(self, head: Bytes, buffers: Sequence[Tensor] = (), rest: Sequence[Bytes] = ()):
        self.head = head
        self.buffers = buffers
        self.rest = rest

    def whole_head(self) -> bytes:
        """Return the head in one piece."""
        return b"".join((self.head, *self.rest))
