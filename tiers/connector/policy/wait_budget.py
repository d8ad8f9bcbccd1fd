"""WaitBudget: how long each request may still wait for all tiers together."""

from __future__ import annotations

import math
from collections.abc import Callable

LOOKUP_SECONDS = 1.0
"""How long a request waits for one lookup at most, whatever `max_wait` is."""


class WaitBudget:
    """What each request has left of `max_wait` seconds; used by the scheduler's thread alone.

    A lookup may take half of them, so that a tier that never answers leaves time to load from one
    that does. A lookup costs at most `lookup_seconds`, even if the engine's step took longer.
    """

    def __init__(self, now: Callable[[], float], max_wait: float = math.inf) -> None:
        self.lookup_seconds = min(LOOKUP_SECONDS, max_wait / 2)
        self._now = now
        self._max_wait = max_wait
        self._spent: dict[str, float] = {}
        self._looking: dict[str, float] = {}
        self._loading: dict[str, float] = {}

    def left(self, request_id: str) -> float:
        """Seconds that the request may still wait."""
        since = self._loading.get(request_id)
        loading = 0.0 if since is None else self._now() - since
        return self._max_wait - self._spent.get(request_id, 0.0) - loading

    def looks(self, request_id: str) -> None:
        """A tier is asked and has no answer yet."""
        self._looking.setdefault(request_id, self._now())

    def is_looking(self, request_id: str) -> bool:
        """Whether an answer is missing."""
        return request_id in self._looking

    def found(self, request_id: str) -> None:
        """The lookup has ended."""
        since = self._looking.pop(request_id, None)
        if since is not None:
            self._charge(request_id, min(self._now() - since, self.lookup_seconds))

    def loads(self, request_id: str) -> None:
        """The request begins to wait for a load, its own or another request's."""
        self._loading.setdefault(request_id, self._now())

    def loads_now(self, request_id: str) -> bool:
        """Whether that load is under way."""
        return request_id in self._loading

    def loaded(self, request_id: str) -> None:
        """The request no longer waits: the load has ended in all tiers, or was given up."""
        since = self._loading.pop(request_id, None)
        if since is not None:
            self._charge(request_id, self._now() - since)

    def _charge(self, request_id: str, seconds: float) -> None:
        self._spent[request_id] = self._spent.get(request_id, 0.0) + seconds

    def forget(self, request_id: str) -> None:
        """The request has finished."""
        for kept in (self._spent, self._looking, self._loading):
            kept.pop(request_id, None)
