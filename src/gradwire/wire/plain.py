"""Values that need no pickle.

Most of what is sent is numbers, strings and tensors, alone or as the arguments of a function. Such
a value is marshalled, with the tensors beside it, which takes half the time of a pickle. Whatever
else there is in a value, it is pickled as a whole: only that keeps what its parts have in common.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from types import FunctionType
from typing import Any

from torch import Tensor

#: What becomes of a value: what it was, something plain, and the tensors that were in it.
Parts = tuple[int, Any, Sequence[Tensor]]

#: Something plain and tensors beside it; one value; a call.
BESIDE, _SINGLE, _CALL = range(3)
#: Exactly these: of a subclass only pickle knows what it is.
_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None)})
#: Stands where a tensor was. (Its type is not among those above.)
_A_TENSOR = ...


def parts_of(value: Any) -> Parts | None:
    """A value in parts; None if it has to be pickled."""
    kind = type(value)
    if kind is Tensor:
        return _SINGLE, None, (value,)
    return (_SINGLE, value, ()) if kind in _ATOMS else None


def parts_of_call(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Parts | None:
    """A call in parts; None if it has to be pickled."""
    if type(func) is not FunctionType:
        return None
    module, name = func.__module__, func.__qualname__
    if getattr(sys.modules.get(module), "__dict__", {}).get(name) is not func:
        return None  # a method, a local function, or one that others would not find
    tensors: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = type(value)
        if kind is Tensor:
            tensors.append(value)
        elif kind not in _ATOMS:
            return None
    if tensors:
        if len(tensors) > 1 and len(set(map(id, tensors))) < len(tensors):
            return None  # one given twice arrives as one
        args = [_A_TENSOR if type(value) is Tensor else value for value in args]
        if kwargs:
            kwargs = {
                key: _A_TENSOR if type(value) is Tensor else value for key, value in kwargs.items()
            }
    return _CALL, (module, name, tuple(args), kwargs), tensors


def put_together(form: int, value: Any, tensors: Sequence[Tensor]) -> Any:
    """The value again."""
    if form == _SINGLE:
        return tensors[0] if tensors else value
    if form == BESIDE:
        return value, tensors
    module, name, args, kwargs = value
    func = getattr(sys.modules.get(module) or import_module(module), name)
    if tensors:
        left = iter(tensors)
        args = tuple(_filled(args, left))
        if kwargs:
            kwargs = dict(zip(kwargs, _filled(kwargs.values(), left), strict=True))
    return func, args, kwargs


def _filled(values: Any, tensors: Iterator[Tensor]) -> list[Any]:
    return [next(tensors) if value is _A_TENSOR else value for value in values]
