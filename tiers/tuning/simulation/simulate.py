"""`simulate`: a chain's decisions on a trace, their time, and the report of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from spec.chain import ChainSpec
from spec.errors import SpecError
from spec.offloading import INFLIGHT_SHARE, STAGING, STAGING_STEPS
from tiers.traces.trace import TraceRequest
from tiers.tuning.machine import Machine
from tiers.tuning.report import DAY, Mark, Report, Served, Stretch, TierCounts, TierUse
from tiers.tuning.simulation.sim_chain import SimChain, SimTier
from tiers.tuning.simulation.sim_engine import SimEngine
from tiers.tuning.simulation.simulated_tier import SimulatedTier
from tiers.tuning.simulation.spaces import SPACES, AgedSpace, LruSpace, SampledSpace, TimedSpace
from tiers.tuning.simulation.workload import Workload

STRETCHES = 16


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
    marks, came = engine.run(), requests.times[engine.warm :]
    return report_on(engine.served, marks, came, chain.tiers, machine, requests.block_tokens)


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
        blocks = math.inf if tier.capacity is None else tier.capacity // block_bytes
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
        raise SpecError(
            [f"{tier.name}: found admission {tier.admission!r}; simulated is threshold"]
        )
    if tier.ttl is not None:
        return TimedSpace(blocks, runs, tier.ttl)
    if of_type := {"object": AgedSpace, "redis": SampledSpace}.get(tier.type):
        return of_type(blocks, runs)
    if tier.eviction not in SPACES:
        known = ", ".join(SPACES)
        raise SpecError([f"{tier.name}: found eviction {tier.eviction!r}; simulated are {known}"])
    return SPACES[tier.eviction](blocks, runs)


def report_on(
    served: Sequence[Served],
    marks: tuple[Mark, Mark],
    came: Sequence[float],
    tiers: Sequence[SimTier],
    machine: Machine,
    block_tokens: int,
) -> Report:
    """Of what came between two marks. `served`: in the order in which prompts ended. `came`: when
    each request did, in seconds."""
    start, end = marks
    seconds = max(end.now - start.now, 1e-9)
    counts = zip(tiers, start.tiers, end.tiers, strict=True)
    block_bytes = machine.kv_bytes_per_token * block_tokens
    loaded = sum(prompt.loaded for prompt in served)
    # Where prompts wait, tiers load meanwhile for others than are served.
    between = sum(map(_hits, start.tiers, end.tiers))
    part = loaded / between if between else 0.0
    uses = tuple(_use(*one, seconds, machine, block_bytes, part) for one in counts)
    waits = sorted(prompt.wait for prompt in served)
    tokens, own = sum(prompt.tokens for prompt in served), sum(prompt.own for prompt in served)
    # A cache of 0 bytes is that of an engine without a prefix cache, which always has room.
    room = machine.engine_cache // block_bytes if machine.engine_cache else math.inf
    return Report(
        requests=len(waits),
        seconds=seconds,
        gpu_load=(end.gpu_busy - start.gpu_busy) / seconds / machine.gpus,
        tiers=uses,
        prompt_tokens=tokens,
        engine_hit_tokens=own,
        computed_tokens=tokens - own - loaded,
        ttft_mean=sum(waits) / len(waits) if waits else 0.0,
        ttft_p50=_quantile(waits, 0.5),
        ttft_p99=_quantile(waits, 0.99),
        prefill_seconds_saved=loaded / machine.prefill_rate,
        stretches=_stretches(served),
        room_wait=(end.room_wait - start.room_wait) / seconds,
        pause=max((later - one for one, later in pairwise(came)), default=0.0) / seconds,
        free_answers=not machine.decode_seconds_per_token and any(p.answer > 1 for p in served),
        too_long=sum(-(-prompt.tokens // block_tokens) > room for prompt in served),
    )


def _hits(before: TierCounts, after: TierCounts) -> int:
    return after.hit_tokens - before.hit_tokens


def _use(
    tier: SimTier,
    before: TierCounts,
    after: TierCounts,
    seconds: float,
    machine: Machine,
    block_bytes: int,
    part: float,
) -> TierUse:
    """`part`: of the tokens that were loaded meanwhile, those of the prompts that were served."""
    profile = machine.profile(tier.name, tier.type)
    stored = after.stored - before.stored
    dropped = max(0, after.dropped - before.dropped)
    a_day = stored * block_bytes / seconds * DAY
    return TierUse(
        name=tier.name,
        hit_tokens=round(_hits(before, after) * part),
        load_busy=(after.load_busy - before.load_busy) / seconds,
        store_busy=(after.store_busy - before.store_busy) / seconds,
        loaded_bytes=(after.loaded - before.loaded) * block_bytes,
        stored_bytes=stored * block_bytes,
        written_bytes_per_day=a_day,
        offered_blocks=stored + dropped,
        dropped_blocks=dropped,
        life_years=profile.life_years(a_day, tier.write_budget),
        price_per_month=profile.price(tier.capacity),
        held_bytes=None if after.held is None else math.ceil(after.held * block_bytes),
    )


def _stretches(served: Sequence[Served]) -> tuple[Stretch, ...]:
    """Equal parts of the prompts that were served, in their order."""
    cuts = [len(served) * number // STRETCHES for number in range(STRETCHES + 1)]
    found = []
    for part in (served[start:end] for start, end in pairwise(cuts) if end > start):
        waits = sorted(prompt.wait for prompt in part)
        loaded = sum(prompt.loaded for prompt in part)
        computed = sum(prompt.tokens - prompt.own for prompt in part) - loaded
        found.append(Stretch(sum(waits) / len(waits), _quantile(waits, 0.99), computed, loaded))
    return tuple(found)


def _quantile(values: Sequence[float], part: float) -> float:
    """The value that so large a part of the sorted values is at or below; 0 if there is none."""
    return values[min(len(values) - 1, int(part * len(values)))] if values else 0.0
