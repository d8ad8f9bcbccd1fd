"""Lookups: what one tier was asked of one request, and how stores behind a network are asked."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from tiers.concurrency.executors import io_executor, wait_a_moment
from tiers.connector.scheduler.answers import Answers


class Asked(NamedTuple):
    """A question to a store behind a network. `answer`: which keys from number `first` on are held;
    cancelled: nobody waited for it any more, and it was never asked. `since`: when it came up."""

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
        self.cancel()
        self.answers.renew()
        self.asked, self.until = None, math.inf

    @property
    def is_unanswered(self) -> bool:
        """Whether the last question has no answer, or not yet."""
        if self.asked is None:
            return False
        return not self.asked.answer.done() or self.asked.answer.cancelled()

    def cancel(self) -> None:
        """The request begins without the answer, or has finished: a question that waits for a
        thread is not asked."""
        if self.asked is not None and self.asked.answer.cancel():
            self.asked = None


class LookupQueue:
    """Questions to a store behind a network, first come first asked; used by the scheduler's
    thread.

    A question that nobody waits for any more is never asked, so that past the store's capacity
    each answer still serves a request. How long a question may wait for a thread depends on the
    queue. One that was empty of late holds a burst, and is worth waiting for: as long as for any
    answer. One that has been standing makes all wait alike and answers no more of them, so each
    waits `STANDING_WAIT`. The rule is that of CoDel (Nichols and Jacobson, 2012) as servers use it
    (Maurer, "Fail at Scale", 2015).
    """

    THREADS = 4
    """Questions asked at once. A store behind a network answers as many times more of them as long
    as it is waited for; what is computed for one is the interpreter's, one thread at a time."""
    STANDING_PART = 0.5
    """A queue is standing when for this part of what a request waits no question found a thread
    free."""
    STANDING_WAIT = 0.015
    """Seconds for which a question then waits for a thread, until the engine's next step."""

    def __init__(self, patience: float, clock: Callable[[], float]) -> None:
        """`patience`: seconds that a request waits for an answer. `clock` gives seconds."""
        self.threads = io_executor(self.THREADS, "lookup")
        self._patience = patience
        self._clock = clock
        self._waiting: deque[Future[list[bool]]] = deque()
        self._begun: list[Future[list[bool]]] = []
        self._free_at = -math.inf

    def ask(
        self, look: Callable[[Sequence[bytes]], list[bool]], keys: Sequence[bytes], first: int
    ) -> Asked:
        """Have a thread look up the keys from number `first` on."""
        now = self._clock()
        self._note_free(now, self.THREADS - 1)
        answer = self.threads.submit(look, list(keys[first:]))
        self._waiting.append(answer)
        return Asked(first, answer, now)

    def wait_a_moment(self) -> None:
        """Wait for an answer, if any is under way: the step has nothing to compute."""
        self._note_free(self._clock(), self.THREADS)
        wait_a_moment([*self._begun, *self._waiting])

    def _note_free(self, now: float, most: int) -> None:
        """A thread is free where `most` questions at most have no answer."""
        while self._waiting and (self._waiting[0].running() or self._waiting[0].done()):
            self._begun.append(self._waiting.popleft())
        self._begun = [answer for answer in self._begun if not answer.done()]
        if len(self._begun) + len(self._waiting) <= most:
            self._free_at = now

    def gives_up(self, asked: Asked) -> bool:
        """Whether nobody waits for an answer any more. A question that was not asked yet then
        never is."""
        now = self._clock()
        # A question that has a thread to itself waits for no other, however late the thread is.
        self._note_free(now, self.THREADS)
        waited = now - asked.since
        is_standing = now >= self._free_at + self.STANDING_PART * self._patience
        if waited >= (min(self.STANDING_WAIT, self._patience) if is_standing else self._patience):
            asked.answer.cancel()  # without effect on one that a thread has begun
        return asked.answer.cancelled() or waited >= self._patience
