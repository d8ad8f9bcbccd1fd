"""LookupQueue: how stores behind a network are asked, beside the engine's steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from tiers.concurrency.executors import IoExecutor, wait_a_moment


class Reply(Future[list[bool]]):
    """The answer of a store behind a network. `at`: when it came, by the thread that asked."""

    at: float | None = None


class AskedKeys(NamedTuple):
    """A question to a store behind a network. `answer`: which keys from number `first` on are held;
    cancelled: nobody waited for it any more, and it was never asked. `since`: when it came up."""

    first: int
    answer: Reply
    since: float


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
