"""`simulate`: a chain's decisions on a trace, their time, and the report of it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from spec.chain import ChainSpec
from spec.errors import SpecError
from spec.offloading import INFLIGHT_SHARE, STAGING, STAGING_STEPS
from tiers.traces.trace import TraceRequest
from tiers.tuning.machine import Machine
from tiers.tuning.report import DAY, Report, TierUse, quantile, stretches
from tiers.tuning.simulation.sim_chain import SimChain, SimTier
from tiers.tuning.simulation.sim_engine import SimEngine
from tiers.tuning.simulation.simulated_tier import SimulatedTier, TierCounts
from tiers.tuning.simulation.spaces import SPACES, LruSpace, TimedSpace
from tiers.tuning.simulation.workload import Workload


def simulate(
    requests: Workload | Iterable[TraceRequest],
    block_tokens: int,
    chain: SimChain | ChainSpec,
    machine: Machine,
    *,
    warm: float = 0.0,
) -> Report:
    """Serve the requests with the chain on the machine; report on all but the first part.

    `block_tokens`: of a block, for both engine and chain. `warm`: the fraction of the requests
    that only warms the caches, from 0 to less than 1. Who simulates many chains makes a `Workload`
    once. Raises TraceError for requests that are no trace, SpecError for a tier without a profile.
    """
    if not isinstance(requests, Workload):
        requests = Workload.of(requests, block_tokens)
    if isinstance(chain, ChainSpec):
        chain = SimChain.of(chain)
    tiers = _tiers(chain, machine, requests)
    engine = SimEngine(requests, tiers, chain, machine, int(len(requests) * warm))
    engine.run()
    return _report(engine)


def _tiers(chain: SimChain, machine: Machine, workload: Workload) -> list[SimulatedTier]:
    """The tiers, empty. Raises SpecError for one without a profile."""
    block_bytes = machine.kv_bytes_per_token * workload.block_tokens
    pool = sum(tier.capacity or 0 for tier in chain.tiers if tier.is_host)
    pool += STAGING if chain.staging is None else chain.staging
    slots = pool // block_bytes
    if chain.staging is None:
        slots = max(slots, STAGING_STEPS * -(-machine.step_tokens // workload.block_tokens))
    share = 1.0 if len(chain.tiers) == 1 else INFLIGHT_SHARE
    tiers = []
    for tier in chain.tiers:
        profile = machine.profile(tier.name, tier.type)
        most = slots if tier.is_host else slots * share
        blocks = math.inf
        if tier.capacity is not None:
            held_bytes = block_bytes * (1 if tier.is_host else profile.stored_share)
            blocks = int(tier.capacity // held_bytes)
        space = _space(tier, blocks, len(workload.lengths))
        tiers.append(SimulatedTier(tier, profile, block_bytes, most, workload, space))
    stores = [(tier.known, tier.held) for tier in tiers if not tier.spec.is_host]
    for one in tiers:
        if one.spec.is_host:
            # A block being copied from its slot into a store is not evicted.
            one.space.pins, one.space.places = stores, slots
    return tiers


def _space(tier: SimTier, blocks: float, runs: int) -> LruSpace:
    if tier.admission != "threshold":
        found = f"found admission {tier.admission!r}; simulated is threshold"
        raise SpecError([f"{tier.name}: {found}"])
    if tier.ttl is not None:
        return TimedSpace(blocks, runs, tier.ttl)
    if tier.eviction not in SPACES:
        known = ", ".join(SPACES)
        raise SpecError([f"{tier.name}: found eviction {tier.eviction!r}; simulated are {known}"])
    return SPACES[tier.eviction](blocks, runs)


def _report(engine: SimEngine) -> Report:
    machine, size = engine.machine, engine.workload.block_tokens
    seconds = max(engine.now - engine.since, 1e-9)
    uses = []
    for tier, before in zip(engine.tiers, engine.counts_before, strict=True):
        tier.drain(engine.now)
        uses.append(_use(tier, before, engine, seconds))
    prompts = engine.workload.tokens[engine.warm :]
    tier_hits = sum(use.hit_tokens for use in uses)
    waits = sorted(served.wait for served in engine.served)
    # A cache of 0 bytes is that of an engine without a prefix cache, which always has room here.
    block_bytes = machine.kv_bytes_per_token * size
    engine_blocks = machine.engine_cache // block_bytes if machine.engine_cache else math.inf
    return Report(
        requests=len(waits),
        seconds=seconds,
        gpu_load=(engine.gpu_busy - engine.gpu_busy_before) / seconds / machine.gpus,
        tiers=tuple(uses),
        prompt_tokens=sum(prompts),
        engine_hit_tokens=engine.own_hits,
        computed_tokens=sum(prompts) - engine.own_hits - tier_hits,
        ttft_mean=sum(waits) / len(waits) if waits else 0.0,
        ttft_p50=quantile(waits, 0.5),
        ttft_p99=quantile(waits, 0.99),
        prefill_seconds_saved=tier_hits / machine.prefill_rate,
        stretches=stretches(engine.served),
        room_wait=(engine.room_wait.until(engine.now) - engine.room_wait_before) / seconds,
        too_long=sum(-(-tokens // size) > engine_blocks for tokens in prompts),
    )


def _use(tier: SimulatedTier, before: TierCounts, engine: SimEngine, seconds: float) -> TierUse:
    """The use of a tier since `before`."""
    spec, profile, counts, size = tier.spec, tier.profile, tier.counts, engine.workload.block_tokens
    stored = counts.stored - before.stored
    dropped = max(0, counts.dropped - before.dropped)
    block_bytes = size * engine.machine.kv_bytes_per_token * profile.stored_share
    a_day = stored * block_bytes / seconds * DAY
    held = tier.space.used + tier.space.claimed
    was_full = spec.ttl is not None or held >= tier.space.capacity
    return TierUse(
        name=spec.name,
        hit_tokens=(counts.hits - before.hits) * size,
        load_busy=(counts.load_busy - before.load_busy) / seconds,
        store_busy=(counts.store_busy - before.store_busy) / seconds,
        loaded_bytes=int((counts.loaded - before.loaded) * block_bytes),
        stored_bytes=int(stored * block_bytes),
        written_bytes_per_day=a_day,
        offered_blocks=stored + dropped,
        dropped_blocks=dropped,
        life_years=profile.life_years(a_day, spec.write_budget),
        price_per_month=profile.price(spec.capacity),
        held_bytes=None if was_full else math.ceil(held * block_bytes),
    )
