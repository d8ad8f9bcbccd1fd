"""Which tier serves which block? The load policy decides, over what each tier has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress, count, groupby, pairwise
from operator import itemgetter, ne
from types import MappingProxyType
from typing import NamedTuple

from tiers.contract.block_groups import COMPLETE, MISSING, NO_WINDOW, leading, usable, waves
from tiers.loading.shares import HeldRun, Piece

Shares = dict[int, list[range]]
"""Blocks of one request that each child loads: child to ranges of block indexes, in order."""

Coverage = Callable[[range], Sequence[int] | None]
"""How much of each of these blocks of the request a child can load (see `contract.block_groups`);
None: it is still looking."""


class Choice(NamedTuple):
    """How many tokens are loaded, whether beside the steps, and by whom.

    `tokens` None: a child is still looking, ask again. `shares`: of our tiers. `pieces`: of
    connectors, which load a prefix one behind the other, each with its tokens, in whole blocks but
    for the last. `probed`: the child that loads only to be measured. `passed`: children that have
    tokens and are skipped, each with why, a word of `explain.accounts.REASONS`. `seconds`: until
    the end of the prompt, where that is estimated. `within`: seconds after which the load is ended.
    `computed`: tokens that precede those of the choice.
    """

    tokens: int | None
    is_async: bool
    shares: Shares | None = None
    probed: int | None = None
    passed: Mapping[int, str] = MappingProxyType({})
    seconds: float = 0.0
    within: float = math.inf
    computed: int = 0
    pieces: tuple[tuple[int, int], ...] = ()


NO_LOAD = Choice(0, False)
PENDING = Choice(None, False)


class Stitch(NamedTuple):
    """A prefix in which each block has the child of the highest load priority that holds it.

    `stop`: the block behind its last. `looking`: a child that has not answered yet might make it
    longer. `body`: the block behind the last whose parts without a window are all held.
    """

    shares: Shares
    stop: int
    looking: bool
    body: int


def stitched(
    children: Mapping[int, Coverage],
    blocks: range,
    window: int = 0,
    give: Callable[[Sequence[HeldRun]], Sequence[Piece]] | None = None,
) -> Stitch:
    """Stitch a prefix of `blocks` from the `children`, which are in load-priority order.

    A child is asked only where those above it leave a gap, and nobody is asked beyond a gap that
    all of them leave. One that is still looking holds nothing so far; it is worth waiting for only
    where such a gap ends the prefix. The last `window` blocks come from children that hold them
    whole. `give`: gives the runs of the prefix to their holders, so that all children are asked;
    None: each to the first of them.
    """
    levels: dict[int, list[int]] = {child: [] for child in children}
    best: list[int] = []
    stop = 0
    looking = False
    for wave in waves(blocks):
        nothing = [MISSING] * len(wave)
        most: Sequence[int] = nothing
        gap, asks = 0, True
        for child, coverage in children.items():
            held = coverage(wave) if asks else ()
            looking |= held is None
            if held and any(held):
                most = held if most is nothing else list(map(max, most, held))
                gap = leading(most)
                is_whole = gap == len(wave) and not (window and min(most) < COMPLETE)
                asks = give is not None or not is_whole
            levels[child] += held or nothing
        best += most
        stop += gap
        if gap < len(wave):
            break
    body = stop
    if window:
        stop = usable(best, window)
    tail = max(0, stop - window)
    stretches = _stretches(levels, range(tail), NO_WINDOW)
    stretches += _stretches(levels, range(tail, stop), COMPLETE)
    pieces = [(who[0], n) for who, n in stretches] if give is None else give(stretches)
    shares = _shares(pieces, blocks.start)
    is_looking = looking and stop < len(blocks)
    return Stitch(shares, blocks.start + stop, is_looking, blocks.start + body)


def _stretches(levels: Mapping[int, Sequence[int]], blocks: range, least: int) -> list[HeldRun]:
    """Who holds at least `least` of these blocks."""
    ends = {blocks.start, blocks.stop}
    for level in levels.values():
        part = level[blocks.start : blocks.stop]
        if part and part.count(part[0]) < len(part):  # by far most often they are alike
            ends.update(compress(count(blocks.start + 1), map(ne, part, part[1:])))
    return [
        (tuple(child for child, level in levels.items() if level[start] >= least), stop - start)
        for start, stop in pairwise(sorted(ends))
    ]


def _shares(pieces: Iterable[tuple[int, int]], block: int) -> Shares:
    """Pieces of a prefix that begins with this block, as shares."""
    shares: Shares = {}
    for child, run in groupby(pieces, key=itemgetter(0)):
        stop = block + sum(length for _, length in run)
        shares.setdefault(child, []).append(range(block, stop))
        block = stop
    return shares


def clip(shares: Shares, count: int) -> Shares:
    """The shares of the first `count` blocks alone; children that are left with none are out."""
    stop = min((ranges[0].start for ranges in shares.values()), default=0) + count
    clipped = {
        child: [range(r.start, min(r.stop, stop)) for r in ranges if r.start < stop]
        for child, ranges in shares.items()
    }
    return {child: ranges for child, ranges in clipped.items() if ranges}


def behind(shares: Shares, first: Shares) -> Shares:
    """The shares of a prefix of which `first` has the first blocks; either begins where it does."""
    stop = max(ranges[-1].stop for ranges in first.values())
    merged = {child: list(ranges) for child, ranges in first.items()}
    for child, ranges in shares.items():
        rest = [range(max(r.start, stop), r.stop) for r in ranges if r.stop > stop]
        if rest:
            merged.setdefault(child, []).extend(rest)
    return merged


def tokens_of_each(choice: Choice, tokens: int, block_tokens: int) -> dict[int, int]:
    """How many of the first `tokens` of a choice each serving child loads, by its place."""
    if not choice.pieces:
        shares = clip(choice.shares or {}, tokens // block_tokens)
        return {i: sum(map(len, parts)) * block_tokens for i, parts in shares.items()}
    serving = {}
    for child, whole in choice.pieces:
        if tokens > 0:
            serving[child] = min(whole, tokens)
        tokens -= whole
    return serving
