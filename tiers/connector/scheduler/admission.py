"""Why was a block not stored? Admission names the rule; one line the setting to change."""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from spec.chain import TenantSpec
from spec.fields import format_rate, format_size
from spec.offloading import (
    BUDGET_BURST,
    INFLIGHT_SHARE,
    QUEUE_SECONDS,
    STAGING,
    STAGING_STEPS,
    OffloadingSpec,
    StoreSpec,
)
from spec.plugins import is_ours
from spec.policies import AdmissionPolicy, admission_policy
from tiers.guarded_policies import GuardedAdmission
from tiers.wrappers.opening import log_name

logger = logging.getLogger(__name__)

HALF_LIFE = 10.0
"""Seconds of storing after which a measurement counts half."""


class StoreRate:
    """Blocks a second of one tier, over all ranks, while it stores; of late counts most.

    Idle time does not count, so that a tier with little to do is not taken to be slow. Used by the
    scheduler's thread alone.
    """

    def __init__(self) -> None:
        self._blocks = self._seconds = 0.0

    def ended(self, blocks: int, seconds: float) -> None:
        """A job has stored `blocks`, in `seconds` on the slowest rank."""
        left = 0.5 ** (seconds / HALF_LIFE)
        # A job that took very long counts no more than the time that is remembered.
        counts = (1 - left) * HALF_LIFE / math.log(2) / seconds if seconds else 1.0
        self._blocks = self._blocks * left + blocks * counts
        self._seconds = self._seconds * left + seconds * counts

    def blocks_in(self, seconds: float) -> float | None:
        """How many blocks it stores in this time; None: nothing was measured."""
        return self._blocks * seconds / self._seconds if self._seconds else None


class ThresholdAdmission(AdmissionPolicy):
    """Admits a block from its Nth request on, which leaves out what is asked for only once."""

    COUNTED = 1 << 18
    """Blocks whose requests are counted; beyond it the oldest counts are forgotten."""

    def __init__(self, threshold: int) -> None:
        super().__init__(threshold)
        # The first of a plain dict is found only behind all that were removed before it.
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def admits(self, key: bytes) -> bool:
        if self.threshold == 1:
            return True
        count = self._counts.pop(key, 0) + 1
        self._counts[key] = count
        if len(self._counts) > self.COUNTED:
            self._counts.popitem(last=False)
        return count >= self.threshold

    def stored(self, key: bytes) -> None:
        self._counts.pop(key, None)


def make_admission(spec: OffloadingSpec) -> AdmissionPolicy:
    """The tier's policy; a plugin's is guarded."""
    policy, threshold = admission_policy(spec.admission), spec.store_threshold
    if is_ours(policy):
        return policy(threshold)
    name = f"tier {log_name(spec)!r}: {spec.admission}"
    return GuardedAdmission(policy, ThresholdAdmission(threshold), threshold, name)


class Admission:
    """A tier's rules of what is stored; used by the scheduler's thread alone.

    What it answers is None, or the name of the counter (see `stats`) for what is not stored.
    `now` gives seconds, never going back. `is_only_tier`: of its chain; else it could starve others
    of slots when it lags behind. `step_blocks`: blocks that a step of the engine completes at most.
    `acceptance` counts what is taken and refused, `rate` learns how fast the tier stores.
    """

    def __init__(
        self,
        spec: OffloadingSpec,
        now: Callable[[], float],
        is_only_tier: bool = False,
        step_blocks: int = 0,
    ) -> None:
        self.acceptance = AcceptanceMonitor(spec, now)
        self.rate = StoreRate()
        self._step_blocks = step_blocks
        self._now = now
        self._chosen, self._policy = spec.admission, make_admission(spec)
        self._budget: float | None = None
        self._left = 0.0
        self._since = now()
        self.use(spec, is_only_tier)

    def use(self, spec: OffloadingSpec, is_only_tier: bool) -> None:
        """Admit by these settings from now on. What is left of a write budget stays, but for one
        that is new."""
        store = spec if isinstance(spec, StoreSpec) else None
        self.spec = self.acceptance.spec = spec
        self._max_inflight = store.max_inflight if store is not None else None
        self._share = 1.0 if is_only_tier else INFLIGHT_SHARE
        if spec.admission != self._chosen:
            self._chosen, self._policy = spec.admission, make_admission(spec)
        self._policy.threshold = spec.store_threshold
        before, self._budget = self._budget, store.write_budget if store is not None else None
        most = (self._budget or 0.0) * BUDGET_BURST
        self._left = most if before is None else min(self._left, most)

    def warning(self) -> str:
        """What became of a plugin's policy; see `Warns`."""
        return self._policy.asked.warning if isinstance(self._policy, GuardedAdmission) else ""

    def most_inflight(self, block_bytes: int, slots: int) -> int:
        """How many blocks may be in flight into the tier, of a pool of `slots`.

        What lies longer than `QUEUE_SECONDS` comes late and holds memory that others could use. A
        tier that has stored nothing yet may have as much as `staging` is made for.
        """
        most = max(1, int(slots * self._share))
        if not block_bytes:
            return most
        if self._max_inflight is not None:
            return min(most, max(1, self._max_inflight // block_bytes))
        stored = self.rate.blocks_in(QUEUE_SECONDS)
        if stored is None:
            stored = max(STAGING_STEPS * self._step_blocks, STAGING // block_bytes)
        return min(most, max(1, int(stored)))

    @property
    def admits_all(self) -> bool:
        """Whether no block needs to be asked for, as by default: a call for each costs time."""
        is_plain = isinstance(self._policy, ThresholdAdmission) and self._policy.threshold == 1
        return is_plain and self._budget is None

    def refuses(self, key: bytes, size: int) -> str | None:
        """Ask for a block of `size` bytes that the tier misses: once per request, and again where
        it was admitted and found no room."""
        if not self._policy.admits(key):
            return "store_deferred"
        return None if self._can_pay(size) else "store_dropped_budget"

    def _can_pay(self, size: int) -> bool:
        if self._budget is None:
            return True
        now, before = self._now(), self._since
        self._since = now
        self._left = min(self._budget * BUDGET_BURST, self._left + (now - before) * self._budget)
        return self._left >= size

    def stores(self, key: bytes, size: int) -> None:
        """The block is in flight; once it is evicted, it has to be asked for anew."""
        self._policy.stored(key)
        self._left -= size


WINDOW_SECONDS = 60.0
"""Seconds over which what a tier takes is compared with what it is offered."""
QUIET_SECONDS = 3600.0
"""Seconds after which it is logged again."""
FEWEST_LOST = 16
"""Fewer blocks lost in that time are not worth a line."""
INTENDED = ("store_deferred", "store_dropped_down")
"""Refusals that count as no loss: the operator wishes the first, the guard logs the second."""


class AcceptanceMonitor:
    """Counts one tier's blocks, over all ranks as one; used by the scheduler's thread alone.

    `now` gives seconds, never going back.
    """

    def __init__(self, spec: OffloadingSpec, now: Callable[[], float]) -> None:
        self.spec = spec
        self._now = now
        self._since: float | None = None
        self._quiet_until = 0.0
        self._offered = 0
        self._lost: Counter[str] = Counter()
        """Blocks that were not stored, by the names of their counters; below 0 where those of an
        earlier minute have found room."""

    def offered(self, taken: int, refused: Iterable[str]) -> None:
        """`taken` new blocks, and others `refused`, of each the name of its counter."""
        lost = [name for name in refused if name not in INTENDED]
        if self._since is None:
            self._since = self._now()
            self._quiet_until = max(self._quiet_until, self._since)
        self._offered += taken + len(lost)
        self._lost.update(lost)

    def found_room(self, reasons: Iterable[str]) -> None:
        """Blocks that were refused, each for one of these, are stored now."""
        self._lost.subtract(reasons)

    def failed(self, blocks: int) -> None:
        """Blocks that were taken are not stored."""
        self._lost["store_failures"] += blocks

    def look(self) -> None:
        """Log it, when the time is over, if the tier took under half."""
        now = self._now()
        if self._since is None or now < self._since + WINDOW_SECONDS:
            return
        lost = sum((+self._lost).values())
        if now >= self._quiet_until and lost >= FEWEST_LOST and 2 * lost > self._offered:
            self._quiet_until = now + QUIET_SECONDS
            (reason, _), *_ = self._lost.most_common(1)
            logger.warning(
                "tier %r took %d of the %d blocks that it was offered in %.0f s: %s",
                log_name(self.spec),
                max(0, self._offered - lost),
                self._offered,
                now - self._since,
                self._remedy(reason),
            )
        self._since, self._offered = None, 0
        self._lost.clear()

    def _remedy(self, reason: str) -> str:
        store = self.spec if isinstance(self.spec, StoreSpec) else None
        if reason == "store_dropped_budget" and store is not None and store.write_budget:
            return (
                f"raise its write_budget, now {format_rate(store.write_budget)}, or keep out with "
                "store_threshold: 2 what is asked for only once"
            )
        if reason == "store_failures":
            return (
                "it did not store the others; where this log has no error of it, it is full: raise "
                "its capacity, or a server's maxmemory, and have that evict (maxmemory-policy)"
            )
        if reason == "store_dropped_no_slot" or store is None:
            return "no slot of host memory was free; raise staging"
        most = store.max_inflight
        if most is None:
            setting = f"staging, set its max_inflight (now what it stores in {QUEUE_SECONDS:g} s)"
        else:
            setting = f"its max_inflight, now {format_size(most)}"
        if store.store_rate is not None:
            setting += f" or its store_rate, now {format_rate(store.store_rate)}"
        return (
            f"it stores more slowly than blocks come; raise {setting}, or keep out with "
            "store_threshold: 2 what is asked for only once"
        )


class PinBounds(NamedTuple):
    """How many blocks may be retained for all tenants together, and for one of them."""

    all: int
    per_tenant: int


class Tenants:
    """A tier's view of the rules; used by the scheduler's thread alone."""

    def __init__(
        self, tier: str, rules: Mapping[str, TenantSpec], max_retained: float = 0.0
    ) -> None:
        """`max_retained`: the part of the tier that hints may retain."""
        self._tier = tier
        self._rules = rules
        self._max_retained = max_retained
        # Not of plain dicts, as above.
        self._kept: defaultdict[str, OrderedDict[bytes, None]] = defaultdict(OrderedDict)
        self._owner: dict[bytes, str] = {}

    def follow(self, rules: Mapping[str, TenantSpec], max_retained: float) -> None:
        """Go by these rules from now on, over the blocks counted so far."""
        self._rules, self._max_retained = rules, max_retained

    def may_keep(self, tenant: str) -> bool:
        """Whether the tier is one for this tenant."""
        rule = self._rules.get(tenant)
        return rule is None or rule.tiers is None or self._tier in rule.tiers

    def retained(self, tenant: str, max_blocks: int) -> PinBounds:
        """How much of a tier's `max_blocks` hints may retain, in all and for a tenant."""
        rule, part = self._rules.get(tenant), self._max_retained
        share = part / 2 if rule is None or rule.max_retained is None else rule.max_retained
        return PinBounds(int(part * max_blocks), int(share * max_blocks))

    def has_quota(self, tenant: str) -> bool:
        """Whether what it keeps is counted."""
        rule = self._rules.get(tenant)
        return rule is not None and rule.quota is not None

    def keeps(self, tenant: str, key: bytes) -> None:
        """The tier has taken a block of a tenant with a quota. Called at once: the next block of
        the same job may take its room."""
        kept = self._kept[tenant]
        kept[key] = None
        kept.move_to_end(key)
        self._owner[key] = tenant

    def beyond(self, tenant: str, block_bytes: int) -> list[bytes]:
        """The tenant's oldest blocks, beyond its quota: they must be dropped, and count no more."""
        rule = self._rules.get(tenant)
        if rule is None or rule.quota is None:
            return []
        kept = self._kept[tenant]
        beyond = len(kept) - rule.quota // max(1, block_bytes)
        oldest = list(itertools.islice(kept, max(0, beyond)))
        self.forget(oldest)
        return oldest

    def forget(self, keys: Iterable[bytes]) -> None:
        """The tier has these blocks no more."""
        for key in keys:
            tenant = self._owner.pop(key, None)
            if tenant is not None:
                self._kept[tenant].pop(key, None)
