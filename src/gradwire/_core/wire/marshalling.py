"""Values that Python's `marshal` can encode, so that they need no pickle.

Most messages carry numbers, strings and tensors: alone, in small tuples, lists and dictionaries, or
as the arguments of a function. `marshal` encodes such a value in half the time of pickle. It cannot
encode tensors and instances of registered types. So these objects are *detached*: a placeholder
takes their place in the value, and they travel beside it. A value that contains anything else is
pickled as a whole. So is a value that contains an object twice: it must arrive as one object, and
only pickle ensures that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from types import FunctionType
from typing import Any

#: A value in the parts in which it is encoded. The first item is PAIR, VALUE or CALL: it tells what
#: the value is. The second item is the part of the value that `marshal` can encode. The third item
#: lists the tensors and other objects that were taken out, because `marshal` cannot encode them.
Split = tuple[int, Any, Sequence[Any]]

#: These numbers tell the receiver what an encoded value is. A CALL is a call of a function. A PAIR
#: consists of a value and a list of tensors. Anything else is a VALUE.
PAIR, VALUE, CALL = range(3)
# Only instances of exactly these types are encoded with `marshal`, which does not support instances
# of subclasses.
_ATOMS = frozenset({int, float, complex, bool, type(None)})
_TEXTS = frozenset({str, bytes})
_CONTAINERS = frozenset({tuple, list, dict})
# A value is pickled if one of its containers has more than _MAX_ITEMS items, or if it has more than
# _MAX_CONTAINERS containers. Pickle is faster than `marshal` for such values.
_MAX_ITEMS = 16
_MAX_CONTAINERS = 4
#: A value with a longer text is pickled. If the text occurs several times in the value, a pickle
#: contains it only once.
_MAX_TEXT = 1024
#: The object that takes the place of each object that was taken out of the value. If the value
#: itself contains this object, an Ellipsis, the value is pickled.
_PLACEHOLDER = ...


class _NeedsPickle(Exception):
    pass


def split_value(value: Any, detached_types: Collection[type]) -> Split | None:
    """Split a value into tensors and instances of registered types, which `marshal` cannot encode,
    and the rest, which it can. Return None if the value must be pickled."""
    if type(value) in detached_types:
        return VALUE, _PLACEHOLDER, [value]
    detached: list[Any] = []
    try:
        (rest,) = _detach((value,), detached_types, detached, set())
    except _NeedsPickle:
        return None
    return VALUE, rest, detached


def split_call(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    detached_types: Collection[type],
) -> Split | None:
    """Split a function call into tensors and instances of registered types, which `marshal` cannot
    encode, and the rest, which it can. Return None if the call must be pickled."""
    if type(func) is not FunctionType:
        if not callable(func):
            raise TypeError("it is not callable")
        return None
    module, name = func.__module__, func.__qualname__
    try:
        if _find(module, name) is not func:
            return None
    except (AttributeError, KeyError):
        # The function cannot be found by its module and name, so the callee could not find it
        # either. Pickle must encode the call.
        return None
    detached: list[Any] = []
    seen: set[int] = set()
    try:
        rest_of_args = _detach(args, detached_types, detached, seen)
        rest_of_kwargs = _detach((kwargs,), detached_types, detached, seen)[0] if kwargs else None
    except _NeedsPickle:
        return None
    return CALL, (module, name, rest_of_args, rest_of_kwargs), detached


def _detach(
    values: Iterable[Any], detached_types: Collection[type], detached: list[Any], seen: set[int]
) -> list[Any]:
    """Return the values with placeholders in place of all tensors and instances of registered
    types. Append these objects to `detached`, and add their ids and those of all containers to
    `seen`."""
    rest = []
    for value in values:
        cls = type(value)
        if cls in _TEXTS:
            if len(value) > _MAX_TEXT:
                raise _NeedsPickle
        elif cls not in _ATOMS:
            identity = id(value)
            if identity in seen:
                # The value contains this object twice. It must arrive as one object, not as two
                # equal ones, and only pickle ensures that.
                raise _NeedsPickle
            seen.add(identity)
            if cls in detached_types:
                detached.append(value)
                value = _PLACEHOLDER
            else:
                value = _detach_from_container(cls, value, detached_types, detached, seen)
        rest.append(value)
    return rest


def _detach_from_container(
    cls: type, value: Any, detached_types: Collection[type], detached: list[Any], seen: set[int]
) -> Any:
    if (
        cls not in _CONTAINERS
        or len(value) > _MAX_ITEMS
        or len(seen) - len(detached) > _MAX_CONTAINERS
    ):
        raise _NeedsPickle
    if cls is not dict:
        return cls(_detach(tuple(value), detached_types, detached, seen))
    # Another thread may be changing the dictionary. `list` copies all items in one atomic step.
    pairs = list(value.items())
    if not all(type(key) is str for key, _ in pairs):
        raise _NeedsPickle
    items = _detach([item for _, item in pairs], detached_types, detached, seen)
    return {key: item for (key, _), item in zip(pairs, items, strict=True)}


def join(form: int, rest: Any, detached: Sequence[Any]) -> Any:
    """Undo `split_value` and `split_call`. A call becomes `(func, args, kwargs)`."""
    if form == PAIR:
        return rest, detached
    if rest is _PLACEHOLDER:
        return detached[0]
    remaining = iter(detached)
    if form == VALUE:
        return _attach((rest,), remaining)[0] if detached else rest
    module, name, args, kwargs = rest
    if _needs_import(module):
        __import__(module)
    func = _find(module, name)
    if detached:
        args = _attach(args, remaining)
        kwargs = kwargs and _attach((kwargs,), remaining)[0]
    return func, tuple(args), kwargs or {}


def _needs_import(module: str) -> bool:
    """Whether a module is not imported yet, or another thread is importing it at this moment. An
    import statement would check the same, but take ten times as long."""
    imported = sys.modules.get(module)
    return imported is None or getattr(getattr(imported, "__spec__", None), "_initializing", False)


def _find(module: str, name: str) -> Any:
    imported = sys.modules[module]
    return attrgetter(name)(imported) if "." in name else getattr(imported, name)


def _attach(values: Iterable[Any], detached: Iterator[Any]) -> list[Any]:
    """Undo `_detach`: replace each placeholder by the object that was there."""
    whole = []
    for value in values:
        if value is _PLACEHOLDER:
            value = next(detached)
        elif type(value) in _CONTAINERS:
            if type(value) is dict:
                value = dict(zip(value, _attach(value.values(), detached), strict=True))
            else:
                value = type(value)(_attach(value, detached))
        whole.append(value)
    return whole
