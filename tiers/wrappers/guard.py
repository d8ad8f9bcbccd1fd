"""Who decides that a tier is down? The guard, which turns any failure of a store into a miss.

A store may raise; a guarded store never does. A circuit breaker leaves a failed tier alone for a
while, so that a dead server costs one timeout at each retry instead of one at each request. Reads
and writes have a breaker each: a disk that refuses writes still serves what it has.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import partial
from operator import add
from typing import Any, NamedTuple, cast

from spec.errors import class_name, describe_error
from tiers.breaker import RETRY_AFTER, RETRY_AFTER_MAX, Breaker, Call
from tiers.concurrency.counter import LockedCounter
from tiers.concurrency.executors import in_background, is_ending
from tiers.concurrency.repeated_log import RepeatedLog
from tiers.errors import (
    KVTiersError,
    RecordError,
    TierError,
    TierFull,
    TierNotOpen,
    TierUnavailable,
    ends_process,
)
from tiers.store import (
    Block,
    Capability,
    Capable,
    Clear,
    Counts,
    Damages,
    Described,
    LocalIndex,
    Measured,
    Packs,
    PacksWindows,
    PutCounts,
    Recent,
    RecentBlocks,
    Remembers,
    Resizable,
    TierStore,
    Touch,
    Usage,
    Waiting,
    Warns,
    capability,
    each,
    required,
    time_left,
)
from tiers.wrappers.put_process import PutsApart
from tiers.wrappers.reopening import Reopening

logger = logging.getLogger(__name__)

DEADLINE = 10.0
"""Seconds after which a verb that has not returned counts as failed."""

MAX_COUNT = 2**63
"""No store counts as many blocks, and a larger number fits no metric."""

MOST_CAUSES = 8
"""Named in the log of one time that a tier is down: some errors have a number in each."""

CLOSE_SECONDS = 15.0
"""Seconds to wait for a store to close, by default, of which an engine has two; the close continues
in the background until the process ends."""


class Health(NamedTuple):
    """How a tier does. `reads`, `writes`: calls go through now. `reads_up`, `writes_up`: the last
    one worked. When a retry is due, calls go through although the last one failed. `opening`: it
    has yet to open for the first time. `is_degraded`: it works, and not as its settings ask for.
    `why`: the last error, or what it warns of, where it does not work as it should."""

    reads: bool
    writes: bool
    reads_up: bool
    writes_up: bool
    opening: bool = False
    is_degraded: bool = False
    why: str = ""


HEALTHY = Health(reads=True, writes=True, reads_up=True, writes_up=True)
FAILED = Health(reads=False, writes=False, reads_up=False, writes_up=False)


def warned(why: str, health: Health = HEALTHY) -> Health:
    """The health of what also warns of something; nothing: an empty text."""
    return health._replace(is_degraded=True, why=health.why or why) if why else health


class Guarded(Capable):
    """A TierStore over another that never raises: a failure is a miss. Thread-safe. It closes the
    other, and has the capabilities that this has now; ask `capability`, not isinstance. A tier that
    is left alone holds nothing.

    A failure other than TierFull and RecordError, or a verb that takes longer than `deadline`,
    opens the breaker of reads, of writes, or of lookups in memory, as do calls that their callers
    gave up before anything had come (see `Breaker`): the tier is left alone for
    `retry_after`, then one call tries it; while trials fail, the wait doubles up to
    `retry_after_max`. Changes are logged; if they repeat, a sum each minute is. All times are in
    seconds.

    `store`: or a `Reopening`, of which the open one is asked; there is none until the first has
    opened, and after one is lost.
    `is_prompt`: `peek` never waits, so the engine's thread may call it. Otherwise the result has no
    LocalIndex.
    """

    def __init__(
        self,
        store: TierStore | Reopening,
        tier_name: str,
        *,
        retry_after: float = RETRY_AFTER,
        retry_after_max: float = RETRY_AFTER_MAX,
        deadline: float = DEADLINE,
        clock: Callable[[], float] = time.monotonic,
        is_prompt: bool = True,
    ) -> None:
        self._source = store
        self.tier_name = tier_name
        self.failures = LockedCounter()
        """Calls that failed, by the error's name."""
        self._is_prompt = is_prompt
        # Lookups without I/O have a breaker of their own: that they work proves nothing of reads.
        # So have the store's reports of itself, which nobody needs to serve.
        self._lanes = self._reads, self._writes, self._looks, self._reports = [
            _Lane(tier_name, calls, retry_after, retry_after_max, deadline, clock)
            for calls in ("reads", "writes", "lookups", "its reports of itself")
        ]
        self._damage_log = RepeatedLog(logger, f"tier {tier_name}", "blocks were damaged")
        self._warning = ""
        self._has_logged_capability = False
        self._damaged = 0
        self._put_counts = PutCounts()
        self._capacity: int | None = None
        self._resized: tuple[TierStore, int] | None = None
        self._before = PutCounts(), 0
        # Without it two loads that end at once could let the count fall, and vLLM's thread of
        # metrics ends at a counter that falls; nor could a lost store be distinguished from its
        # successor, whose counts begin anew.
        self._counting = threading.Lock()
        self._closed = False
        self._closing: Call | None = None

    def capability(self, kind: type[Capability]) -> Capability | None:
        """As the store. A LocalIndex that may be slow is none: the scheduler then asks `has`."""
        if kind is LocalIndex and not self._is_prompt:
            return None
        store = self.now()
        attempt = _Attempt(self, self._looks, store, None)
        with attempt:
            has = store is not None and capability(store, kind) is not None
            return cast(Capability, self) if has else None
        if attempt.error is not None and not self._has_logged_capability:  # it is asked often
            self._has_logged_capability = True
            line = "tier %s: the question whether it has %s failed, and it is used without (%s)"
            words = self.tier_name, kind.__name__, describe_error(attempt.error)
            logger.warning(line, *words, exc_info=_trace_of(attempt.error))
        return None

    @property
    def health(self) -> Health:
        self._notice_late()
        is_open, is_degraded = self.now() is not None, bool(self._warns_of())
        are_closed = self._reads.is_closed and self._looks.is_closed and self._writes.is_closed
        if are_closed and is_open and not is_degraded:
            return HEALTHY  # asked several times a request
        reads = (self._reads, self._looks)
        return Health(
            reads=is_open and not any(lane.is_refusing() for lane in reads),
            writes=is_open and not self._writes.is_refusing(),
            reads_up=is_open and all(lane.is_closed for lane in reads),
            writes_up=is_open and self._writes.is_closed,
            opening=isinstance(self._source, Reopening) and self._source.is_opening,
            is_degraded=is_degraded,
            why=self._why(),
        )

    def _why(self) -> str:
        if isinstance(self._source, Reopening) and self._source.now is None:
            return self._source.why
        asked = self._reads, self._writes, self._looks
        return next((lane.why for lane in asked if not lane.is_closed), self._warns_of())

    def _warns_of(self) -> str:
        store = self.now()
        return self._warning or (store.puts_here if isinstance(store, PutsApart) else "")

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        with self._enter(self._reads) as store:
            if store is not None:
                return each("has", store.has(keys), len(keys))
        return [False] * len(keys)

    def pack_blocks(self) -> int:
        """As the store; 0: it is not known now."""
        with self._look(self._reports) as store:
            if store is not None:
                found: object = required(store, Packs).pack_blocks()
                if type(found) is not int or not 0 < found < MAX_COUNT:
                    raise TierError(f"pack_blocks answered {found!r:.40}")
                return found
        return 0

    def held_prefix(self, prompts: Sequence[Sequence[bytes]]) -> list[int]:
        with self._enter(self._reads) as store:
            if store is not None:
                found: object = required(store, Packs).held_prefix(prompts)
                if not isinstance(found, list) or len(found) != len(prompts):
                    raise TierError(f"held_prefix answered {found!r:.40}")
                found = list.copy(found)
                for count, keys in zip(found, prompts, strict=True):
                    if type(count) is not int or not 0 <= count <= len(keys):
                        raise TierError(f"held_prefix answered {count!r:.40} of {len(keys)}")
                return found
        return [0] * len(prompts)

    def held_blocks(self, prompts: Sequence[Sequence[bytes]]) -> list[list[bool]]:
        with self._enter(self._reads) as store:
            if store is not None:
                found: object = required(store, PacksWindows).held_blocks(prompts)
                if not isinstance(found, list) or len(found) != len(prompts):
                    raise TierError(f"held_blocks answered {found!r:.40}")
                answers = zip(found, prompts, strict=True)
                return [each("held_blocks", held, len(keys)) for held, keys in answers]
        return [[False] * len(keys) for keys in prompts]

    def forget(self) -> None:
        with self._look(self._reports) as store:
            if store is not None:
                required(store, Remembers).forget()

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        self._resize()
        with self._enter(self._writes) as store:
            if store is not None:
                given = [block.readonly() for block in blocks]
                held = each("put", store.put(given), len(blocks))
                self._count_puts(store)
                if capability(store, Warns) is not None:
                    self.warning()  # of its puts; health has it then
                return held
        return [False] * len(blocks)

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        with self._enter(self._reads) as store:
            if store is not None:
                got = each("get", store.get(blocks), len(blocks))
                self._count_damage(store)
                if not (any(got) or time_left()):
                    raise TierUnavailable("nothing has come in time")
                return got
        return [False] * len(blocks)

    def _count_damage(self, store: TierStore) -> None:
        damages = capability(store, Damages)
        if damages is not None:
            found = _count("damaged", damages.damaged())
            with self._counting:
                found += self._before[1]
                more = max(0, found - self._damaged) if store is self.now() else 0
                self._damaged += more
            if more:
                line = "tier %s: %d block(s) were damaged, each a miss; see kvtiers verify, scrub"
                self._damage_log.log(line, self.tier_name, more, count=more)

    def _count_puts(self, store: TierStore) -> None:
        counts = capability(store, Counts)
        if counts is not None:
            found_counts: object = counts.counts()
            if not isinstance(found_counts, PutCounts):
                raise TierError(f"counts answered a {type(found_counts).__name__}")
            found = [_count("counts", count) for count in found_counts]
            with self._counting:
                if store is self.now():
                    found = list(map(add, found, self._before[0]))
                    self._put_counts = PutCounts(*map(max, found, self._put_counts))

    def drop(self, keys: Sequence[bytes]) -> None:
        with self._enter(self._writes) as store:
            if store is not None:
                store.drop(keys)

    def use_deadline(self, seconds: float) -> None:
        """Calls that begin from now on may take so long."""
        for lane in self._lanes:
            lane.deadline = seconds

    def close(self, seconds: float | None = None) -> None:
        """Close the store, even one that is down; waits so long at most. Idempotent."""
        seconds = CLOSE_SECONDS if seconds is None else seconds
        if self._closed:
            return
        self._closed = True
        self._closing = self._writes.enter()
        attempt = _Attempt(self, self._writes, self.now(), self._closing)
        try:
            closing = in_background(partial(self._close, attempt), "close")
        except RuntimeError:  # no thread can be had, as while the interpreter ends
            self._close(attempt)
            return
        if not wait([closing], seconds).done:
            self.failures.count("Late")
            line = "tier %s: not closed after %g s; the engine does not wait any longer"
            logger.warning(line, self.tier_name, seconds)

    def _close(self, attempt: _Attempt) -> None:
        with attempt:
            self._source.close()

    def peek(self, keys: Sequence[bytes]) -> list[bool]:
        with self._look(self._looks) as store:
            # One that was opened anew may have yet to make its index, as after a mount.
            index = None if store is None else capability(store, LocalIndex)
            if index is not None:
                return each("peek", index.peek(keys), len(keys))
        return [False] * len(keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        with self._look(self._looks) as store:
            if store is not None:
                required(store, Touch).touch(keys)

    def clear(self, namespace: bytes) -> bool:
        with self._enter(self._writes) as store:
            # Only True means more: a plugin's other truthy answer could come back for ever.
            return store is not None and required(store, Clear).clear(namespace) is True
        return False

    def resize(self, capacity: int) -> None:
        """Have the store resized with the next `put` or `usage`, and so each that is opened later.
        Does not wait."""
        self._capacity = capacity

    def _resize(self) -> None:
        wanted = self._capacity
        if wanted is None or self._resized == (self.now(), wanted):
            return
        with self._look(self._reports) as store:
            if store is not None:
                if (resizable := capability(store, Resizable)) is not None:
                    resizable.resize(wanted)
                self._resized = store, wanted

    def recent(self, namespace: bytes, count: int, before: int | None = None) -> RecentBlocks:
        with self._enter(self._reads) as store:
            if store is not None:
                found: object = required(store, Recent).recent(namespace, count, before)
                if not isinstance(found, RecentBlocks):
                    raise TierError(f"recent answered a {type(found).__name__}")
                return found
        return RecentBlocks()

    def damaged(self) -> int:
        """The store's count after the last load that worked; this does not ask it."""
        return self._damaged

    def counts(self) -> PutCounts:
        """The store's counts when it was last put to or measured; this does not ask it."""
        return self._put_counts

    def usage(self) -> Usage:
        self._resize()
        with self._look(self._reports) as store:
            if store is not None:
                found: object = required(store, Measured).usage()
                if not isinstance(found, Usage):
                    raise TierError(f"usage answered a {type(found).__name__}")
                bound = 0 if found.capacity is None else found.capacity
                for count in (found.blocks, found.used, bound):
                    _count("usage", count)
                self._count_puts(store)
                return found
        return Usage(0, 0, None)

    def describe(self) -> str:
        with self._look(self._reports) as store:
            if store is not None:
                return str(required(store, Described).describe())
        return ""

    def warning(self) -> str:
        """As the store; as before while the tier is left alone."""
        with self._look(self._reports) as store:
            if store is not None:
                self._warning = str(required(store, Warns).warning())
        return self._warning

    def _enter(self, lane: _Lane) -> _Attempt:
        """Begin a call that the breaker of `lane` decides on."""
        self._notice_late()
        store = self.now()
        return _Attempt(self, lane, store, None if store is None else lane.enter())

    def _look(self, lane: _Lane) -> _Attempt:
        """Begin a call that needs no I/O: it is no trial of reads, but waits until one is due."""
        self._notice_late()
        store = self.now()
        is_refused = store is None or self._reads.is_refusing()
        return _Attempt(self, lane, store, None if is_refused else lane.enter())

    def now(self) -> TierStore | None:
        return self._source.now if isinstance(self._source, Reopening) else self._source

    def end(
        self,
        lane: _Lane,
        call: Call | None,
        store: TierStore | None,
        error: BaseException | None,
        is_given_up: bool,
    ) -> bool:
        """Report to its breaker how a call of this store ended, `is_given_up`: after its caller had
        given it up; return whether `error` ends here.
        Here, and only here, any exception of a store is caught: none may reach the engine, nor what
        an error of a plugin raises when isinstance asks it."""
        if error is None or issubclass(type(error), TierFull | RecordError):  # the tier did answer
            if error is not None:
                self.failures.count(class_name(error))
            if call is not None and lane.succeeded(call):
                lane.went_up()
            return True
        if ends_process(error):
            lane.leave(call)
            return False
        if not is_given_up:  # that is a late load, and counted as one
            self.failures.count(class_name(error))
        if isinstance(self._source, Reopening) and issubclass(type(error), TierNotOpen):
            lane.leave(call)
            with self._counting:
                if self._source.lost(store, cast(TierNotOpen, error)):
                    self._before = self._put_counts, self._damaged
            return True
        # A call in flight while the store was closed may end anyhow; the engine is ending as well.
        is_news = not (self._closed or is_ending()) or call is self._closing
        opens = lane.given_up if is_given_up else lane.failed
        if call is not None and (opens(call) or call.is_trial) and is_news:
            lane.went_down(describe_error(error), _trace_of(error))
        return True

    def _notice_late(self) -> None:
        for lane in self._lanes:
            if lane.notice_late():
                self.failures.count("Late")
                lane.went_down(f"no answer within its deadline, {lane.deadline:g} s", None)


class _Lane(Breaker):
    """The breaker of one kind of calls, which logs when they go down or up."""

    def __init__(self, tier_name: str, calls: str, *settings: Any) -> None:
        """`settings`: those of a Breaker."""
        super().__init__(*settings)
        self.why = ""
        """Why they are down, or were last."""
        self._tier_name, self._calls = tier_name, calls
        self._causes: set[str] = set()
        self._changes = RepeatedLog(
            logger,
            f"tier {tier_name}",
            f"times {calls} went down or up",
            at_once=4,
            state=lambda: f"; they are {'up' if self.is_closed else 'down'} now",
        )

    def went_up(self) -> None:
        self._causes.clear()
        line = "tier %s: %s are up again"
        self._changes.log(line, self._tier_name, self._calls, level=logging.INFO)

    def went_down(self, why: str, trace: BaseException | None) -> None:
        """It has opened, or a trial failed; of another cause than calls before, it is logged."""
        self.why = f"{self._calls} are down: {why}"
        if why not in self._causes and len(self._causes) < MOST_CAUSES:
            self._causes.add(why)
            line = "tier %s: %s are down (%s); tried again every %g s or more"
            self._changes.log(line, self._tier_name, self._calls, why, self.wait, exc_info=trace)


class _Attempt:
    """One call of the store, as a context: yields the store, None where it may not be called, and
    hands the call's end, raised or not, to `Guarded.end`. A body that raised is left without a
    result: answer as for a miss. The store sees how long it may take. Adds no frame between the
    guard and the store."""

    __slots__ = ("_call", "_guarded", "_lane", "_store", "_waiting", "error")

    def __init__(
        self, guarded: Guarded, lane: _Lane, store: TierStore | None, call: Call | None
    ) -> None:
        self._guarded = guarded
        self._lane = lane
        self._call = call
        self._store = store
        self._waiting = None if call is None else Waiting(partial(lane.left, call))
        self.error: BaseException | None = None

    def __enter__(self) -> TierStore | None:
        if self._waiting is None:
            return None
        self._waiting.__enter__()
        return self._store

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> bool:
        self.error = error
        is_given_up = False
        if self._waiting is not None:
            self._waiting.__exit__()
            is_given_up = error is not None and self._waiting.is_over_around
        return self._guarded.end(self._lane, self._call, self._store, error, is_given_up)


def _count(verb: str, found: object) -> int:
    """A number of blocks or bytes that a store reports. Raises TierError for anything else."""
    if type(found) is not int or not 0 <= found < MAX_COUNT:
        raise TierError(f"{verb} answered {found!r:.80}, not a number of blocks or bytes")
    return found


def _trace_of(error: BaseException) -> BaseException | None:
    """The error whose traceback is logged: an error of ours needs none, a defect does, unless a
    formatter that asks its class would meet code of a plugin's."""
    kind = type(error)
    odd = {"__class__", "__getattribute__"}  # of no class of Python's above BaseException
    is_plain = type(kind) is type and not any(odd & vars(one).keys() for one in kind.__mro__[:-2])
    return error if is_plain and not issubclass(kind, KVTiersError) else None
