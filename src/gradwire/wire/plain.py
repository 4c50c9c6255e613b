"""Values that need no pickle.

Most of what is sent is numbers, strings and tensors, alone, in small tuples, lists and
dictionaries, or as the arguments of a function. Such a value is marshalled, and what cannot be
marshalled goes beside it: tensors, and whatever a codec was taught. That takes half the time of a
pickle. With anything else in it, a value is pickled as a whole: only that keeps what its parts have
in common.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from types import FunctionType
from typing import Any

#: What a value was, something plain, and what goes beside that.
Parts = tuple[int, Any, Sequence[Any]]

#: Something plain and something beside it, as they were given; a value; a call.
PAIR, VALUE, CALL = range(3)
#: Exactly these: of a subclass only pickle knows what it is.
_ATOMS = frozenset({int, float, complex, bool, type(None)})
_TEXTS = frozenset({str, bytes})
_CONTAINERS = frozenset({tuple, list, dict})
#: Pickle is faster with more items than this in a container, or with more than this many of those;
#: and it does not repeat a long text.
_FEW_ITEMS = 16
_FEW_CONTAINERS = 4
_LONG = 1024
#: Stands where something was that goes beside. (No value has it, since its type is none of those.)
_BESIDE = ...


class _NeedsPickle(Exception):
    pass


def parts_of(value: Any, beside: Collection[type]) -> Parts | None:
    """A value in parts; None if it has to be pickled. Objects of the types `beside` go there."""
    if type(value) in beside:
        return VALUE, _BESIDE, [value]
    things: list[Any] = []
    try:
        (plain,) = _strip((value,), beside, things, set())
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
    try:
        if _find(module, name) is not func:
            return None
    except (AttributeError, KeyError):
        return None  # others would not find it either
    things: list[Any] = []
    met: set[int] = set()
    try:
        plain_args = _strip(args, beside, things, met)
        plain_kwargs = _strip((kwargs,), beside, things, met)[0] if kwargs else None
    except _NeedsPickle:
        return None
    return CALL, (module, name, plain_args, plain_kwargs), things


def _strip(
    values: Iterable[Any], beside: Collection[type], things: list[Any], met: set[int]
) -> list[Any]:
    """Values without the things in them that go beside, which are added to the others."""
    stripped = []
    for value in values:
        kind = type(value)
        if kind in _TEXTS:
            if len(value) > _LONG:
                raise _NeedsPickle
        elif kind not in _ATOMS:
            identity = id(value)
            if identity in met:
                raise _NeedsPickle  # it has to arrive as one
            met.add(identity)
            if kind in beside:
                things.append(value)
                value = _BESIDE
            else:
                value = _strip_container(kind, value, beside, things, met)
        stripped.append(value)
    return stripped


def _strip_container(
    kind: type, value: Any, beside: Collection[type], things: list[Any], met: set[int]
) -> Any:
    if (
        kind not in _CONTAINERS
        or len(value) > _FEW_ITEMS
        or len(met) - len(things) > _FEW_CONTAINERS
    ):
        raise _NeedsPickle
    if kind is not dict:
        return kind(_strip(tuple(value), beside, things, met))
    pairs = list(value.items())  # at once: another thread may change it
    if not all(type(key) is str for key, _ in pairs):
        raise _NeedsPickle
    items = _strip([item for _, item in pairs], beside, things, met)
    return {key: item for (key, _), item in zip(pairs, items, strict=True)}


def put_together(form: int, plain: Any, things: Sequence[Any]) -> Any:
    """The value again."""
    if form == PAIR:
        return plain, things
    if plain is _BESIDE:
        return things[0]
    left = iter(things)
    if form == VALUE:
        return _fill((plain,), left)[0] if things else plain
    module, name, args, kwargs = plain
    if _is_missing(module):
        __import__(module)
    func = _find(module, name)
    if things:
        args = _fill(args, left)
        kwargs = kwargs and _fill((kwargs,), left)[0]
    return func, tuple(args), kwargs or {}


def _is_missing(module: str) -> bool:
    """Whether a module must be imported, or another thread is still at it. (Python would find that
    out as well, but takes ten times as long for it.)"""
    found = sys.modules.get(module)
    return found is None or getattr(getattr(found, "__spec__", None), "_initializing", False)


def _find(module: str, name: str) -> Any:
    found = sys.modules[module]
    return attrgetter(name)(found) if "." in name else getattr(found, name)


def _fill(values: Iterable[Any], things: Iterator[Any]) -> list[Any]:
    """Undo `_strip`."""
    filled = []
    for value in values:
        if value is _BESIDE:
            value = next(things)
        elif type(value) in _CONTAINERS:
            if type(value) is dict:
                value = dict(zip(value, _fill(value.values(), things), strict=True))
            else:
                value = type(value)(_fill(value, things))
        filled.append(value)
    return filled
