"""Settings of the present chain that no search chooses, so that the chosen chain lacks them."""

from __future__ import annotations

from collections.abc import Iterator

from spec.chain import ChainSpec
from tiers.tuning.search.budget import TUNED, Budget
from tiers.tuning.simulation.chain import SimChain

_CHOSEN = {"version", "tiers", "load_policy", "load_when", "promote"}


def unsearched(present: ChainSpec, chosen: SimChain, budget: Budget) -> list[str]:
    """Keys that the present chain sets and the chosen chain's YAML has not, in its order."""
    return [*_of_chain(present, chosen), *_of_tiers(present, chosen, budget)]


def _of_chain(present: ChainSpec, chosen: SimChain) -> Iterator[str]:
    for key in type(present).model_fields:
        if key in present.model_fields_set - _CHOSEN:
            yield key


def _of_tiers(present: ChainSpec, chosen: SimChain, budget: Budget) -> Iterator[str]:
    types = {tier.type for tier in chosen.tiers}
    for tier in present.tiers:
        if tier.type in types:
            written = {"type", *TUNED, *budget.medium(tier.type).settings}
            for key in type(tier).model_fields:
                if key in tier.model_fields_set - written:
                    yield f"{key} of {tier.tier_name}"
