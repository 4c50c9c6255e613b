"""What workers tell each other in a pass, and how it travels: the gradients beside the rest."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
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
    """The news without their gradients, and those. Of an answer remains how many gradients it has,
    or if some of them are none, what is in their places."""
    sends, answers, standing, questions, prospects = news
    beside: list[Tensor] = []
    said: list[Any] = []
    for id, gradients in answers:
        if gradients is None:
            said.append((id, None))
            continue
        found = [g for g in gradients if g is not None and g is not NOTHING]
        beside += found
        if len(found) == len(gradients):
            said.append((id, len(found)))
        else:
            places = [g if g is None or g is NOTHING else _NEXT for g in gradients]
            said.append((id, places))
    return (sends, said, standing, questions, prospects), beside


def restored(said: Any, beside: Iterable[Tensor]) -> News:
    """Undo `plain`."""
    sends, answered, standing, questions, prospects = said
    following = iter(beside)
    answers: list[Answer] = []
    for id, places in answered:
        if places is None:
            answers.append((id, None))
        elif type(places) is int:
            answers.append((id, list(islice(following, places))))
        else:
            answers.append((id, [next(following) if place else place for place in places]))
    return sends, answers, standing, questions, prospects
