"""The soak's chains and engines: drawn, with other settings each, over the same stores."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spec.chain import ChainSpec
from spec.offloading import OffloadingSpec, StoreSpec
from spec.registry import make_tier
from tests.soak.faults import Mood, Sabotaged
from tests.support.replay_chains import HYBRID, MODEL, RECURRENT, SLOT, WINDOWS, encryption

MAX_WAIT = 0.5
SHARE = 0.3
"""Of the chains, tiers and engines, those that have a setting that is not the default."""
SMALL, LARGE = 150 * SLOT, 6000 * SLOT

CPU_SIZE: dict[str, Any] = {"capacity": 150 * SLOT, "verify": "always"}
DISK_SIZE = {"capacity": LARGE}

Settings = Mapping[str, Sequence[Any]]
"""Settings, and the values of which one is drawn."""

CHAIN: Settings = {
    "load_policy": ("first", "longest"),
    "load_when": ("sooner",),
    "promote": (False,),
    "store": ("prompt", "computed"),
    "on_reset": ("keep",),
    "explain": ({},),
}
TIER: Settings = {"store_threshold": (2, 3), "paused": ("reads", "writes")}
STORE: Settings = {
    **TIER,
    "max_inflight": (SMALL, LARGE),
    "store_rate": ("2MB/s", "50MB/s"),
    "load_rate": ("2MB/s", "50MB/s"),
    "loads_at_once": (1, 4),
}
CPU: Settings = {**TIER, "eviction": ("arc",), "capacity": (30 * SLOT, 600 * SLOT)}
DISK: Settings = {"io": ("direct", "buffered"), "durability": ("batch", "sync")}
REDIS: Settings = {**STORE, "ttl": ("1s", "1d"), "codec": ("zstd", "byteplanes", "auto")}
PACKS: Settings = {"capacity": (LARGE,)}
ENGINE: Settings = {
    "world_size": (2, 3),
    "steps_in_flight": (2,),
    "prefix_caching": (True,),
    "drops_last": (True,),
    "batch_tokens": (64, 256),
}
TIERS = 5
MODELS = MODEL, HYBRID, WINDOWS, RECURRENT


class Chains:
    """Chains of a cpu tier, and of stores in a folder and on a server. `mood`: of the disk."""

    def __init__(self, folder: Path, url: str, mood: Mood, rng: random.Random) -> None:
        self._folder, self._url, self._mood, self._random = folder, url, mood, rng
        self._encryption = encryption(folder)
        for name in ("shared", "object"):
            (folder / name).mkdir(mode=0o700)

    def draw(self, count: int | None = None) -> ChainSpec:
        """A chain of so many tiers, or of one to five."""
        kinds = [self._cpu, self._disk, self._redis, self._shared, self._object]
        some = self._random.sample(kinds, count or self._random.randrange(1, TIERS + 1))
        whole = {"load_when": "always", "load_policy": "stitched", **self.some(CHAIN)}
        sizes = {"max_wait": f"{MAX_WAIT}s", "staging": 300 * SLOT}
        tiers = [make() for make in some]
        return ChainSpec.model_validate({"version": 1, **whole, **sizes, "tiers": tiers})

    def change(self, before: ChainSpec) -> ChainSpec:
        """The next chain of an engine, which refuses it only where its cpu tier would go."""
        old, drawn = {tier.tier_name: tier for tier in before.tiers}, self.draw()
        tiers = [
            _like(tier, old.get(tier.tier_name))
            for tier in drawn.tiers
            if isinstance(tier, StoreSpec) or tier.tier_name in old
        ]
        same = {"on_reset": before.on_reset, "explain": before.explain}
        return drawn.model_copy(update={"tiers": tuple(tiers) or before.tiers, **same})

    def some(self, settings: Settings) -> dict[str, Any]:
        """Some of these, each with a value."""
        drawn = {name: self._random.choice(values) for name, values in settings.items()}
        return {name: value for name, value in drawn.items() if self._random.random() < SHARE}

    def _cpu(self) -> OffloadingSpec:
        return made("cpu", {**CPU_SIZE, **self.some(CPU)})

    def _disk(self) -> OffloadingSpec:
        inner = made("disk", {"path": str(self._folder / "disk"), **DISK_SIZE, **self.some(DISK)})
        limits = {"deadline": "400ms", **self._store()}
        tier = Sabotaged.model_validate({"type": "disk", "inner": inner, **limits})
        tier._mood = self._mood
        return tier

    def _redis(self) -> OffloadingSpec:
        limits = {"timeout": "300ms", "deadline": "2s"}
        return made("redis", {"url": self._url, **limits, **self.some(REDIS)})

    def _shared(self) -> OffloadingSpec:
        place = {"path": str(self._folder / "shared")}
        return made("shared", {**place, **self._store(), **self.some(PACKS)})

    def _object(self) -> OffloadingSpec:
        place = {"url": f"file://{self._folder / 'object'}"}
        return made("object", {**place, **self._store(), **self.some(PACKS)})

    def _store(self) -> dict[str, Any]:
        is_encrypted = self._random.random() < SHARE
        return {**self.some(STORE), **(self._encryption if is_encrypted else {})}


def _like(tier: OffloadingSpec, old: OffloadingSpec | None) -> OffloadingSpec:
    """The tier, with what the one that has its blocks so far has for good."""
    kept = ("encryption", "eviction") if old is not None else ()
    return tier.model_copy(update={k: getattr(old, k) for k in kept if hasattr(old, k)})


def made(kind: str, settings: dict[str, Any]) -> OffloadingSpec:
    written: dict[object, object] = {"type": kind}
    written.update(settings)
    return make_tier(kind, written)
