"""How many slots the host pool of a chain has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from spec.chain import ChainSpec
from spec.offloading import STAGING, STAGING_STEPS, HostSpec
from tiers.contract.block_groups import BlockGroups
from tiers.contract.engine_info import EngineInfo
from tiers.host.slots import slots_within


@dataclass(frozen=True)
class PoolSize:
    """The size of a chain's host pool.

    `capacity`: of its host tiers, in bytes over all ranks. `staging`: the same, for blocks in
    flight; None: as many as `step_blocks`, the blocks that one step completes, ask for. `hosts`:
    the names of the host tiers and the capacity of each.
    """

    capacity: int
    staging: int | None
    step_blocks: int
    world_size: int
    hosts: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, chain: ChainSpec, engine: EngineInfo) -> PoolSize:
        tiers = [tier for tier in chain.tiers if isinstance(tier, HostSpec)]
        hosts = [(tier.tier_name, tier.capacity) for tier in tiers]
        blocks = -(-engine.step_tokens // engine.block_tokens) * len(BlockGroups(engine))
        return cls(0, chain.staging, blocks, engine.world_size)._with(hosts)

    def _with(self, hosts: Sequence[tuple[str, int]]) -> PoolSize:
        """With these host tiers alone."""
        return replace(self, capacity=sum(size for _, size in hosts), hosts=tuple(hosts))

    def resized(self, name: str, capacity: int) -> PoolSize:
        """With another capacity of one host tier; 0: without it."""
        hosts = {**dict(self.hosts), name: capacity}
        return self._with([host for host in hosts.items() if host[1]])

    def smaller(self) -> list[PoolSize]:
        """What to do with where this is too much: without the largest host tier, then without the
        next; with no more than is asked for in the chain, or `STAGING`; then with nothing."""
        by_size = sorted(self.hosts, key=lambda host: host[1])
        fewer = [self._with(by_size[:count]) for count in range(len(by_size) - 1, 0, -1)]
        staging = self._with(())
        least = replace(staging, staging=STAGING if self.staging is None else self.staging)
        return [*fewer, staging, least, PoolSize(0, 0, 0, self.world_size)]

    @property
    def num_bytes(self) -> int:
        """Bytes over all ranks; where a step's blocks ask for more, `slots` has more."""
        return self.capacity + (STAGING if self.staging is None else self.staging)

    def slots(self, payload_bytes: int) -> int:
        """How many slots each rank has, for blocks of this many bytes; fewer for larger blocks."""
        slots = slots_within(self.num_bytes, payload_bytes, self.world_size)
        # A block in flight that a host tier keeps has one slot for both.
        return max(slots, STAGING_STEPS * self.step_blocks) if self.staging is None else slots
