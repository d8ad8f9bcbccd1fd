"""Was a change of the chain for the better? What the tiers save before and after it is compared.

What they save is the time that computing the loaded tokens would have taken, less the time that
requests waited for their loads: the metrics `tenant_prefill_seconds` and `tenant_load_seconds`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from pydantic import BaseModel, Field

from tiers.concurrency.executors import start_thread
from tiers.connector.multi.changes import Changes, PendingChange

logger = logging.getLogger(__name__)

PARTS = 20
"""Parts of the time before a change, and after it, between which what is saved varies."""
WARMING = 0.25
"""The part of the time after it that is left out: a tier that came, or grew, is empty at first."""
FEWEST_PARTS = 5
"""With fewer parts that had requests, before or after, nothing is said."""
ERRORS = 2.0
"""A difference counts beyond so many standard errors of it: 19 times in 20 it is no chance."""
CHANGE_SECONDS = 300.0
"""No change takes longer."""
RETRY_SECONDS = 1.0

Outcome = Literal[
    "watching", "not applied", "better", "same", "worse", "too little", "another change"
]


class Saved(NamedTuple):
    """What tiers saved in some time."""

    prompt_tokens: float
    seconds: float


SavedHistory = Callable[[float, float, int], list[Saved]]
"""What tiers saved from one time to another, which are of `time.monotonic`, in so many parts."""


class Verdict(BaseModel, frozen=True, extra="forbid"):
    """What came of a change. `before`, `after`, `margin`: seconds saved for 1,000 tokens of a
    prompt, and what the difference may be by chance; None: it is not judged by them."""

    outcome: Outcome
    before: float | None = None
    after: float | None = None
    margin: float | None = None
    went_back: bool = Field(default=False, description="The chain of before is in effect again.")
    why_not_back: str = Field(default="", description="Why that could not be done.")


def describe(verdict: Verdict) -> str:
    said = {
        "watching": "it is being watched",
        "not applied": "it is not in effect, so there is nothing to judge",
        "too little": "there were too few requests, before it or after it, to judge it",
        "another change": "another change came, so it is not judged",
    }.get(verdict.outcome)
    if said is not None:
        return said
    if verdict.before is None or verdict.after is None or verdict.margin is None:
        text = f"{verdict.outcome}: it was made in part alone"
    else:
        text = (
            f"{verdict.outcome}: tiers save {verdict.after:.3g} s for 1,000 tokens of prompts, "
            f"{verdict.before:.3g} s before it; by chance it may be {verdict.margin:.2g} s"
        )
    if verdict.went_back:
        text += "; the chain of before is in effect again"
    return text + (f"; going back failed: {verdict.why_not_back}" if verdict.why_not_back else "")


def compare(before: Sequence[Saved], after: Sequence[Saved]) -> Verdict:
    """Compare what was saved for a token of a prompt: a ratio of sums, whose error follows from how
    the parts differ from it (the ratio estimator; Cochran, Sampling Techniques, 1977, chapter 6).
    """
    rates = [_rate(parts) for parts in (before, after)]
    if rates[0] is None or rates[1] is None:
        return Verdict(outcome="too little")
    (rate_before, error_before), (rate_after, error_after) = rates[0], rates[1]
    margin = ERRORS * math.hypot(error_before, error_after)
    gain = rate_after - rate_before
    outcome: Outcome = "same" if abs(gain) <= margin else "better" if gain > 0 else "worse"
    return Verdict(
        outcome=outcome, before=1000 * rate_before, after=1000 * rate_after, margin=1000 * margin
    )


def _rate(parts: Sequence[Saved]) -> tuple[float, float] | None:
    """Seconds saved for a token, and the standard error; None: too few parts had any."""
    busy = [part for part in parts if part.prompt_tokens > 0]
    if len(busy) < FEWEST_PARTS:
        return None
    tokens = math.fsum(part.prompt_tokens for part in busy)
    rate = math.fsum(part.seconds for part in busy) / tokens
    squares = math.fsum((part.seconds - rate * part.prompt_tokens) ** 2 for part in busy)
    return rate, math.sqrt(squares * len(busy) / (len(busy) - 1)) / tokens


class ChangeWatch:
    """Watches a change on a thread of its own, and goes back where it was for the worse. The engine
    keeps it, so that it goes on when whoever asked for the change has left."""

    def __init__(
        self, changes: Changes, history: SavedHistory, pending: PendingChange, seconds: float
    ) -> None:
        """`seconds`: before and after the change."""
        self.verdict = Verdict(outcome="watching")
        self._changes, self._history = changes, history
        self._pending, self._seconds = pending, seconds
        self._stop = threading.Event()
        start_thread(self._run, "change-watch")

    def close(self) -> None:
        """Watch no more; nobody goes back. Does not wait."""
        self._stop.set()

    def _run(self) -> None:
        asked = time.monotonic()
        verdict = self._watch(asked)
        if verdict is None:
            return
        self.verdict = self._go_back(verdict) if verdict.outcome == "worse" else verdict
        log = logger.warning if verdict.outcome == "worse" else logger.info
        log("the last change of the chain: %s", describe(self.verdict))

    def _watch(self, asked: float) -> Verdict | None:
        """The verdict, when the time is over; None: the engine ends before."""
        if not self._pending.wait(CHANGE_SECONDS) or self._pending.why:
            return Verdict(outcome="worse" if self._pending.in_part else "not applied")
        began, version = time.monotonic(), self._pending.version
        for _ in range(PARTS):
            if self._stop.wait(self._seconds / PARTS):
                return None
            if self._changes.version != version:
                return Verdict(outcome="another change")
        before = self._history(asked - self._seconds, asked, PARTS)
        warm = began + WARMING * self._seconds
        return compare(before, self._history(warm, began + self._seconds, PARTS))

    def _go_back(self, verdict: Verdict) -> Verdict:
        before, version = self._pending.before, self._pending.version
        assert before is not None, "it is in effect"
        until = time.monotonic() + CHANGE_SECONDS
        # A tier that leaves can't come again before it has left. For nothing else is waited.
        while (self._pending.in_part or self._pending.remains) and time.monotonic() < until:
            if self._changes.version != version or not self._changes.review(before).refused:
                break
            if self._stop.wait(RETRY_SECONDS):
                return verdict
        pending = self._changes.request(before, version)
        why = "" if pending.wait(CHANGE_SECONDS) else f"not done after {CHANGE_SECONDS:g} s"
        why = why or pending.why
        return verdict.model_copy(update={"went_back": not why, "why_not_back": why})
