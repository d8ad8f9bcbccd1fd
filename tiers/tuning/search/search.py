"""Which chain serves a trace best? The search simulates the chains that may be the best.

The search begins with every order of every choice of media, as `Space.starts` has them. Then it
goes in rounds: of the best chains so far it takes a few, not more than `ALIKE` with the same tiers
in the same order, and simulates all chains one step from them, until no chain is new.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from tiers.tuning.report import Report
from tiers.tuning.search.processes import Job, Simulations
from tiers.tuning.search.score import Gap, Score, gap, score
from tiers.tuning.search.space import Space, simplicity
from tiers.tuning.simulation.chain import SimChain

BEAM = 4
ALIKE = 2


@dataclass(frozen=True)
class Evaluated:
    """A chain, what serving the searched part with it does, and how good that is."""

    chain: SimChain
    report: Report
    score: Score


@dataclass(frozen=True)
class Split:
    """Fractions of a trace's requests: up to `warm` they only warm, up to `searched` search and
    choice count them, and the rest is held back from both."""

    warm: float = 0.2
    searched: float = 0.6


@dataclass(frozen=True)
class Found:
    """What was tried, the best first."""

    tried: tuple[Evaluated, ...]

    def near(self, share: float) -> int:
        """How many chains are within a share of the best."""
        best = self.tried[0].score
        return sum(
            one.score.worse_than(best) <= share
            for one in self.tried
            if one.score.excess <= best.excess
        )

    def of(self, chain: SimChain) -> Evaluated | None:
        """The chain, if it was tried."""
        return next((one for one in self.tried if one.chain == chain), None)


class Trials:
    """The chains that were tried so far, each on the part that is searched."""

    def __init__(
        self,
        space: Space,
        simulations: Simulations,
        split: Split,
        advance: Callable[[Trials], None] = lambda trials: None,
    ) -> None:
        """`advance` is called after each chain."""
        self.space = space
        self._simulations = simulations
        self._split = split
        self._advance = advance
        self._tried: dict[SimChain, Evaluated] = {}
        self._asked: dict[SimChain, int] = {}

    def __len__(self) -> int:
        return len(self._tried)

    @property
    def best(self) -> Evaluated | None:
        """The best so far, and among the same scores the simplest; None: nothing was tried."""
        return min(self._tried.values(), key=self._rank, default=None)

    def of(self, chain: SimChain) -> Evaluated | None:
        """The chain, if it was tried."""
        return self._tried.get(chain)

    def run(
        self,
        chains: Iterable[SimChain],
        most: int | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> list[Evaluated]:
        """Try chains that were not, `most` at most and none once `is_over`; those that are tried
        by then, in order."""
        asked = list(dict.fromkeys(chains))
        for chain in asked:
            self._asked.setdefault(chain, len(self._asked))
        new = islice((chain for chain in asked if chain not in self._tried), most)
        jobs = [(chain, self._split.searched, self._split.warm) for chain in new]
        self._simulations.run(jobs, self._note, is_over)
        return [self._tried[chain] for chain in asked if chain in self._tried]

    def gap(self, mine: Evaluated, other: Evaluated) -> Gap:
        """How much worse a chain is than another."""
        return gap(mine.report, other.report, self.space.budget)

    def found(self) -> Found:
        """All of them."""
        return Found(tuple(sorted(self._tried.values(), key=self._rank)))

    def beam(self) -> list[Evaluated]:
        """The best chains: of each order of tiers a few, of those with the same score the
        simplest."""
        chosen: list[Evaluated] = []
        orders: Counter[tuple[str, ...]] = Counter()
        scores: set[Score] = set()
        for one in sorted(self._tried.values(), key=self._rank):
            order = tuple(tier.type for tier in one.chain.tiers)
            if orders[order] < ALIKE and one.score not in scores:
                orders[order] += 1
                scores.add(one.score)
                chosen.append(one)
            if len(chosen) == BEAM:
                break
        return chosen

    def _note(self, job: Job, report: Report) -> None:
        chain = job[0]
        self._tried[chain] = Evaluated(chain, report, score(report, self.space.budget))
        self._advance(self)

    def _rank(self, one: Evaluated) -> tuple[Score, tuple[float, ...], int]:
        # The last is the order of asking: processes end in any order, and ties must not hang on it.
        order = self._asked[one.chain]
        return one.score, simplicity(one.chain, self.space.budget.machine), order


def search(trials: Trials, limit: int, is_over: Callable[[], bool] = lambda: False) -> None:
    """Try `limit` chains at most, and none once `is_over`."""
    space, count = trials.space, 0
    trials.run(space.starts(), limit, is_over)
    while count < len(trials) < limit:
        count = len(trials)
        steps = (chain for one in trials.beam() for chain in next_steps(one, space))
        trials.run(steps, limit - count, is_over)


def next_steps(one: Evaluated, space: Space) -> Iterator[SimChain]:
    """The chains one step from a chain, but for settings of tiers that served nothing."""
    idle = {use.name for use in one.report.tiers if not use.hit_tokens}
    for step in space.steps(one.chain):
        if step.tier not in idle or step.kind in ("tiers", "order"):
            yield step.chain
