"""`tune`: from a workload and a budget to a verdict and the chain's YAML."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from spec.chain import ChainSpec
from tiers.tuning.search.budget import Budget
from tiers.tuning.search.processes import Simulations
from tiers.tuning.search.score import excesses
from tiers.tuning.search.search import Found, Split, complete, search
from tiers.tuning.search.sizes import worth_trying
from tiers.tuning.search.space import Space
from tiers.tuning.search.verdict import Court, Verdict, decide
from tiers.tuning.simulation.chain import SimChain
from tiers.tuning.simulation.workload import Workload

LIMIT = 250
"""Chains that are simulated in the search, if there are more."""


@dataclass(frozen=True)
class Tuned:
    """What tuning came to."""

    budget: Budget
    workload: Workload
    split: Split
    space: Space
    found: Found
    verdict: Verdict

    @property
    def broken(self) -> list[str]:
        """The constraints that even the chosen chain breaks, in words."""
        return [text for text, _ in excesses(self.verdict.chosen.report, self.budget)]


def tune(
    workload: Workload,
    budget: Budget,
    hit_ratio: Callable[[int], float],
    present: ChainSpec | None = None,
    *,
    limit: int = LIMIT,
    split: Split | None = None,
    processes: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> Tuned:
    """Find the chain that serves the workload best within the budget.

    `hit_ratio`: of an LRU of so many bytes. `present`: the operator's chain, to compare with.
    `processes`: see `Simulations`. `advance` is called after each simulation. Raises SpecError for
    a present chain with a tier that has no profile, KVTiersError if a process dies.
    """
    split = split or Split()
    space = Space(budget, worth_trying(budget, hit_ratio))
    own = None if present is None else present_chain(present, budget)
    with Simulations(workload, budget.machine, processes) as simulations:
        found = search(space, simulations, split, limit, advance)
        court = Court(budget, simulations, split, advance)
        verdict = decide(space, found, court, own)
        found = complete(found, verdict.chosen.chain, space, simulations, split, advance)
    return Tuned(budget, workload, split, space, found, verdict)


def present_chain(chain: ChainSpec, budget: Budget) -> SimChain:
    """The operator's chain as the simulation has it. A server, whose size no chain says, has the
    budget's limit. Raises SpecError for a tier that the budget's machine has no profile of."""
    found = SimChain.of(chain)
    limits = {medium.type: medium.limit for medium in budget.media}
    tiers = []
    for tier in found.tiers:
        known = budget.machine.profile(tier.name, tier.type).capacity
        size = tier.capacity or known or limits.get(tier.type)
        tiers.append(replace(tier, capacity=size))
    return replace(found, tiers=tuple(tiers))
