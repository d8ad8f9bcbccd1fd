"""Which chain serves a trace best? The search simulates the chains that may be the best.

The search begins with every order of every choice of media, as `Space.starts` has them. Then it
works in rounds: of the best chains so far it takes a few, not more than `SAME_ORDER` with the same
tiers in the same order, and simulates all chains one step from them, until no chain is new.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean, stdev
from typing import NamedTuple

from tiers.tuning.report import Report
from tiers.tuning.search.budget import Budget
from tiers.tuning.search.processes import Simulations
from tiers.tuning.search.space import Space
from tiers.tuning.simulation.sim_chain import SimChain

BEAM = 4
SAME_ORDER = 2
FEWEST = 8
"""Stretches from which on their differences mean anything."""
LEAST = 0.005
"""A difference that is below a simulation's precision, whatever its stretches say."""
_T = dict(zip(range(8, 17), (2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13), strict=True))
"""Student's t of 95% by the number of stretches."""


# -- how good a chain's report is, by the budget's objective and constraints ---------------------


@dataclass(frozen=True, order=True)
class Score:
    """Less is better; a chain that keeps all constraints comes before any that does not.

    `excess`: the sum of the excesses over each limit, as shares of the limits; 0: all are kept.
    `value`: the objective; seconds saved are negative.
    """

    excess: float
    value: float

    def worse_than(self, other: Score) -> float:
        """By which share of the other's this value is worse: 0.02 is two percent; infinite where
        the other's is 0."""
        difference = self.value - other.value
        if scale := abs(other.value):
            return difference / scale
        return difference and math.copysign(math.inf, difference)


def score(report: Report, budget: Budget) -> Score:
    """The score of a report. Its value is seconds, or the price of a month for `cost`."""
    values = {
        "mean_ttft": report.ttft_mean,
        "p99_ttft": report.ttft_p99,
        "saved_seconds": -report.prefill_seconds_saved,
        "cost": cost(report, budget),
    }
    excess = sum(over for _, over in excesses(report, budget))
    return Score(excess, values[budget.objective])


def cost(report: Report, budget: Budget) -> float:
    """The price of the tiers for a month, and of the GPU time that prompts took of it."""
    gpus = budget.machine.gpus * report.gpu_load * (budget.gpu_price_per_month or 0.0)
    return (report.price_per_month or 0.0) + gpus


def excesses(report: Report, budget: Budget) -> list[tuple[str, float]]:
    """Each constraint that a chain breaks, in words, and by which share of its limit."""
    limits = budget.constraints
    found = []
    for name, is_, limit in (
        ("mean_ttft", report.ttft_mean, limits.mean_ttft),
        ("p99_ttft", report.ttft_p99, limits.p99_ttft),
        ("price_per_month", report.price_per_month or 0.0, limits.price_per_month),
    ):
        if limit is not None and is_ > limit:
            found.append((f"{name} is {is_:.3g}, not {limit:.3g} or less", _share(is_, limit)))
    years = limits.life_years
    for tier in report.tiers:
        life = tier.life_years
        if years is not None and life is not None and round(life, 9) < years:
            text = f"{tier.name} lasts {life:.2g} years, not {years:.3g} or more"
            found.append((text, _share(years, life)))
    return found


def _share(larger: float, smaller: float) -> float:
    return larger / smaller - 1 if smaller > 0 else float(1 << 30)


class Gap(NamedTuple):
    """By which share of another's objective a chain's is worse, and how uncertain that is."""

    share: float
    margin: float

    @property
    def is_certain(self) -> bool:
        """Whether the difference is more than chance."""
        return abs(self.share) > self.margin


def gap(mine: Report, other: Report, budget: Budget) -> Gap:
    """How much worse a report is than another of the same requests.

    The margin is the uncertainty of the mean of the differences (95%), as they vary between
    stretches of the requests; infinite where there are too few of them.
    """
    share = score(mine, budget).worse_than(score(other, budget))
    pairs = list(zip(_values(mine, budget), _values(other, budget), strict=False))
    if len(pairs) < FEWEST:
        return Gap(share, math.inf)
    scale = abs(fmean(theirs for _, theirs in pairs)) or math.inf
    spread = stdev(mine - theirs for mine, theirs in pairs) / scale
    return Gap(share, max(LEAST, _T[len(pairs)] * spread / math.sqrt(len(pairs))))


def _values(report: Report, budget: Budget) -> list[float]:
    rate, parts = budget.machine.prefill_rate, report.stretches
    match budget.objective:
        case "mean_ttft":
            return [part.ttft_mean for part in parts]
        case "p99_ttft":
            return [part.ttft_p99 for part in parts]
        case "saved_seconds":
            return [-part.tier_tokens / rate for part in parts]
        case "cost":
            busy = (budget.gpu_price_per_month or 0.0) / rate / report.seconds * len(parts)
            price = report.price_per_month or 0.0
            return [price + part.computed_tokens * busy for part in parts]


def beats(mine: Report, other: Report, budget: Budget) -> bool:
    """Whether a report is better than another, by more than chance if both keep the constraints or
    break them by as much."""
    ours, theirs = score(mine, budget).excess, score(other, budget).excess
    found = gap(mine, other, budget)
    return ours < theirs or (ours == theirs and found.share < 0 and found.is_certain)


# -- trials --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluated:
    """A chain, the report of serving the searched part with it, and its score."""

    chain: SimChain
    report: Report
    score: Score


@dataclass(frozen=True)
class Split:
    """Fractions of a trace's requests: up to `warm` they only warm, up to `searched` search and
    choice count them, and the rest is held back from both."""

    warm: float = 0.2
    searched: float = 0.6


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
        self.beaten: set[SimChain] = set()
        """Those that others are better than, by more than chance."""

    def __len__(self) -> int:
        return len(self._tried)

    @property
    def tried(self) -> Sequence[Evaluated]:
        """All of them, the best first, and among the same scores the simplest."""
        return sorted(self._tried.values(), key=self._rank)

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
        for (chain, *_), report in self._simulations.run(jobs, is_over):
            self._tried[chain] = Evaluated(chain, report, score(report, self.space.budget))
            self._advance(self)
        return [self._tried[chain] for chain in asked if chain in self._tried]

    def _rank(self, one: Evaluated) -> tuple[Score, tuple[float, ...], int]:
        # The last is the order of asking: processes end in any order, and ties must not hang on it.
        order = self._asked[one.chain]
        return one.score, self.space.simplicity(one.chain), order


def search(trials: Trials, limit: int, is_over: Callable[[], bool] = lambda: False) -> None:
    """Try `limit` chains at most, and none once `is_over`."""
    space, count = trials.space, 0
    trials.run(space.starts(), limit, is_over)
    while count < len(trials) < limit:
        count = len(trials)
        steps: list[SimChain] = []
        for one in _beam(trials):
            # Settings of a tier that served nothing change nothing.
            idle = {use.name for use in one.report.tiers if not use.hit_tokens}
            steps += (
                step.chain
                for step in space.steps(one.chain)
                if step.tier not in idle or step.kind in ("tiers", "order")
            )
        trials.run(steps, limit - count, is_over)


def _beam(trials: Trials) -> list[Evaluated]:
    """The best chains: of each order of tiers a few, of those with the same score the simplest."""
    chosen: list[Evaluated] = []
    orders: Counter[tuple[str, ...]] = Counter()
    scores: set[Score] = set()
    for one in trials.tried:
        order = tuple(tier.type for tier in one.chain.tiers)
        if orders[order] < SAME_ORDER and one.score not in scores:
            orders[order] += 1
            scores.add(one.score)
            chosen.append(one)
        if len(chosen) == BEAM:
            break
    return chosen
