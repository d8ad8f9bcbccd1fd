"""Verdict: which of the chains that were tried is chosen, and what it is worth elsewhere.

All is chosen on the part of the trace that is searched. What differs by less than the differences
of its stretches leave open is not told apart: then a setting keeps its default, and a tier goes or
shrinks where that costs next to nothing. What is chosen is then simulated for requests that neither
the search nor this choice saw.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from tiers.tuning.search.finalists import Finalist
from tiers.tuning.search.score import LEAST
from tiers.tuning.search.search import Evaluated, Trials
from tiers.tuning.search.space import simplicity
from tiers.tuning.simulation.chain import SimChain

NEVER_GIVEN_UP = 0.02
"""A tier, or a part of its size, that brings more stays, however little is certain of it."""


@dataclass(frozen=True)
class Verdict:
    """What was chosen, and what it was compared with.

    `chosen`: the simplest that can't be told from what scored best in the search.
    `judged`: by what they are called, the chosen chain (`chosen`) and others on requests that it
    was not chosen by, or on those where not `is_unseen`. `finalists`: those that were served for
    real, by what they were called when the simulation had chosen.
    """

    chosen: Evaluated
    judged: Mapping[str, Evaluated]
    is_unseen: bool
    finalists: Mapping[str, Finalist] = field(default_factory=dict)


def settled(trials: Trials, grows: bool) -> Evaluated:
    """The chain to choose, once all that are one step from it were tried too, so that what each of
    its choices brings is known, and none is told to be better."""
    while True:
        chosen = choose(trials, grows)
        if grows:
            chosen = with_room_to_grow(chosen, trials)
        steps = trials.run(step.chain for step in trials.space.steps(chosen.chain))
        if not any(_beats(one, chosen, trials) for one in steps):
            return chosen


def _beats(one: Evaluated, chosen: Evaluated, trials: Trials) -> bool:
    gap = trials.gap(one, chosen)
    if one.score.excess == chosen.score.excess:
        return gap.share < 0 and gap.tells
    return one.score < chosen.score


def choose(trials: Trials, grows: bool = False, may_try: bool = True) -> Evaluated:
    """The simplest chain that can't be told from the best: step by step, each compared with the
    best. `grows`: later requests will use more room than these. `may_try`: chains that were not
    tried too."""
    space = trials.space
    machine = space.budget.machine
    best = chosen = trials.best
    assert best is not None and chosen is not None, "something was tried"
    while True:
        known = simplicity(chosen.chain, machine)
        steps = (step.chain for step in space.steps(chosen.chain))
        simpler = [chain for chain in steps if simplicity(chain, machine) < known]
        tried = trials.run(simpler, None if may_try else 0)
        equal = [one for one in tried if _equals(one, best, trials, grows)]
        if not equal:
            return chosen
        chosen = min(equal, key=lambda one: simplicity(one.chain, machine))


def _equals(one: Evaluated, best: Evaluated, trials: Trials, grows: bool) -> bool:
    """Whether a chain that scores worse than the best may take its place."""
    if one.score.excess > best.score.excess:
        return False
    gap = trials.gap(one, best)
    mine, theirs = _room(one.chain), _room(best.chain)
    if mine == theirs:
        return gap.share <= gap.margin
    if grows:
        return gap.share <= (LEAST if mine.keys() < theirs.keys() else 0)
    return gap.share <= min(gap.margin, NEVER_GIVEN_UP)


def _room(chain: SimChain) -> Mapping[str, int | None]:
    return {tier.type: tier.capacity for tier in chain.tiers}


def with_room_to_grow(chosen: Evaluated, trials: Trials) -> Evaluated:
    """The chosen chain with tiers as large as limits and constraints allow, where these requests
    fill less of them than later ones will, so that no size beyond can be judged by them."""
    space = trials.space
    for tier, use in zip(chosen.chain.tiers, chosen.report.tiers, strict=True):
        if use.held_bytes is not None or tier.capacity == space.sizes[tier.type][0]:
            chosen = next(_larger(chosen, tier.type, tier.capacity or 0, trials), chosen)
    return chosen


def _larger(chosen: Evaluated, kind: str, least: int, trials: Trials) -> Iterator[Evaluated]:
    size = trials.space.budget.medium(kind).limit
    while size > least:
        tiers = tuple(
            replace(tier, capacity=size) if tier.type == kind else tier
            for tier in chosen.chain.tiers
        )
        for one in trials.run([replace(chosen.chain, tiers=tiers)]):
            worse = one.score.worse_than(chosen.score) > LEAST
            if one.score.excess <= chosen.score.excess and not worse:
                yield one
        size //= 2
