"""Search: simulate the chains that may be the best, on the part of a trace that it is given.

The search begins with every order of every choice of media. Then it goes in rounds: of the best
chains so far it takes a few, not more than `ALIKE` with the same tiers in the same order, and
simulates all chains one step from them, until no chain is new. Where a budget allows so few chains
that all can be simulated, all are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tiers.tuning.report import Report
from tiers.tuning.search.budget import Budget
from tiers.tuning.search.processes import Simulations
from tiers.tuning.search.score import Score, score
from tiers.tuning.search.space import Space, simplicity
from tiers.tuning.simulation.chain import SimChain

BEAM = 4
ALIKE = 2


@dataclass(frozen=True)
class Tried:
    """A chain, what serving the trace with it does, and how good that is."""

    chain: SimChain
    report: Report
    score: Score


@dataclass(frozen=True)
class Split:
    """Fractions of a trace's requests: up to `warm` they only warm, up to `seen` the search counts
    them, and the rest is held back from it."""

    warm: float = 0.25
    seen: float = 0.5


@dataclass(frozen=True)
class Found:
    """What the search tried, the best first, and whether that was all there is."""

    tried: tuple[Tried, ...]
    is_all: bool

    def near(self, share: float) -> int:
        """How many chains are within a share of the best."""
        best = self.tried[0].score
        return sum(
            one.score.worse_than(best) <= share
            for one in self.tried
            if one.score.excess <= best.excess
        )

    def of(self, chain: SimChain) -> Tried | None:
        """The chain, if it was tried."""
        return next((one for one in self.tried if one.chain == chain), None)


def search(
    space: Space,
    simulations: Simulations,
    split: Split,
    limit: int,
    advance: Callable[[], None] = lambda: None,
) -> Found:
    """Try `limit` chains at most. `advance` is called for each."""
    budget = space.budget
    tried: dict[SimChain, Tried] = {}

    def judge(chains: Iterable[SimChain]) -> None:
        new = [chain for chain in dict.fromkeys(chains) if chain not in tried]
        new = new[: limit - len(tried)]
        jobs = [(chain, split.seen, split.warm) for chain in new]
        for chain, report in zip(new, simulations.run(jobs, advance), strict=True):
            tried[chain] = Tried(chain, report, score(report, budget))

    everything = closure(space, limit)
    judge(everything or space.starts())
    count = 0
    while count < len(tried) < limit and not everything:
        count = len(tried)
        best = beam(tried.values(), budget)
        judge(chain for one in best for chain in next_steps(one, space))
    return Found(tuple(sorted(tried.values(), key=rank(budget))), bool(everything))


def complete(
    found: Found,
    chain: SimChain,
    space: Space,
    simulations: Simulations,
    split: Split,
    advance: Callable[[], None] = lambda: None,
) -> Found:
    """Try a chain and all that are one step from it too, to say what each choice brings."""
    wanted = [chain, *(step.chain for step in space.steps(chain))]
    new = [one for one in dict.fromkeys(wanted) if found.of(one) is None]
    reports = simulations.run([(one, split.seen, split.warm) for one in new], advance)
    more = [
        Tried(one, report, score(report, space.budget))
        for one, report in zip(new, reports, strict=True)
    ]
    return Found(tuple(sorted((*found.tried, *more), key=rank(space.budget))), found.is_all)


def rank(budget: Budget) -> Callable[[Tried], tuple[Score, tuple[float, ...]]]:
    """The key that sorts chains: by score, and among the same scores the simpler first."""
    return lambda one: (one.score, simplicity(one.chain, budget.machine))


def beam(tried: Iterable[Tried], budget: Budget) -> list[Tried]:
    """The best chains: of each order of tiers a few, of those with the same score the simplest."""
    chosen: list[Tried] = []
    orders: Counter[tuple[str, ...]] = Counter()
    scores: set[Score] = set()
    for one in sorted(tried, key=rank(budget)):
        order = tuple(tier.type for tier in one.chain.tiers)
        if orders[order] < ALIKE and one.score not in scores:
            orders[order] += 1
            scores.add(one.score)
            chosen.append(one)
        if len(chosen) == BEAM:
            break
    return chosen


def next_steps(one: Tried, space: Space) -> Iterator[SimChain]:
    """The chains one step from a chain, but for settings of tiers that served nothing."""
    idle = {use.name for use in one.report.tiers if not use.hit_tokens}
    for step in space.steps(one.chain):
        if step.tier not in idle or step.kind in ("tiers", "order"):
            yield step.chain


def closure(space: Space, limit: int) -> list[SimChain]:
    """All chains of the space, or none if there are more than `limit`."""
    known = dict.fromkeys(space.starts())
    new = list(known)
    while new and len(known) <= limit:
        found = dict.fromkeys(step.chain for chain in new for step in space.steps(chain))
        new = [chain for chain in found if chain not in known]
        known.update(dict.fromkeys(new))
    return [] if new or len(known) > limit else list(known)
