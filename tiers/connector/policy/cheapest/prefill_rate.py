"""PrefillMeter: how fast the engine computes prompts, seen from the scheduler's process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from tiers.connector.policy.requests import RequestState, Scheduled

KEEP = 0.7
"""Weight of all earlier steps when one is measured."""
UNDER_WAY = 64
"""Steps kept that have not ended; no engine prepares so many."""


class PrefillRate:
    """Prompt tokens per second, over steps that compute at least `min_tokens` of them.

    A measured step has a number, which crosses to the workers and back. It has taken the time from
    when it was scheduled, or from the end of the step before it where that is later, to when its
    results came back. So the engine's idle time counts for nothing, and an engine that schedules
    ahead of its results (asynchronous scheduling, pipelines) is measured by the distance of its
    results. Decoding in the same step counts as part of what a prompt costs; steps that mostly
    decode have few prompt tokens and are left out. Used by the scheduler's thread alone.
    """

    def __init__(self, now: Callable[[], float], min_tokens: int) -> None:
        self._now = now
        self._min_tokens = min_tokens
        self._steps: dict[int, tuple[int, float]] = {}
        self._number = 0
        self._last_end = -math.inf
        self._tokens = self._seconds = 0.0

    @property
    def seconds_per_token(self) -> float | None:
        """None: not measured yet."""
        return self._seconds / self._tokens if self._tokens else None

    def expect(self, state: RequestState) -> None:
        """All tokens that a request has before it runs are its prompt."""
        state.prompt_tokens = state.request.num_tokens

    def step_begins(self, scheduled: Iterable[Scheduled]) -> int | None:
        """Note what a step will compute; its number, if it is to be measured."""
        tokens = sum(
            min(max(one.state.prompt_tokens - one.before, 0), one.after - one.before)
            for one in scheduled
        )
        if tokens < self._min_tokens:
            return None
        self._number += 1
        self._steps[self._number] = (tokens, self._now())
        # The results of a step that failed never come.
        self._steps.pop(self._number - UNDER_WAY, None)
        return self._number

    def step_ended(self, number: int | None) -> int:
        """Take note that a step's results are here; the tokens of one that is measured."""
        now, before = self._now(), self._last_end
        self._last_end = now
        if number is None or number not in self._steps:
            return 0
        tokens, scheduled = self._steps.pop(number)
        return self.measured(tokens, now - max(scheduled, before))

    def measured(self, tokens: int, seconds: float) -> int:
        """Take in a step that computed so many tokens; those that count."""
        if tokens < self._min_tokens:
            return 0
        self._tokens = KEEP * self._tokens + tokens
        self._seconds = KEEP * self._seconds + seconds
        return tokens
