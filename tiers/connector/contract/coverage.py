"""How much of each block of a prompt a tier holds."""

from __future__ import annotations

from collections.abc import Sequence

MISSING, NO_WINDOW, COMPLETE = 0, 1, 2
"""How much of a block is held: all parts (COMPLETE), at least those without a window (NO_WINDOW),
or less (MISSING).

A block without its windowed parts is of use wherever attention windows no longer reach it.
"""

WAVE = 64
"""Blocks asked for at once, since most lookups of a long prompt end in its first blocks."""


def usable(held: Sequence[int], window: int) -> int:
    """The longest prefix of which all blocks are held, its last `window` ones whole."""
    stop = next((i for i, much in enumerate(held) if not much), len(held))
    if not window:
        return stop
    longest_so_far = whole = 0
    for block in range(stop):
        whole = whole + 1 if held[block] == COMPLETE else 0
        if whole >= min(window, block + 1):
            longest_so_far = block + 1
    return longest_so_far
