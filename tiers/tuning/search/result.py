"""What tuning came to, as text, as the chain's YAML and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from spec.chain import ChainSpec
from tiers.tuning.search.budget import TUNED, Budget
from tiers.tuning.search.chain_file import Reasons, chain_yaml
from tiers.tuning.search.score import cost, excesses, gap
from tiers.tuning.search.search import Evaluated
from tiers.tuning.search.show import (
    finals,
    frontier,
    frontier_table,
    has_prices,
    notes,
    price_of,
    table,
)
from tiers.tuning.search.tune import Tuned
from tiers.tuning.search.words import change, expected, name, seconds
from tiers.tuning.simulation.chain import SimChain


def as_text(tuned: Tuned, judged_on: str | None = None) -> str:
    """The comparison, notes and the frontier, for a terminal. `judged_on`: another trace's name."""
    return "\n\n".join(
        [
            f"{_where(tuned, judged_on)}:\n{table(tuned.verdict, tuned.budget)}",
            *_real(tuned),
            "\n".join(notes(tuned)),
            frontier_table(tuned.found, tuned.budget),
        ]
    )


def _real(tuned: Tuned) -> Iterator[str]:
    """What serving the finalists came to."""
    if tuned.verdict.finalists:
        head = "Finalists, simulated and served with real connectors and stores, on requests"
        yield f"{head} {_searched(tuned)}:\n{finals(tuned.verdict, tuned.budget)}"


def _where(tuned: Tuned, judged_on: str | None) -> str:
    """Which requests the table is about."""
    if not tuned.verdict.is_unseen:
        return f"The search was interrupted. The best so far, on requests {_searched(tuned)}"
    if judged_on is not None:
        return f"Judged on {judged_on}, of which a part warms, and which no choice saw"
    first = int(tuned.requests * tuned.split.searched) + 1
    return f"Judged on requests {first:,} to {tuned.requests:,}, which no choice saw"


def _searched(tuned: Tuned) -> str:
    ends = (int(tuned.requests * part) for part in (tuned.split.warm, tuned.split.searched))
    first, last = ends
    return f"{first + 1:,} to {last:,}"


def as_yaml(
    tuned: Tuned, trace: str, present: ChainSpec | None = None, judged_on: str | None = None
) -> str | None:
    """The chosen chain's YAML, with what it lacks of the present one; None if it has no tiers."""
    verdict, budget = tuned.verdict, tuned.budget
    chosen = verdict.chosen
    if not chosen.chain.tiers:
        return None
    better = "more" if budget.objective == "saved_seconds" else "less"
    head = [
        f"Chosen by kvtiers tune from {len(tuned.found.tried):,} chains, for traffic as in {trace} "
        f"and the objective {budget.objective}. Behind each choice is by how much the objective "
        f"changes with another one ({better} is better), and behind ± how uncertain that is, both "
        f"on requests {_searched(tuned)}, by which all was chosen.",
        f"{_where(tuned, judged_on)}:",
        *expected(verdict.judged["chosen"].report),
    ]
    others = [label for label in ("none", "fastest first") if label in verdict.judged]
    head += [_beside(label, tuned) for label in others]
    if lacks := lacking(tuned, present):
        head.insert(0, lacks)
    why = reasons(tuned)
    return chain_yaml(chosen, budget, why, head)


def _beside(label: str, tuned: Tuned) -> str:
    """What the chosen chain's objective is against another one's."""
    mine, other = (tuned.verdict.judged[one] for one in ("chosen", label))
    what = {"none": "no tiers", "fastest first": "all media, fastest first"}[label]
    said = change(gap(mine.report, other.report, tuned.budget), tuned.budget.objective)
    return f"Against {what} (TTFT mean {seconds(other.report.ttft_mean)}): {said}."


def reasons(tuned: Tuned) -> Reasons:
    """What each chain that was tried and is one step from the chosen one came to, by the figures
    by which all was chosen."""
    chosen = tuned.verdict.chosen
    texts: dict[tuple[str, str | None], list[str]] = {}
    for step in tuned.space.steps(chosen.chain):
        other = tuned.found.of(step.chain)
        if other is not None:
            said = f"{step.text}: {compared(other, chosen, tuned.budget)}"
            texts.setdefault((step.kind, step.tier), []).append(said)
    if tuned.growth is not None:
        for tier in chosen.chain.tiers:
            if (tier.capacity or 0) > tuned.space.sizes[tier.type][0]:
                texts[("capacity", tier.type)].append("all that the searched requests fill")
    return texts


def compared(other: Evaluated, mine: Evaluated, budget: Budget) -> str:
    """How much the objective changes, or which constraint is broken."""
    if other.score.excess > mine.score.excess:
        return "; ".join(text for text, _ in excesses(other.report, budget))
    return change(gap(other.report, mine.report, budget), budget.objective)


_CHOSEN = {"version", "tiers", "load_policy", "load_when", "promote"}


def unsearched(present: ChainSpec, chosen: SimChain, budget: Budget) -> Iterator[str]:
    """Keys that the present chain sets and no search chooses, in its order, but those of tiers that
    the chosen chain lacks."""
    for key in type(present).model_fields:
        if key in present.model_fields_set - _CHOSEN:
            yield key
    types = {tier.type for tier in chosen.tiers}
    for tier in present.tiers:
        if tier.type in types:
            written = {"type", *TUNED, *budget.medium(tier.type).settings}
            for key in type(tier).model_fields:
                if key in tier.model_fields_set - written:
                    yield f"{key} of {tier.tier_name}"


def lacking(tuned: Tuned, present: ChainSpec | None) -> str | None:
    """What the present chain has beyond what the search chose, in words."""
    chosen = tuned.verdict.chosen.chain
    keys = [] if present is None else list(unsearched(present, chosen, tuned.budget))
    if not keys:
        return None
    return f"The present chain has more, which no search chooses: {', '.join(keys)}. Add it here."


def as_json(tuned: Tuned, trace: str) -> dict[str, Any]:
    """All figures, for `json.dumps`."""
    verdict, budget, found = tuned.verdict, tuned.budget, tuned.found
    judged = verdict.judged
    return {
        "trace": trace,
        "objective": budget.objective,
        "requests": tuned.requests,
        "split": asdict(tuned.split),
        "interrupted": tuned.is_cut_off,
        "growth": tuned.growth,
        "sizes": {kind: list(sizes) for kind, sizes in tuned.space.sizes.items()},
        **{
            key: _judged(judged[label], tuned) if label in judged else None
            for key, label in (
                ("chosen", "chosen"),
                ("present", "present"),
                ("fastest_first", "fastest first"),
                ("none", "none"),
            )
        },
        "best_of_search": _chain(found.tried[0]),
        "broken": tuned.broken,
        "finalists": {
            label: {
                "name": name(one.simulated.chain),
                "simulated": one.simulated.report.to_json(),
                "real": None if one.real is None else one.real.to_json(),
                "why": one.why,
            }
            for label, one in verdict.finalists.items()
        },
        "tried": len(found.tried),
        "within": {share: found.near(float(share) / 100) for share in ("1", "5", "10")},
        "frontier_by": "price_per_month" if has_prices(budget) else "bytes",
        "frontier": [
            {"cost": price, "ttft_mean": ttft, **_chain(one)}
            for price, ttft, one in frontier(found, budget)
        ],
        "search": [
            {
                **_chain(one),
                "objective": one.score.value,
                "excess": one.score.excess,
                "ttft_mean": one.report.ttft_mean,
                "cost": price_of(one, budget),
                **dict(zip(("worse_by", "margin"), _gap(one, tuned), strict=True)),
            }
            for one in found.tried
        ],
    }


def _gap(one: Evaluated, tuned: Tuned) -> tuple[float, float | None]:
    """As `Gap` has it against the chosen chain; None: too few requests tell."""
    found = gap(one.report, tuned.verdict.chosen.report, tuned.budget)
    return found.share, None if found.margin == float("inf") else found.margin


def _judged(one: Evaluated, tuned: Tuned) -> dict[str, Any]:
    return {
        **_chain(one),
        "objective": one.score.value,
        "cost": cost(one.report, tuned.budget),
        "report": one.report.to_json(),
    }


def _chain(one: Evaluated) -> dict[str, Any]:
    return {"name": name(one.chain), **asdict(one.chain)}
