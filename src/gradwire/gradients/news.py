"""What workers tell each other in a pass, and how it travels: the gradients beside the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from torch import Tensor

from gradwire.gradients.functions import NOTHING, Gradient

# (id of a send, the gradients of its tensors or None)
Answer = tuple[int, "list[Gradient] | None"]
# (id of a send, which of its tensors gradients will come to)
Prospect = tuple[int, "list[int]"]
# What one worker tells another: its sends that have no answer yet (said once), answers, how the
# teller stands to the one who is told, the sends whose prospects it asks for, and prospects.
News = tuple["list[int]", "list[Answer]", int, "list[int]", "list[Prospect]"]

#: In the place of a gradient: the next of those beside it.
_NEXT: Literal[True] = True


def plain(news: News) -> tuple[Any, list[Tensor]]:
    """The news without their gradients, and those."""
    sends, answers, standing, questions, prospects = news
    beside: list[Tensor] = []
    said = []
    for id, gradients in answers:
        places: list[bool | None] | None = None
        if gradients is not None:
            places = []
            for gradient in gradients:
                if gradient is None or gradient is NOTHING:
                    places.append(gradient)
                else:
                    places.append(_NEXT)
                    beside.append(gradient)
        said.append((id, places))
    return (sends, said, standing, questions, prospects), beside


def restored(said: Any, beside: Iterable[Tensor]) -> News:
    """Undo `plain`."""
    sends, answers, standing, questions, prospects = said
    following = iter(beside)
    for _, places in answers:
        if places is not None:
            places[:] = [next(following) if place else place for place in places]
    return sends, answers, standing, questions, prospects
