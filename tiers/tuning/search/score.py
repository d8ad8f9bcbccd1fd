"""How good a chain's report is, by the budget's objective and constraints."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import NamedTuple

from tiers.tuning.report import Report
from tiers.tuning.search.budget import Budget

FEWEST = 8
"""Stretches from which on their differences tell anything."""
LEAST = 0.005
"""A difference that a simulation can't tell, whatever its stretches say."""
_T = dict(zip(range(8, 17), (2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13), strict=True))
"""Student's t of 95% by the number of stretches."""


@dataclass(frozen=True, order=True)
class Score:
    """Less is better; a chain that keeps all constraints comes before any that does not.

    `excess`: the sum of what is over each limit, as shares of the limits; 0: all are kept.
    `value`: the objective; seconds saved are negative.
    """

    excess: float
    value: float

    def worse_than(self, other: Score) -> float:
        """By which share of the other's this value is worse: 0.02 is two percent."""
        difference = self.value - other.value
        return difference / abs(other.value) if difference else 0.0


def score(report: Report, budget: Budget) -> Score:
    """The score of a report."""
    return Score(sum(over for _, over in excesses(report, budget)), value(report, budget))


def value(report: Report, budget: Budget) -> float:
    """The objective: seconds, or the price of a month for `cost`."""
    match budget.objective:
        case "mean_ttft":
            return report.ttft_mean
        case "p99_ttft":
            return report.ttft_p99
        case "saved_seconds":
            return -report.prefill_seconds_saved
        case "cost":
            return cost(report, budget)


class Gap(NamedTuple):
    """By which share of another's objective a chain's is worse, and how far off that may be."""

    share: float
    margin: float

    @property
    def tells(self) -> bool:
        """Whether the difference is more than chance."""
        return abs(self.share) > self.margin


def gap(mine: Report, other: Report, budget: Budget) -> Gap:
    """How much worse a report is than another of the same requests.

    The margin is what the mean of the differences is uncertain by (95%), as they vary between
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
    """The objective of each stretch."""
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
