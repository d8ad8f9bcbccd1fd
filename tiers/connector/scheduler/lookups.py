"""Lookups: what one tier was asked of one request, and answered."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from tiers.connector.scheduler.lookup_queue import AskedKeys
from tiers.contract.messages import NO_LOOKUP_TIMES, LookupTimes


class HeldLog:
    """What a tier has come to hold, or has lost, so far as this process learns of it.

    Keeps the last `LIMIT` changes at least; one step makes fewer. Used by the scheduler's thread.
    """

    LIMIT = 4096

    def __init__(self) -> None:
        self._log: list[tuple[bytes, bool]] = []
        self._first = 0

    def note(self, key: bytes, held: bool) -> None:
        """The tier holds this block from now on, or no more."""
        self._log.append((key, held))
        if len(self._log) > 2 * self.LIMIT:
            del self._log[: self.LIMIT]
            self._first += self.LIMIT

    def forget(self) -> None:
        """Anything may have changed: answers of before are asked for anew."""
        self._first += len(self._log) + 1
        self._log.clear()

    @property
    def count(self) -> int:
        return self._first + len(self._log)

    def since(self, count: int) -> Sequence[tuple[bytes, bool]] | None:
        """The changes after the first `count`; None: not all of them are known any more."""
        return self._log[count - self._first :] if count >= self._first else None


class LookupTimer:
    """How long one tier takes to answer about a request, and how long its answer then lies until
    the engine's next step; used by the scheduler's thread.

    `times`: of the answers that hold now. What a tier answers in the call itself, perhaps in
    several steps, takes the time within those calls.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """The request begins: what comes is of the next time."""
        self.forget()
        self._next()

    def forget(self) -> None:
        """Drop the times of answers that hold no more."""
        self.times = NO_LOOKUP_TIMES

    def _next(self) -> None:
        self._since: float | None = None
        self._within = 0.0
        self._of_thread: tuple[float, float] | None = None

    def answered_by_thread(self, answer: float, lay: float) -> None:
        """A thread had the answer that is taken now, `answer` seconds after the question and `lay`
        seconds ago."""
        self._of_thread = answer, lay

    def asked(self, began: float, now: float) -> None:
        """The tier was asked from `began` to `now`, and has no answer yet."""
        self._since = began if self._since is None else self._since
        self._within += now - began

    def went_down(self, now: float) -> None:
        """The tier is not asked any more: what the request waited for had no answer."""
        if self._since is not None:
            self.answered_by_thread(now - self._since, 0.0)
            self.answered(now, now)

    def answered(self, began: float, now: float) -> None:
        """The tier was asked from `began` to `now`, and has answered."""
        self.asked(began, now)
        waited = now - (began if self._since is None else self._since)
        answer, lay = self._of_thread or (self._within, waited - self._within)
        # The engine asks later than the tier answers where the question came up before.
        times = LookupTimes(answer, min(lay, waited), waited)
        self.times = LookupTimes(*map(sum, zip(self.times, times, strict=True)))
        self._next()


class Lookup:
    """Answers of one tier for one request, each kept for a while; used by the scheduler's thread.

    A request that waits for room is asked about in every step. So what a tier in memory answers is
    kept, and corrected by what changes: a step costs as much as it changes, however long the prompt
    is. `version` changes with the answers. `asked`: the question to a store behind a network, whose
    answer is good `until` then.
    """

    LAP_SECONDS = 1.0
    """Seconds until a request's answers are compared anew: those behind it have what is left."""

    def __init__(self) -> None:
        self.timer = LookupTimer()
        self.version = 0
        self.asked: AskedKeys | None = None
        self.until = math.inf
        self._is_noted = False
        self._first = self._next = self._seen = 0
        self._lap = -math.inf
        self._held: list[bool] = []
        self._numbers: dict[bytes, int] = {}

    def renew(self) -> None:
        self.cancel()
        self.timer.forget()
        self.asked, self.until, self._is_noted = None, math.inf, False
        self._renew_held()

    def _renew_held(self) -> None:
        self._held, self._numbers = [], {}
        self.version += 1

    # -- of a tier in memory -----------------------------------------------------------------

    def unknown(self, asked: range, changes: HeldLog) -> range:
        """Which of these numbers were not asked for before: `add` what the tier answers."""
        if self._held and not self._first <= asked.start <= self._first + len(self._held):
            self._renew_held()  # the engine has computed more of it since, or less
        if not self._held:
            self._first = self._next = asked.start
            self._seen = changes.count
        return range(self._first + len(self._held), asked.stop)

    def add(self, held: Sequence[bool]) -> None:
        """Take in the answers for the numbers that were unknown."""
        self._held += held
        self._numbers = {}

    def of(self, asked: range) -> list[bool]:
        """Which keys of these numbers are held; none is unknown."""
        return self._held[asked.start - self._first : asked.stop - self._first]

    def follow(self, changes: HeldLog, keys: Sequence[bytes]) -> None:
        """Correct the answers by what has changed. `keys`: all of the request's."""
        if not self._held or self._seen == changes.count:
            return
        news = changes.since(self._seen)
        self._seen = changes.count
        if news is None:
            self._renew_held()
            return
        if not self._numbers:
            answered = range(self._first, self._first + len(self._held))
            self._numbers = {keys[number]: number for number in answered}
        for key, held in news:
            number = self._numbers.get(key)
            if number is not None:
                self._correct(number, held)

    def to_check(self, count: int, now: float) -> range:
        """The next numbers, `count` at most, whose answers are to be compared with the tier: all in
        a lap, and no more of them until `LAP_SECONDS` after it began."""
        stop = self._first + len(self._held)
        ends = count >= len(self._held) or self._next >= stop
        if ends and now >= self._lap + self.LAP_SECONDS:
            self._next = self._first
        start, self._next = self._next, min(self._next + count, stop)
        if start == self._first:
            self._lap = now
        return range(start, self._next)

    def correct(self, numbers: range, held: Sequence[bool]) -> None:
        """Take in the answers of now for these numbers."""
        for number, is_held in zip(numbers, held, strict=True):
            self._correct(number, is_held)

    def _correct(self, number: int, held: bool) -> None:
        if self._held[number - self._first] != held:
            self._held[number - self._first] = held
            self.version += 1

    # -- of a store behind a network ---------------------------------------------------------

    def taken(self, now: float) -> None:
        """The answer is taken, or given up; only the first time counts."""
        if self.asked is not None and not self._is_noted:
            self._is_noted = True
            at = now if self.asked.answer.at is None else self.asked.answer.at
            self.timer.answered_by_thread(at - self.asked.since, now - at)

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


class LookupPace:
    """Names that an index may be asked for now; used by the scheduler's thread.

    A name costs that thread 0.2 to 0.4 us, and its block another microsecond, so that a long prompt
    would hold up all requests that decode. It is looked up over several steps instead, while it
    waits for its turn; and so is what a hint is about. A short question costs a step little, and is
    not held back by long ones; of many together each waits for those before it.
    """

    OF_A_BLOCK = 3
    """So many names cost what else a block does: its key, and the question to the tiers above."""
    AT_ONCE = 16_384
    """Names of a step, at most: about 5 ms."""
    A_SECOND = 1_600_000.0
    """For each second that is not spent on such a question: half of the thread's time or less, so
    that an idle engine answers about as soon."""
    FEW, OF_SHORT = 2048, 0.25
    """Names of a short question; the part of what long ones have that these have beside them."""

    def __init__(self, ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`ranks`: names of a block. `clock`: of the machine, since it is its time that is spent,
        in seconds."""
        self._names = ranks + self.OF_A_BLOCK
        self._clock = clock
        self._left = self._left_of_short = float(self.AT_ONCE)
        self._at = clock()

    def is_short(self, blocks: int) -> bool:
        """Whether a question about `blocks` is short, and not one of too many."""
        return blocks * self._names <= self.FEW and self._left_of_short > 0

    def take(self, blocks: int) -> int:
        """How many of `blocks` are looked up now."""
        now = self._clock()
        more, self._at = (now - self._at) * self.A_SECOND, now
        self._left = min(self._left + more, self.AT_ONCE)
        self._left_of_short = min(self._left_of_short + more, self.AT_ONCE)
        if self.is_short(blocks):
            self._left_of_short -= blocks * self._names / self.OF_SHORT
            return blocks
        # Not a few names for each that waits: a call costs as much as a hundred.
        may = int(self._left) if self._left >= self.FEW else 0
        blocks = min(blocks, may // self._names)
        self._left -= blocks * self._names
        return blocks

    def took(self) -> None:
        """Those were looked up. The time that took allows for nothing: each of many long prompts
        that wait would otherwise be given as much as the first, all in one step."""
        self._at = self._clock()
