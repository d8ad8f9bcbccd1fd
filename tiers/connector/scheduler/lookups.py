"""Lookup: what one tier was asked of one request, and what it answered."""

from __future__ import annotations

import math
from concurrent.futures import Future
from typing import NamedTuple

from tiers.connector.scheduler.answers import Answers


class Asked(NamedTuple):
    """A question to a store behind a network. `answer`: which keys from number `first` on are held.
    `since`: when it was asked."""

    first: int
    answer: Future[list[bool]]
    since: float


class Lookup:
    """Answers of one tier for one request, each kept for a while; used by the scheduler's thread.

    A request that waits for room is asked about in every step. `answers`: of a tier in memory.
    `asked`: the question to a store behind a network, whose answer is good `until` then.
    """

    def __init__(self) -> None:
        self.answers = Answers()
        self.asked: Asked | None = None
        self.until = math.inf

    def renew(self) -> None:
        """Forget all answers."""
        self.answers.renew()
        self.asked, self.until = None, math.inf

    @property
    def is_under_way(self) -> bool:
        """Whether a question has no answer yet."""
        return self.asked is not None and not self.asked.answer.done()

    def cancel(self) -> None:
        """The request has finished; a question under way ends unread."""
        if self.asked is not None:
            self.asked.answer.cancel()
