"""What the guard of a tier tells the operator: going down, coming up, damage."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from spec.errors import describe_error
from tiers.breaker import Breaker
from tiers.concurrency.repeated_log import RepeatedLog
from tiers.errors import KVTiersError

# Operators know these lines as the guard's.
_log = logging.getLogger("tiers.wrappers.guard")


class GuardLog:
    """The log lines of one tier's guard; those that repeat are summed up. Thread-safe."""

    def __init__(self, tier_name: str, breakers: Mapping[Breaker, str]) -> None:
        """`breakers`: with what each of them breaks, like "reads"."""
        self._where = f"tier {tier_name}"
        self._names = dict(breakers)
        self._damage = RepeatedLog(_log, self._where, "blocks were damaged")
        self._has_told = False
        self._changes = {breaker: self._changes_of(breaker) for breaker in breakers}

    def _changes_of(self, breaker: Breaker) -> RepeatedLog:
        return RepeatedLog(
            _log,
            self._where,
            f"times {self._names[breaker]} went down or up",
            at_once=4,
            state=lambda: f"; they are {'up' if breaker.is_closed else 'down'} now",
        )

    def down(self, breaker: Breaker, why: str, trace: BaseException | None) -> None:
        """A breaker has opened."""
        self._changes[breaker].log(
            "%s: %s are down (%s); tried again every %g s or more",
            self._where,
            self._names[breaker],
            why,
            breaker.wait,
            exc_info=trace,
        )

    def up(self, breaker: Breaker) -> None:
        """A breaker has closed."""
        line, level = "%s: %s are up again", logging.INFO
        self._changes[breaker].log(line, self._where, self._names[breaker], level=level)

    def damaged(self, blocks: int) -> None:
        """The store has found so many more blocks damaged, if any."""
        if blocks > 0:
            line = "%s: %d block(s) were damaged; each is a miss and is computed again"
            self._damage.log(line, self._where, blocks, count=blocks)

    def cannot_tell(self, what: str, error: BaseException) -> None:
        """The store failed when it was asked for a capability; once, since it is asked often."""
        if not self._has_told:
            self._has_told = True
            line = "%s: it can't tell whether it has %s, and is used without (%s)"
            _log.warning(line, self._where, what, describe_error(error), exc_info=trace_of(error))

    def hangs_in_close(self, seconds: float) -> None:
        """The store did not close in time."""
        _log.warning(
            "%s: not closed after %g s; the engine goes on without waiting for it",
            self._where,
            seconds,
        )


def trace_of(error: BaseException) -> BaseException | None:
    """The error whose traceback is logged: one of ours says enough, a defect's is needed."""
    return None if isinstance(error, KVTiersError) else error
