"""`simulate`: a chain's decisions on a trace, their time, and the report of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from spec.chain import ChainSpec
from spec.errors import SpecError
from spec.offloading import QUEUE_SECONDS
from tiers.traces.trace import TraceRequest
from tiers.tuning.machine import Machine, TierProfile
from tiers.tuning.report import DAY, Report, TierUse, quantile, stretches
from tiers.tuning.simulation.arc_space import ArcSpace
from tiers.tuning.simulation.chain import SimChain, SimTier
from tiers.tuning.simulation.engine import Engine
from tiers.tuning.simulation.spaces import LruSpace, TimedSpace
from tiers.tuning.simulation.tier import Tier, TierSettings
from tiers.tuning.simulation.workload import Workload

STAGING = 256 << 20
STEPS = 2
"""See `tiers/contract/pool_size.py`, as for STAGING."""
SHARE = 0.5
"""Of all slots, what the stores under way of a tier beside others may hold."""


def simulate(
    requests: Workload | Iterable[TraceRequest],
    block_tokens: int,
    chain: SimChain | ChainSpec,
    machine: Machine,
    *,
    warm: float = 0.0,
) -> Report:
    """Serve the requests with the chain on the machine; report on all but the first part.

    `block_tokens`: of a block, for engine and chain alike. `warm`: the fraction of the requests
    that only warms the caches, from 0 to less than 1. Who simulates many chains makes a `Workload`
    once. Raises TraceError for requests that are no trace, SpecError for a tier without a profile.
    """
    if not isinstance(requests, Workload):
        requests = Workload.of(requests, block_tokens)
    if isinstance(chain, ChainSpec):
        chain = SimChain.of(chain)
    tiers = _tiers(chain, machine, requests)
    engine = Engine(requests, tiers, chain, machine, int(len(requests) * warm))
    engine.run()
    return _report(engine, chain, machine)


def _tiers(chain: SimChain, machine: Machine, workload: Workload) -> list[Tier]:
    """The tiers, empty. Raises SpecError for one without a profile."""
    block_bytes = machine.kv_bytes_per_token * workload.block_tokens
    slots = _slots(chain, machine, workload.block_tokens, block_bytes)
    share = 1.0 if len(chain.tiers) == 1 else SHARE
    tiers = []
    for tier in chain.tiers:
        profile = machine.profile(tier.name, tier.type)
        most = slots if tier.is_host else slots * share
        settings = _settings(tier, profile, block_bytes, most)
        capacity = tier.capacity if tier.capacity is not None else profile.capacity
        blocks = math.inf if capacity is None else _blocks(tier, capacity, profile, block_bytes)
        tiers.append(Tier(settings, workload, _space(tier, blocks, len(workload.lengths))))
    pairs = list(zip(tiers, chain.tiers, strict=True))
    stores = [(tier.known, tier.held) for tier, spec in pairs if not spec.is_host]
    for one, spec in pairs:
        # A block on its way from its slot into a store is not evicted.
        one.space.pins = stores if spec.is_host else ()
        one.space.places = slots if spec.is_host else math.inf
    return tiers


def _space(tier: SimTier, blocks: float, runs: int) -> LruSpace:
    if tier.ttl is not None:
        return TimedSpace(blocks, runs, tier.ttl)
    spaces = {"lru": LruSpace, "arc": ArcSpace}
    if tier.eviction not in spaces:
        known = ", ".join(spaces)
        raise SpecError([f"{tier.name}: found eviction {tier.eviction!r}; simulated are {known}"])
    return spaces[tier.eviction](blocks, runs)


def _blocks(tier: SimTier, capacity: int, profile: TierProfile, block_bytes: int) -> int:
    return int(capacity // (block_bytes * (1.0 if tier.is_host else profile.stored_share)))


def _slots(chain: SimChain, machine: Machine, block_tokens: int, block_bytes: int) -> int:
    """Slots of the host pool."""
    capacity = sum(tier.capacity or 0 for tier in chain.tiers if tier.is_host)
    if chain.staging is not None:
        return int((capacity + chain.staging) // block_bytes)
    step_blocks = -(-machine.step_tokens // block_tokens)
    return max(int((capacity + STAGING) // block_bytes), STEPS * step_blocks)


def _settings(tier: SimTier, profile: TierProfile, block_bytes: int, most: float) -> TierSettings:
    size = block_bytes * profile.stored_share
    bandwidth = min(profile.store_bandwidth, tier.store_rate or math.inf)
    room = float(max(1, int(most)))
    if tier.max_inflight is not None:
        room = min(room, max(1, tier.max_inflight // block_bytes))
    elif not tier.is_host:
        room = min(room, max(1, int(QUEUE_SECONDS * bandwidth / size)))
    return TierSettings(
        tier.name,
        room,
        tier.is_host,
        tier.store_threshold,
        size / min(profile.load_bandwidth, tier.load_rate or math.inf),
        size / bandwidth,
        profile.load_latency,
        profile.store_latency,
        profile.concurrency,
        profile.shared_link,
        None if tier.write_budget is None else tier.write_budget / size,
    )


def _report(engine: Engine, chain: SimChain, machine: Machine) -> Report:
    """What the counted requests came to."""
    workload = engine.workload
    seconds = max(engine.now - engine.since, 1e-9)
    size = workload.block_tokens
    own = engine.marks[0] if engine.marks else {"gpu_busy": 0.0}
    uses = []
    for number, (tier, spec) in enumerate(zip(engine.tiers, chain.tiers, strict=True), 1):
        tier.drain(engine.now)
        before = engine.marks[number] if engine.marks else dict.fromkeys(tier.counts.__slots__, 0)
        done = {name: value - before[name] for name, value in tier.counts.values().items()}
        profile = machine.profile(spec.name, spec.type)
        held = tier.space.used + tier.space.claimed
        block_bytes = size * machine.kv_bytes_per_token
        was_full = spec.ttl is not None or held >= tier.space.capacity
        kept = None if was_full else held
        uses.append(_use(spec, profile, done, seconds, block_bytes, size, kept))
    prompt_tokens = sum(workload.tokens[engine.warm :])
    tier_hits = sum(use.hit_tokens for use in uses)
    own_hits = engine.own_hits
    waits = sorted(one.wait for one in engine.served)
    return Report(
        requests=len(waits),
        seconds=seconds,
        gpu_load=(engine.gpu_busy - own["gpu_busy"]) / seconds / machine.gpus,
        tiers=tuple(uses),
        prompt_tokens=prompt_tokens,
        engine_hit_tokens=own_hits,
        computed_tokens=prompt_tokens - own_hits - tier_hits,
        ttft_mean=sum(waits) / len(waits) if waits else 0.0,
        ttft_p50=quantile(waits, 0.5),
        ttft_p99=quantile(waits, 0.99),
        prefill_seconds_saved=tier_hits / machine.prefill_rate,
        stretches=stretches(engine.served),
        too_long=_too_long(workload.tokens[engine.warm :], size, machine),
    )


def _too_long(prompts: Sequence[int], size: int, machine: Machine) -> int:
    """How many prompts the engine's cache can't hold; one of 0 bytes is that of an engine without a
    prefix cache, which never lacks room here."""
    blocks = machine.engine_cache // (machine.kv_bytes_per_token * size)
    return sum(-(-tokens // size) > blocks for tokens in prompts) if machine.engine_cache else 0


def _use(
    spec: SimTier,
    profile: TierProfile,
    done: dict[str, float],
    seconds: float,
    block_bytes: int,
    block_tokens: int,
    held: int | None,
) -> TierUse:
    stored = int(done["stored"])
    dropped = max(0, int(done["dropped"]))
    size = block_bytes * profile.stored_share
    a_day = stored * size / seconds * DAY
    return TierUse(
        name=spec.name,
        hit_tokens=int(done["hits"]) * block_tokens,
        load_busy=done["load_busy"] / seconds,
        store_busy=done["store_busy"] / seconds,
        loaded_bytes=int(done["loaded"] * size),
        stored_bytes=int(stored * size),
        written_bytes_per_day=a_day,
        offered_blocks=stored + dropped,
        dropped_blocks=dropped,
        life_years=profile.life_years(a_day, spec.write_budget),
        price_per_month=profile.price(spec.capacity),
        held_bytes=None if held is None else math.ceil(held * size),
    )
