"""The guard: around any store, failure becomes a miss, here and nowhere else.

A store raises; what is guarded never does. A tier that fails is then left alone for a while by a
circuit breaker, so that a dead server costs one timeout a while, not one a request. Reads and
writes have a breaker each: a disk that takes nothing any more still gives what it has.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from tiers.breaker import Breaker, Call
from tiers.concurrency.counter import LockedCounter
from tiers.errors import KVTiersError, RecordError, TierError, TierFull
from tiers.store import (
    Block,
    Capability,
    Clear,
    Damages,
    Described,
    LocalIndex,
    Measured,
    StoreWrapper,
    TierStore,
    Touch,
    Usage,
    capability,
    each,
)
from tiers.wrappers.guard_log import GuardLog

T = TypeVar("T")

RETRY_AFTER = 1.0
"""Seconds a failed tier is left alone at first; doubled by every trial that fails."""

RETRY_AFTER_MAX = 30.0
"""Seconds a failed tier is left alone at most."""

DEADLINE = 10.0
"""Seconds after which a verb that has not returned counts as failed."""

CLOSE_SECONDS = 30.0
"""How long closing a store is waited for; it goes on behind, until the process ends."""


class Health(NamedTuple):
    """Whether a tier is asked for blocks (`reads`), and given any (`writes`); and whether those
    worked when they were last tried. Once the time for a trial has come a tier is asked that is
    not up."""

    reads: bool
    writes: bool
    reads_up: bool
    writes_up: bool


HEALTHY = Health(reads=True, writes=True, reads_up=True, writes_up=True)


class Guarded(StoreWrapper):
    """A TierStore that never raises: what fails is a miss. Made by `guard`, which see."""

    def __init__(
        self, store: TierStore, tier_name: str, make: Callable[[], Breaker], is_prompt: bool
    ) -> None:
        super().__init__(store)
        self.tier_name = tier_name
        self.failures = LockedCounter()
        """Calls that failed, by the error's name."""
        self._is_prompt = is_prompt
        self._reads, self._writes = make(), make()
        # What needs no I/O proves nothing of what does; where it fails, that is left alone too.
        self._looks = make()
        names = {self._reads: "reads", self._writes: "writes", self._looks: "lookups"}
        self._log = GuardLog(tier_name, names)
        self._damaged = 0
        self._closed = False

    def capability(self, kind: type[Capability]) -> Capability | None:
        """As the store; but an index that may not be prompt is none: `has` asks it."""
        if kind is LocalIndex and not self._is_prompt:
            return None
        has = self._try(lambda: capability(self._inner, kind) is not None, False, self._looks, None)
        return cast(Capability, self) if has else None

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
        return self._ask(self._reads, lambda: self._got(blocks), otherwise=[False] * len(blocks))

    def _got(self, blocks: Sequence[Block]) -> list[bool]:
        got = self._each("get", blocks)
        damages = capability(self._inner, Damages)
        if damages is not None:
            found: object = damages.damaged()
            if type(found) is not int:
                raise TierError(f"damaged answered a {type(found).__name__}")
            self._log.damaged(found - self._damaged)
            self._damaged = found
        return got

    def drop(self, keys: Sequence[bytes]) -> None:
        """As the store; a failure drops nothing."""
        self._ask(self._writes, lambda: self._inner.drop(keys), otherwise=None)

    def close(self) -> None:
        """Close the store, also one that is down; waits `CLOSE_SECONDS` at most. Idempotent."""
        if self._closed:
            return
        self._closed = True
        entered = self._writes.enter()
        # A daemon: a close that hangs must not keep the process from its end.
        closing = threading.Thread(
            target=lambda: self._try(self._inner.close, None, self._writes, entered), daemon=True
        )
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            self.failures.count("Late")
            self._log.hangs_in_close(CLOSE_SECONDS)

    def peek(self, keys: Sequence[bytes]) -> list[bool]:
        """As the store; False while the tier is left alone."""
        return self._look(lambda: self._each("peek", keys), [False] * len(keys))

    def touch(self, keys: Sequence[bytes]) -> None:
        """As the store; nothing while the tier is left alone."""
        self._look(lambda: self._inner_as(Touch).touch(keys), None)

    def clear(self, namespace: bytes) -> bool:
        """As the store; a failure ends it."""
        # Only True: what is merely not false might be so for ever.
        return self._ask(
            self._writes, lambda: self._inner_as(Clear).clear(namespace) is True, otherwise=False
        )

    def damaged(self) -> int:
        """As the store has said after the last load that worked; it is not asked."""
        return self._damaged

    def usage(self) -> Usage:
        """As the store; nothing held while the tier is left alone."""
        return self._look(self._usage, Usage(0, 0, None))

    def describe(self) -> str:
        """As the store; nothing while the tier is left alone."""
        return self._look(lambda: str(self._inner_as(Described).describe()), "")

    def _usage(self) -> Usage:
        found: object = self._inner_as(Measured).usage()
        if not isinstance(found, Usage):
            raise TierError(f"usage answered a {type(found).__name__}")
        return found

    def _ask_each(self, breaker: Breaker, verb: str, items: Sequence[Any]) -> list[bool]:
        return self._ask(breaker, lambda: self._each(verb, items), otherwise=[False] * len(items))

    def _each(self, verb: str, items: Sequence[Any]) -> list[bool]:
        return each(verb, getattr(self._inner, verb)(items), len(items))

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
        except BaseException as error:
            # A process is told to stop on its first thread; elsewhere it is the store that exits.
            if threading.current_thread() is threading.main_thread():
                breaker.leave(entered)
                raise
            self._fail(error, breaker, entered)
            return otherwise
        if entered is not None and breaker.succeeded(entered):
            self._log.up(breaker)
        return result

    def _fail(self, error: BaseException, breaker: Breaker, entered: Call | None) -> None:
        self.failures.count(type(error).__name__)
        if entered is not None and breaker.failed(entered):
            # Where an error of ours came from is no news; a defect's place is.
            trace = None if isinstance(error, KVTiersError) else error
            self._log.down(breaker, f"{type(error).__name__}: {error}", trace)

    def _notice_late(self) -> None:
        for breaker in (self._reads, self._writes, self._looks):
            if breaker.notice_late():
                self.failures.count("Late")
                self._log.down(breaker, f"no answer after {breaker.deadline:g} s", None)


def guard(
    store: TierStore,
    tier_name: str,
    *,
    retry_after: float = RETRY_AFTER,
    retry_after_max: float = RETRY_AFTER_MAX,
    deadline: float = DEADLINE,
    clock: Callable[[], float] = time.monotonic,
    is_prompt: bool = True,
) -> Guarded:
    """Guard a store; the result owns it and has the store's capabilities.

    `is_prompt`: whether `peek` can be relied on never to wait, so that the engine's own thread may
    call it. Otherwise the result has no LocalIndex.

    No verb of the result raises. Every failure is counted by kind. One other than a full tier or
    a bad record, or a verb that takes longer than `deadline` seconds, also opens a breaker, that of
    reads, of writes, or of lookups in memory: the tier is left alone for `retry_after` seconds,
    then one call tries it; while trials fail the wait doubles up to `retry_after_max`. Going down
    and coming up are logged; where they repeat, a sum each minute is. All times are in seconds.
    """
    return Guarded(
        store,
        tier_name,
        lambda: Breaker(retry_after, retry_after_max, deadline, clock),
        is_prompt,
    )
