"""`tune`: from a trace and a budget to the chain to choose, and its worth elsewhere.

All is chosen on the part of the trace that is searched. Chains whose difference may be chance, by
how it varies between stretches of the requests, are equal: then a setting keeps its default, and a
tier is left out or shrinks where that costs next to nothing. The chosen chain is then simulated for
requests that neither the search nor this choice saw.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from spec.chain import ChainSpec
from tiers.traces.trace import TraceRequest
from tiers.tuning.curve import measure
from tiers.tuning.search.budget import Budget
from tiers.tuning.search.processes import Simulations, interrupts
from tiers.tuning.search.search import (
    LEAST,
    Evaluated,
    Split,
    Trials,
    beats,
    excesses,
    gap,
    score,
    search,
)
from tiers.tuning.search.space import Space, growth, worth_trying
from tiers.tuning.simulation.sim_chain import SimChain
from tiers.tuning.simulation.workload import Workload

LIMIT = 250
"""Chains that are simulated in the search, if there are more."""
ENOUGH = 160
"""Requests by which chains differ: some in each stretch."""
NEVER_GIVEN_UP = 0.02
"""A tier, or a part of its size, that brings more stays, however little is certain of it."""


@dataclass(frozen=True)
class TuneOptions:
    """How long a search may take and what it uses.

    `limit`: chains, `seconds`: of the search. `processes`: see `Simulations`. `judge`: requests of
    another trace, by which the chosen chain is judged. `near_present`: see `present` of `Space`.
    """

    limit: int = LIMIT
    seconds: float | None = None
    split: Split = field(default_factory=Split)
    processes: int = 0
    judge: Sequence[TraceRequest] | None = None
    near_present: bool = False


@dataclass(frozen=True)
class Tuned:
    """The result of tuning.

    `counted`: requests of the search that do not only warm. `tried`: all chains of the search, the
    best first. `growth`: see `growth`. `chosen`: the simplest chain that equals the best of the
    search. `judged`: the chosen chain (`chosen`) and others by their labels, on requests that no
    choice saw, or if `is_cut_off`, since the search was interrupted, on those of the search.
    """

    budget: Budget
    requests: int
    counted: int
    split: Split
    space: Space
    tried: Sequence[Evaluated]
    growth: str | None
    chosen: Evaluated
    judged: Mapping[str, Evaluated]
    is_cut_off: bool

    @property
    def broken(self) -> list[str]:
        """The constraints that the chosen chain breaks where it is judged, in words."""
        return [text for text, _ in excesses(self.judged["chosen"].report, self.budget)]

    def near(self, share: float) -> int:
        """How many chains are within a share of the best."""
        best = self.tried[0].score
        return sum(
            one.score.worse_than(best) <= share
            for one in self.tried
            if one.score.excess <= best.excess
        )


def tune(
    requests: Sequence[TraceRequest],
    block_tokens: int,
    budget: Budget,
    present: ChainSpec | None = None,
    options: TuneOptions = TuneOptions(),
    advance: Callable[[Trials], None] = lambda trials: None,
) -> Tuned:
    """Find the chain that serves the requests best within the budget.

    `present`: the operator's chain, to compare with. `advance` is called after each simulation.
    An interrupt ends the search with the best so far; before there is any it is raised. Raises
    SpecError for a present chain with a tier that has no profile, KVTiersError if a process dies.
    """
    split = options.split if options.judge is None else replace(options.split, searched=1.0)
    searched = requests[: int(len(requests) * split.searched)]
    block_bytes = block_tokens * budget.machine.kv_bytes_per_token
    curves = measure(searched, block_tokens, second_use=False)
    grows = growth(curves)
    budget, now, is_within = with_present(budget, present) if present else (budget, None, False)
    sizes = worth_trying(budget, lambda size: curves.all.ratio(size // block_bytes))
    space = Space(budget, sizes, now if options.near_present else None)
    guesses = {"fastest first": space.fastest_first(), "none": SimChain(())}
    compared = guesses if now is None else {"present": now, **guesses}
    # What `space` does not start from and is beyond the budget is judged, and never chosen.
    tried = compared if is_within else guesses
    workload = Workload.of(requests, block_tokens)
    is_cut_off = False
    ends = math.inf if options.seconds is None else time.monotonic() + options.seconds
    with (
        interrupts() as is_interrupted,
        Simulations(workload, budget.machine, options.processes, is_interrupted) as simulations,
    ):
        trials = Trials(space, simulations, split, advance)
        try:
            search(trials, options.limit, lambda: time.monotonic() > ends)
            trials.run(tried.values())
            chosen = settled(trials, grows is not None and space.present is None)
            chains = {"chosen": chosen.chain, **compared}
            judged = _judged(chains, simulations, options, block_tokens, budget)
        except KeyboardInterrupt:
            if not len(trials):
                raise
            is_cut_off = True
            chosen = choose(trials, may_try=False)
            by_chain = {one.chain: one for one in trials.tried}
            known = {label: by_chain[one] for label, one in compared.items() if one in by_chain}
            judged = {"chosen": chosen, **known}
    return Tuned(
        budget,
        len(requests),
        len(searched) - int(len(requests) * split.warm),
        split,
        space,
        trials.tried,
        grows,
        chosen,
        judged,
        is_cut_off,
    )


def with_present(budget: Budget, chain: ChainSpec) -> tuple[Budget, SimChain, bool]:
    """The budget with the profiles of the operator's tiers for those media that they have with the
    same settings, their chain for the simulation, and whether it is within the budget. A server,
    whose size no key says, has the medium's limit. Raises SpecError for a tier with no profile."""
    machine, media = budget.machine, {medium.type: medium for medium in budget.media}
    found, links = SimChain.of(chain), dict(machine.tiers)
    tiers, within = [], set[str]()
    for spec, tier in zip(chain.tiers, found.tiers, strict=True):
        link, medium = machine.profile(tier.name, tier.type), media.get(tier.type)
        if medium is not None:
            size, new = tier.capacity or medium.limit, medium.tier()
            tier = replace(tier, capacity=size)
            if all(getattr(spec, key) == getattr(new, key) for key in medium.settings):
                links[tier.type] = link
                if size <= medium.limit:
                    within.add(tier.type)
        tiers.append(tier)
    budget = budget.model_copy(update={"machine": machine.model_copy(update={"tiers": links})})
    return budget, replace(found, tiers=tuple(tiers)), len(within) == len(tiers)


def _judged(
    chains: Mapping[str, SimChain],
    simulations: Simulations,
    options: TuneOptions,
    block_tokens: int,
    budget: Budget,
) -> dict[str, Evaluated]:
    """The chains by their labels, on requests that neither search nor choice saw."""
    begin = options.split.searched if options.judge is None else options.split.warm
    jobs = {label: (one, 1.0, begin) for label, one in chains.items()}
    if options.judge is None:
        reports = dict(simulations.run(jobs.values()))
    else:
        other = Workload.of(options.judge, block_tokens)
        with Simulations(other, simulations.machine, options.processes) as elsewhere:
            reports = dict(elsewhere.run(jobs.values()))
    found = {label: (job[0], reports[job]) for label, job in jobs.items()}
    return {k: Evaluated(one, report, score(report, budget)) for k, (one, report) in found.items()}


# -- which chain to choose -----------------------------------------------------------------------


def settled(trials: Trials, grows: bool) -> Evaluated:
    """The chain to choose, once all that are one step from it were tried too, so that the worth of
    each of its choices is known, and none is better by more than chance."""
    while True:
        chosen = choose(trials, grows)
        if grows:
            chosen = with_room_to_grow(chosen, trials)
        steps = trials.run(step.chain for step in trials.space.steps(chosen.chain))
        if not any(beats(one.report, chosen.report, trials.space.budget) for one in steps):
            return chosen
        trials.beaten.add(chosen.chain)  # else it is chosen again where nothing new was tried


def choose(trials: Trials, grows: bool = False, may_try: bool = True) -> Evaluated:
    """The simplest chain that equals the best: step by step, each compared with the best. `grows`:
    later requests will use more room than these. `may_try`: chains that were not tried too."""
    space = trials.space
    best = chosen = trials.tried[0]
    while True:
        known = space.simplicity(chosen.chain)
        steps = (step.chain for step in space.steps(chosen.chain))
        simpler = [chain for chain in steps if space.simplicity(chain) < known]
        tried = trials.run(simpler, None if may_try else 0)
        equal = [one for one in tried if _equals(one, best, trials, grows)]
        if not equal:
            return chosen
        chosen = min(equal, key=lambda one: space.simplicity(one.chain))


def _equals(one: Evaluated, best: Evaluated, trials: Trials, grows: bool) -> bool:
    """Whether a chain that scores worse than the best may take its place."""
    if one.score.excess > best.score.excess or one.chain in trials.beaten:
        return False
    found = gap(one.report, best.report, trials.space.budget)
    mine, theirs = ({t.type: t.capacity for t in each.chain.tiers} for each in (one, best))
    if mine == theirs:
        return found.share <= found.margin
    if grows:
        return found.share <= (LEAST if mine.keys() < theirs.keys() else 0)
    return found.share <= min(found.margin, NEVER_GIVEN_UP)


def with_room_to_grow(chosen: Evaluated, trials: Trials) -> Evaluated:
    """The chosen chain with tiers as large as limits and constraints allow, where later requests
    will fill more of them than these do: by these, larger sizes can't be judged."""
    space = trials.space
    for tier, use in zip(chosen.chain.tiers, chosen.report.tiers, strict=True):
        if use.held_bytes is not None or tier.capacity == space.sizes[tier.type][0]:
            chosen = next(_larger(chosen, tier.type, tier.capacity or 0, trials), chosen)
    return chosen


def _larger(chosen: Evaluated, kind: str, least: int, trials: Trials) -> Iterator[Evaluated]:
    size = trials.space.budget.medium(kind).limit
    while size > least:
        tiers = tuple(
            replace(tier, capacity=size) if tier.type == kind else tier
            for tier in chosen.chain.tiers
        )
        for one in trials.run([replace(chosen.chain, tiers=tiers)]):
            worse = one.score.worse_than(chosen.score) > LEAST or one.chain in trials.beaten
            if one.score.excess <= chosen.score.excess and not worse:
                yield one
        size //= 2
