"""The guard: around any store, failure becomes a miss, here and nowhere else.

A store raises; what is guarded never does. A tier that fails is then left alone for a while by a
circuit breaker, so that a dead server costs one timeout a while, not one a request. Reads and
writes have a breaker each: a disk that takes nothing any more still gives what it has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from tiers.breaker import Breaker, Call
from tiers.errors import KVTiersError, RecordError, TierError, TierFull
from tiers.store import (
    Block,
    Clear,
    Damages,
    LocalIndex,
    Measured,
    TierStore,
    Touch,
    Usage,
    with_capabilities,
)
from tiers.tally import Tally

T = TypeVar("T")

_log = logging.getLogger(__name__)

RETRY_AFTER = 1.0
"""Seconds a failed tier is left alone at first; doubled by every trial that fails."""

RETRY_AFTER_MAX = 30.0
"""Seconds a failed tier is left alone at most."""


DEADLINE = 10.0
"""Seconds after which a verb that has not returned counts as failed."""


class Health(NamedTuple):
    """Whether a tier is asked for blocks (`reads`), and given any (`writes`); and whether those
    worked when they were last tried. Once the time for a trial has come a tier is asked that is
    not up."""

    reads: bool
    writes: bool
    reads_up: bool
    writes_up: bool


HEALTHY = Health(reads=True, writes=True, reads_up=True, writes_up=True)


class Guarded:
    """A TierStore that never raises: what fails is a miss. Made by `guard`, which see."""

    def __init__(self, store: TierStore, tier_name: str, make: Callable[[], Breaker]) -> None:
        self.tier_name = tier_name
        self.failures = Tally()
        """Calls that failed, by the error's name."""
        self._store: Any = store
        self._reads, self._writes = make(), make()
        # What needs no I/O proves nothing of what does; where it fails, that is left alone too.
        self._looks = make()
        self._closed = False

    @property
    def is_up(self) -> bool:
        """Whether reads and writes worked when they were last tried."""
        health = self.health
        return health.reads_up and health.writes_up

    @property
    def health(self) -> Health:
        """How the tier does now."""
        self._notice_late()
        reads = (self._reads, self._looks)
        return Health(
            not any(breaker.is_refusing() for breaker in reads),
            not self._writes.is_refusing(),
            all(breaker.is_closed for breaker in reads),
            self._writes.is_closed,
        )

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """As the store; a failure is False."""
        return self._ask_each(self._reads, "has", keys)

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        """As the store; a failure is False."""
        return self._ask_each(self._writes, "put", blocks)

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        """As the store; a failure is a miss."""
        return self._ask_each(self._reads, "get", blocks)

    def drop(self, keys: Sequence[bytes]) -> None:
        """As the store; a failure drops nothing."""
        self._ask(self._writes, lambda: self._store.drop(keys), otherwise=None)

    def close(self) -> None:
        """Close the store, also one that is down. Idempotent."""
        if not self._closed:
            self._closed = True
            self._try(self._store.close, None, self._writes, self._writes.enter())

    def _ask_each(self, breaker: Breaker, verb: str, items: Sequence[Any]) -> list[bool]:
        return self._ask(breaker, lambda: self._each(verb, items), otherwise=[False] * len(items))

    def _each(self, verb: str, items: Sequence[Any]) -> list[bool]:
        answers: list[bool] = getattr(self._store, verb)(items)
        if len(answers) != len(items):
            raise TierError(f"{verb} gave {len(answers)} answers for {len(items)}")
        return answers

    def _ask(self, breaker: Breaker, call: Callable[[], T], otherwise: T) -> T:
        self._notice_late()
        entered = breaker.enter()
        return otherwise if entered is None else self._try(call, otherwise, breaker, entered)

    def _look(self, call: Callable[[], T], otherwise: T) -> T:
        """Ask for what needs no I/O: it is no trial of reads."""
        self._notice_late()
        if self._reads.is_refusing():
            return otherwise
        entered = self._looks.enter()
        return otherwise if entered is None else self._try(call, otherwise, self._looks, entered)

    def _try(
        self, call: Callable[[], T], otherwise: T, breaker: Breaker, entered: Call | None
    ) -> T:
        try:
            result = call()
        except (TierFull, RecordError) as error:  # the tier did answer
            self.failures.count(type(error).__name__)
            result = otherwise
        except Exception as error:  # noqa: BLE001 - the one place: nothing may reach the engine
            self._fail(error, breaker, entered)
            return otherwise
        except BaseException:
            breaker.leave(entered)
            raise
        if entered is not None and breaker.succeeded(entered):
            _log.warning("tier %s: %s are up again", self.tier_name, self._name(breaker))
        return result

    def _fail(self, error: Exception, breaker: Breaker, entered: Call | None) -> None:
        self.failures.count(type(error).__name__)
        if entered is not None and breaker.failed(entered):
            # Where an error of ours came from is no news; a defect's place is.
            trace = None if isinstance(error, KVTiersError) else error
            self._say_down(breaker, f"{type(error).__name__}: {error}", trace)

    def _notice_late(self) -> None:
        for breaker in (self._reads, self._writes, self._looks):
            if breaker.notice_late():
                self.failures.count("Late")
                self._say_down(breaker, f"no answer after {breaker.deadline:g} s", None)

    def _say_down(self, breaker: Breaker, why: str, trace: Exception | None) -> None:
        _log.warning(
            "tier %s: %s are down (%s); tried again every %g s or more",
            self.tier_name,
            self._name(breaker),
            why,
            breaker.wait,
            exc_info=trace,
        )

    def _name(self, breaker: Breaker) -> str:
        return {self._reads: "reads", self._writes: "writes"}.get(breaker, "lookups")


class _Peek(Guarded):
    def peek(self, keys: Sequence[bytes]) -> list[bool]:
        """As the store; False while the tier is left alone."""
        return self._look(lambda: self._each("peek", keys), [False] * len(keys))


class _Touch(Guarded):
    def touch(self, keys: Sequence[bytes]) -> None:
        """As the store; nothing while the tier is left alone."""
        self._look(lambda: self._store.touch(keys), None)


class _Clear(Guarded):
    def clear(self, namespace: bytes) -> bool:
        """As the store; a failure ends it."""
        return self._ask(self._writes, lambda: bool(self._store.clear(namespace)), otherwise=False)


class _Damages(Guarded):
    def damaged(self) -> int:
        """As the store, also while the tier is left alone."""
        return self._try(lambda: cast(int, self._store.damaged()), 0, self._looks, None)


class _Measured(Guarded):
    def usage(self) -> Usage:
        """As the store; nothing held while the tier is left alone."""
        return self._look(lambda: cast(Usage, self._store.usage()), Usage(0, 0, None))


_CAPABILITIES: tuple[tuple[type, type[Guarded]], ...] = (
    (LocalIndex, _Peek),
    (Touch, _Touch),
    (Clear, _Clear),
    (Damages, _Damages),
    (Measured, _Measured),
)


def guard(
    store: TierStore,
    tier_name: str,
    *,
    retry_after: float = RETRY_AFTER,
    retry_after_max: float = RETRY_AFTER_MAX,
    deadline: float = DEADLINE,
    clock: Callable[[], float] = time.monotonic,
) -> Guarded:
    """Guard a store; the result owns it and has exactly the store's capabilities.

    No verb of the result raises. Every failure is counted by kind. One other than a full tier or
    a bad record, or a verb that takes longer than `deadline` seconds, also opens a breaker, that of
    reads, of writes, or of lookups in memory: the tier is left alone for `retry_after` seconds,
    then one call tries it; while trials fail the wait doubles up to `retry_after_max`. Going down
    and coming up are logged once each. All times are in seconds.
    """
    made = with_capabilities(Guarded, store, _CAPABILITIES)
    return made(store, tier_name, lambda: Breaker(retry_after, retry_after_max, deadline, clock))
