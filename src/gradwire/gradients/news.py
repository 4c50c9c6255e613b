"""What workers tell each other in a pass, in the form in which it travels: the gradients beside the
rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Literal

from torch import Tensor

from gradwire.gradients.functions import NOTHING, PASSED_ON, Gradient

#: In the place of a gradient: the next of those beside it.
_NEXT: Literal[True] = True
# Of an answer: how many gradients it has; if some of them are none, what is in their places; and
# None if it has none at all.
Places = int | list[Any] | None
# (id of a send, what there is for its tensors)
Answer = tuple[int, Places]
# (id of a send, which of its tensors gradients will come to)
Prospect = tuple[int, "list[int]"]
# (id of a send of who tells, which of its tensors, id of the message of who is told in which that
# tensor came, and no other)
Shortcut = tuple[int, int, int]
# What one worker tells another: its sends that have no answer yet (said once), shortcuts (as well),
# answers, how the teller stands to the one who is told, the sends whose prospects it asks for, and
# prospects.
Said = tuple["list[int]", "list[Shortcut]", "list[Answer]", int, "list[int]", "list[Prospect]"]
News = tuple[Said, Sequence[Tensor]]


def put_beside(beside: list[Tensor], gradients: Sequence[Gradient] | None) -> Places:
    """Put the gradients of an answer beside it."""
    if gradients is None:
        return None
    places: list[Any] = []
    all_there = True
    for gradient in gradients:
        if gradient is None or gradient is NOTHING or gradient is PASSED_ON:
            places.append(gradient)
            all_there = False
        else:
            places.append(_NEXT)
            beside.append(gradient)
    return len(places) if all_there else places


def take_from(beside: Iterator[Tensor], places: Places) -> list[Gradient] | None:
    """Undo `put_beside`."""
    if places is None:
        return None
    if type(places) is int:
        return list(islice(beside, places))
    assert type(places) is list
    return [next(beside) if place is True else place for place in places]
