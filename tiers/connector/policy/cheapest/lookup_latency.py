"""LookupLatency: how long a tier that is still looking will take to answer."""

from __future__ import annotations

from collections.abc import Callable

KEEP = 0.7
"""Weight of all earlier lookups when one is answered."""
FADE = 0.98
"""Factor by which the expected wait shrinks whenever a request skips waiting. After a few dozen, a
request waits again and measures anew."""


class LookupLatency:
    """Expected latency of each tier's lookups, over those that are not answered at once."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._since: dict[str, dict[int, float]] = {}
        self._usual: dict[int, float] = {}

    def left(self, child: int, request_id: str) -> float:
        """Estimated seconds until the answer; at least as many as were waited already."""
        now = self._now()
        waited = now - self._since.setdefault(request_id, {}).setdefault(child, now)
        return max(self._usual.get(child, 0.0) - waited, waited)

    def answered(self, child: int, request_id: str) -> None:
        """Take in that `child` has answered; an answer that nobody waited for is no sample."""
        since = self._since.get(request_id, {}).pop(child, None)
        if since is not None:
            waited = self._now() - since
            usual = self._usual.get(child, waited)
            self._usual[child] = KEEP * usual + (1 - KEEP) * waited

    def decided(self, request_id: str) -> None:
        """The request begins, without waiting for the answers that are missing."""
        for child, since in self._since.pop(request_id, {}).items():
            # A wait in vain is expected to take as long again.
            in_vain = 2 * (self._now() - since)
            self._usual[child] = max(FADE * self._usual.get(child, 0.0), in_vain)

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request."""
        self._since.pop(request_id, None)
