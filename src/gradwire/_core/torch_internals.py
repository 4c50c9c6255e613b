"""The private functions of torch that gradwire uses, in one place.

Torch may change them in any version. So this module looks all of them up when it is imported. If
one is missing, gradwire refuses to start and names the version of torch, instead of failing in the
middle of a backward pass. `make matrix` runs the test suite on the versions in `CHECKED_ON`.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph

#: The versions of torch on which all these functions were checked.
CHECKED_ON = ("2.6.0", "2.11.0", "2.13.0", "2.15.0")


def find(path: str) -> Any:
    """Return the object with this path in torch, for example ``"_C._current_graph_task_id"``. Raise
    ImportError if this version of torch does not have it."""
    try:
        return attrgetter(path)(torch)
    except AttributeError:
        raise ImportError(_describe_missing(f"torch.{path}")) from None


def check_attributes(instance: object, what: str, names: tuple[str, ...]) -> None:
    """Raise ImportError if an object of torch lacks one of these private attributes."""
    for name in names:
        if not hasattr(instance, name):
            raise ImportError(_describe_missing(f"the attribute {name} of {what}"))


def _describe_missing(name: str) -> str:
    return (
        f"gradwire uses {name}, which torch {torch.__version__} does not have. Install a version "
        f"of torch from {CHECKED_ON[0]} to {CHECKED_ON[-1]}, or a newer version of gradwire"
    )


# -- autograd graphs

#: Returns the number of the graph task (one run of torch's engine) on this thread; -1 outside one.
current_graph_task_id: Callable[[], int] = find("_C._current_graph_task_id")
#: Runs torch's engine. `torch.autograd.grad` calls it too, but first makes checks that take as long
#: as the run of a small graph.
run_backward: Callable[..., Any] = find("autograd.variable.Variable._execution_engine.run_backward")
#: The class of the nodes that accumulate the gradients of leaves.
AccumulateGrad: Any = find("_C._functions.AccumulateGrad")
#: Makes functions. Such a function returns an alias of its argument, whose node raises an error.
DelayedError: Callable[[str, int], Callable[[Tensor], Tensor]] = find("_C._functions.DelayedError")
#: An operation whose result shares the storage of its argument, but is not a view for autograd.
share_storage: Callable[..., Tensor] = find("ops.aten._unsafe_view.default._op")

# -- saved tensors

saved_tensors_hooks_are_enabled: Callable[[], bool] = find(
    "_C._autograd._saved_tensors_hooks_is_enabled"
)
push_saved_tensors_hooks: Callable[[Callable[..., Any], Callable[..., Any]], None] = find(
    "_C._autograd._push_saved_tensors_default_hooks"
)
pop_saved_tensors_hooks: Callable[[], None] = find("_C._autograd._pop_saved_tensors_default_hooks")

# -- tensors and storages

#: Returns how many references there are to a storage. The argument is the attribute `_cdata` of the
#: storage, which is the address of its C++ object.
storage_use_count: Callable[[int], int] = find("_C._storage_Use_Count")
#: Returns a view of a tensor with the negative bit set.
neg_view: Callable[[Tensor], Tensor] = find("_neg_view")
#: A context manager that turns off parts of torch's dispatcher, which are given as dispatch keys.
ExcludeDispatchKeys: Any = find("_C._ExcludeDispatchKeyGuard")
#: The dispatch key under which torch counts the in-place changes of a tensor (`Tensor._version`).
COUNTING_KEYS: Any = find("_C.DispatchKeySet")(find("_C.DispatchKey.ADInplaceOrView"))
#: The types of torch's operators.
OPERATOR_TYPES: frozenset[type] = frozenset(
    {find("_ops.OpOverload"), find("_ops.OpOverloadPacket")}
)
#: The base class of `torch.futures.Future`.
CFuture: Any = find("_C.Future")

#: Makes a tensor of a subclass that shares the elements of another tensor.
make_subclass: Callable[..., Any] = find("Tensor._make_subclass")
#: Applies a function to all objects of a type in nested lists, tuples and dicts.
tree_map_only: Callable[..., Any] = find("utils._pytree.tree_map_only")

# -- only for `gradwire.compat`

#: Returns the name of a builtin operator, such as "aten::add" for `torch.add`, or None.
find_builtin: Callable[[Any], str | None] = find("jit._builtins._find_builtin")
profiler_is_enabled: Callable[[], bool] = find("_C._autograd._profiler_enabled")
RecursiveScriptModule: Any = find("jit._script.RecursiveScriptModule")
#: The private attributes of `DistributedDataParallel` modules and of their reducers. They are
#: checked when a module is first used.
DDP_ATTRIBUTES = ("_delay_grad_buffer", "_module_parameters", "_use_python_reducer")
STATIC_GRAPH_ATTRIBUTES = ("_static_graph_delay_allreduce_enqueued",)
REDUCER_ATTRIBUTES = ("_check_reducer_finalized", "_delay_all_reduce")

# -- private attributes, which other modules use directly

_leaf = torch.zeros((), device="cpu", requires_grad=True)
with torch.inference_mode(False), torch.enable_grad():
    check_attributes(
        _leaf.clone().grad_fn,
        "autograd nodes",
        ("_sequence_nr", "_set_sequence_nr", "_register_hook_dict"),
    )
check_attributes(
    _leaf, "tensors", ("_backward_hooks", "_base", "_is_view", "_indices", "_values", "_version")
)
check_attributes(_leaf.untyped_storage(), "storages", ("_cdata",))
check_attributes(CFuture, "torch.futures.Future", ("_set_unwrap_func",))
check_attributes(graph.GradientEdge, "torch.autograd.graph.GradientEdge", ("_fields",))
