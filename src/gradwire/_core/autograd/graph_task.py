"""Graph tasks: what torch's autograd engine calls one execution of `backward` or `grad`.

Several tasks may run the same nodes at the same time: on other threads, or because a hook in the
middle of one task starts another. A hook of gradwire must act only in the task that it was
registered for. So the hook compares the number of that task with the number of the current task.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gradwire._core.autograd.edges import edge_at, make_alias
from gradwire._core.torch_internals import current_graph_task_id

#: The sequence number of a node that torch runs before all others. Among the nodes that are ready,
#: torch runs the one with the highest number first.
FIRST_SEQUENCE_NUMBER = 1 << 62


class GraphTask:
    """One task of torch's engine, and the hooks that were registered for it."""

    __slots__ = ("_number", "hooked")

    def __init__(self) -> None:
        self._number = -1
        #: The dictionaries of tensor hooks to which hooks for this task were added. The key of
        #: each added hook is the task, so `remove_hooks` can find it.
        self.hooked: list[MutableMapping[Any, Any]] = []

    def make_first_node(self) -> tuple[Tensor, GradientEdge]:
        """Make an autograd node that torch runs before all others, with a hook that notes the
        number of this task.

        Return a leaf and an edge. The caller must add the edge to those where the task begins, and
        must ask the task for the gradient of the leaf. Otherwise torch does not run the node.
        """
        leaf = torch.zeros((), requires_grad=True, device="cpu")
        node: Any = make_alias(leaf, large=False).grad_fn
        node._set_sequence_nr(FIRST_SEQUENCE_NUMBER)
        node.register_prehook(self._learn_number)
        return leaf, edge_at(node)

    def _learn_number(self, _gradients: Any) -> None:
        self._number = current_graph_task_id()

    def is_current(self) -> bool:
        """Return whether the calling thread is running a node for this task."""
        return current_graph_task_id() == self._number

    def remove_hooks(self) -> None:
        for hooks in self.hooked:
            hooks.pop(self, None)
