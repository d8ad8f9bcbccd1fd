"""LookupPace: how much of an index the engine's thread looks through in one step."""

from __future__ import annotations

import time
from collections.abc import Callable


class LookupPace:
    """Names that an index may be asked for now; used by the scheduler's thread.

    A name costs that thread 0.2 to 0.4 us, and its block another microsecond, so that a long prompt
    would hold up all requests that decode. It is looked up over several steps instead, while it
    waits for its turn; and so is what a hint is about. A short question costs a step little, and is
    not held back by those of others.
    """

    OF_A_BLOCK = 3
    """So many names cost what else a block does: its key, and the question to the tiers above."""
    AT_ONCE = 16_384
    """Names of a step, at most: about 5 ms."""
    A_SECOND = 1_600_000.0
    """For each second that is not spent on such a question: half of the thread's time or less, so
    that an idle engine answers about as soon."""
    FEW = 4096
    """Names of a question that is never held back."""

    def __init__(self, ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`ranks`: names of a block. `clock`: of the machine, since it is its time that is spent,
        in seconds."""
        self._names = ranks + self.OF_A_BLOCK
        self._clock = clock
        self._left, self._at = float(self.AT_ONCE), clock()

    def is_short(self, blocks: int) -> bool:
        """Whether a question of so many blocks is never held back."""
        return blocks * self._names <= self.FEW

    @property
    def is_spent(self) -> bool:
        """Whether nothing was left when something was last looked up."""
        return self._left <= 0

    def take(self, blocks: int) -> int:
        """How many of so many blocks are looked up now."""
        now = self._clock()
        self._left = min(self._left + (now - self._at) * self.A_SECOND, self.AT_ONCE)
        self._at = now
        if not self.is_short(blocks):
            # Not a few names for each that waits: a call costs as much as a hundred.
            may = int(self._left) if self._left >= self.FEW else 0
            blocks = min(blocks, may // self._names)
        self._left -= blocks * self._names
        return blocks

    def took(self) -> None:
        """Those were looked up. The time that took allows for nothing: each of many long prompts
        that wait would otherwise be given as much as the first, all in one step."""
        self._at = self._clock()
