"""A chain at the replay's scale: as many blocks as the operator's, of few bytes, on own places."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from spec.chain import ChainSpec
from spec.offloading import HostSpec, OffloadingSpec, StoreSpec
from tiers.contract.engine_info import EngineInfo
from tiers.contract.pool_size import PoolSize
from tiers.disk.slab import slot_bytes
from tiers.errors import KVTiersError
from tiers.host.slots import slot_stride
from tiers.lab.replay.clock import Clock
from tiers.lab.replay.links import Link, LinkedSpec
from tiers.lab.server import in_own_place, limit
from tiers.remote.spec import RedisSpec
from tiers.tuning.machine import Machine

NO_DEADLINE = 600.0
"""Seconds of the machine that a verb may take; the trace's time has no deadline."""


class Scale(NamedTuple):
    """Bytes of a block: in the trace's world, and here."""

    real_bytes: int
    payload_bytes: int

    def blocks(self, size: float) -> int:
        """The number of blocks in `size` bytes of the trace's world."""
        return int(size // self.real_bytes)


WITHOUT_TRAFFIC = {"record": None, "explain": None, "ghosts": ()}
"""What becomes of a chain's settings about live traffic, which is none here."""


class CannotReplay(KVTiersError):
    """A trace or a chain can't be replayed for real on this machine."""


def scaled(
    chain: ChainSpec, engine: EngineInfo, scale: Scale, folder: Path, stack: ExitStack
) -> ChainSpec:
    """Scale a chain; the operator's folders and servers are left alone. Its tiers get folders in an
    empty one, and a server that is started for each Redis tier ends with the stack.

    Raises NoPlace for a tier that can't be moved.
    """
    stride = slot_stride(scale.payload_bytes)
    tiers = [_tier(tier, scale, folder, stack) for tier in chain.tiers]
    hosts = sum(tier.capacity // stride for tier in tiers if isinstance(tier, HostSpec))
    slots = PoolSize.of(chain, engine).slots(scale.real_bytes)
    staging = max(1, slots - hosts) * stride
    return chain.model_copy(update={**WITHOUT_TRAFFIC, "tiers": tuple(tiers), "staging": staging})


def _tier(tier: OffloadingSpec, scale: Scale, folder: Path, stack: ExitStack) -> OffloadingSpec:
    here = in_own_place(tier, folder / tier.tier_name, stack)
    if isinstance(here, HostSpec):
        room = max(1, scale.blocks(here.capacity) * slot_stride(scale.payload_bytes))
        return here.model_copy(update={"capacity": room})
    assert isinstance(here, StoreSpec)
    change: dict[str, object] = {"deadline": NO_DEADLINE}
    if here.max_inflight is not None:
        change["max_inflight"] = scale.blocks(here.max_inflight) * scale.payload_bytes or 1
    if here.write_budget is not None:
        change["write_budget"] = here.write_budget * scale.payload_bytes / scale.real_bytes
    if isinstance(here, RedisSpec):
        change["timeout"] = NO_DEADLINE
        if here.maxmemory is not None:
            limit(here, scale.blocks(here.maxmemory), scale.payload_bytes)
    capacity = getattr(here, "capacity", None)
    if isinstance(capacity, int):
        change["capacity"] = max(1, scale.blocks(capacity)) * slot_bytes(scale.payload_bytes)
    return here.model_copy(update=change)


def linked(
    chain: ChainSpec, machine: Machine, scale: Scale, clock: Clock
) -> tuple[ChainSpec, dict[str, Link]]:
    """Put each tier of a scaled chain behind the link of its profile; the links by tier name.
    Raises SpecError for one without a profile."""
    links: dict[str, Link] = {}
    tiers: list[OffloadingSpec] = []
    for tier in chain.tiers:
        profile = machine.profile(tier.tier_name, tier.type)
        rates = (tier.load_rate, tier.store_rate) if isinstance(tier, StoreSpec) else ()
        link = links[tier.tier_name] = Link(clock, profile, scale.real_bytes, *rates)
        tiers.append(LinkedSpec.over(tier, link) if isinstance(tier, StoreSpec) else tier)
    return chain.model_copy(update={"tiers": tuple(tiers)}), links
