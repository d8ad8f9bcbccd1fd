"""LookupLatency: how long a tier that is still looking will take to answer."""

from __future__ import annotations

from collections.abc import Callable

from tiers.connector.policy.request_state import RequestState

KEEP = 0.7
"""Weight of all earlier lookups when one is answered."""
FADE = 0.98
"""Factor by which the expected wait shrinks whenever a request skips waiting. After a few dozen, a
request waits again and measures anew."""


class LookupLatency:
    """Expected latency of each tier's lookups, over those that are not answered at once.

    `RequestState.looking` has, by child, when a request began to wait for an answer.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._usual: dict[int, float] = {}

    def left(self, child: int, request_state: RequestState) -> float:
        """Estimated seconds until the answer; at least as many as were waited already."""
        now = self._now()
        waited = now - request_state.looking.setdefault(child, now)
        return max(self._usual.get(child, 0.0) - waited, waited)

    def answered(self, child: int, request_state: RequestState) -> None:
        """Take in that `child` has answered; an answer that nobody waited for is no sample."""
        since = request_state.looking.pop(child, None)
        if since is not None:
            waited = self._now() - since
            usual = self._usual.get(child, waited)
            self._usual[child] = KEEP * usual + (1 - KEEP) * waited

    def decided(self, request_state: RequestState) -> None:
        """The request begins, without waiting for the answers that are missing."""
        for child, since in request_state.looking.items():
            # A wait in vain is expected to take as long again.
            in_vain = 2 * (self._now() - since)
            self._usual[child] = max(FADE * self._usual.get(child, 0.0), in_vain)
        request_state.looking.clear()
