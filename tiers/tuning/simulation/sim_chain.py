"""SimChain: a chain for the simulation, quick to make by the thousand."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from spec.chain import ChainSpec
from spec.offloading import LOADS_AT_ONCE, HostSpec, OffloadingSpec
from tiers.tuning.machine import size_of


@dataclass(frozen=True)
class SimTier:
    """One tier. Sizes in bytes, rates in bytes per second, times in seconds; None: no limit."""

    name: str
    type: str
    is_host: bool
    """Whether its blocks stay in the host pool (cpu), rather than in a store."""
    capacity: int | None = None
    """None: without limit."""
    eviction: str = "lru"
    """One of `SPACES`; stores have `lru`."""
    store_threshold: int = 1
    max_inflight: int | None = None
    store_rate: float | None = None
    load_rate: float | None = None
    write_budget: float | None = None
    ttl: float | None = None
    admission: str = "threshold"
    paused: str | None = None
    loads_at_once: int = LOADS_AT_ONCE

    @classmethod
    def of(cls, spec: OffloadingSpec) -> SimTier:
        is_host = isinstance(spec, HostSpec)
        more: Any = {one.name: getattr(spec, one.name, one.default) for one in fields(cls)[4:]}
        return cls(spec.tier_name, spec.type, is_host, size_of(spec), **more)


@dataclass(frozen=True)
class SimChain:
    """A chain: its tiers in load priority, and how they work together."""

    tiers: tuple[SimTier, ...]
    load_policy: str = "stitched"
    promote: bool = True
    max_wait: float = 10.0
    staging: int | None = None
    store: str = "all"
    load_when: str = "sooner"

    @classmethod
    def of(cls, spec: ChainSpec) -> SimChain:
        more = {one.name: getattr(spec, one.name) for one in fields(cls)[1:]}
        return cls(tuple(map(SimTier.of, spec.tiers)), **more)
