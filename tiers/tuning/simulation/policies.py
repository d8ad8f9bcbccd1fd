"""Load policies: which tier loads which blocks of a prompt, by runs, as the chain decides it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from operator import or_
from typing import NamedTuple

from tiers.shares import Pace, Stretch, share
from tiers.tuning.simulation.spaces import leading
from tiers.tuning.simulation.tier import Tier

Pieces = list[tuple[int, int]]
"""A prefix in order: which tier loads how many blocks."""


CROWD = 4
"""See `tiers/connector/policy/cheapest/cheapest.py`."""


class Question(NamedTuple):
    """Blocks of a prompt that could be loaded: at most `most`, from block `skip` of the run
    `path[at]` on. `waiting`: other prompts that wait to begin."""

    path: Sequence[int]
    at: int
    skip: int
    most: int
    now: float
    waiting: int = 0


Policy = Callable[[Sequence[Tier], Question, Sequence[int]], Pieces]
"""Asked with the masks of the runs."""


class Costs(NamedTuple):
    """What `cheapest` compares: seconds to compute a block, blocks at least, and its margin."""

    compute: float
    least: float
    margin: float


def policy(name: str, costs: Costs) -> Policy:
    """The load policy of a name. Raises ValueError for one that is not simulated."""
    policies: dict[str, Policy] = {
        "first": first,
        "longest": longest,
        "stitched": stitched,
        "cheapest": partial(cheapest, costs),
        "soonest": soonest,
    }
    if name not in policies:
        raise ValueError(f"found load policy {name!r}; simulated are {', '.join(policies)}")
    return policies[name]


def first(tiers: Sequence[Tier], question: Question, masks: Sequence[int]) -> Pieces:
    """The first tier that has any of it."""
    for index, tier in enumerate(tiers):
        if blocks := _prefix(tier, question, masks):
            return [(index, blocks)]
    return []


def longest(tiers: Sequence[Tier], question: Question, masks: Sequence[int]) -> Pieces:
    """The tier that has the most of it, the first of several."""
    most, best = 0, -1
    for index, tier in enumerate(tiers):
        blocks = _prefix(tier, question, masks)
        if blocks > most:
            most, best = blocks, index
            if most == question.most:
                break
    return [(best, most)] if most else []


def cheapest(
    costs: Costs, tiers: Sequence[Tier], question: Question, masks: Sequence[int]
) -> Pieces:
    """The tier that saves most time, if any saves enough of it."""
    best: Pieces = []
    saved = 0.0
    crowded = costs.compute * min(CROWD, 1 + question.waiting)
    for index, tier in enumerate(tiers):
        blocks = _prefix(tier, question, masks)
        compute, load = blocks * crowded, tier.estimate(blocks, question.now)
        pays = blocks >= costs.least and load * (1 + costs.margin) < compute
        if pays and compute - load > saved:
            saved, best = compute - load, [(index, blocks)]
    return best


def _prefix(tier: Tier, question: Question, masks: Sequence[int]) -> int:
    """How many blocks in a row the tier holds."""
    path, at, skip, most, *_ = question
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


def stitched(tiers: Sequence[Tier], question: Question, masks: Sequence[int]) -> Pieces:
    """Each block from the first tier that has it."""
    path, at, skip, left, *_ = question
    pieces: Pieces = []
    for run in path[at:]:
        whole = masks[run] >> skip
        found = 0
        shares: list[tuple[int, int]] = []
        for index, tier in enumerate(tiers):
            more = tier.held[run] >> skip & ~found
            if more:
                found |= more
                shares.append((index, more))
                if found == whole:
                    break
        count = whole.bit_length() if found == whole else leading(found)
        if count > left:
            count = left
        if len(shares) == 1 and count:
            pieces.append((shares[0][0], count))
        else:
            prefix = (1 << count) - 1
            pieces += [(index, n) for index, more in shares if (n := (more & prefix).bit_count())]
        left -= count
        if found != whole or not left:
            break
        skip = 0
    return pieces


def soonest(tiers: Sequence[Tier], question: Question, masks: Sequence[int]) -> Pieces:
    """Shared among the tiers, so that the last block comes soonest, given what is queued."""
    path, at, skip, left, now, _ = question
    stretches: list[Stretch] = []
    for run in path[at:]:
        held = [tier.held[run] >> skip for tier in tiers]
        found = reduce(or_, held)
        count = min(leading(found), left)
        stretches += _stretches(held, count)
        left -= count
        if found != masks[run] >> skip or not left:
            break
        skip = 0
    paces = {
        index: Pace(tier.estimate(0, now), tier.settings.load_seconds)
        for index, tier in enumerate(tiers)
    }
    return share(stretches, paces, last=lambda tier: 0)[0]


def _stretches(held: Sequence[int], count: int) -> Iterator[Stretch]:
    """Who holds the first `count` blocks of a run, of which all are held by some."""
    first = 0
    while first < count:
        have = [bool(blocks >> first & 1) for blocks in held]
        # Each holder has blocks up to its next gap, and each other none up to its next block.
        same = count - first
        for blocks, has in zip(held, have, strict=True):
            rest = blocks >> first
            same = min(same, leading(rest) if has else _gap(rest, same))
        yield tuple(index for index, has in enumerate(have) if has), same
        first += same


def _gap(blocks: int, most: int) -> int:
    """How many blocks are missing before the first one that is there; `most` if none is."""
    return (blocks & -blocks).bit_length() - 1 if blocks else most
