"""RRefs to the parameters of modules, whose parts may be on several workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from gradwire._core.rref.rref import RRef


def parameter_rrefs(module: nn.Module, recurse: bool = True) -> list[RRef[Any]]:
    """Return RRefs to the parameters of a module of this worker, and to those of the remote modules
    in it. The order is the one that ``module.parameters()`` would have if all these modules were on
    one worker. If `recurse` is False, leave out the parameters of the modules in this module.

        >>> parameter_rrefs(nn.Sequential(encoder, nn.Linear(64, 10)))       # doctest: +SKIP
    """
    rrefs: list[RRef[Any]] = []
    # Two modules may have the same parameter, or contain the same remote module. These sets hold
    # the ones already seen, so that each parameter is returned only once.
    parameters: set[nn.Parameter] = set()
    remote_modules: set[int] = set()
    for part in module.modules() if recurse else [module]:
        # This module cannot import `RemoteModule`, because the module `nn` imports this one.
        remote: Any = part if hasattr(part, "remote_parameters") else None
        if remote is None:
            new = [each for each in part.parameters(recurse=False) if each not in parameters]
            parameters.update(new)
            rrefs += [RRef(parameter) for parameter in new]
        elif remote.module_rref._rref_id not in remote_modules:
            remote_modules.add(remote.module_rref._rref_id)
            rrefs += remote.remote_parameters(recurse)
    return rrefs


def as_rrefs(parameters: Any) -> list[RRef[Any]]:
    """Return RRefs to the given parameters. `parameters` is a module or an RRef to a parameter, or
    contains several of them."""
    given: Iterable[Any] = [parameters] if isinstance(parameters, nn.Module | RRef) else parameters
    rrefs: list[RRef[Any]] = []
    for each in given:
        if isinstance(each, nn.Module):
            rrefs += parameter_rrefs(each)
        elif isinstance(each, RRef):
            rrefs.append(each)
        else:
            raise TypeError(
                f"params_rref must hold modules, or RRefs to parameters, not a "
                f"{type(each).__name__}. Give it the whole model, whose remote parts then train "
                "too: DistributedOptimizer(optimizer_class, model, ...)"
            )
    return rrefs
