"""Answers: what a tier in memory said of a request, kept true while the request waits for room."""

from __future__ import annotations

from collections.abc import Sequence


class Changes:
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
        """How many changes there were so far."""
        return self._first + len(self._log)

    def since(self, count: int) -> Sequence[tuple[bytes, bool]] | None:
        """The changes after the first `count`; None: not all of them are known any more."""
        return self._log[count - self._first :] if count >= self._first else None


class Answers:
    """Which keys of one request a tier holds; used by the scheduler's thread.

    A request that waits for room is asked about in every step. So what the tier said is kept, and
    corrected by what changes: a step costs as much as it changes, however long the prompt is.
    `version` tells other answers apart. `checked`: when some were last compared with the tier.
    """

    def __init__(self) -> None:
        self.version = 0
        self.checked = 0.0
        self._first = 0
        self._held: list[bool] = []
        self._seen = 0
        self._next = 0
        self._numbers: dict[bytes, int] = {}

    def renew(self) -> None:
        """Forget all answers."""
        self._held, self._numbers = [], {}
        self.version += 1

    def unknown(self, asked: range, changes: Changes) -> range:
        """Which of these numbers were not asked for before: `add` what the tier says of them."""
        if self._held and not self._first <= asked.start <= self._first + len(self._held):
            self.renew()  # the engine has computed more of it since, or less
        if not self._held:
            self._first = self._next = asked.start
            self._seen = changes.count
        return range(self._first + len(self._held), asked.stop)

    def add(self, held: Sequence[bool]) -> None:
        """The tier says this of the numbers that were unknown."""
        self._held += held
        self._numbers = {}

    def of(self, asked: range) -> list[bool]:
        """Which keys of these numbers are held; none is unknown."""
        return self._held[asked.start - self._first : asked.stop - self._first]

    def follow(self, changes: Changes, keys: Sequence[bytes]) -> None:
        """Correct the answers by what has changed. `keys`: all of the request's."""
        if not self._held or self._seen == changes.count:
            return
        news = changes.since(self._seen)
        self._seen = changes.count
        if news is None:
            self.renew()
            return
        if not self._numbers:
            answered = range(self._first, self._first + len(self._held))
            self._numbers = {keys[number]: number for number in answered}
        for key, held in news:
            number = self._numbers.get(key)
            if number is not None:
                self._correct(number, held)

    def to_check(self, count: int) -> range:
        """The next numbers, `count` at most, whose answers are to be compared with the tier."""
        stop = self._first + len(self._held)
        begins = count >= len(self._held) or self._next >= stop
        start = self._first if begins else self._next
        self._next = min(start + count, stop)
        return range(start, self._next)

    def correct(self, numbers: range, held: Sequence[bool]) -> None:
        """The tier says this of the keys of these numbers."""
        for number, one in zip(numbers, held, strict=True):
            self._correct(number, one)

    def _correct(self, number: int, held: bool) -> None:
        if self._held[number - self._first] != held:
            self._held[number - self._first] = held
            self.version += 1
