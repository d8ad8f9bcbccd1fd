"""Finalists: chains that the simulation can't tell apart, and those compared, served for real."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import yaml

from spec.chain import ChainSpec
from tiers.errors import KVTiersError
from tiers.tuning.machine import size_key, size_of
from tiers.tuning.report import Report
from tiers.tuning.search.budget import Budget
from tiers.tuning.search.chain_file import chain_yaml
from tiers.tuning.search.score import gap, score
from tiers.tuning.search.search import Evaluated, Trials
from tiers.tuning.simulation.chain import SimChain

ALTERNATIVES = 2
Serve = Callable[[ChainSpec], Report]
"""Serves the searched requests with real connectors, and counts those that the search counted."""


@dataclass(frozen=True)
class Finalist:
    """A chain as it was simulated, and as it was served; if it could not be, `why`."""

    simulated: Evaluated
    real: Report | None
    why: str = ""


def serve_all(
    chosen: Evaluated,
    compared: Mapping[str, SimChain],
    present: ChainSpec | None,
    trials: Trials,
    serve: Serve,
) -> dict[str, Finalist]:
    """Serve the chosen chain, the best that can't be told from it, and those it is compared with
    (`present` as it is written), all of which were tried; by what they are called. Nothing, where
    no tier is chosen."""
    if not chosen.chain.tiers:
        return {}
    finalists = {"chosen": chosen}
    finalists |= {f"alternative {n}": one for n, one in enumerate(_alike(chosen, trials), 1)}
    for label, chain in compared.items():
        tried = trials.of(chain)
        if tried is not None and (label == "present" or tried not in finalists.values()):
            finalists[label] = tried
    found = {}
    for label, one in finalists.items():
        if one.chain.tiers:
            if label == "present" and present is not None:
                spec = _sized(present, one.chain)
            else:
                spec = spec_of(one, trials.space.budget)
            found[label] = _served(one, spec, serve)
    return found


def _alike(chosen: Evaluated, trials: Trials) -> Iterator[Evaluated]:
    """The best chains that differ from the chosen one by too little to tell, and from each other
    by something."""
    reports = [chosen.report.stretches]
    for one in trials.found().tried:
        if len(reports) > ALTERNATIVES:
            return
        if one.score.excess > chosen.score.excess or one.report.stretches in reports:
            continue
        if not trials.gap(one, chosen).tells:
            reports.append(one.report.stretches)
            yield one


def _served(one: Evaluated, spec: ChainSpec, serve: Serve) -> Finalist:
    try:
        return Finalist(one, serve(spec))
    except KVTiersError as error:
        return Finalist(one, None, str(error))


def _sized(present: ChainSpec, simulated: SimChain) -> ChainSpec:
    """The operator's chain, whose servers have the size that was simulated."""
    tiers = [
        tier if size_of(tier) is not None or key is None else tier.model_copy(update={key: size})
        for tier, size, key in (
            (tier, one.capacity, size_key(type(tier)))
            for tier, one in zip(present.tiers, simulated.tiers, strict=True)
        )
    ]
    return present.model_copy(update={"tiers": tuple(tiers)})


def spec_of(one: Evaluated, budget: Budget) -> ChainSpec:
    """The chain as it would be written."""
    return ChainSpec.model_validate(yaml.safe_load(chain_yaml(one, budget, {}, [])))


def choose_served(finalists: Mapping[str, Finalist], budget: Budget) -> Evaluated | None:
    """The chain within the budget that served best, if it was better than the chosen one by more
    than chance; None: the choice stands."""
    chosen = finalists.get("chosen")
    if chosen is None or chosen.real is None:
        return None
    mine = score(chosen.real, budget)
    better = []
    for label, one in finalists.items():
        if one.real is not None and label not in ("chosen", "present"):
            found, theirs = gap(one.real, chosen.real, budget), score(one.real, budget)
            if theirs.excess < mine.excess or (
                theirs.excess == mine.excess and found.share < 0 and found.tells
            ):
                better.append((theirs, label))
    return finalists[min(better)[1]].simulated if better else None
