"""How much of each block of a prompt a tier holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

MISSING, NO_WINDOW, COMPLETE = 0, 1, 2
"""How much of a block is held: all parts (COMPLETE), at least those without a window (NO_WINDOW),
or less (MISSING).

A block without its windowed parts is of use wherever attention windows no longer reach it. Of
models without windows a held block is NO_WINDOW; True and False stand for NO_WINDOW and MISSING.
"""

WAVE = 64
"""Blocks of the first wave of a lookup."""


def waves(blocks: range) -> Iterator[range]:
    """Part `blocks` into waves, each four times as long as the one before.

    Most lookups of a long prompt end in its first blocks.
    """
    start, size = blocks.start, WAVE
    while start < blocks.stop:
        yield range(start, min(start + size, blocks.stop))
        start, size = start + size, 4 * size


def leading(coverage: Sequence[int]) -> int:
    """How many leading blocks are held."""
    return len(coverage) if all(coverage) else coverage.index(MISSING)


def usable(coverage: Sequence[int], window: int) -> int:
    """The longest prefix of which all blocks are held, its last `window` ones whole."""
    stop = leading(coverage)
    if not window:
        return stop
    longest_so_far = whole = 0
    for block in range(stop):
        whole = whole + 1 if coverage[block] == COMPLETE else 0
        if whole >= min(window, block + 1):
            longest_so_far = block + 1
    return longest_so_far
