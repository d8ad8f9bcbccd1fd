"""`tune`: from a trace and a budget to a verdict and the chain's YAML."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from spec.chain import ChainSpec
from tiers.traces.trace import TraceRequest
from tiers.tuning.curve import measure
from tiers.tuning.report import Report
from tiers.tuning.search.budget import Budget
from tiers.tuning.search.finalists import Finalist, Serve, choose_served, serve_all
from tiers.tuning.search.processes import Simulations, interrupts
from tiers.tuning.search.score import excesses, score
from tiers.tuning.search.search import Evaluated, Found, Split, Trials, search
from tiers.tuning.search.sizes import Demand, worth_trying
from tiers.tuning.search.space import Space
from tiers.tuning.search.verdict import Verdict, choose, settled
from tiers.tuning.simulation.chain import SimChain
from tiers.tuning.simulation.workload import Workload

LIMIT = 250
"""Chains that are simulated in the search, if there are more."""
ENOUGH = 160
"""Requests that tell chains apart: some in each stretch."""


ServeRequests = Callable[[Sequence[TraceRequest], float, Callable[[], bool], ChainSpec], Report]
"""Serves requests with a chain, of which a fraction only warms; an interrupt, of which the function
tells, is raised."""


@dataclass(frozen=True)
class Asked:
    """How long a search may take and what it goes by.

    `limit`: chains, `seconds`: of the search. `processes`: see `Simulations`. `judge`: requests of
    another trace, which what was chosen is judged on. `serve`: serves finalists for real, given
    what the search saw.
    """

    limit: int = LIMIT
    seconds: float | None = None
    split: Split = field(default_factory=Split)
    processes: int = 0
    judge: Sequence[TraceRequest] | None = None
    serve: ServeRequests | None = None


@dataclass(frozen=True)
class Tuned:
    """What tuning came to. `growth`: see `Demand`. `counted`: the requests that were searched.
    `is_cut_off`: it was interrupted before all was done."""

    budget: Budget
    requests: int
    counted: int
    split: Split
    space: Space
    found: Found
    verdict: Verdict
    growth: str | None
    is_cut_off: bool

    @property
    def broken(self) -> list[str]:
        """The constraints that the chosen chain breaks where it is judged, in words."""
        return [text for text, _ in excesses(self.verdict.judged["chosen"].report, self.budget)]


def tune(
    requests: Sequence[TraceRequest],
    block_tokens: int,
    budget: Budget,
    present: ChainSpec | None = None,
    asked: Asked = Asked(),
    advance: Callable[[Trials], None] = lambda trials: None,
) -> Tuned:
    """Find the chain that serves the requests best within the budget.

    `present`: the operator's chain, to compare with. `advance` is called after each simulation.
    An interrupt ends the search with the best so far; before there is any it is raised. Raises
    SpecError for a present chain with a tier that has no profile, KVTiersError if a process dies.
    """
    split = asked.split if asked.judge is None else replace(asked.split, searched=1.0)
    searched = requests[: int(len(requests) * split.searched)]
    block_bytes = block_tokens * budget.machine.kv_bytes_per_token
    demand = Demand(measure(searched, block_tokens, second_use=False), block_bytes)
    space = Space(budget, worth_trying(budget, demand.hit_ratio))
    compared = {"fastest first": space.fastest_first(), "none": SimChain(())}
    if present is not None:
        compared = {"present": present_chain(present, budget), **compared}
    workload = Workload.of(requests, block_tokens)
    is_cut_off = False
    ends = math.inf if asked.seconds is None else time.monotonic() + asked.seconds
    with (
        interrupts() as is_interrupted,
        Simulations(workload, budget.machine, asked.processes, is_interrupted) as simulations,
    ):
        trials = Trials(space, simulations, split, advance)
        try:
            search(trials, asked.limit, lambda: time.monotonic() > ends)
            trials.run(compared.values())
            chosen = settled(trials, demand.growth is not None)
            finalists: Mapping[str, Finalist] = {}
            if asked.serve is not None:
                warm = split.warm / split.searched
                serve = partial(asked.serve, searched, warm, is_interrupted)
                chosen, finalists = _finals(chosen, compared, present, trials, serve)
            chains = {"chosen": chosen.chain, **compared}
            reports = _judged(chains, simulations, asked, block_tokens)
            judged = {
                label: Evaluated(chain, report, score(report, budget))
                for (label, chain), report in zip(chains.items(), reports, strict=True)
            }
            verdict = Verdict(chosen, judged, True, finalists)
        except KeyboardInterrupt:
            if not len(trials):
                raise
            is_cut_off, verdict = True, _cut_off(trials, compared)
    counted = len(searched) - int(len(requests) * split.warm)
    return Tuned(
        budget,
        len(requests),
        counted,
        split,
        space,
        trials.found(),
        verdict,
        demand.growth,
        is_cut_off,
    )


def _finals(
    chosen: Evaluated,
    compared: Mapping[str, SimChain],
    present: ChainSpec | None,
    trials: Trials,
    serve: Serve,
) -> tuple[Evaluated, Mapping[str, Finalist]]:
    """Serve the finalists for real; which of them to choose then."""
    finalists = serve_all(chosen, compared, present, trials, serve)
    better = choose_served(finalists, trials.space.budget)
    if better is not None:
        # What each of its choices brings is to be known, too.
        trials.run(step.chain for step in trials.space.steps(better.chain))
    return better or chosen, finalists


def _judged(
    chains: Mapping[str, SimChain], simulations: Simulations, asked: Asked, block_tokens: int
) -> list[Report]:
    """What serving requests with chains comes to that neither search nor choice saw."""
    if asked.judge is None:
        return simulations.run((chain, 1.0, asked.split.searched) for chain in chains.values())
    other = Workload.of(asked.judge, block_tokens)
    with Simulations(other, simulations.machine, asked.processes) as elsewhere:
        return elsewhere.run((chain, 1.0, asked.split.warm) for chain in chains.values())


def _cut_off(trials: Trials, compared: Mapping[str, SimChain]) -> Verdict:
    """The best so far, as it was when it was searched."""
    chosen = choose(trials, may_try=False)
    tried = {label: trials.of(chain) for label, chain in compared.items()}
    judged = {"chosen": chosen} | {label: one for label, one in tried.items() if one is not None}
    return Verdict(chosen, judged, is_unseen=False)


def present_chain(chain: ChainSpec, budget: Budget) -> SimChain:
    """The operator's chain as the simulation has it. A server, whose size no key says, has the
    budget's limit. Raises SpecError for a tier that the budget's machine has no profile of."""
    found = SimChain.of(chain)
    limits = {medium.type: medium.limit for medium in budget.media}
    tiers = []
    for tier in found.tiers:
        known = budget.machine.profile(tier.name, tier.type).capacity
        size = tier.capacity or known or limits.get(tier.type)
        tiers.append(replace(tier, capacity=size))
    return replace(found, tiers=tuple(tiers))
