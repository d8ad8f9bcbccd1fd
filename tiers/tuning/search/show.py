"""What the search came to, for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tiers.tuning.search.budget import Budget
from tiers.tuning.search.score import cost, excesses
from tiers.tuning.search.search import Found, Tried
from tiers.tuning.search.space import Space
from tiers.tuning.search.verdict import Judged, Verdict
from tiers.tuning.search.words import name, percent, seconds, size

PLOT_WIDTH, PLOT_HEIGHT = 64, 14
COLUMNS = ("", "TTFT mean", "p50", "p99", "from tiers", "GPUs", "links", "life", "price", "chain")


def table(verdict: Verdict, budget: Budget) -> str:
    """The chains that were compared on requests that the search did not see, one on a line."""
    rows = [("chosen", verdict.chosen)]
    if verdict.best.chain != verdict.chosen.chain:
        rows.append(("its equal", verdict.best))
    if verdict.present is not None:
        rows.append(("present", verdict.present))
    rows += [("fastest first", verdict.stitched), ("none", verdict.none)]
    return _aligned([COLUMNS, *(_row(label, one) for label, one in rows)])


def _row(label: str, one: Judged) -> tuple[str, ...]:
    report = one.report
    lives = [tier.life_years for tier in report.tiers if tier.life_years is not None]
    links = [max(tier.load_busy, tier.store_busy) for tier in report.tiers]
    price = report.price_per_month
    return (
        label,
        seconds(report.ttft_mean),
        seconds(report.ttft_p50),
        seconds(report.ttft_p99),
        percent(report.tier_hit_tokens / max(1, report.prompt_tokens)),
        percent(report.gpu_load),
        percent(max(links, default=0.0)),
        f"{min(lives):.2g} y" if lives else "-",
        "-" if price is None else f"{price:,.0f}",
        name(one.chain),
    )


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def notes(verdict: Verdict, found: Found, space: Space) -> list[str]:
    """What else an operator should know, a sentence or two each."""
    best = verdict.chosen
    told = [
        f"{len(found.tried):,} chains were simulated{', all there are' if found.is_all else ''}: "
        f"{found.near(0.01):,} are within 1% of the best, {found.near(0.05):,} within 5%, "
        f"{found.near(0.1):,} within 10%."
    ]
    if best.chain != verdict.best.chain:
        told.append(_simpler(best, verdict.best))
    told += left_out(verdict, found, space)
    told += [
        f"No chain that was tried keeps all constraints: {text}."
        for text, _ in excesses(best.report, space.budget)
    ]
    told += [f"Beware: {warning}." for warning in best.report.warnings]
    return told


def _simpler(chosen: Judged, best: Judged) -> str:
    """Why a chain was chosen that is not the best of the search."""
    gap = chosen.score.worse_than(best.score)
    if gap <= 0:
        return f"What is chosen is simpler than {name(best.chain)}, and no worse."
    spread = percent(chosen.margin(best))
    return (
        f"{name(best.chain)} is {percent(gap)} better, less than the {spread} by which "
        "the two vary between parts of the trace: the simpler one is chosen."
    )


def left_out(verdict: Verdict, found: Found, space: Space) -> list[str]:
    """For each medium that the chosen chain lacks: what the best chain with it came to."""
    chosen = verdict.chosen.chain
    mine = {tier.type for tier in chosen.tiers}
    reference = found.of(chosen) or found.tried[0]
    told = []
    for medium in space.budget.media:
        if medium.type not in mine:
            with_it = [one for one in found.tried if _has(one, {*mine, medium.type})]
            why = _why(with_it[0], medium.type, reference) if with_it else "it was not tried"
            told.append(f"{medium.type} is left out: {why}.")
    return told


def _has(one: Tried, types: set[str]) -> bool:
    return {tier.type for tier in one.chain.tiers} == types


def _why(one: Tried, kind: str, reference: Tried) -> str:
    gap = one.score.worse_than(reference.score)
    use = next(tier for tier in one.report.tiers if tier.name == kind)
    share = percent(use.hit_tokens / max(1, one.report.prompt_tokens))
    busy = percent(max(use.load_busy, use.store_busy))
    if one.score.excess > reference.score.excess:
        verdict = "breaks a constraint"
    elif abs(gap) < 0.0005:
        verdict = "is as good"
    else:
        verdict = f"is {percent(abs(gap))} {'worse' if gap > 0 else 'better, too little to tell'}"
    return (
        f"the best chain with it {verdict}; it would serve {share} of the prompts' tokens with its "
        f"link {busy} busy"
    )


def frontier(found: Found, budget: Budget) -> list[tuple[float, float, Tried]]:
    """Of all chains tried those that no other beats in both price and mean TTFT: price a month (or
    bytes, where no price is given), TTFT, chain; the cheapest first."""
    points = sorted(
        ((price_of(one, budget), one.report.ttft_mean, one) for one in found.tried),
        key=lambda point: point[:2],
    )
    kept: list[tuple[float, float, Tried]] = []
    for point in points:
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept


def has_prices(budget: Budget) -> bool:
    """Whether any tier has a price."""
    profiles = [budget.machine.tiers[medium.type] for medium in budget.media]
    prices = [(p.price_per_gb_month, p.price_per_month) for p in profiles]
    return budget.gpu_price_per_month is not None or any(any(p) for p in prices)


def price_of(one: Tried, budget: Budget) -> float:
    """The price of a chain for a month, or its bytes."""
    if has_prices(budget):
        return cost(one.report, budget)
    return float(sum(tier.capacity or 0 for tier in one.chain.tiers))


def plot(found: Found, budget: Budget, chosen: Tried | None) -> str:
    """Mean TTFT against price: every chain tried, the frontier, and what was chosen."""
    kept = {id(one) for _, _, one in frontier(found, budget)}
    points = [(price_of(one, budget), one.report.ttft_mean, one) for one in found.tried]
    xs = [x for x, _, _ in points]
    ys = [math.log(max(y, 1e-6)) for _, y, _ in points]
    canvas = [[" "] * PLOT_WIDTH for _ in range(PLOT_HEIGHT)]
    for (x, _, one), y in sorted(zip(points, ys, strict=True), key=lambda p: id(p[0][2]) in kept):
        column = round(_place(x, min(xs), max(xs)) * (PLOT_WIDTH - 1))
        row = PLOT_HEIGHT - 1 - round(_place(y, min(ys), max(ys)) * (PLOT_HEIGHT - 1))
        if canvas[row][column] != "*":
            mark = "o" if id(one) in kept else "."
            canvas[row][column] = "*" if chosen is not None and one is chosen else mark
    sides = {0: seconds(math.exp(max(ys))), PLOT_HEIGHT - 1: seconds(math.exp(min(ys)))}
    body = [f"{sides.get(at, ''):>8} |{''.join(line)}".rstrip() for at, line in enumerate(canvas)]
    text = (lambda x: f"{x:,.0f}") if has_prices(budget) else size
    axis = "price a month" if has_prices(budget) else "bytes of all tiers"
    first, last = text(min(xs)), text(max(xs))
    gap = PLOT_WIDTH - len(first) - len(last)
    legend = "* chosen  o not beaten in both  . other chains"
    head = "Mean TTFT in the search, against price"
    foot = f"{'':10}{first}{axis:^{gap}}{last}"
    return "\n".join([head, *body, foot, f"{'':10}{legend}"])


def _place(value: float, low: float, high: float) -> float:
    """Where between them, 0 to 1."""
    return (value - low) / (high - low) if high > low else 0.0
