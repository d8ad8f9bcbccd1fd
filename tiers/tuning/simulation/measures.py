"""The report of a simulated engine."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tiers.tuning.machine import Machine, TierProfile
from tiers.tuning.report import DAY, Report, TierUse, quantile, stretches
from tiers.tuning.simulation.chain import SimChain, SimTier
from tiers.tuning.simulation.engine import Engine


def report_of(engine: Engine, chain: SimChain, machine: Machine) -> Report:
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
