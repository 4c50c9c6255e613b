"""Decoding the values that arrive from other workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gradwire._core.rpc.interceptors import Interceptor
from gradwire._core.wire.codec import Codec
from gradwire._core.wire.messages import Tags


class Decoder:
    """Decodes calls and results. First it shows the tags of the message to the interceptors, which
    are objects of the layers above. Tags are values that the interceptors of the sender have
    attached to the message."""

    def __init__(self, codec: Codec, interceptors: Sequence[Interceptor]):
        self._codec = codec
        self._interceptors = interceptors

    def decode(
        self,
        payload: bytes | memoryview,
        buffers: Sequence[Tensor],
        sender: int,
        tags: Tags | None,
        is_call: bool = False,
    ) -> tuple[Any, Sequence[Any]]:
        """Return a value, and the futures that must be done before the value may be used: the
        confirmations of the RRefs in it."""
        on_receive = None
        if tags:
            try:
                for interceptor in self._interceptors:
                    on_receive = interceptor.arriving(sender, tags) or on_receive
            except Exception:
                # An interceptor has failed, so nobody will use the value. It is decoded
                # nevertheless: this creates the RRefs in the value. When they are dropped, their
                # owners learn that this worker does not use them.
                self._codec.decode(payload, buffers, None, is_call)
                raise
        return self._codec.decode(payload, buffers, on_receive, is_call)
