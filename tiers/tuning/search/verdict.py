"""Verdict: which of the best chains is chosen, on requests that the search did not see.

The best of the search are simulated on the part that was held back. Two chains are equal there if
the difference of their scores is below the spread of that difference between quarters of that part.
Of what is equal to the best the simplest is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import stdev

from tiers.tuning.report import Report
from tiers.tuning.search.budget import Budget
from tiers.tuning.search.processes import Simulations
from tiers.tuning.search.score import Score, score
from tiers.tuning.search.search import Found, Split
from tiers.tuning.search.space import Space, simplicity
from tiers.tuning.simulation.chain import SimChain

FINALISTS = 10
ALWAYS_EQUAL, NEVER_EQUAL = 0.005, 0.02
"""Differences below the first say nothing whatever their spread, those above the second are never
given up for simplicity."""
WORTH_A_LOOK = 0.05
"""A simpler chain that is further behind in the search is not looked at again."""


@dataclass(frozen=True)
class Judged:
    """A chain on the requests that the search did not see."""

    chain: SimChain
    report: Report
    score: Score
    quarters: tuple[float, ...]
    """The objective of each quarter of them; their mean TTFT if it is no waiting time."""

    def equals(self, best: Judged) -> bool:
        """Whether it can't be told from one that is better."""
        if self.score.excess > best.score.excess:
            return False
        return self.score.worse_than(best.score) <= self.margin(best)

    def margin(self, best: Judged) -> float:
        """The difference up to which the two are equal."""
        pairs = list(zip(self.quarters, best.quarters, strict=False))
        spread = stdev(mine / theirs for mine, theirs in pairs) if len(pairs) > 1 else 0.0
        return min(max(spread, ALWAYS_EQUAL), NEVER_EQUAL)


@dataclass(frozen=True)
class Verdict:
    """What was chosen and what it was compared with; all on the part that was held back.

    `best`: what scored best; `chosen`: the simplest that equals it. `stitched`: all media, fastest
    first, with the defaults. `present`: the operator's chain, if they named one.
    """

    chosen: Judged
    best: Judged
    finalists: tuple[Judged, ...]
    none: Judged
    stitched: Judged
    present: Judged | None


class Court:
    """Judges chains on the part of a trace that was held back."""

    def __init__(
        self,
        budget: Budget,
        simulations: Simulations,
        split: Split,
        advance: Callable[[], None] = lambda: None,
    ) -> None:
        self._budget = budget
        self._simulations = simulations
        self._advance = advance
        self._split = split

    def judge(self, chains: Iterable[SimChain]) -> list[Judged]:
        """Simulate chains on the whole trace, and count what the search did not see."""
        chains = list(chains)
        jobs = [(chain, 1.0, self._split.seen) for chain in chains]
        reports = self._simulations.run(jobs, self._advance)
        return [self._judged(chain, report) for chain, report in zip(chains, reports, strict=True)]

    def _judged(self, chain: SimChain, report: Report) -> Judged:
        column = 1 if self._budget.objective == "p99_ttft" else 0
        quarters = tuple(quarter[column] for quarter in report.ttft_quarters)
        return Judged(chain, report, score(report, self._budget), quarters)


def decide(space: Space, found: Found, court: Court, present: SimChain | None) -> Verdict:
    """Choose among the best that the search found."""
    finalists = court.judge(best_different(found))
    stitched, none = court.judge([space.fastest_first(), SimChain(())])
    own = None if present is None else court.judge([present])[0]
    # What an operator has or would guess is a candidate as any other, but sizes beyond the budget.
    best = min((*finalists, stitched, none), key=lambda one: one.score)
    return Verdict(simplest(best, space, found, court), best, tuple(finalists), none, stitched, own)


def best_different(found: Found) -> list[SimChain]:
    """The ten best chains, one of those that come to the same."""
    by_score: dict[Score, SimChain] = {}
    for one in found.tried:
        by_score.setdefault(one.score, one.chain)
    return list(by_score.values())[:FINALISTS]


def simplest(best: Judged, space: Space, found: Found, court: Court) -> Judged:
    """The simplest chain that equals the best: step by step, each compared with the best."""
    machine = space.budget.machine
    chosen = best
    while True:
        known = simplicity(chosen.chain, machine)
        simpler = [
            step.chain
            for step in space.steps(chosen.chain)
            if simplicity(step.chain, machine) < known and _is_close(step.chain, best, found)
        ]
        equal = [one for one in court.judge(simpler) if one.equals(best)]
        if not equal:
            return chosen
        chosen = min(equal, key=lambda one: simplicity(one.chain, machine))


def _is_close(chain: SimChain, best: Judged, found: Found) -> bool:
    """Whether the search leaves it open that a chain equals the best."""
    mine, theirs = found.of(chain), found.of(best.chain)
    if mine is None or theirs is None:
        return True
    return mine.score.worse_than(theirs.score) <= WORTH_A_LOOK
