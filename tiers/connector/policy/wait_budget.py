"""How long may a request still wait? For all tiers together what is left of `max_wait`."""

from __future__ import annotations

import math
from collections.abc import Callable

LOOKUP_SECONDS = 1.0
"""How long a request waits for one lookup, unless `max_wait` is short or very long."""


def lookup_seconds(max_wait: float) -> float:
    """How long one lookup may take: half of `max_wait` at most, so that a tier that never answers
    leaves time to load from one that does; and a tenth of a `max_wait` that is longer than usual,
    as it is where tiers are far away or machines are busy."""
    return min(max_wait / 2, max(LOOKUP_SECONDS, max_wait / 10))


class WaitBudget:
    """What one request has left of `max_wait` seconds; used by the scheduler's thread alone.

    A lookup costs at most `lookup_seconds`, even if the engine's step took longer. `now` gives
    seconds, never going back.
    """

    def __init__(self, now: Callable[[], float], max_wait: float = math.inf) -> None:
        self._now = now
        self._lookup_seconds = lookup_seconds(max_wait)
        self._left = max_wait
        self._looking: float | None = None
        self._loading: float | None = None

    def left(self) -> float:
        """Seconds that the request may still wait."""
        return self._left - (0.0 if self._loading is None else self._now() - self._loading)

    def looks(self) -> None:
        """A tier is asked and has no answer yet."""
        if self._looking is None:
            self._looking = self._now()

    @property
    def is_looking(self) -> bool:
        """Whether an answer is missing."""
        return self._looking is not None

    def found(self) -> None:
        """The lookup has ended."""
        if self._looking is not None:
            self._left -= min(self._now() - self._looking, self._lookup_seconds)
            self._looking = None

    def loads(self) -> None:
        """The request begins to wait for a load, its own or another request's."""
        if self._loading is None:
            self._loading = self._now()

    @property
    def is_loading(self) -> bool:
        """Whether that load is in flight."""
        return self._loading is not None

    def loaded(self) -> None:
        """The request no longer waits: the load has ended in all tiers, or was given up."""
        self._left, self._loading = self.left(), None
