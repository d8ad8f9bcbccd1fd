"""How good a chain's report is, by the budget's objective and constraints."""

from __future__ import annotations

from dataclasses import dataclass

from tiers.tuning.report import Report
from tiers.tuning.search.budget import Budget


@dataclass(frozen=True, order=True)
class Score:
    """Less is better; a chain that keeps all constraints comes before any that does not.

    `excess`: the sum of what is over each limit, as shares of the limits; 0: all are kept.
    `value`: the objective; seconds saved are negative.
    """

    excess: float
    value: float

    def worse_than(self, other: Score) -> float:
        """By which share this value is worse than the other's: 0.02 is two percent."""
        mine, theirs = self.value, other.value
        if mine == theirs:
            return 0.0
        if theirs < 0:  # seconds saved
            return theirs / mine - 1 if mine < 0 else float("inf")
        return mine / theirs - 1 if theirs > 0 else float("inf")


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
