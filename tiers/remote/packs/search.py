"""Which packs hold a prompt's blocks, found by reading few indexes.

Each search is a generator: it yields the keys whose packs it wants to know, and is sent their
indexes, None for a pack that is not there. So several go on together, a round trip for all.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tiers.remote.packs.pack import Index

Found: TypeAlias = Mapping[bytes, Index | None]

AHEAD = 16
"""Indexes that are read at once behind a pack that ends early: what follows is often short."""
FIRST_PROBES = 8
"""First blocks of groups that a prompt is asked for to begin with: most prompts are not there."""
PROBES = 32


@dataclass(frozen=True, slots=True)
class Span:
    """Blocks `at` to `at + count` of some keys, which are the first of the pack of `key`."""

    key: bytes
    at: int
    count: int

    @property
    def stop(self) -> int:
        return self.at + self.count


def walk(
    keys: Sequence[bytes], at: int, stop: int
) -> Generator[Sequence[bytes], Found, list[Span]]:
    """From block `at` on, pack by pack, up to `stop` or as far as there are packs."""
    spans: list[Span] = []
    ahead = 1
    while at < stop:
        found = yield keys[at : min(at + ahead, stop)]
        more = walk_known(keys, at, stop, found.get)
        if not more:
            break
        spans += more
        at = more[-1].stop
        ahead = AHEAD
    return spans


def walk_known(
    keys: Sequence[bytes],
    at: int,
    stop: int,
    known: Callable[[bytes], Index | None],
    skips: bool = False,
) -> list[Span]:
    """As `walk`, as far as the packs are known; none is in two. `skips`: also behind blocks that
    are in none."""
    spans: list[Span] = []
    while at < stop:
        index = known(keys[at])
        count = 0 if index is None else min(index.matches(keys, at), stop - at)
        if count:
            spans.append(Span(keys[at], at, count))
        elif not skips:  # none is known; or a digest's accident, or a pack under another's name
            break
        at += max(1, count)
    return spans


def cover(
    keys: Sequence[bytes], wanted: Sequence[int], known: Callable[[bytes], Index | None]
) -> Generator[Sequence[bytes], Found, list[Span]]:
    """The packs of a group that hold the `wanted` numbers, which rise, for a store of what is in
    none. They are looked for from the group's first block on, or, if packs are missing there, from
    the first wanted one on. Packs that are `known` to end before that are not asked for: an
    answer's blocks come one by one."""
    first, stop = wanted[0], wanted[-1] + 1
    ends = (span.stop for span in walk_known(keys, 0, len(keys), known))
    at = max((end for end in ends if end <= first), default=0)
    spans = yield from walk(keys, at, stop)
    if (spans[-1].stop if spans else at) < first:
        spans = yield from walk(keys, first, stop)
    return spans


def find(keys: Sequence[bytes], stop: int) -> Generator[Sequence[bytes], Found, list[Span]]:
    """The packs of a group that hold its blocks up to `stop`: from its first one on, and, if any is
    missing there, wherever they begin."""
    spans = yield from walk(keys, 0, stop)
    at = spans[-1].stop if spans else 0
    if at < stop:
        found = yield keys[at:stop]
        spans += walk_known(keys, at, stop, found.get, skips=True)
    return spans


def find_all(
    keys: Sequence[bytes], pack_blocks: int
) -> Generator[Sequence[bytes], Found, list[Span]]:
    """The packs of a prompt of which any block may be missing: the first blocks of all groups are
    asked for, and then each block that is in none of their packs."""
    found: dict[bytes, Index | None] = {}
    spans: list[Span] = []
    asked = keys[::pack_blocks]
    while asked:
        answers = yield asked
        found.update((key, answers[key]) for key in asked)
        spans = walk_known(keys, 0, len(keys), found.get, skips=True)
        asked = [k for k, has in zip(keys, marked(spans, len(keys)), strict=True) if not has]
        asked = [key for key in asked if key not in found]
    return spans


def marked(spans: Sequence[Span], count: int) -> list[bool]:
    """Which of `count` blocks are in one of these."""
    held = [False] * count
    for span in spans:
        held[span.at : span.stop] = [True] * span.count
    return held


def held(keys: Sequence[bytes], pack_blocks: int) -> Generator[Sequence[bytes], Found, int]:
    """How many blocks of a prompt are there, from its first on. The groups before the last one that
    begins are taken for whole: a block stands for all before it."""
    heads = keys[::pack_blocks]
    low, high = -1, len(heads)  # the last that is there, the first that is not
    probes = FIRST_PROBES
    while high - low > 1:
        numbers = _spread(low, high, probes)
        found = yield [heads[number] for number in numbers]
        for number in numbers:
            if found[heads[number]] is None:
                high = number
                break
            low = number
        probes = PROBES
    if low < 0:
        return 0
    base = low * pack_blocks
    spans = yield from walk(keys, base, min(base + pack_blocks, len(keys)))
    return spans[-1].stop if spans else base


def _spread(low: int, high: int, count: int) -> list[int]:
    """Some numbers between these two, evenly; the first of all is among them."""
    gap = high - low
    numbers = {low + max(1, gap * step // (count + 1)) for step in range(1, count + 1)}
    return sorted({number for number in numbers if number < high} | ({0} if low < 0 else set()))
