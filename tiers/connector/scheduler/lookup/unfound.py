"""Unfound: notices a store of which nothing is found again that was stored."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

logger = logging.getLogger(__name__)


class VisibilityCheck:
    """Watches the first blocks that the workers stored, until one of them is found.

    Blocks are noted by the scheduler's thread, and lookups by whichever threads they are made on;
    a lookup that misses what is just being noted only comes to its conclusion later.
    """

    STORED = 4096
    """Blocks remembered."""
    MISSED = 32
    """So many lookups of stored blocks, all in vain, are no accident."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._stored: dict[bytes, None] | None = {}
        self._missed = 0
        self._lock = threading.Lock()  # without it two lookups at once could both log it

    def stored(self, key: bytes) -> None:
        """The workers have stored a block."""
        if self._stored is not None and len(self._stored) < self.STORED:
            self._stored[key] = None

    def lost(self, key: bytes) -> None:
        """A block is known to be gone."""
        if self._stored is not None:
            self._stored.pop(key, None)

    def reset(self) -> None:
        """All blocks are known to be gone."""
        if self._stored is not None:
            self._stored = {}

    def asked(self, keys: Sequence[bytes], held: Sequence[bool]) -> None:
        """A store that works was asked for these keys."""
        stored = self._stored
        if stored is None or stored.keys().isdisjoint(keys):
            return
        answers = [has for key, has in zip(keys, held, strict=True) if key in stored]
        if any(answers):
            self._stored = None
            return
        with self._lock:
            self._missed += len(answers)
            if self._missed < self.MISSED or self._stored is None:
                return
            self._stored = None
        logger.warning(
            "tier %s: blocks are stored, and none of the %d asked for since was found. The "
            "scheduler's process and each worker open the store separately: what one puts the "
            "others must see, in a file, a server or shared memory. Or its capacity is so "
            "small that all is evicted before it is asked for",
            self._tier,
            self._missed,
        )
