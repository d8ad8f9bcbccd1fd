"""Lookups: what one tier was asked of one request, and how stores behind a network are asked."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from tiers.concurrency.executors import IoExecutor, wait_a_moment
from tiers.contract.messages import NO_LOOKUP_TIMES, LookupTimes


class Reply(Future[list[bool]]):
    """The answer of a store behind a network. `at`: when it came, by the thread that asked."""

    at: float | None = None


class AskedKeys(NamedTuple):
    """A question to a store behind a network. `answer`: which keys from number `first` on are held;
    cancelled: nobody waited for it any more, and it was never asked. `since`: when it came up."""

    first: int
    answer: Reply
    since: float


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


class _KeyQuestion(NamedTuple):
    """Keys that a store is to be asked for, and the answer."""

    keys: Sequence[bytes]
    answer: Reply


_REFUSED = Reply()
_REFUSED.cancel()


class LookupQueue:
    """Questions to a store behind a network, first come first asked; used by the scheduler's
    thread.

    A thread asks for its share of the queue in one call: each call takes several turns for the
    interpreter's lock. What nobody waits for any more is never asked, and what would wait in vain
    is refused at once, which costs next to nothing. So past the store's capacity each answer still
    serves a request. How many questions may wait depends on the queue. One that was empty of late
    holds a burst, which is worth waiting for. One that has been standing makes all wait as long and
    answers no more of them, so it takes what is answered soon. The rule is that of CoDel (Nichols
    and Jacobson, 2012) as servers use it (Maurer, "Fail at Scale", 2015), but for the end that is
    cut.
    """

    THREADS = 4
    """Calls at once. A store behind a network answers as many times more of them as long as it is
    waited for; what is computed for one is the interpreter's, one thread at a time."""
    TOGETHER = 1024
    """Keys of a call, unless one question has more; of each rank."""
    BURST_PART = 0.5
    """The part of what a request waits for which a queue may stand. It is used up while questions
    wait for a thread, and comes back while none does."""
    STANDING_WAIT = 0.01
    """Seconds for which a question then waits for a thread, beside one of the engine's steps."""

    def __init__(
        self,
        look: Callable[[Sequence[Sequence[bytes]]], list[bool]],
        patience: float,
        clock: Callable[[], float],
    ) -> None:
        """`look` asks the store, on a thread, about the keys of some questions, one
        after another. `patience`: seconds that a request waits for an answer. `clock` gives
        seconds."""
        self.threads = IoExecutor(self.THREADS, "lookup")
        self._look = look
        self._clock = clock
        # Without it a call that ends would be counted while another is taken, and be lost.
        self._lock = threading.Lock()
        self._waiting: deque[_KeyQuestion] = deque()
        self._calls: list[list[_KeyQuestion]] = []
        self._asked_for = self._answered = self._each = 0.0
        self.wait_at_most(patience)
        self._spare, self._is_free = self._most_spare, True
        self._noted = self._came = self._since = clock()
        self._step = self._step_before = 0.0

    def wait_at_most(self, seconds: float) -> None:
        """Requests wait so long for an answer from now on."""
        self._patience, self._most_spare = seconds, self.BURST_PART * seconds

    def ask(self, keys: Sequence[bytes], first: int) -> AskedKeys:
        """Have a thread look up the keys from number `first` on, or refuse to."""
        now = self._now()
        with self._lock:
            self._note_free(now)
            wait = len(self._waiting) * self._each
            if not self._is_free and wait >= max(self._spare, self._soon()):
                return AskedKeys(first, _REFUSED, now)
            question = _KeyQuestion(keys[first:], Reply())
            self._waiting.append(question)
            self._note_free(now)
        self.threads.submit(self._answer)
        return AskedKeys(first, question.answer, now)

    def wait_a_moment(self) -> None:
        """Wait for an answer, if any is in flight: the step has nothing to compute."""
        with self._lock:
            self._note_free(self._now())
            asked = [question.answer for some in (*self._calls, self._waiting) for question in some]
        wait_a_moment(asked)

    def gives_up(self, asked: AskedKeys) -> bool:
        """Whether nobody waits for an answer any more. A question that was not asked yet then
        never is."""
        now = self._now()
        with self._lock:
            self._note_free(now)
        waited = now - asked.since
        # More than was expected where the store has become slow, or hangs.
        if waited >= (self._patience if self._spare else 2 * self._soon()):
            asked.answer.cancel()  # without effect on one that a thread has begun
        return asked.answer.cancelled() or waited >= self._patience

    def _now(self) -> float:
        """The time. An engine asks at the beginning of each step, so that a step is a pause."""
        now = self._clock()
        if now >= self._since + self._most_spare:
            self._since, self._step_before, self._step = now, self._step, 0.0
        self._step = max(self._step, now - self._came)
        self._came = now
        return now

    def _soon(self) -> float:
        """Seconds that a question may wait in a queue that stands, by the longest step of late."""
        step = max(self._step, self._step_before)
        return min(self.STANDING_WAIT + step, self._most_spare)

    def _note_free(self, now: float) -> None:
        """Count the time since the last call, and note whether no question waits from now on."""
        while self._waiting and self._waiting[0].answer.cancelled():
            self._waiting.popleft()
        passed, self._noted = max(0.0, now - self._noted), max(now, self._noted)
        spare = self._spare + (passed if self._is_free else -passed)
        self._spare = min(max(0.0, spare), self._most_spare)
        # A question that has a thread to itself waits for no other, however late the thread is.
        self._is_free = len(self._waiting) + len(self._calls) <= self.THREADS

    # -- its threads -------------------------------------------------------------------------

    def _answer(self) -> None:
        """Answer this thread's share of what waits, if anything does."""
        call, began = self._next_call(), self._clock()
        if not call:
            return
        try:
            held = self._look([question.keys for question in call])
        except BaseException as error:  # noqa: BLE001 - raised where the answer is asked for
            for question in call:
                question.answer.set_exception(error)
            now = self._clock()
        else:
            start, now = 0, self._clock()
            for question in call:
                question.answer.at = now
                question.answer.set_result(held[start : start + len(question.keys)])
                start += len(question.keys)
        with self._lock:
            self._calls.remove(call)
            self._note_free(now)
            # Of sums: a short call behind a long one takes as long.
            self._asked_for = 0.9 * self._asked_for + now - began
            self._answered = 0.9 * self._answered + len(call)
            self._each = self._asked_for / self._answered / self.THREADS

    def _next_call(self) -> list[_KeyQuestion]:
        call: list[_KeyQuestion] = []
        with self._lock:
            self._note_free(self._clock())
            share, keys = self._share(), 0
            while self._waiting and (not call or (len(call) < share and keys < self.TOGETHER)):
                question = self._waiting.popleft()
                if question.answer.set_running_or_notify_cancel():
                    call.append(question)
                    keys += len(question.keys)
            if call:
                self._calls.append(call)
            self._note_free(self._noted)
        return call

    def _share(self) -> int:
        """Questions of a call: a thread's part, if a call of that many is answered soon."""
        soon = int(self._soon() / (self.THREADS * self._each)) if self._each else 1
        return min(-(-len(self._waiting) // self.THREADS), soon)
