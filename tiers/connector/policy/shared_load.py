"""SharedLoad: one load of one request, from all tiers that serve it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tiers.explain.attempt import UNNOTED, Attempt


class SharedLoad:
    """What of a load the engine can use: the blocks before the first that failed in any tier.

    That is known when the last tier has ended. Used by the scheduler's thread alone.
    """

    def __init__(self, tiers: int, notes: Attempt = UNNOTED) -> None:
        """`notes`: told what came of it."""
        self.notes = notes
        self._left = tiers
        self._failed: list[int] = []
        self._parts: list[tuple[Sequence[int], Callable[[int], None]]] = []

    def end(
        self, blocks: Sequence[int], failed: Iterable[int], count: Callable[[int], None]
    ) -> bool:
        """One tier has ended its `blocks`; `count` is told, once, how many are of use. Whether
        it was the last."""
        self._parts.append((blocks, count))
        self._failed += failed
        self._left -= 1
        if self._left > 0:
            return False
        first = min(self._failed, default=None)
        for part, count_usable in self._parts:
            usable = len(part) if first is None else sum(block < first for block in part)
            count_usable(usable)
            self.notes.part_usable(part[0], usable)
        return True
