"""LookupWaits: whether it pays to wait for a tier that is still looking."""

from __future__ import annotations

from collections.abc import Callable

KEEP = 0.7
"""Weight of all earlier lookups when one is answered."""
FADE = 0.98
"""What a request that does not wait leaves of the expected wait, so that one of some dozens waits
and finds out whether lookups have become quicker."""


class LookupLatency:
    """How long lookups of each tier that are not answered at once take to be."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._since: dict[str, dict[int, float]] = {}
        self._usual: dict[int, float] = {}

    def left(self, child: int, request_id: str) -> float:
        """Seconds until the answer, as it seems; the longer it was waited for, the longer still."""
        now = self._now()
        waited = now - self._since.setdefault(request_id, {}).setdefault(child, now)
        return max(self._usual.get(child, 0.0) - waited, waited)

    def answered(self, child: int, request_id: str) -> None:
        """An answer is here; one that came before anybody waited says nothing."""
        since = self._since.get(request_id, {}).pop(child, None)
        if since is not None:
            waited = self._now() - since
            usual = self._usual.get(child, waited)
            self._usual[child] = KEEP * usual + (1 - KEEP) * waited

    def decided(self, request_id: str) -> None:
        """The request goes on without the answers that it lacks."""
        for child, since in self._since.pop(request_id, {}).items():
            # What was waited for in vain so long may well take as long again.
            in_vain = 2 * (self._now() - since)
            self._usual[child] = max(FADE * self._usual.get(child, 0.0), in_vain)

    def forget(self, request_id: str) -> None:
        """The request is gone, perhaps without ever having begun."""
        self._since.pop(request_id, None)
