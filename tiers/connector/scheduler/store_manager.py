"""A tier behind a store, as the scheduler sees it."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from itertools import compress
from operator import not_

from spec.offloading import OffloadingSpec, StoreSpec
from tiers.concurrency.executors import start_thread
from tiers.concurrency.repeated_log import RepeatedLog
from tiers.connector.policy.request_state import LOOKUP_SECONDS
from tiers.connector.scheduler.clearing import Clearing
from tiers.connector.scheduler.lookup_queue import AskedKeys, LookupQueue
from tiers.connector.scheduler.lookups import HeldLog, Lookup, LookupPace
from tiers.connector.scheduler.store_keys import RankKeys, VisibilityCheck
from tiers.connector.scheduler.store_uses import StoreUses
from tiers.connector.scheduler.tier_manager import DOWN, TierManager
from tiers.contract.generation import Generation
from tiers.contract.messages import NO_PLACE, PromptPlace
from tiers.recent import RecentDict
from tiers.store import (
    LocalIndex,
    Measured,
    Packs,
    PacksWindows,
    Recent,
    RecentBlocks,
    Remembers,
    Usage,
    Warns,
    capability,
)
from tiers.wrappers.guard import HEALTHY, Guarded, Health

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Seconds between two looks."""
MOST_ABSENT = 1024
"""Blocks that lookups missed and the next step that stores does not look up again, at most."""
UNCOUNTED = Usage(0, 0, 0)
"""Of a store that does not count: a capacity beside it would show a tier that is always empty."""
LOOK_SHARE = 0.01
"""The part of the time that looks may take: a store that is slow to count is asked less often."""


class StoreWatch:
    """Looks at one store on another thread, in the scheduler's process alone: an engine that has
    nothing to do reports trouble, too, and each trouble once."""

    def __init__(self, store: Guarded) -> None:
        self.usage = Usage(0, 0, None)
        """What it held a moment ago."""
        self._store = store
        self._warned = ""
        self._log = RepeatedLog(
            logger,
            f"tier {store.tier_name!r}",
            "changes of what it is short of",
            at_once=4,
            state=lambda: f"; now: {self._warned or 'nothing'}",
        )
        self._stop = threading.Event()
        start_thread(self._run, f"watch-{store.tier_name}")

    def close(self) -> None:
        """Look no more. Does not wait."""
        self._stop.set()

    def _run(self) -> None:
        pause = took = 0.0
        while not self._stop.wait(pause):
            before, began = took, time.monotonic()
            self._look()
            # Both: one may have waited for the interpreter alone, as while an engine starts.
            took = time.monotonic() - began
            pause = max(LOOK_SECONDS, min(before, took) / LOOK_SHARE)

    def _look(self) -> None:
        self._hear()
        if (measured := capability(self._store, Measured)) is not None:
            self.usage = measured.usage()
        elif self._store.health.reads_up:
            self.usage = UNCOUNTED

    def _hear(self) -> None:
        """Log once what keeps the store from what its settings ask for, and when that is over."""
        warns = capability(self._store, Warns)
        if warns is None:
            return  # or not open now, which whoever opens it reports
        before, self._warned = self._warned, warns.warning()
        if self._warned != before:
            line = self._warned or "it has all that its settings ask for again"
            level = logging.WARNING if self._warned else logging.INFO
            self._log.log("tier %r: %s", self._store.tier_name, line, level=level)


class StoreManager(TierManager):
    """A tier behind a store, asked on this thread where it answers from memory, else behind it.

    `namespaces`: one per rank, or one of ranks that have the same part of a block. A block is held
    only where every part is.
    """

    RECENT = 1 << 18
    """Keys remembered as held, so that neither is a store behind a network offered them again, nor
    an index asked: 2 microseconds a key where it has a million, 16 ms for 128k tokens."""
    RECENT_SECONDS = 60.0
    """How long at most; then an offer renews a time to live, or replaces what was evicted."""
    LOOKUP_LIFETIME = 0.5
    """Seconds that an answer of a store behind a network holds while its request waits to run."""
    CHECKS = 6_400.0
    """Names a second whose answers are compared with an index again while requests wait, the first
    of the queue first: 1% of the thread's time. A prompt of 128k tokens on eight ranks takes ten
    seconds, on one little more than one. What others evict meanwhile is missed by the load."""
    CHECKED_AT_ONCE = 64
    """Names, at least: a call costs as much as 50 of them, and a decision makes several."""

    def __init__(
        self,
        store: Guarded,
        namespaces: Sequence[bytes],
        generation: Generation,
        clock: Callable[[], float] = time.monotonic,
        lookup_deadline: float = LOOKUP_SECONDS,
        *,
        in_order: Sequence[bool] = (),
        in_rows: Sequence[bool] = (),
        window: int = 0,
    ) -> None:
        """`generation`: of the keys that it is given. `lookup_deadline`: seconds after which a
        lookup in flight counts as a miss. `in_order`, `in_rows`: keys that are looked up are those
        of a prompt's blocks, in order and from its first on, and these are the parts of each block
        (see `BlockGroups`); none: they may be any. `window`: see `RankKeys.has_prompts`."""
        self._store = store
        self._clearing = Clearing(store, namespaces)
        self._parts = RankKeys(store, namespaces, generation)
        self.pace = LookupPace(len(namespaces))
        self._checks, self._checked = 0.0, clock()
        self._generation = generation
        self._clock = clock
        self._changes = HeldLog()
        self._recent = RecentDict[bytes, None](self.RECENT, self.RECENT_SECONDS, clock)
        self._absent: dict[bytes, None] = {}
        # Asked now, so that one that takes time to make is there for the first request.
        self._found_index = capability(store, LocalIndex)
        self._in_order, self._in_rows, self._window = in_order, in_rows, window
        self._packed: Sequence[bool] = ()
        self._packs = 0
        self._ask_packs_at = -math.inf
        self._unfound = VisibilityCheck(store.tier_name)
        self._is_belied = False
        """Whether a block was gone since the store was last told so."""
        self._queue = LookupQueue(self._look, lookup_deadline, clock)
        self._watch = StoreWatch(store)
        self._uses = StoreUses(store, self._parts, self._queue.threads, clock)

    @property
    def _index(self) -> LocalIndex | None:
        # Asked until it is there: later, if the store is opened late or has yet to make it.
        if self._found_index is None:
            self._found_index = capability(self._store, LocalIndex)
        return self._found_index

    @property
    def _pack_blocks(self) -> int:
        """Blocks of a group of a store that keeps prompts together, those of the parts that are
        `_packed`; 0: it does not, or it is not known yet."""
        if self._in_order and not self._packs and self._clock() >= self._ask_packs_at:
            # A store that is opened late may have them later; each block that is stored asks.
            self._ask_packs_at = self._clock() + LOOK_SECONDS
            windows = capability(self._store, PacksWindows) is not None
            self._packed = self._in_rows if windows else self._in_order
            packs = capability(self._store, Packs) if any(self._packed) else None
            self._packs = 0 if packs is None else packs.pack_blocks()
        return self._packs

    def place(self, keys: Sequence[bytes], numbers: Sequence[int]) -> PromptPlace:
        if not numbers or not (group := self._pack_blocks):  # no window may reach a tier's part
            return NO_PLACE
        base = self._group_begin(min(numbers), group)
        places = [number - base for number in numbers]
        return PromptPlace(keys[base : max(numbers) + 1], places, group, self._packed)

    def _group_begin(self, number: int, group: int) -> int:
        """The number of the first key of the group that has this one."""
        return number - number % (group * len(self._in_order))

    def coverage(
        self, lookup: Lookup, keys: Sequence[bytes], asked: range
    ) -> Sequence[bool] | None:
        """Look the keys up in the index, a long prompt's in several steps, or begin to ask for all
        keys from `asked` on."""
        if not self.health().reads:
            lookup.timer.went_down(self._clock())
            return [False] * len(asked)
        if (index := self._index) is not None:
            self._follow(index, lookup, keys)
            if unknown := lookup.unknown(asked, self._changes):
                if count := self.pace.take(len(unknown)):
                    some = keys[unknown.start : unknown.start + count]
                    held = self._parts.peek(index, some)
                    self.pace.took()
                    self._note_asked(some, held)
                    if len(some) + len(self._absent) <= MOST_ABSENT:
                        self._absent.update(dict.fromkeys(compress(some, map(not_, held))))
                    lookup.add(held)
                if count < len(unknown):
                    return None
            return lookup.of(asked)
        question = self._look_up(lookup, keys, asked.start)
        first, answer, _ = question
        if not answer.done() and not self._queue.gives_up(question):
            return None
        lookup.taken(self._clock())
        is_done = answer.done()
        if is_done and lookup.until == math.inf:
            # The lifetime begins when the answer is first read. Otherwise an engine with slow steps
            # would always find it expired.
            lookup.until = self._clock() + self.LOOKUP_LIFETIME
        if not is_done or answer.cancelled():
            return [False] * len(asked)
        held = answer.result()[asked.start - first : asked.stop - first]
        return held + [False] * (len(asked) - len(held))

    def version(self, lookup: Lookup, keys: Sequence[bytes]) -> int | None:
        if not self.health().reads:
            return DOWN
        if (index := self._index) is not None:
            self._follow(index, lookup, keys)
            return lookup.version
        has_answer = lookup.asked is not None and lookup.asked.answer.done()
        return lookup.version if has_answer and self._clock() <= lookup.until else None

    def _follow(self, index: LocalIndex, lookup: Lookup, keys: Sequence[bytes]) -> None:
        """Correct answers of the index by what this engine has stored since, and by looking some
        of their keys up again."""
        if lookup.asked is not None:
            # Asked while the index was made, and answered for a moment only; nothing corrects it.
            lookup.renew()
        lookup.follow(self._changes, keys)
        now, before = self._clock(), self._checked
        self._checks = min(self._checks + (now - before) * self.CHECKS, self.CHECKS)
        self._checked = now
        if self._checks < self.CHECKED_AT_ONCE:
            return
        if some := lookup.to_check(int(self._checks) // len(self._parts), now):
            self._checks -= len(some) * len(self._parts)
            held = self._parts.peek(index, keys[some.start : some.stop])
            lookup.correct(some, held)

    def _look_up(self, lookup: Lookup, keys: Sequence[bytes], first: int) -> AskedKeys:
        """What the store is or was asked about the keys from number `first` on, at least."""
        now = self._clock()
        asked = lookup.asked
        if asked is None or asked.first > first or now > lookup.until:
            lookup.renew()
            if group := self._pack_blocks:
                first = self._group_begin(first, group)
            asked = lookup.asked = self._queue.ask(keys, first)
        return asked

    def _look(self, questions: Sequence[Sequence[bytes]]) -> list[bool]:
        """Ask which keys the store has of all ranks; on a thread of the queue."""
        keys = [key for some in questions for key in some]
        if self._is_belied:
            self._is_belied = False
            if (remembers := capability(self._store, Remembers)) is not None:
                remembers.forget()
        if self._packs:
            args = self._in_order, self._packed, self._window, self._packs
            held = self._parts.has_prompts(questions, *args)
        else:
            held = self._parts.has(keys)
        self._note_asked(keys, held)
        return held

    def _note_asked(self, keys: Sequence[bytes], held: Sequence[bool]) -> None:
        """Keys were looked up: misses are offered anew; a store that never finds any is noticed."""
        if self.health().reads_up:
            self._recent.discard(compress(keys, map(not_, held)))
            self._unfound.asked(keys, held)

    def holds(self, keys: Sequence[bytes]) -> list[bool] | None:
        """Ask the store, on the caller's thread, which keys it holds, all of this generation or all
        of none; None: it can't answer now, or not for single blocks."""
        if self._pack_blocks:
            return None
        failed = self._store.failures.total
        held = self._parts.has(keys)
        is_sure = self.health().reads_up and self._store.failures.total == failed
        return held if is_sure else None

    def announceable(self, keys: Sequence[bytes]) -> list[bool] | None:
        """As `holds`, to keep true what was announced. Of a store with `Packs` all are: to ask for
        each block again and again costs more than an announcement that holds no more."""
        return [True] * len(keys) if self._pack_blocks else self.holds(keys)

    def prepare_load(self, keys: Sequence[bytes]) -> list[int | None]:
        """Stores keep their blocks elsewhere; one that is evicted before it is read is a miss."""
        self._recent.update(dict.fromkeys(keys))
        return [None] * len(keys)

    def touch_and_list_missing(self, keys: Sequence[bytes]) -> list[bool]:
        """What is not known to be held; the store itself skips what it turns out to have."""
        held = self._recent.known(keys)
        absent, self._absent = self._absent, {}
        index = self._index
        unknown = [key for key in compress(keys, map(not_, held)) if key not in absent]
        if index is not None and unknown:
            found = {*compress(unknown, self._parts.peek(index, unknown))}
            self._recent.update(dict.fromkeys(found))
            held = [has or key in found for key, has in zip(keys, held, strict=True)]
        used = [*compress(keys, held)]
        self._uses.note(used, at_once=index is not None)
        return [*map(not_, held)]

    def recent(self, count: int, before: int | None) -> RecentBlocks | None:
        recent = capability(self._store, Recent)
        return None if recent is None else self._parts.recent(recent, count, before)

    def pinnable(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those that an index holds now, of a store that takes uses."""
        index = self._index
        if index is None or self._uses.touch is None:
            return []
        recent = self._recent.known(keys)
        held = self._parts.peek(index, keys)
        return [key for key, *has in zip(keys, recent, held, strict=True) if any(has)]

    def pin(self, keys: Sequence[bytes]) -> None:
        self._uses.pin(keys)

    def unpin(self, keys: Sequence[bytes]) -> None:
        self._uses.unpin(keys)

    def renew_pins(self, blocks: int, max_blocks: int) -> None:
        self._uses.renew_pins(blocks, max_blocks)

    def stored(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._changes.note(key, held=True)
        self._recent.update(dict.fromkeys(keys))
        self._clearing.stored(keys, self._generation.tag)
        self._unfound.stored(keys)

    def touch_prefix(self, keys: Sequence[bytes]) -> None:
        """Touch them all: a store takes what came with the last step to be used last."""
        self._uses.note(keys, at_once=self._index is not None)

    def loaded(self, any_arrived: bool, lost: Sequence[bytes]) -> None:
        self._unfound.loaded(any_arrived, lost)
        super().loaded(any_arrived, lost)

    def discard(self, key: bytes) -> None:
        self._changes.note(key, held=False)
        self._recent.discard((key,))
        self._unfound.lost(key)
        self._is_belied = True

    def drop(self, keys: Sequence[bytes], generation: bytes) -> None:
        """Drop these blocks in the background, from a shared store too."""
        super().drop(keys, generation)
        self._clearing.drop(keys, generation)

    def reset(self) -> None:
        self._changes.forget()
        self._uses.clear()
        self._recent.clear()
        self._unfound.reset()

    def clear(self, generation: bytes) -> None:
        self._clearing.clear(generation)

    def prefetch_lookup(self, lookup: Lookup, keys: Sequence[bytes]) -> None:
        """Begin to ask a store behind a network, so that its answer is there in time."""
        if self._index is None and lookup.asked is None and self.health().reads:
            self._look_up(lookup, keys, 0)

    def wait_a_moment(self) -> None:
        self._queue.wait_a_moment()

    def health(self) -> Health:
        """The guard's health for reads; writes are the workers'."""
        found = self._store.health
        return found if found is HEALTHY else found._replace(writes=True, writes_up=True)

    def resize(self, capacity: int, max_blocks: int) -> None:
        self._recent.clear()  # what it evicts is offered anew
        self._store.resize(capacity)

    def usage(self) -> Usage:
        return self._watch.usage

    def evicted(self) -> int:
        return self._store.counts().evicted

    def failures(self) -> int:
        return self._store.failures.total

    def retune(self, spec: OffloadingSpec, lookup_deadline: float) -> None:
        self._queue.wait_at_most(lookup_deadline)
        if isinstance(spec, StoreSpec):
            self._store.use_deadline(spec.deadline)

    def close(self) -> None:
        """Close the store, once what nobody can find again is dropped, as far as time allows."""
        self._watch.close()
        self._clearing.close(self._generation.tag)
        self._queue.threads.shutdown(wait=False, cancel_futures=True)
        self._store.close()
