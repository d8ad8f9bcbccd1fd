"""How many slots the host pool of a chain has."""

from __future__ import annotations

from dataclasses import dataclass, replace

from spec.chain import ChainSpec
from spec.offloading import HostSpec
from tiers.connector.contract.block_groups import BlockGroups
from tiers.connector.contract.engine import EngineInfo
from tiers.host.memory import slots_within

STAGING = 256 << 20
"""Bytes, over all ranks, for blocks on their way, where the chain does not say and a step of the
engine needs no more."""
STEPS = 2
"""Steps of whose blocks every one has a slot: what one step stores finds room while what the step
before it stored is still on its way."""


@dataclass(frozen=True)
class PoolSize:
    """The size of a chain's host pool.

    `capacity`: of its host tiers, in bytes over all ranks. `staging`: the same, for blocks on their
    way; None: as many as `step_blocks`, the blocks that one step completes, ask for.
    """

    capacity: int
    staging: int | None
    step_blocks: int
    world_size: int

    @classmethod
    def of(cls, chain: ChainSpec, engine: EngineInfo) -> PoolSize:
        """The size for a chain over this engine."""
        capacity = sum(tier.capacity for tier in chain.tiers if isinstance(tier, HostSpec))
        blocks = -(-engine.step_tokens // engine.block_tokens) * len(BlockGroups(engine))
        return cls(capacity, chain.staging, blocks, engine.world_size)

    def smaller(self) -> list[PoolSize]:
        """What to do with where this is too much: without the host tiers, and with no more than is
        asked for in the chain, or `STAGING`; then with nothing."""
        staging = replace(self, capacity=0)
        least = replace(staging, staging=STAGING if self.staging is None else self.staging)
        return [staging, least, PoolSize(0, 0, 0, self.world_size)]

    def slots(self, payload_bytes: int) -> int:
        """How many slots each rank has, for blocks of so many bytes; fewer for larger blocks."""
        staging = STAGING if self.staging is None else self.staging
        slots = slots_within(self.capacity + staging, payload_bytes, self.world_size)
        # A block on its way that a host tier keeps has one slot for both.
        return max(slots, STEPS * self.step_blocks) if self.staging is None else slots
