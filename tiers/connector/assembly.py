"""From a chain's spec to its two halves: a connector per tier, all of which share one host pool."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from spec.chain import ChainSpec
from spec.offloading import HostSpec, OffloadingSpec, StoreSpec
from tiers.connector.live_chain import LiveChain, tenant_names
from tiers.connector.multi.multi_scheduler import MultiSettings
from tiers.connector.multi.worker_changes import ChangeParts
from tiers.connector.policy.request_table import RequestTable
from tiers.connector.policy.tenant_counts import TenantCounts
from tiers.connector.scheduler.offloading_scheduler import OffloadingScheduler
from tiers.connector.scheduler.open_tier import TierOpener
from tiers.connector.worker.host_slots import HostSlots
from tiers.connector.worker.offloading_worker import OffloadingWorker
from tiers.contract.block_copier import OpenCopier
from tiers.contract.engine_info import EngineInfo
from tiers.contract.generation import Generation
from tiers.contract.pool_size import PoolSize
from tiers.contract.protocols import RequestObserver
from tiers.contract.weight_reports import Watch
from tiers.explain.explanations import Explanations
from tiers.explain.spans import engine_tracer

DRAIN_SECONDS = 10.0
"""How long a tier may go on storing when the engine shuts down."""

SchedulerParts = tuple[Sequence[OffloadingScheduler], MultiSettings, Sequence[str], str]
"""The parameters of a `MultiScheduler`."""
WorkerParts = tuple[Sequence[OffloadingWorker], Sequence[str], str, Watch, ChangeParts]
"""The parameters of a `MultiWorker`."""


def scheduler_parts(
    chain: ChainSpec,
    engine: EngineInfo,
    now: Callable[[], float] = time.monotonic,
    wake: Callable[[], None] = lambda: None,
) -> SchedulerParts:
    """Make the tiers of a chain as the scheduler has them, and the settings of their policy.
    `wake`: see `MultiSettings`."""
    engine = _salted(engine, chain)
    # One for all tiers: each would else gather a block for itself, after a reset.
    keeps = chain.on_reset == "keep"
    generation = Generation(lasts=keeps, is_own=engine.weights_change and not keeps)
    requests = RequestTable(
        engine,
        generation,
        now,
        max_wait=chain.max_wait,
        store=chain.store,
        tenants=TenantCounts(tenant_names(chain)),
    )
    opener = TierOpener(chain, engine, generation, now)
    observers: list[RequestObserver] = []
    names = _names(chain)
    explainer = Explanations()
    if (explain := chain.explain) is not None:
        explainer = Explanations(names, engine.block_tokens, explain.requests, engine_tracer())
        observers.append(explainer)
    live = LiveChain(chain, requests, opener, now, names, observers)
    settings = MultiSettings(
        requests, now=now, observers=observers, explainer=explainer, rebuilder=live, wake=wake
    )
    tiers = [live.make(tier, chain) for tier in chain.tiers]
    _warm(chain, tiers)
    return tiers, settings, _names(chain), _identity(chain)


def _warm(chain: ChainSpec, children: Sequence[OffloadingScheduler]) -> None:
    """Have the first store that knows what was used last fill the first cpu tier, where the chain
    says so."""
    spec, pairs = chain.warm, [*zip(chain.tiers, children, strict=True)]
    if spec is None:
        return
    target = next(child for tier, child in pairs if isinstance(tier, HostSpec))
    stores = (child for tier, child in pairs if isinstance(tier, StoreSpec))

    def try_next() -> bool:
        if (store := next(stores, None)) is not None:
            store.warm(spec, target, try_next)
        return store is not None

    try_next()


def worker_parts(
    chain: ChainSpec,
    engine: EngineInfo,
    open_copier: OpenCopier,
    root: Path = Path("/"),
    now: Callable[[], float] = time.monotonic,
) -> WorkerParts:
    """Make the tiers of a chain as a worker has them, which open with the engine's paged KV, and
    what watches the weights.

    Host memory over all ranks: see `PoolSize`. Each process also uses a few bounce slots per store
    tier. `root`: where the system describes its memory. `now`: the clock of the loads' time limits,
    in seconds.
    """
    engine = _salted(engine, chain)
    host = HostSlots(engine, PoolSize.of(chain, engine), open_copier, root, now)

    def make(tier: OffloadingSpec) -> OffloadingWorker:
        return OffloadingWorker(tier, host, DRAIN_SECONDS)

    children = [*map(make, chain.tiers)]
    parts = ChangeParts(engine.rank, make, host.close)
    return children, _names(chain), _identity(chain), host.watch, parts


def _salted(engine: EngineInfo, chain: ChainSpec) -> EngineInfo:
    return replace(engine, facts={**engine.facts, "salt": chain.salt})


def _names(chain: ChainSpec) -> list[str]:
    return [tier.tier_name for tier in chain.tiers]


def _identity(chain: ChainSpec) -> str:
    # Workers report of this chain alone: another one has other tiers and other slots.
    tiers = [(t.type, t.name, t.capacity if isinstance(t, HostSpec) else 0) for t in chain.tiers]
    text = repr((chain.salt, chain.staging, tiers))
    return "tiers-" + hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
