"""Load policies: which tier loads which blocks of a prompt, by runs, as the chain decides it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import islice
from operator import or_
from typing import NamedTuple

from tiers.loading.shares import HeldRun, LinkCost, share
from tiers.tuning.simulation.spaces import leading
from tiers.tuning.simulation.tier import Tier

Pieces = list[tuple[int, int]]
"""A prefix in order: which tier loads how many blocks."""
Placed = Sequence[tuple[int, Tier]]
"""Tiers with their places in the chain."""


class Question(NamedTuple):
    """Blocks of a prompt that could be loaded: at most `most`, from block `skip` of the run
    `path[at]` on."""

    path: Sequence[int]
    at: int
    skip: int
    most: int


class Plan(NamedTuple):
    """What a policy would load; see `tiers.loading.comparison.Plan`. `size`: tokens of a block."""

    pieces: Pieces
    size: int

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.pieces) * self.size

    @property
    def parts(self) -> Mapping[int, int]:
        parts: dict[int, int] = {}
        for tier, count in self.pieces:
            parts[tier] = parts.get(tier, 0) + count * self.size
        return parts

    def behind(self, head: Plan) -> Plan:
        """The plan of which `head` loads the first blocks."""
        skip = sum(count for _, count in head.pieces)
        pieces = list(head.pieces)
        for tier, count in self.pieces:
            if count > skip:
                pieces.append((tier, count - skip))
            skip = max(0, skip - count)
        return Plan(pieces, self.size)


Policy = Callable[[Placed, Question, Sequence[int]], Pieces]
"""Asked with the masks of the runs."""


def policy(name: str) -> Policy:
    """The load policy of a name. Raises ValueError for one that is not simulated."""
    policies: dict[str, Policy] = {"first": first, "longest": longest, "stitched": stitched}
    if name not in policies:
        raise ValueError(f"found load policy {name!r}; simulated are {', '.join(policies)}")
    return policies[name]


def first(tiers: Placed, question: Question, masks: Sequence[int]) -> Pieces:
    """The first tier that has any of it."""
    for place, tier in tiers:
        if blocks := _prefix(tier, question, masks):
            return [(place, blocks)]
    return []


def longest(tiers: Placed, question: Question, masks: Sequence[int]) -> Pieces:
    """The tier that has the most of it, the first of several."""
    most, best = 0, -1
    for place, tier in tiers:
        blocks = _prefix(tier, question, masks)
        if blocks > most:
            most, best = blocks, place
            if most == question.most:
                break
    return [(best, most)] if most else []


def _prefix(tier: Tier, question: Question, masks: Sequence[int]) -> int:
    """How many blocks in a row the tier holds."""
    path, at, skip, most = question
    held = tier.held
    count = 0
    for run in path[at:]:
        blocks = held[run] >> skip
        if blocks != masks[run] >> skip:
            count += leading(blocks)
            break
        count += blocks.bit_length()
        skip = 0
    return count if count < most else most


def stitched(tiers: Placed, question: Question, masks: Sequence[int]) -> Pieces:
    """Each block from the first tier that has it."""
    path, at, skip, left = question
    pieces: Pieces = []
    for run in islice(path, at, None):
        whole = masks[run] >> skip
        found = 0
        shares: list[tuple[int, int]] = []
        for place, tier in tiers:
            more = tier.held[run] >> skip & ~found
            if more:
                found |= more
                shares.append((place, more))
                if found == whole:
                    break
        count = whole.bit_length() if found == whole else leading(found)
        if count > left:
            count = left
        if len(shares) == 1 and count:
            pieces.append((shares[0][0], count))
        else:
            prefix = (1 << count) - 1
            pieces += [(place, n) for place, more in shares if (n := (more & prefix).bit_count())]
        left -= count
        if found != whole or not left:
            break
        skip = 0
    return pieces


def shared(
    tiers: Placed,
    question: Question,
    masks: Sequence[int],
    paces: Mapping[int, LinkCost],
    last: Callable[[int], int],
) -> Pieces:
    """As `stitched`, shared among the tiers so that the last block comes soonest."""
    path, at, skip, left = question
    stretches: list[HeldRun] = []
    places = [place for place, _ in tiers]
    for run in islice(path, at, None):
        held = [tier.held[run] >> skip for _, tier in tiers]
        found = reduce(or_, held)
        count = min(leading(found), left)
        stretches += _stretches(places, held, count)
        left -= count
        if found != masks[run] >> skip or not left:
            break
        skip = 0
    return share(stretches, paces, last)[0]


def _stretches(places: Sequence[int], held: Sequence[int], count: int) -> Iterator[HeldRun]:
    """Who holds the first `count` blocks of a run, of which all are held by some."""
    first = 0
    while first < count:
        have = [bool(blocks >> first & 1) for blocks in held]
        # Each holder has blocks up to its next gap, and each other none up to its next block.
        same = count - first
        for blocks, has in zip(held, have, strict=True):
            rest = blocks >> first
            same = min(same, leading(rest) if has else _gap(rest, same))
        yield tuple(place for place, has in zip(places, have, strict=True) if has), same
        first += same


def _gap(blocks: int, most: int) -> int:
    """How many blocks are missing before the first one that is there; `most` if none is."""
    return (blocks & -blocks).bit_length() - 1 if blocks else most
