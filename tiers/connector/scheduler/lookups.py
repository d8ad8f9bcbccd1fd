"""What a store manager was told of a request's keys."""

from __future__ import annotations

import math
from concurrent.futures import Future
from typing import NamedTuple


class Peeked(NamedTuple):
    """How many of so many `keys` from `first` on an index `found`; good `until`."""

    first: int
    keys: int
    found: int
    until: float


class Lookup(NamedTuple):
    """`answer`: which keys from `first` on are held, and how many leading ones are; good
    `until`."""

    first: int
    answer: Future[tuple[list[bool], int]]
    asked: float
    until: float = math.inf

    def count_from(self, first: int) -> int:
        """Leading held keys from `first` on."""
        held, count = self.answer.result()
        skipped = first - self.first
        if skipped <= count:
            return count - skipped
        return leading(held[skipped:])


def leading(held: list[bool]) -> int:
    """How many leading keys are held."""
    return held.index(False) if False in held else len(held)
