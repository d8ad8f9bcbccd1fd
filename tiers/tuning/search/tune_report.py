"""The result of tuning as text, as the chain's YAML and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from spec.chain import ChainSpec
from spec.text import aligned, decimal_size, seconds
from tiers.tuning.report import life_and_price, named, waits
from tiers.tuning.search.budget import CHOSEN, TUNED, Budget
from tiers.tuning.search.chain_text import (
    Reasons,
    chain_yaml,
    change,
    expected,
    finite,
    name,
    percent,
)
from tiers.tuning.search.search import LEAST, Evaluated, beats, cost, excesses, gap
from tiers.tuning.search.tune import ENOUGH, Tuned

_COLUMNS = (
    "", "TTFT mean", "p50", "p99", "objective", "from tiers", "GPUs", "links", "life", "price"
)  # fmt: skip


def as_text(tuned: Tuned, judged_on: str | None = None) -> str:
    """The comparison, notes and the frontier, for a terminal. `judged_on`: another trace's name."""
    head = f"{_where(tuned, judged_on)}:\n{comparison(tuned, tuned.judged)}"
    return "\n\n".join([head, "\n".join(notes(tuned)), _frontier_table(tuned)])


def comparison(tuned: Tuned, labels: Iterable[str]) -> str:
    """The judged chains of these labels, as a table with a line for each chain's name."""
    shown = {label: tuned.judged[label] for label in labels}
    rows = [_row(label, one, tuned) for label, one in shown.items()]
    return named([_COLUMNS, *rows], [name(one.chain) for one in shown.values()])


def _where(tuned: Tuned, judged_on: str | None) -> str:
    if tuned.is_cut_off:
        return f"The search was interrupted. The best so far, on requests {_searched(tuned)}"
    if judged_on is not None:
        return f"Judged on {judged_on}, of which a part warms, and which no choice saw"
    first = int(tuned.requests * tuned.split.searched) + 1
    return f"Judged on requests {first:,} to {tuned.requests:,}, which no choice saw"


def _searched(tuned: Tuned) -> str:
    split = tuned.split
    first, last = (int(tuned.requests * part) for part in (split.warm, split.searched))
    return f"{first + 1:,} to {last:,}"


def _row(label: str, one: Evaluated, tuned: Tuned) -> tuple[str, ...]:
    report, chosen = one.report, tuned.judged["chosen"]
    links = [max(tier.load_busy, tier.store_busy) for tier in report.tiers]
    changed = change(gap(report, chosen.report, tuned.budget), tuned.budget.objective)
    return (
        label,
        *waits(report),
        "" if one is chosen else changed,
        percent(report.tier_hit_tokens / max(1, report.prompt_tokens)),
        percent(report.gpu_load),
        percent(max(links, default=0.0)),
        *life_and_price(report),
    )


# -- notes ---------------------------------------------------------------------------------------


def notes(tuned: Tuned) -> list[str]:
    """What else an operator should know, a sentence or two each."""
    chosen, best, judged = tuned.chosen, tuned.tried[0], tuned.judged["chosen"]
    found = [
        f"{len(tuned.tried):,} chains were simulated: "
        f"{tuned.near(0.01):,} are within 1% of the best, {tuned.near(0.05):,} within 5%, "
        f"{tuned.near(0.1):,} within 10%."
    ]
    if chosen.chain != best.chain:
        difference = gap(best.report, chosen.report, tuned.budget)
        found.append(
            f"What is chosen comes to the same as the best in the search, {name(best.chain)}."
            if abs(difference.share) < LEAST
            else f"Best in the search was {name(best.chain)} "
            f"({change(difference, tuned.budget.objective)}), which is too little to give up the "
            "defaults, or a tier less, for."
        )
    found += left_out(tuned)
    if chosen.score.excess:
        found += [
            f"No chain that was tried keeps all constraints: {text}."
            for text, _ in excesses(chosen.report, tuned.budget)
        ]
    elif judged.score.excess:
        found += [
            f"Where it is judged, and not where it was searched, {text}." for text in tuned.broken
        ]
    found += [*unconfirmed(tuned), *too_little(tuned)]
    return [*found, *(f"Beware: {warning}." for warning in judged.report.warnings)]


def unconfirmed(tuned: Tuned) -> Iterator[str]:
    """What the search gained, and requests that nothing was chosen by do not show."""
    budget, searched = tuned.budget, {one.chain: one.report for one in tuned.tried}
    for label, what in (("present", "the present chain"), ("none", "no tiers")):
        other = tuned.judged.get(label)
        if tuned.is_cut_off or other is None or other.chain not in searched:
            continue
        there = tuned.chosen.report, searched[other.chain]
        here = tuned.judged["chosen"].report, other.report
        if beats(*there, budget) and not beats(*here, budget):
            was, now = (change(gap(*pair, budget), budget.objective) for pair in (there, here))
            yield (
                f"Don't trust what is chosen: against {what} it came to {was} in the search, and "
                f"comes to {now} where it is judged, so the traffic has changed. Record longer."
            )


def too_little(tuned: Tuned) -> list[str]:
    """Why the trace is too short, if it is."""
    found = []
    if tuned.counted < ENOUGH:
        found.append(
            f"The search counted {tuned.counted:,} requests, too few to tell chains apart: record "
            f"{ENOUGH:,} at least, better thousands."
        )
    if tuned.growth is not None:
        found.append(
            f"The trace is still growing ({tuned.growth}): what is reused later than it lasts is "
            "not in it. Tiers that it does not fill are as large as the budget allows. Record "
            "longer."
        )
    return found


def left_out(tuned: Tuned) -> list[str]:
    """For each medium that the chosen chain has not: the result of the best chain with it."""
    mine = {tier.type for tier in tuned.chosen.chain.tiers}
    found = []
    for medium in tuned.budget.media:
        if medium.type not in mine:
            types = {*mine, medium.type}
            with_it = [one for one in tuned.tried if {t.type for t in one.chain.tiers} == types]
            why = _why(with_it, medium.type, tuned) if with_it else "no chain with it was tried"
            found.append(f"{medium.type} is left out: {why}.")
    return found


def _why(with_it: Sequence[Evaluated], kind: str, tuned: Tuned) -> str:
    """The result of the best of the chains with a medium."""
    one, chosen, budget = with_it[0], tuned.chosen, tuned.budget
    use = next(use for use in one.report.tiers if use.name == kind)
    share = percent(use.hit_tokens / max(1, one.report.prompt_tokens))
    busy = percent(max(use.load_busy, use.store_busy))
    served = f"{share} of the prompts' tokens from it, its link {busy} busy"
    if one.score.excess > chosen.score.excess:
        return (
            f"of {len(with_it)} chains that were tried with it none keeps the constraints. The "
            f"best of them, {name(one.chain)}: {_compared(one, tuned)}; {served}"
        )
    found = gap(one.report, chosen.report, budget)
    little = ", too little to tell" if found.share < 0 and not found.is_certain else ""
    changed = change(found, budget.objective)
    return f"the best chain with it, {name(one.chain)}, comes to {changed}{little}; {served}"


def _compared(other: Evaluated, tuned: Tuned) -> str:
    """By how much another chain changes the objective, or which constraint it breaks."""
    chosen, budget = tuned.chosen, tuned.budget
    if other.score.excess > chosen.score.excess:
        return "; ".join(text for text, _ in excesses(other.report, budget))
    return change(gap(other.report, chosen.report, budget), budget.objective)


# -- the frontier --------------------------------------------------------------------------------


def _frontier(tuned: Tuned) -> list[tuple[float, float, Evaluated]]:
    """Of all chains tried those that no other beats in both price and mean TTFT: price a month (or
    bytes, where no price is given), TTFT, chain; the cheapest first."""
    points = sorted(
        ((_price_of(one, tuned.budget), one.report.ttft_mean, one) for one in tuned.tried),
        key=lambda point: point[:2],
    )
    kept: list[tuple[float, float, Evaluated]] = []
    for point in points:
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept


def _has_prices(budget: Budget) -> bool:
    profiles = [budget.machine.tiers[medium.type] for medium in budget.media]
    prices = [(p.price_per_gb_month, p.price_per_month) for p in profiles]
    return budget.gpu_price_per_month is not None or any(any(p) for p in prices)


def _price_of(one: Evaluated, budget: Budget) -> float:
    if _has_prices(budget):
        return cost(one.report, budget)
    return float(sum(tier.capacity or 0 for tier in one.chain.tiers))


def _frontier_table(tuned: Tuned) -> str:
    has_prices = _has_prices(tuned.budget)
    rows = [("price" if has_prices else "bytes", "TTFT mean", "")]
    rows += [
        (f"{price:,.0f}" if has_prices else decimal_size(price), seconds(ttft), name(one.chain))
        for price, ttft, one in _frontier(tuned)
    ]
    return "\n".join(["Not beaten in both, on the requests of the search:", *aligned(rows)])


# -- YAML and JSON -------------------------------------------------------------------------------


def as_yaml(
    tuned: Tuned, trace: str, present: ChainSpec | None = None, judged_on: str | None = None
) -> str | None:
    """The chosen chain's YAML, with what the present one has beyond it; None if it has no tiers."""
    budget, judged = tuned.budget, tuned.judged
    if not tuned.chosen.chain.tiers:
        return None
    better = "more" if budget.objective == "saved_seconds" else "less"
    head = [
        f"Chosen by kvtiers tune from {len(tuned.tried):,} chains, for traffic as in {trace} "
        f"and the objective {budget.objective}. Behind each choice is by how much the objective "
        f"changes with another one ({better} is better), and behind ± how uncertain that is, both "
        f"on requests {_searched(tuned)}, by which all was chosen.",
        f"{_where(tuned, judged_on)}:",
        *expected(judged["chosen"].report),
    ]
    for label, what in (("none", "no tiers"), ("fastest first", "all media, fastest first")):
        if label in judged:
            found = gap(judged["chosen"].report, judged[label].report, budget)
            ttft = seconds(judged[label].report.ttft_mean)
            head.append(f"Against {what} (TTFT mean {ttft}): {change(found, budget.objective)}.")
    if more := unsearched(tuned, present):
        head.insert(0, more)
    return chain_yaml(tuned.chosen, budget, _reasons(tuned), head)


def _reasons(tuned: Tuned) -> Reasons:
    """The result of each chain that was tried and is one step from the chosen one, by the figures
    by which all was chosen."""
    chosen = tuned.chosen
    tried = {one.chain: one for one in tuned.tried}
    texts: dict[tuple[str, str | None], list[str]] = {}
    for step in tuned.space.steps(chosen.chain):
        if (other := tried.get(step.chain)) is not None:
            text = f"{step.text}: {_compared(other, tuned)}"
            texts.setdefault((step.kind, step.tier), []).append(text)
    if tuned.growth is not None:
        for tier in chosen.chain.tiers:
            if (tier.capacity or 0) > tuned.space.sizes[tier.type][0]:
                texts[("capacity", tier.type)].append("all that the searched requests fill")
    return texts


def unsearched(tuned: Tuned, present: ChainSpec | None) -> str | None:
    """The keys that the present chain sets and no search chooses, in words, but those of tiers that
    are not in the chosen chain; None: there are none."""
    keys = [] if present is None else list(_unsearched(present, tuned))
    if not keys:
        return None
    return f"The present chain has more, which no search chooses: {', '.join(keys)}. Add it here."


def _unsearched(present: ChainSpec, tuned: Tuned) -> Iterator[str]:
    for key in type(present).model_fields:
        if key in present.model_fields_set - {"version", "tiers", *CHOSEN}:
            yield key
    types = {tier.type for tier in tuned.chosen.chain.tiers}
    for tier in present.tiers:
        if tier.type in types:
            written = {"type", *TUNED, *tuned.budget.medium(tier.type).settings}
            for key in type(tier).model_fields:
                if key in tier.model_fields_set - written:
                    yield f"{key} of {tier.tier_name}"


def as_json(tuned: Tuned, trace: str) -> dict[str, Any]:
    budget = tuned.budget
    labels = ("chosen", "present", "fastest first", "none")
    return {
        "trace": trace,
        "objective": budget.objective,
        "requests": tuned.requests,
        "split": asdict(tuned.split),
        "interrupted": tuned.is_cut_off,
        "growth": tuned.growth,
        "sizes": {kind: list(sizes) for kind, sizes in tuned.space.sizes.items()},
        **{label.replace(" ", "_"): _judged(label, tuned) for label in labels},
        "best_of_search": _chain(tuned.tried[0]),
        "broken": tuned.broken,
        "tried": len(tuned.tried),
        "within": {share: tuned.near(float(share) / 100) for share in ("1", "5", "10")},
        "frontier_by": "price_per_month" if _has_prices(budget) else "bytes",
        "frontier": [
            {"cost": price, "ttft_mean": ttft, **_chain(one)}
            for price, ttft, one in _frontier(tuned)
        ],
        "search": [_tried(one, tuned) for one in tuned.tried],
    }


def _judged(label: str, tuned: Tuned) -> dict[str, Any] | None:
    if (one := tuned.judged.get(label)) is None:
        return None
    return {
        **_chain(one),
        "objective": one.score.value,
        "cost": cost(one.report, tuned.budget),
        "report": one.report.to_json(),
    }


def _tried(one: Evaluated, tuned: Tuned) -> dict[str, Any]:
    found = gap(one.report, tuned.chosen.report, tuned.budget)
    return {
        **_chain(one),
        "objective": one.score.value,
        "excess": one.score.excess,
        "ttft_mean": one.report.ttft_mean,
        "cost": _price_of(one, tuned.budget),
        "worse_by": finite(found.share),
        "margin": finite(found.margin),
    }


def _chain(one: Evaluated) -> dict[str, Any]:
    return {"name": name(one.chain), **asdict(one.chain)}
