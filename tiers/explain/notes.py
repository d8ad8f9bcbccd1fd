"""RequestNotes: what is noted of one request while it is served; `accounts` makes sense of it."""

from __future__ import annotations

import time
from collections.abc import Mapping

from tiers.explain.attempt import Attempt

MAX_ATTEMPTS = 8
"""Attempts of a request that are kept; of more, the first and the last ones."""


class RequestNotes:
    """All attempts of one request. `pending`: the one that is being decided. `hits`: tokens that
    each child was to load while the engine counted them; `external`: what it counted itself.
    `trace`: the trace context that came with the request. `ended`: how it ended,
    in the engine's word. `bytes`: about what it takes in memory, then."""

    __slots__ = (
        *("attempts", "began", "bytes", "ended", "ended_at", "external", "hits", "left_out"),
        *("pending", "prompt", "request_id", "trace"),
    )

    def __init__(
        self, request_id: str, prompt: int, trace: Mapping[str, str] | None = None
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.trace = trace
        self.began = time.time()
        self.attempts: list[Attempt] = []
        self.left_out = 0
        self.pending: Attempt | None = None
        self.hits: dict[int, int] = {}
        self.external = 0
        self.ended: str | None = None
        self.ended_at: float | None = None
        self.bytes = 0

    def add(self, attempt: Attempt) -> None:
        """An attempt is decided."""
        self.pending = None
        self.attempts.append(attempt)
        if len(self.attempts) > MAX_ATTEMPTS:
            del self.attempts[MAX_ATTEMPTS // 2]
            self.left_out += 1

    def end(self, status: str) -> None:
        """The request has ended, as the engine says."""
        self.pending = None
        self.ended, self.ended_at = status, time.time()
        self.bytes = self._size()

    def _size(self) -> int:
        """About what it takes in memory, in bytes."""
        answers = sum(len(one.answers) + 2 * len(one.parts) for one in self.attempts)
        trace = 0 if self.trace is None else 512
        return 1000 + trace + 1100 * len(self.attempts) + 300 * answers
