"""Values that need no pickle.

Most of what is sent is numbers, strings and tensors, alone, in small tuples, lists and
dictionaries, or as the arguments of a function. Such a value is marshalled, and what cannot be
marshalled goes beside it: tensors, and whatever a codec was taught. That takes half the time of a
pickle. With anything else in it, a value is pickled as a whole: only that keeps what its parts have
in common.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib import import_module
from types import FunctionType
from typing import Any

#: What a value was, something plain, and what goes beside that.
Parts = tuple[int, Any, Sequence[Any]]

#: Something plain and something beside it, as they were given; a value; a call.
PAIR, VALUE, CALL = range(3)
#: Exactly these: of a subclass only pickle knows what it is.
_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None)})
_CONTAINERS = frozenset({tuple, list, dict})
#: With more items than this, pickle is faster.
_FEW = 16
#: Stands where something was that goes beside. (No value has it, since its type is none of those.)
_BESIDE = ...


class _NeedsPickle(Exception):
    pass


def parts_of(value: Any, beside: Collection[type]) -> Parts | None:
    """A value in parts; None if it has to be pickled. Objects of the types `beside` go there."""
    things: list[Any] = []
    try:
        plain = _strip(value, beside, things, set())
    except _NeedsPickle:
        return None
    return VALUE, plain, things


def parts_of_call(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    beside: Collection[type],
) -> Parts | None:
    """A call in parts; None if it has to be pickled."""
    if type(func) is not FunctionType:
        return None
    module, name = func.__module__, func.__qualname__
    if _attribute(sys.modules.get(module), name) is not func:
        return None  # others would not find it
    things: list[Any] = []
    met: set[int] = set()
    try:
        plain_args = [_strip(value, beside, things, met) for value in args]
        plain_kwargs = _strip(kwargs, beside, things, met) if kwargs else None
    except _NeedsPickle:
        return None
    return CALL, (module, name, plain_args, plain_kwargs), things


def _strip(value: Any, beside: Collection[type], things: list[Any], met: set[int]) -> Any:
    """A value without the things that go beside it, which are added to the others."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    # What is met twice has to arrive as one, unless nobody can tell.
    if kind in beside:
        if id(value) not in met:
            met.add(id(value))
            things.append(value)
            return _BESIDE
    elif kind in _CONTAINERS and len(value) <= _FEW:
        if kind is tuple:
            return tuple([_strip(item, beside, things, met) for item in value])
        if id(value) not in met:
            met.add(id(value))
            if kind is list:
                return [_strip(item, beside, things, met) for item in value]
            if all(type(key) is str for key in value):
                return {key: _strip(item, beside, things, met) for key, item in value.items()}
    raise _NeedsPickle


def put_together(form: int, plain: Any, things: Sequence[Any]) -> Any:
    """The value again."""
    if form == PAIR:
        return plain, things
    left = iter(things)
    if form == VALUE:
        return _fill(plain, left) if things else plain
    module, name, args, kwargs = plain
    func = _attribute(sys.modules.get(module) or import_module(module), name)
    if func is None:
        raise AttributeError(f"module {module!r} has no {name!r}")
    if things:
        args = [_fill(value, left) for value in args]
        kwargs = kwargs and _fill(kwargs, left)
    return func, tuple(args), kwargs or {}


def _fill(plain: Any, things: Iterator[Any]) -> Any:
    """Undo `_strip`."""
    if plain is _BESIDE:
        return next(things)
    kind = type(plain)
    if kind is tuple:
        return tuple([_fill(item, things) for item in plain])
    if kind is list:
        return [_fill(item, things) for item in plain]
    if kind is dict:
        return {key: _fill(item, things) for key, item in plain.items()}
    return plain


def _attribute(module: Any, name: str) -> Any:
    """What a module has under a name; None if there is nothing."""
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
