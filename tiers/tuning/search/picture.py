"""Waiting time against price as a PNG; needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from tiers.tuning.search.show import frontier, has_prices, price_of
from tiers.tuning.search.tune import Tuned


def draw(tuned: Tuned, file: Path) -> None:
    """Draw every chain tried, the frontier and what was chosen. Raises ModuleNotFoundError without
    matplotlib, OSError."""
    from matplotlib.figure import Figure

    found, budget = tuned.found, tuned.budget
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    points = [(price_of(one, budget), one.report.ttft_mean) for one in found.tried]
    axes.plot(*zip(*points, strict=True), ".", color="0.7", label="chains tried")
    kept = [(price, ttft) for price, ttft, _ in frontier(found, budget)]
    axes.plot(*zip(*kept, strict=True), "o-", drawstyle="steps-post", label="not beaten in both")
    chosen = found.of(tuned.verdict.chosen.chain)
    if chosen is not None:
        at = price_of(chosen, budget), chosen.report.ttft_mean
        axes.plot(*at, "*", markersize=16, label="chosen")
    axes.set(
        xlabel="price a month" if has_prices(budget) else "bytes of all tiers",
        ylabel="mean TTFT in the search, s",
        yscale="log",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, format="png", dpi=110)
