"""From a chain's spec to its connectors: one per tier, sharing one host pool."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from spec.chain import ChainSpec
from spec.offloading import HostSpec
from tiers.connector.contract.block_groups import BlockGroups
from tiers.connector.contract.copier import OpenCopier
from tiers.connector.contract.engine import EngineInfo, Role
from tiers.connector.contract.generation import Generation
from tiers.connector.contract.pool_size import PoolSize
from tiers.connector.multi.connector import MultiConnector
from tiers.connector.offloading import OffloadingConnector
from tiers.connector.policy.load_sharing import LoadSharing
from tiers.connector.policy.wait_budget import WaitBudget
from tiers.connector.scheduler.admission import Admission
from tiers.connector.scheduler.announcing import Announcer
from tiers.connector.scheduler.opening import ChainPool, TierOpener
from tiers.connector.scheduler.scheduler import OffloadingScheduler
from tiers.connector.scheduler.tenant_quotas import Tenants
from tiers.connector.worker.host_slots import HostSlots
from tiers.connector.worker.worker import OffloadingWorker

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
        # One for all tiers: each would else gather a block for itself, after a reset.
        keeps = chain.on_reset == "keep"
        generation = Generation(lasts=keeps, is_own=engine.weights_change and not keeps)
        wait_budget = WaitBudget(now, chain.max_wait)
        opener = TierOpener(
            ChainPool(size, announcer),
            generation,
            wait_budget.lookup_seconds,
            engine.host,
            announcer,
        )
        children = [
            OffloadingConnector(
                tier.tier_name,
                scheduler=OffloadingScheduler(
                    tier.tier_name,
                    engine,
                    partial(opener.open, tier),
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
