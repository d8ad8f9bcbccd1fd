"""PrefillRate: how fast the engine computes prompts, seen from the scheduler's process."""

from __future__ import annotations

import math
from collections.abc import Callable

KEEP = 0.7
"""Weight of all earlier steps when one is measured."""
IN_FLIGHT = 64
"""Steps kept that have not ended; no engine prepares so many."""
MIN_TOKENS = 64
"""Of a step that is measured: one that mostly decodes has fewer prompt tokens."""


class PrefillRate:
    """Prompt tokens per second, over steps that compute at least `MIN_TOKENS` of them.

    A measured step has a number, which crosses to the workers and back. It has taken the time from
    when it was scheduled, or from the end of the step before it where that is later, to when its
    results came back. So the engine's idle time counts for nothing, and an engine that schedules
    ahead of its results (asynchronous scheduling, pipelines) is measured by the distance of its
    results. Decoding in the same step counts as part of what a prompt costs. Used by one thread
    alone.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._steps: dict[int, tuple[int, float]] = {}
        self._number = 0
        self._last_end = -math.inf
        self._tokens = self._seconds = 0.0

    @property
    def seconds_per_token(self) -> float | None:
        """None: not measured yet."""
        return self._seconds / self._tokens if self._tokens else None

    def step_begins(self, tokens: int) -> int | None:
        """Note that a step will compute so many tokens of prompts; its number, if it is to be
        measured."""
        if tokens < MIN_TOKENS:
            return None
        self._number += 1
        self._steps[self._number] = (tokens, self._now())
        # The results of a step that failed never come.
        self._steps.pop(self._number - IN_FLIGHT, None)
        return self._number

    def step_ended(self, number: int | None) -> bool:
        """Take note that a step's results are here; whether they tell how fast the engine is."""
        now, before = self._now(), self._last_end
        self._last_end = now
        if number is None or number not in self._steps:
            return False
        tokens, scheduled = self._steps.pop(number)
        return self.measured(tokens, now - max(scheduled, before))

    def measured(self, tokens: int, seconds: float) -> bool:
        """Take in a step that computed so many tokens; whether it counts."""
        if tokens < MIN_TOKENS:
            return False
        self._tokens = KEEP * self._tokens + tokens
        self._seconds = KEEP * self._seconds + seconds
        return True
