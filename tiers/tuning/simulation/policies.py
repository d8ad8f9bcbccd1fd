"""Load policies: which tier loads which blocks of a prompt, by runs, as the chain decides it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from tiers.tuning.simulation.tier import Tier

Pieces = list[tuple[int, int]]
"""A prefix in order: which tier loads how many blocks."""


class Question(NamedTuple):
    """Blocks of a prompt that could be loaded: at most `most`, from block `skip` of the run
    `path[at]` on."""

    path: Sequence[int]
    at: int
    skip: int
    most: int
    now: float


Policy = Callable[[Sequence[Tier], Question, Sequence[int]], Pieces]
"""Asked with the blocks of each run."""


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


def first(tiers: Sequence[Tier], question: Question, lengths: Sequence[int]) -> Pieces:
    """The first tier that has any of it."""
    for index, tier in enumerate(tiers):
        if blocks := _prefix(tier, question, lengths):
            return [(index, blocks)]
    return []


def longest(tiers: Sequence[Tier], question: Question, lengths: Sequence[int]) -> Pieces:
    """The tier that has the most of it, the first of several."""
    most, best = 0, -1
    for index, tier in enumerate(tiers):
        blocks = _prefix(tier, question, lengths)
        if blocks > most:
            most, best = blocks, index
            if most == question.most:
                break
    return [(best, most)] if most else []


def cheapest(
    costs: Costs, tiers: Sequence[Tier], question: Question, lengths: Sequence[int]
) -> Pieces:
    """The tier that saves most time, if any saves enough of it."""
    best: Pieces = []
    saved = 0.0
    for index, tier in enumerate(tiers):
        blocks = _prefix(tier, question, lengths)
        compute, load = blocks * costs.compute, tier.wait_for(blocks, question.now)
        pays = blocks >= costs.least and load * (1 + costs.margin) < compute
        if pays and compute - load > saved:
            saved, best = compute - load, [(index, blocks)]
    return best


def _prefix(tier: Tier, question: Question, lengths: Sequence[int]) -> int:
    """How many blocks in a row the tier holds."""
    path, at, skip, most, _ = question
    held = tier.held
    count = -skip
    for run in path[at:]:
        have = held.get(run, 0)
        count += have
        if have < lengths[run]:
            break
    return 0 if count <= 0 else count if count < most else most


def stitched(tiers: Sequence[Tier], question: Question, lengths: Sequence[int]) -> Pieces:
    """Each block from the first tier that has it."""
    path, at, skip, left, _ = question
    pieces: Pieces = []
    for run in path[at:]:
        have = skip
        for index, tier in enumerate(tiers):
            more = tier.held.get(run, 0) - have
            if more > 0:
                more = min(more, left)
                pieces.append((index, more))
                have += more
                left -= more
                if have == lengths[run] or not left:
                    break
        if have < lengths[run] or not left:
            break
        skip = 0
    return pieces


def soonest(tiers: Sequence[Tier], question: Question, lengths: Sequence[int]) -> Pieces:
    """Each block from the tier that delivers it first, given what is queued."""
    path, at, skip, left, now = question
    ready = [max(now, t.load_free) + t.settings.load_latency for t in tiers]
    pieces: Pieces = []
    for run in path[at:]:
        held = [tier.held.get(run, 0) for tier in tiers]
        stop = min(max(held, default=0), skip + left)
        for block in range(skip, stop):
            ends = [
                (ready[index] + tier.settings.load_seconds, index)
                for index, tier in enumerate(tiers)
                if held[index] > block
            ]
            end, index = min(ends)
            ready[index] = end
            if pieces and pieces[-1][0] == index:
                pieces[-1] = (index, pieces[-1][1] + 1)
            else:
                pieces.append((index, 1))
        left -= max(0, stop - skip)
        if stop < lengths[run] or left <= 0:
            break
        skip = 0
    return pieces
