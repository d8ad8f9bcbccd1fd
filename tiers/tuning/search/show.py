"""What the search came to, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from tiers.tuning.search.budget import Budget
from tiers.tuning.search.finalists import Finalist
from tiers.tuning.search.score import LEAST, cost, excesses, gap
from tiers.tuning.search.search import Evaluated, Found
from tiers.tuning.search.space import Space
from tiers.tuning.search.tune import ENOUGH, Tuned
from tiers.tuning.search.verdict import Verdict
from tiers.tuning.search.words import change, name, percent, seconds, size

COLUMNS = (
    "",
    "TTFT mean",
    "p50",
    "p99",
    "objective",
    "from tiers",
    "GPUs",
    "links",
    "life",
    "price",
)


def table(verdict: Verdict, budget: Budget) -> str:
    """The chains that were compared, two lines each: figures, and the chain's name."""
    chosen = verdict.judged["chosen"]
    rows = [_row(label, one, chosen, budget) for label, one in verdict.judged.items()]
    return _named([COLUMNS, *rows], [name(one.chain) for one in verdict.judged.values()])


def _named(rows: Sequence[Sequence[str]], names: Sequence[str]) -> str:
    """A table whose rows but the first have a name each, on a line below."""
    head, *lines = _aligned(rows)
    pairs = (f"{line}\n    {text}" for line, text in zip(lines, names, strict=True))
    return "\n".join([head, *pairs])


def _row(label: str, one: Evaluated, chosen: Evaluated, budget: Budget) -> tuple[str, ...]:
    report = one.report
    lives = [tier.life_years for tier in report.tiers if tier.life_years is not None]
    links = [max(tier.load_busy, tier.store_busy) for tier in report.tiers]
    price = report.price_per_month
    changed = change(gap(report, chosen.report, budget), budget.objective)
    return (
        label,
        seconds(report.ttft_mean),
        seconds(report.ttft_p50),
        seconds(report.ttft_p99),
        "" if one is chosen else changed,
        percent(report.tier_hit_tokens / max(1, report.prompt_tokens)),
        percent(report.gpu_load),
        percent(max(links, default=0.0)),
        f"{min(lives):.2g} y" if lives else "-",
        "-" if price is None else f"{price:,.0f}",
    )


FINAL_COLUMNS = (
    "", "TTFT mean", "real", "p99", "real", "from tiers", "real", "objective, real"
)  # fmt: skip


def finals(verdict: Verdict, budget: Budget) -> str:
    """The chains that were served for real, two lines each, and which the verdict goes by."""
    chosen = verdict.finalists["chosen"]
    rows = [_final(label, one, chosen, budget) for label, one in verdict.finalists.items()]
    names = [
        name(one.simulated.chain) + (one.why and f": not served: {one.why}")
        for one in verdict.finalists.values()
    ]
    text = _named([FINAL_COLUMNS, *rows], names)
    if verdict.chosen.chain == chosen.simulated.chain:
        return f"{text}\nNone served better by more than chance: the choice stands."
    now = name(verdict.chosen.chain)
    return f"{text}\n{now} served better by more than chance: it is chosen instead."


def _final(label: str, one: Finalist, chosen: Finalist, budget: Budget) -> tuple[str, ...]:
    said, real = one.simulated.report, one.real
    if real is None:
        return label, seconds(said.ttft_mean), "-", seconds(said.ttft_p99), *["-"] * 4
    changed = ""
    if one is not chosen and chosen.real is not None:
        changed = change(gap(real, chosen.real, budget), budget.objective)
    both = (said, real)
    return (
        label,
        *(seconds(report.ttft_mean) for report in both),
        *(seconds(report.ttft_p99) for report in both),
        *(percent(report.tier_hit_tokens / max(1, report.prompt_tokens)) for report in both),
        changed,
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def notes(tuned: Tuned) -> list[str]:
    """What else an operator should know, a sentence or two each."""
    verdict, found = tuned.verdict, tuned.found
    chosen, best, judged = verdict.chosen, found.tried[0], verdict.judged["chosen"]
    told = [
        f"{len(found.tried):,} chains were simulated: "
        f"{found.near(0.01):,} are within 1% of the best, {found.near(0.05):,} within 5%, "
        f"{found.near(0.1):,} within 10%."
    ]
    if chosen.chain != best.chain:
        told.append(_simpler(chosen, best, tuned.budget))
    told += left_out(verdict, found, tuned.space)
    if chosen.score.excess:
        told += [
            f"No chain that was tried keeps all constraints: {text}."
            for text, _ in excesses(chosen.report, tuned.budget)
        ]
    elif judged.score.excess:
        told += [
            f"Where it is judged, and not where it was searched, {one}." for one in tuned.broken
        ]
    told += too_little(tuned)
    return [*told, *(f"Beware: {warning}." for warning in judged.report.warnings)]


def too_little(tuned: Tuned) -> list[str]:
    """What the trace is too short for."""
    told = []
    if tuned.counted < ENOUGH:
        told.append(
            f"The search counted {tuned.counted:,} requests, too few to tell chains apart: record "
            f"{ENOUGH:,} at least, better thousands."
        )
    if tuned.growth is not None:
        told.append(
            f"The trace is still growing ({tuned.growth}): what is reused later than it lasts is "
            "not in it. Tiers that it does not fill are as large as the budget allows. Record "
            "longer."
        )
    return told


def _simpler(chosen: Evaluated, best: Evaluated, budget: Budget) -> str:
    """Why a chain was chosen that is not the best of the search."""
    found = gap(best.report, chosen.report, budget)
    if abs(found.share) < LEAST:
        return f"What is chosen comes to the same as the best in the search, {name(best.chain)}."
    return (
        f"Best in the search was {name(best.chain)} ({change(found, budget.objective)}), which is "
        "too little to give up the defaults, or a tier less, for."
    )


def left_out(verdict: Verdict, found: Found, space: Space) -> list[str]:
    """For each medium that the chosen chain lacks: what the best chain with it came to."""
    mine = {tier.type for tier in verdict.chosen.chain.tiers}
    told = []
    for medium in space.budget.media:
        if medium.type not in mine:
            with_it = [one for one in found.tried if _has(one, {*mine, medium.type})]
            if with_it:
                why = _why(with_it, medium.type, verdict.chosen, space.budget)
            else:
                why = "no chain with it was tried"
            told.append(f"{medium.type} is left out: {why}.")
    return told


def _has(one: Evaluated, types: set[str]) -> bool:
    return {tier.type for tier in one.chain.tiers} == types


def _why(with_it: Sequence[Evaluated], kind: str, chosen: Evaluated, budget: Budget) -> str:
    """What the best of the chains with a medium came to."""
    one = with_it[0]
    use = next(use for use in one.report.tiers if use.name == kind)
    share = percent(use.hit_tokens / max(1, one.report.prompt_tokens))
    busy = percent(max(use.load_busy, use.store_busy))
    told = f"{share} of the prompts' tokens from it, its link {busy} busy"
    if one.score.excess > chosen.score.excess:
        broken = "; ".join(text for text, _ in excesses(one.report, budget))
        return (
            f"of {len(with_it)} chains that were tried with it none keeps the constraints. The "
            f"best of them, {name(one.chain)}: {broken}; {told}"
        )
    found = gap(one.report, chosen.report, budget)
    little = ", too little to tell" if found.share < 0 and not found.tells else ""
    said = change(found, budget.objective)
    return f"the best chain with it, {name(one.chain)}, comes to {said}{little}; {told}"


def frontier(found: Found, budget: Budget) -> list[tuple[float, float, Evaluated]]:
    """Of all chains tried those that no other beats in both price and mean TTFT: price a month (or
    bytes, where no price is given), TTFT, chain; the cheapest first."""
    points = sorted(
        ((price_of(one, budget), one.report.ttft_mean, one) for one in found.tried),
        key=lambda point: point[:2],
    )
    kept: list[tuple[float, float, Evaluated]] = []
    for point in points:
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept


def has_prices(budget: Budget) -> bool:
    """Whether any tier has a price."""
    profiles = [budget.machine.tiers[medium.type] for medium in budget.media]
    prices = [(p.price_per_gb_month, p.price_per_month) for p in profiles]
    return budget.gpu_price_per_month is not None or any(any(p) for p in prices)


def price_of(one: Evaluated, budget: Budget) -> float:
    """The price of a chain for a month, or its bytes."""
    if has_prices(budget):
        return cost(one.report, budget)
    return float(sum(tier.capacity or 0 for tier in one.chain.tiers))


def frontier_table(found: Found, budget: Budget) -> str:
    """Price and mean TTFT of the chains that no other beats in both."""
    what = "price" if has_prices(budget) else "bytes"
    rows = [
        (f"{price:,.0f}" if has_prices(budget) else size(price), seconds(ttft), name(one.chain))
        for price, ttft, one in frontier(found, budget)
    ]
    head = "Not beaten in both, on the requests of the search:"
    return "\n".join([head, *_aligned([(what, "TTFT mean", ""), *rows])])
