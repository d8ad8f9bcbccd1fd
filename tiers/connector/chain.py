"""From a chain's spec to its connectors: one per tier, sharing one host pool."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from spec.chain import ChainSpec
from spec.fields import format_size
from spec.offloading import HostSpec, OffloadingSpec, StoreContext, StoreSpec
from tiers.connector.contract.block_groups import BlockGroups
from tiers.connector.contract.copier import OpenCopier
from tiers.connector.contract.engine import EngineInfo, Role
from tiers.connector.contract.generation import Generation
from tiers.connector.contract.messages import WorkerHandshake
from tiers.connector.contract.pool_size import PoolSize
from tiers.connector.multi.connector import MultiConnector
from tiers.connector.offloading import OffloadingConnector
from tiers.connector.policy.load_sharing import LoadSharing
from tiers.connector.policy.wait_budget import WaitBudget
from tiers.connector.scheduler.admission import Admission
from tiers.connector.scheduler.announcing import Announcer
from tiers.connector.scheduler.host_manager import HostManager
from tiers.connector.scheduler.hosts import is_local, refuse_several
from tiers.connector.scheduler.manager import TierManager
from tiers.connector.scheduler.scheduler import OffloadingScheduler, OpenManager
from tiers.connector.scheduler.store_manager import StoreManager
from tiers.connector.scheduler.tenant_quotas import Tenants
from tiers.connector.worker.host_slots import HostSlots
from tiers.connector.worker.worker import OffloadingWorker
from tiers.errors import TierUnusable
from tiers.host.memory import slots_within
from tiers.host.slots import SlotPool
from tiers.wrappers.opening import open_guarded
from tiers.wrappers.residency import open_residency

DRAIN_SECONDS = 10.0
"""How long a tier may go on storing when the engine shuts down."""


def open_chain(
    chain: ChainSpec,
    engine: EngineInfo,
    role: Role,
    open_copier: OpenCopier,
    now: Callable[[], float] = time.monotonic,
    root: Path = Path("/"),
) -> MultiConnector:
    """Make the connectors of a chain in one role. No tier is opened before the workers are known.

    Host memory over all ranks: see `PoolSize`. Each process also uses a few bounce slots per store
    tier. `root`: where the system tells of its memory.
    """
    engine = replace(engine, facts={**engine.facts, "salt": chain.salt})
    size = PoolSize.of(chain, engine)
    if role is Role.SCHEDULER:
        announcer = Announcer(chain)
        pool = _ChainPool(size, announcer)
        # One for all tiers: each would else gather a block for itself, after a reset.
        keeps = chain.on_reset == "keep"
        generation = Generation(lasts=keeps, is_own=engine.weights_change and not keeps)
        wait_budget = WaitBudget(now, chain.max_wait)
        children = [
            OffloadingConnector(
                tier.tier_name,
                scheduler=OffloadingScheduler(
                    tier.tier_name,
                    engine,
                    _manager_opener(
                        tier, pool, generation, wait_budget.lookup_seconds, engine.host, announcer
                    ),
                    chain.promote,
                    generation,
                    wait_budget,
                    Admission(tier, now, alone=len(chain.tiers) == 1),
                    Tenants(tier.tier_name, chain.tenants),
                    now,
                    prompt_only=chain.store == "prompt",
                ),
                hit_source=tier.hit_source,
            )
            for tier in chain.tiers
        ]
        return MultiConnector(
            role,
            children,
            load_policy=chain.load_policy,
            cheapest=chain.cheapest,
            now=now,
            wait_budget=wait_budget,
            sharing=LoadSharing(engine, wait_budget) if engine.caches_prefixes else None,
            media=engine.media,
            block_tokens=engine.block_tokens,
            window=BlockGroups(engine).window,
            drops_last=engine.drops_last,
            chain=_identity(chain),
        )
    host = HostSlots(engine, size, open_copier, root)
    children = [
        OffloadingConnector(
            tier.tier_name,
            worker=OffloadingWorker(tier, host, DRAIN_SECONDS),
        )
        for tier in chain.tiers
    ]
    return MultiConnector(role, children, chain=_identity(chain))


def _identity(chain: ChainSpec) -> str:
    # What workers say is of this chain alone: another one's has other tiers and other slots.
    tiers = [(t.type, t.name, t.capacity if isinstance(t, HostSpec) else 0) for t in chain.tiers]
    text = repr((chain.salt, chain.staging, tiers))
    return "tiers-" + hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class _ChainPool:
    """The chain's slots; made when the first tier learns how large a block is."""

    def __init__(self, size: PoolSize, announcer: Announcer) -> None:
        self._size = size
        self._announcer = announcer
        self._pool: SlotPool | None = None

    def open(self, payload_bytes: int, handshakes: Sequence[WorkerHandshake]) -> SlotPool:
        if self._pool is None:
            made = [handshake.slots for handshake in handshakes if handshake.slots is not None]
            self._pool = SlotPool(min([self._size.slots(payload_bytes), *made]))
            self._announcer.chain(payload_bytes, len(handshakes), self._pool.num_slots)
        return self._pool


def _manager_opener(
    tier: OffloadingSpec,
    chain_pool: _ChainPool,
    generation: Generation,
    lookup_deadline: float,
    host: str,
    announcer: Announcer,
) -> OpenManager:
    def open_manager(
        handshakes: Sequence[WorkerHandshake], in_step: bool
    ) -> tuple[TierManager, SlotPool]:
        # Ranks whose blocks are larger have fewer slots: what fits those fits all.
        payload = max(handshake.payload_bytes for handshake in handshakes)
        pool = chain_pool.open(payload, handshakes)
        if isinstance(tier, HostSpec):
            lacks = [handshake.lacks for handshake in handshakes if handshake.lacks]
            if lacks:
                raise TierUnusable(lacks[0])
            slots = slots_within(tier.capacity, payload, len(handshakes))
            if slots == 0:
                raise TierUnusable(
                    f"capacity {format_size(tier.capacity)} over {len(handshakes)} rank(s) is less "
                    f"than one block of {format_size(payload)}"
                )
            residency = open_residency(tier, pool, slots)
            announcer.host(tier, slots)
            return HostManager(residency, pool), pool
        if isinstance(tier, StoreSpec):
            if is_local(tier, None):
                refuse_several(handshakes, host)
            site = StoreContext(payload, len(handshakes))
            store = open_guarded(tier, site, in_step, partial(announcer.store, tier))
            try:
                if is_local(tier, store):
                    refuse_several(handshakes, host)
            except TierUnusable:
                store.close()
                raise
            spaces = [handshake.namespace for handshake in handshakes]
            return StoreManager(store, spaces, generation, lookup_deadline=lookup_deadline), pool
        raise TierUnusable(f"type {tier.type!r} is neither a StoreSpec nor a HostSpec")

    return open_manager
