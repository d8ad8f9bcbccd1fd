"""The guard: around any store, failure becomes a miss, here and nowhere else.

A store raises; what is guarded never does. A tier that fails is then left alone for a while by a
circuit breaker, so that a dead server costs one timeout a while, not one a request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, TypeVar, cast

from tiers.errors import KVTiersError, RecordError, TierError, TierFull
from tiers.store import Block, Clear, LocalIndex, Measured, TierStore, Touch, Usage

T = TypeVar("T")

_log = logging.getLogger(__name__)

RETRY_AFTER = 1.0
"""Seconds a failed tier is left alone at first; doubled by every trial that fails."""

RETRY_AFTER_MAX = 30.0
"""Seconds a failed tier is left alone at most."""


class Entry(Enum):
    """What a breaker says to a call."""

    REFUSED = "refused"
    ALLOWED = "allowed"
    TRIAL = "trial"


class Breaker:
    """Closed while calls work; open after a failure; one trial call each time the wait is over.

    Thread-safe; its lock is never held during I/O. `clock` gives seconds, never going back.
    """

    def __init__(self, retry_after: float, retry_after_max: float, clock: Callable[[], float]):
        self._first = self._wait = retry_after
        self._longest = retry_after_max
        self._clock = clock
        self._retry_at: float | None = None
        # Without it two callers could both take the one trial, and double the wait twice.
        self._lock = threading.Lock()

    @property
    def is_closed(self) -> bool:
        """Whether calls go through."""
        return self._retry_at is None

    @property
    def wait(self) -> float:
        """Seconds between trials now."""
        return self._wait

    def is_refusing(self) -> bool:
        """Whether a call would be refused now. Takes no trial."""
        retry_at = self._retry_at
        return retry_at is not None and self._clock() < retry_at

    def enter(self) -> Entry:
        """Ask to make a call; its outcome goes to `succeeded` or `failed`."""
        with self._lock:
            if self._retry_at is None:
                return Entry.ALLOWED
            now = self._clock()
            if now < self._retry_at:
                return Entry.REFUSED
            # The next trial has a time already, so a trial that never ends blocks nothing.
            self._retry_at = now + self._wait
            return Entry.TRIAL

    def succeeded(self, entry: Entry) -> bool:
        """Report that the store answered; True if that closed the breaker."""
        with self._lock:
            # A call let in before the tier failed says nothing about it now.
            if entry is not Entry.TRIAL or self._retry_at is None:
                return False
            self._retry_at = None
            self._wait = self._first
            return True

    def failed(self, entry: Entry) -> bool:
        """Report that the store did not answer; True if that opened the breaker."""
        with self._lock:
            opened = self._retry_at is None
            if entry is Entry.TRIAL and not opened:
                self._wait = min(self._wait * 2, self._longest)
            if opened or entry is Entry.TRIAL:
                self._retry_at = self._clock() + self._wait
            return opened


class Failures:
    """How often a tier failed, by kind (the error's name). Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()  # a Counter's += reads, then writes: two would count one

    def count(self, kind: str) -> None:
        """Add one."""
        with self._lock:
            self._counts[kind] += 1

    def by_kind(self) -> dict[str, int]:
        """The counts now."""
        with self._lock:
            return dict(self._counts)

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.by_kind().values())


class Guarded:
    """A TierStore that never raises: what fails is a miss. Made by `guard`, which see."""

    def __init__(self, store: TierStore, tier_name: str, breaker: Breaker) -> None:
        self.tier_name = tier_name
        self.failures = Failures()
        self._store: Any = store
        self._breaker = breaker
        self._closed = False

    @property
    def is_up(self) -> bool:
        """Whether the tier worked when it was last asked."""
        return self._breaker.is_closed

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """As the store; a failure is False."""
        return self._ask_each("has", keys)

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        """As the store; a failure is False."""
        return self._ask_each("put", blocks)

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        """As the store; a failure is a miss."""
        return self._ask_each("get", blocks)

    def drop(self, keys: Sequence[bytes]) -> None:
        """As the store; a failure drops nothing."""
        self._ask(lambda: self._store.drop(keys), otherwise=None)

    def close(self) -> None:
        """Close the store, also one that is down. Idempotent."""
        if not self._closed:
            self._closed = True
            self._call(self._store.close, None, Entry.ALLOWED)

    def _ask_each(self, verb: str, items: Sequence[Any]) -> list[bool]:
        return self._ask(lambda: self._each(verb, items), otherwise=[False] * len(items))

    def _each(self, verb: str, items: Sequence[Any]) -> list[bool]:
        answers: list[bool] = getattr(self._store, verb)(items)
        if len(answers) != len(items):
            raise TierError(f"{verb} gave {len(answers)} answers for {len(items)}")
        return answers

    def _ask(self, call: Callable[[], T], otherwise: T) -> T:
        entry = self._breaker.enter()
        return otherwise if entry is Entry.REFUSED else self._call(call, otherwise, entry)

    def _look(self, call: Callable[[], T], otherwise: T) -> T:
        """Ask for what needs no I/O: it proves nothing, so it never is the trial."""
        if self._breaker.is_refusing():
            return otherwise
        return self._call(call, otherwise, Entry.ALLOWED)

    def _call(self, call: Callable[[], T], otherwise: T, entry: Entry) -> T:
        try:
            result = call()
        except (TierFull, RecordError) as error:  # the tier did answer
            self.failures.count(type(error).__name__)
            result = otherwise
        except Exception as error:  # noqa: BLE001 - the one place: nothing may reach the engine
            self._fail(error, entry)
            return otherwise
        if self._breaker.succeeded(entry):
            _log.warning("tier %s is up again", self.tier_name)
        return result

    def _fail(self, error: Exception, entry: Entry) -> None:
        self.failures.count(type(error).__name__)
        if self._breaker.failed(entry):
            _log.warning(
                "tier %s is down (%s: %s); asked again every %g s or more",
                self.tier_name,
                type(error).__name__,
                error,
                self._breaker.wait,
                # Where an error of ours came from is no news; a defect's place is.
                exc_info=None if isinstance(error, KVTiersError) else error,
            )


class _Peek(Guarded):
    def peek(self, keys: Sequence[bytes]) -> list[bool]:
        """As the store; False while the tier is left alone."""
        return self._look(lambda: self._each("peek", keys), [False] * len(keys))


class _Touch(Guarded):
    def touch(self, keys: Sequence[bytes]) -> None:
        """As the store; nothing while the tier is left alone."""
        self._look(lambda: self._store.touch(keys), None)


class _Clear(Guarded):
    def clear(self, namespace: bytes) -> None:
        """As the store; a failure clears nothing."""
        self._ask(lambda: self._store.clear(namespace), otherwise=None)


class _Measured(Guarded):
    def usage(self) -> Usage:
        """As the store; nothing held while the tier is left alone."""
        return self._look(lambda: cast(Usage, self._store.usage()), Usage(0, 0, None))


_CAPABILITIES: tuple[tuple[type, type[Guarded]], ...] = (
    (LocalIndex, _Peek),
    (Touch, _Touch),
    (Clear, _Clear),
    (Measured, _Measured),
)


def guard(
    store: TierStore,
    tier_name: str,
    *,
    retry_after: float = RETRY_AFTER,
    retry_after_max: float = RETRY_AFTER_MAX,
    clock: Callable[[], float] = time.monotonic,
) -> Guarded:
    """Guard a store; the result owns it and has exactly the store's capabilities.

    No verb of the result raises. Every failure is counted by kind. One other than a full tier or
    a bad record also opens the breaker: the tier is left alone for `retry_after` seconds, then
    one call tries it; while trials fail the wait doubles up to `retry_after_max`. Going down and
    coming up are logged once each.
    """
    shared = tuple(made for capability, made in _CAPABILITIES if isinstance(store, capability))
    # A class with just those methods: capabilities are found by isinstance, so a method that the
    # store lacks must not exist.
    made = type("Guarded", shared, {}) if shared else Guarded
    breaker = Breaker(retry_after, retry_after_max, clock)
    return cast(Guarded, made(store, tier_name, breaker))
