"""Load policies: which connector of a chain serves a request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Choice(NamedTuple):
    """The child that serves, how many tokens, and whether beside the steps.

    `tokens` None: a child is still looking, ask again. `child` None: nobody serves.
    """

    child: int | None
    tokens: int | None
    is_async: bool


def first(answers: Iterable[tuple[int | None, bool]]) -> Choice:
    """The first child, in load-priority order, that has tokens.

    Answers are taken lazily: children below the one that serves are not asked. A child that is
    still looking holds back only those below it; they are asked all the same, so that lookups of
    several children run at once.
    """
    looking = False
    for child, (tokens, is_async) in enumerate(answers):
        if tokens is None:
            looking = True
        elif tokens > 0 and not looking:
            return Choice(child, tokens, is_async)
    return Choice(None, None if looking else 0, False)
