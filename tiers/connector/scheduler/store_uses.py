"""StoreUses: reports to a store which blocks were used, and pins blocks by touching them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future

from tiers.connector.scheduler.store_keys import RankKeys
from tiers.store import TierStore, Touch, capability

LAPS = 8
"""How often each pinned block is touched while a store's whole capacity is stored: so a store that
evicts what was used longest ago has seven eighths of it to give before them."""


class StoreUses:
    """Uses of blocks that are reported to a store; used by the scheduler's thread alone."""

    USES, USES_AT_ONCE = 51_200.0, 1024.0
    """Rate of an index's recency updates, in names a second, and their burst: all of a prompt of
    128k tokens on eight ranks would take the thread up to 90 ms."""

    def __init__(
        self, store: TierStore, parts: RankKeys, threads: Executor, clock: Callable[[], float]
    ) -> None:
        """`threads`: report to a store that takes its time."""
        self._store = store
        self._parts = parts
        self._threads = threads
        self._clock = clock
        self._touching: Future[None] | None = None
        self._waiting: deque[bytes] = deque(maxlen=1 << 17)
        self._allowance, self._reported_at = self.USES_AT_ONCE, clock()
        self._found_touch: Touch | None = None
        self._pinned: dict[bytes, None] = {}
        self._lap: list[bytes] = []
        self._due = 0.0

    @property
    def touch(self) -> Touch | None:
        """The store as one that takes uses; None: it does not, or is not open."""
        if self._found_touch is None:
            self._found_touch = capability(self._store, Touch)
        return self._found_touch

    def note(self, keys: Sequence[bytes], at_once: bool) -> None:
        """Count these blocks as used, the first as the most recent. `at_once`: the store takes it
        from memory, on this thread."""
        if not (keys or self._waiting) or (touch := self.touch) is None:
            return
        if at_once:
            self._waiting.extend(reversed(keys))  # the first last, so that it is evicted last
            self._report(touch)
        elif self._touching is None or self._touching.done():
            # One at a time: what is used while a store takes its time is used again, or matters
            # little.
            self._touching = self._threads.submit(touch.touch, self._parts.names(keys))

    def _report(self, touch: Touch) -> None:
        """Report uses to an index, as many as may be now; the rest follows in later steps."""
        now = self._clock()
        allowance = self._allowance + (now - self._reported_at) * self.USES
        self._allowance, self._reported_at = min(self.USES_AT_ONCE, allowance), now
        count = min(len(self._waiting), int(self._allowance) // len(self._parts))
        if count:
            self._allowance -= count * len(self._parts)
            touch.touch(self._parts.names([self._waiting.popleft() for _ in range(count)][::-1]))

    def clear(self) -> None:
        """Forget those yet to be reported: there are other keys from now on."""
        self._waiting.clear()

    def pin(self, keys: Sequence[bytes]) -> None:
        """Touch these again and again, until `unpin`."""
        self._pinned |= dict.fromkeys(keys)

    def unpin(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._pinned.pop(key, None)

    def renew_pins(self, blocks: int, max_blocks: int) -> None:
        """Touch the next pinned blocks, as many as are due for `blocks` that were stored."""
        self._due += blocks * LAPS * len(self._pinned) / max_blocks
        keys: list[bytes] = []
        while self._due >= 1:
            if not self._lap:
                self._lap = [*self._pinned]
            key = self._lap.pop()  # a prefix's tail first
            if key in self._pinned:
                keys.append(key)
            self._due -= 1
        self.note(keys[::-1], at_once=True)
