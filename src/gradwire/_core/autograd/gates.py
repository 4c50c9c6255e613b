"""Gates: where torch's engine waits for a gradient that another worker has not sent yet.

A backward pass runs the local autograd graph one region (a connected part) at a time. A gate lets
the run of a region begin before the gradients of all sent tensors have come back. A gate is an
autograd node with a hook, a `Gate`. The node leads to the place where the gradient of a sent tensor
enters the graph. Each run of torch's engine gets new nodes for its gates, so several runs can use
the same graph at the same time. As the gradient is not known yet, torch gets a placeholder for it,
the *seed*. When torch runs the node, the hook waits for the gradient and returns it instead of the
seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gradwire._core.autograd.boundary import NOTHING, Gradients, Send

#: A function that blocks until the gradients of a sent message's tensors are known, and returns
#: them. It returns None if none of the tensors gets a gradient.
Wait = Callable[[Send], "Gradients | None"]


class Gate:
    """The hook that waits for the gradient of one sent tensor."""

    __slots__ = ("_position", "_send", "wait")

    def __init__(self, send: Send, position: int):
        self._send = send
        self._position = position
        #: The function that blocks until the gradient is known. It is set before torch's engine
        #: runs with this gate.
        self.wait: Wait | None = None

    def __call__(self, _seed: Any) -> tuple[Tensor | None]:
        """Wait for the gradient and return it. Torch then uses the gradient instead of the seed,
        which is the placeholder that the engine was given."""
        assert self.wait is not None
        send, position = self._send, self._position
        gradients = self.wait(send) or ()
        gradient = gradients[position] if position < len(gradients) else None
        if gradient is None or gradient is NOTHING:
            return (None,)
        # The placeholder that torch was given is dense, and torch does not let a hook replace it by
        # a sparse gradient. So a sparse gradient is made dense.
        has_layout_of_seed = gradient.layout is send.proxies[position].layout
        return (gradient if has_layout_of_seed else gradient.to_dense(),)


#: Three objects: an autograd node, a seed, and the `Gate` that is the hook of the node. The seed is
#: a placeholder that torch gets as the gradient of the node. Its values do not matter, because the
#: hook replaces the seed by the real gradient.
PreparedGate = tuple[Any, Tensor, Gate]


def make_gate(send: Send, position: int) -> PreparedGate:
    """Make a gate for a sent tensor, to be used in one run of torch's engine."""
    alias = send.new_alias(position)
    node: Any = alias.grad_fn
    gate = Gate(send, position)
    node.register_prehook(gate)
    return node, alias.detach(), gate
