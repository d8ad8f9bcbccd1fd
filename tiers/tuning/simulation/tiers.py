"""The tiers of a chain on a machine, in blocks and seconds."""

from __future__ import annotations

import math

from spec.offloading import QUEUE_SECONDS
from tiers.tuning.machine import Machine, TierProfile
from tiers.tuning.simulation.arc_space import ArcSpace
from tiers.tuning.simulation.chain import SimChain, SimTier
from tiers.tuning.simulation.spaces import LruSpace, TimedSpace
from tiers.tuning.simulation.tier import Tier, TierSettings
from tiers.tuning.simulation.workload import Workload

STAGING = 256 << 20
STEPS = 2
"""See `tiers/contract/pool_size.py`, as for STAGING."""
SHARE = 0.5
"""Of all slots, what the stores under way of a tier beside others may hold."""


def tiers_of(chain: SimChain, machine: Machine, workload: Workload) -> list[Tier]:
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
        raise ValueError(f"{tier.name}: found eviction {tier.eviction!r}; simulated are {known}")
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
