"""What tuning came to, as text, as the chain's YAML and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from spec.chain import ChainSpec
from tiers.tuning.search.chain_file import chain_yaml, reasons
from tiers.tuning.search.score import cost
from tiers.tuning.search.search import Tried
from tiers.tuning.search.show import frontier, has_prices, notes, plot, price_of, table
from tiers.tuning.search.tune import Tuned
from tiers.tuning.search.unsearched import unsearched
from tiers.tuning.search.verdict import Judged
from tiers.tuning.search.words import name, percent, seconds


def as_text(tuned: Tuned) -> str:
    """The comparison, notes and the frontier, for a terminal."""
    verdict = tuned.verdict
    chosen = tuned.found.of(verdict.chosen.chain)
    seen, total = int(len(tuned.workload) * tuned.split.seen), len(tuned.workload)
    head = f"Judged on requests {seen + 1:,} to {total:,}, which the search did not see:"
    return "\n\n".join(
        [
            f"{head}\n{table(verdict, tuned.budget)}",
            "\n".join(notes(verdict, tuned.found, tuned.space)),
            plot(tuned.found, tuned.budget, chosen),
        ]
    )


def as_yaml(tuned: Tuned, trace: str, present: ChainSpec | None = None) -> str | None:
    """The chosen chain's YAML, with what it lacks of the present one; None if it has no tiers."""
    verdict, budget = tuned.verdict, tuned.budget
    chosen = verdict.chosen
    if not chosen.chain.tiers:
        return None
    none = verdict.none.report.ttft_mean
    guess = chosen.score.worse_than(verdict.stitched.score)
    said = f"{percent(abs(guess))} {'worse' if guess > 0 else 'better'}"
    head = [
        f"Chosen by kvtiers tune from {len(tuned.found.tried):,} chains, for traffic as in {trace} "
        f"and the objective {budget.objective}. Behind each choice is what the others come to.",
        "Expected, as simulated for requests that the search did not see; the mean TTFT is "
        f"{seconds(none)} without tiers, and the objective is {said} than with all media, fastest "
        "first:",
    ]
    if lacks := lacking(tuned, present):
        head.insert(0, lacks)
    why = reasons(chosen.chain, tuned.space, tuned.found)
    return chain_yaml(chosen.chain, chosen.report, budget, why, head)


def lacking(tuned: Tuned, present: ChainSpec | None) -> str | None:
    """What the present chain has beyond what the search chose, in words."""
    chosen = tuned.verdict.chosen.chain
    keys = unsearched(present, chosen, tuned.budget) if present is not None else []
    if not keys:
        return None
    return f"The present chain has more, which no search chooses: {', '.join(keys)}. Add it here."


def as_json(tuned: Tuned, trace: str) -> dict[str, Any]:
    """All figures, for `json.dumps`."""
    verdict, budget, found = tuned.verdict, tuned.budget, tuned.found
    return {
        "trace": trace,
        "objective": budget.objective,
        "requests": len(tuned.workload),
        "split": asdict(tuned.split),
        "sizes": {kind: list(sizes) for kind, sizes in tuned.space.sizes.items()},
        "chosen": _judged(verdict.chosen, tuned),
        "best": _judged(verdict.best, tuned),
        "present": None if verdict.present is None else _judged(verdict.present, tuned),
        "fastest_first": _judged(verdict.stitched, tuned),
        "none": _judged(verdict.none, tuned),
        "finalists": [_judged(one, tuned) for one in verdict.finalists],
        "equal_up_to": verdict.chosen.margin(verdict.best),
        "broken": tuned.broken,
        "tried": len(found.tried),
        "tried_all": found.is_all,
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
            }
            for one in found.tried
        ],
    }


def _judged(one: Judged, tuned: Tuned) -> dict[str, Any]:
    return {
        "name": name(one.chain),
        **asdict(one.chain),
        "objective": one.score.value,
        "cost": cost(one.report, tuned.budget),
        "report": one.report.to_json(),
    }


def _chain(one: Tried) -> dict[str, Any]:
    tiers = [
        {
            "type": tier.type,
            "capacity": tier.capacity,
            "eviction": tier.eviction,
            "store_threshold": tier.store_threshold,
        }
        for tier in one.chain.tiers
    ]
    return {"load_policy": one.chain.load_policy, "promote": one.chain.promote, "tiers": tiers}
