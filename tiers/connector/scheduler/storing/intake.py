"""Intake: whether a tier takes what it is offered, and what to change where it does not."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping

from spec.fields import format_rate, format_size
from spec.offloading import QUEUE_SECONDS, OffloadingSpec, StoreSpec
from tiers.wrappers.opening import log_name

logger = logging.getLogger(__name__)

WINDOW = 60.0
"""Seconds over which what a tier takes is compared with what it is offered."""
AGAIN = 3600.0
"""Seconds after which it is said again."""
FEWEST = 16
"""Blocks lost in that time that are not worth a line."""
INTENDED = ("store_deferred", "store_dropped_down")
"""What is left out as the operator wishes, or with a line of the guard's."""


class Intake:
    """Counts one tier's blocks, over all ranks as one; used by the scheduler's thread alone.

    `now` gives seconds, never going back.
    """

    def __init__(self, spec: OffloadingSpec, now: Callable[[], float]) -> None:
        self._spec = spec
        self._now = now
        self._since: float | None = None
        self._quiet_until = 0.0
        self._offered = 0
        self._lost: Counter[str] = Counter()

    def offered(self, taken: int, refused: Mapping[str, int]) -> None:
        """So many new blocks were taken, and so many refused, by the names of their counters."""
        lost = {name: count for name, count in refused.items() if name not in INTENDED}
        if self._since is None:
            self._since = self._now()
            self._quiet_until = max(self._quiet_until, self._since)
        self._offered += taken + sum(lost.values())
        self._lost.update(lost)

    def taken_later(self, reasons: Mapping[str, int]) -> None:
        """Blocks that were refused for these reasons were taken after all."""
        self._lost.subtract(reasons)

    def failed(self, blocks: int) -> None:
        """The tier did not store so many blocks that it had taken."""
        self._lost["store_failures"] += blocks

    def look(self) -> None:
        """Say so, when the time is over, if the tier took under half."""
        now = self._now()
        if self._since is None or now < self._since + WINDOW:
            return
        lost = sum(self._lost.values())
        if now >= self._quiet_until and lost >= FEWEST and 2 * lost > self._offered:
            self._quiet_until = now + AGAIN
            (reason, _), *_ = self._lost.most_common(1)
            logger.warning(
                "tier %r took %d of the %d blocks that it was offered in %.0f s: %s",
                log_name(self._spec),
                max(0, self._offered - lost),
                self._offered,
                now - self._since,
                self._remedy(reason),
            )
        self._since, self._offered = None, 0
        self._lost.clear()

    def _remedy(self, reason: str) -> str:
        store = self._spec if isinstance(self._spec, StoreSpec) else None
        if reason == "store_dropped_budget" and store is not None and store.write_budget:
            return (
                f"raise its write_budget, now {format_rate(store.write_budget)}, or keep out with "
                "store_threshold: 2 what is asked for only once"
            )
        if reason == "store_failures":
            return (
                "it did not store the others; look for its errors in this log, and at its capacity "
                "and the room that it has"
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
