"""StoreWatch: asks a store, again and again, how it does, where nobody waits for the answer."""

from __future__ import annotations

import logging
import threading
import time

from tiers.concurrency.executors import widen_affinity
from tiers.concurrency.repeated_log import RepeatedLog
from tiers.store import Measured, Usage, Warns, capability
from tiers.wrappers.guard import Guarded

logger = logging.getLogger(__name__)

EVERY = 1.0
"""Seconds between two looks."""
PART = 0.01
"""The part of the time that looks may take: a store that is slow to count is asked less often."""


class StoreWatch:
    """Looks at one store on a thread of its own, in the scheduler's process alone: an engine that
    has nothing to do hears of trouble, too, and hears it once."""

    def __init__(self, store: Guarded) -> None:
        self.usage = Usage(0, 0, None)
        """What it held a moment ago."""
        self._store = store
        what = "times it was short of its settings"
        self._log = RepeatedLog(logger, f"tier {store.tier_name!r}", what)
        self._warned = ""
        self._stop = threading.Event()
        name = f"kvtiers-watch-{store.tier_name}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def close(self) -> None:
        """Look no more. Does not wait."""
        self._stop.set()

    def _run(self) -> None:
        widen_affinity()
        pause = 0.0
        while not self._stop.wait(pause):
            began = time.monotonic()
            self._look()
            pause = max(EVERY, (time.monotonic() - began) / PART)

    def _look(self) -> None:
        self._hear()
        if (measured := capability(self._store, Measured)) is not None:
            self.usage = measured.usage()

    def _hear(self) -> None:
        """Tell once what keeps the store from what its settings ask for, and when that is over."""
        warns = capability(self._store, Warns)
        if warns is None:
            return  # or not open now, of which whoever opens it tells
        warning = warns.warning()
        if warning and not self._warned:
            self._log.log("tier %r: %s", self._store.tier_name, warning)
        elif self._warned and not warning:
            line = "tier %r has all that its settings ask for again"
            self._log.log(line, self._store.tier_name, level=logging.INFO)
        self._warned = warning
