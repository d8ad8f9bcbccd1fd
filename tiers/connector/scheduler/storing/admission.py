"""Admission: which of the blocks that a tier lacks are stored in it, and why the others are not."""

from __future__ import annotations

from collections.abc import Callable

from spec.offloading import QUEUE_SECONDS, OffloadingSpec, StoreSpec
from tiers.connector.scheduler.storing.intake import Intake
from tiers.connector.scheduler.storing.store_rate import StoreRate
from tiers.contract.pool_size import STAGING, STEPS

COUNTED = 1 << 18
"""Blocks whose requests are counted; beyond it the oldest counts are forgotten."""
BURST = 3600.0
"""Seconds whose part of a write budget may be spent at once."""


class Admission:
    """A tier's rules of what is stored; used by the scheduler's thread alone.

    What it answers is None, or the name of the counter (see `stats`) for what is not stored.
    `now` gives seconds, never going back. `alone`: whether the chain has no other tier, which this
    one could starve of slots when it lags behind. `step_blocks`: what a step of the engine
    completes at most. `intake` counts what comes of it all, `rate` learns how fast the tier stores.
    """

    def __init__(
        self,
        spec: OffloadingSpec,
        now: Callable[[], float],
        alone: bool = False,
        step_blocks: int = 0,
    ) -> None:
        store = spec if isinstance(spec, StoreSpec) else None
        self.intake = Intake(spec, now)
        self.rate = StoreRate()
        self._max_inflight = store.max_inflight if store is not None else None
        self._share = 1.0 if alone else 0.5
        self._step_blocks = step_blocks
        self._store_threshold = spec.store_threshold
        self._budget = store.write_budget if store is not None else None
        self._now = now
        self._counts: dict[bytes, int] = {}
        self._left = (self._budget or 0.0) * BURST
        self._since = now()

    def most_inflight(self, block_bytes: int, slots: int) -> int:
        """How many blocks may be on their way into the tier, of a pool of so many slots.

        What lies longer than `QUEUE_SECONDS` comes late and holds memory that others could use. A
        tier that has stored nothing yet may have as much as `staging` is made for.
        """
        # A tier that lags behind may not hold all slots: it would starve the others.
        most = max(1, int(slots * self._share))
        if not block_bytes:
            return most
        if self._max_inflight is not None:
            return min(most, max(1, self._max_inflight // block_bytes))
        stored = self.rate.blocks_in(QUEUE_SECONDS)
        if stored is None:
            stored = max(STEPS * self._step_blocks, STAGING // block_bytes)
        return min(most, max(1, int(stored)))

    def refuses(self, key: bytes, size: int) -> str | None:
        """Ask for a block of `size` bytes that the tier lacks: once per request, and again where it
        was admitted and found no room."""
        if not self._is_touched_enough(key):
            return "store_deferred"
        return None if self._can_pay(size) else "store_dropped_budget"

    def _is_touched_enough(self, key: bytes) -> bool:
        if self._store_threshold == 1:
            return True
        count = self._counts.pop(key, 0) + 1
        self._counts[key] = count
        if len(self._counts) > COUNTED:
            del self._counts[next(iter(self._counts))]
        return count >= self._store_threshold

    def _can_pay(self, size: int) -> bool:
        if self._budget is None:
            return True
        now, before = self._now(), self._since
        self._since = now
        self._left = min(self._budget * BURST, self._left + (now - before) * self._budget)
        return self._left >= size

    def stores(self, key: bytes, size: int) -> None:
        """The block is on its way; when it goes again, it has to be asked for anew."""
        self._counts.pop(key, None)
        self._left -= size
