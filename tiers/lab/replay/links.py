"""Links: transfers of a real store that take the time that a profile says, in the trace's time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import PrivateAttr

from spec.offloading import StoreContext, StoreSpec
from spec.registry import finds_damage
from tiers.contract.block_copier import Copier, Copy, Fence, Gather, OpenCopier
from tiers.gpu.copier import open_copier
from tiers.lab.replay.clock import Clock
from tiers.store import Block, StoreWrapper, TierStore
from tiers.tuning.machine import TierProfile

QUANTUM_BYTES = 64 << 20
"""Of the trace: bytes that a transfer moves before another has its turn on the link."""


class Direction:
    """One direction of a link: a queue of transfers, each of which waits for those before it.

    Thread-safe. `busy`: seconds of the trace in which it moved bytes.
    """

    def __init__(self) -> None:
        self.busy = 0.0
        self._free_at = 0.0
        # Without it two threads could take the same time of the link.
        self._lock = threading.Lock()

    def passes(self, seconds: float, since: float) -> float:
        """When a transfer of `seconds` is over that is ready at `since`. It waits for all those
        before."""
        with self._lock:
            moment = self._free_at = max(since, self._free_at) + seconds
            self.busy += seconds
        return moment


class Link:
    """The way between the engine and one tier, as `profile` describes it; `load_rate` and
    `store_rate` are the chain's. `block_bytes`: of the trace, for each block."""

    def __init__(
        self,
        clock: Clock,
        profile: TierProfile,
        block_bytes: float,
        load_rate: float | None = None,
        store_rate: float | None = None,
    ) -> None:
        self.block_bytes = block_bytes
        self._load_seconds = self.block_bytes / profile.load_bandwidth
        self._store_seconds = self.block_bytes / profile.store_bandwidth
        self.loads = Direction()
        self.stores = self.loads if profile.shared_link else Direction()
        self.clock = clock
        self._profile = profile
        self._limits = Direction(), Direction()
        self._load_rate, self._store_rate = load_rate, store_rate

    def load(self, blocks: int, since: float) -> None:
        """Return when a load of `blocks`, ready at `since`, is over. A link's loads take turns."""
        if not blocks:
            return
        size, latency = self.block_bytes, self._profile.load_latency
        since = self._wait_for(self._limits[0], self._load_rate, blocks * size, since)
        since += latency
        self.clock.sleep_until(since)
        for turn in self._turns(blocks):
            since = self.loads.passes(turn * self._load_seconds, since)
            self.clock.sleep_until(since)

    def store(self, blocks: int, since: float) -> None:
        """Return when a store of `blocks` is over. Where loads share the link, they have turns
        between its blocks."""
        size, latency = self.block_bytes, self._profile.store_latency
        since = self._wait_for(self._limits[1], self._store_rate, blocks * size, since)
        for turn in self._turns(blocks) if self._profile.shared_link else [blocks]:
            since = self.stores.passes(latency + turn * self._store_seconds, since)
            self.clock.sleep_until(since)
            latency = 0.0

    def stored_at(self, blocks: int, since: float) -> float:
        """When a store of `blocks` is over; does not wait."""
        return self.stores.passes(blocks * self._store_seconds, since)

    def _turns(self, blocks: int) -> list[int]:
        """The number of blocks that a transfer moves in each of its turns."""
        most = max(1, int(QUANTUM_BYTES // self.block_bytes))
        return [min(most, blocks - start) for start in range(0, blocks, most)]

    def _wait_for(self, limit: Direction, rate: float | None, size: float, since: float) -> float:
        """Return when a transfer may begin under the chain's own rate: at once if those before it
        have used up their time, as `RateLimit` has it."""
        if not rate:
            return since
        moment = limit.passes(size / rate, since) - size / rate
        self.clock.sleep_until(moment)
        return moment


class LinkedStore(StoreWrapper):
    """A store whose transfers pass over a link. Answers from memory take no time."""

    def __init__(self, store: TierStore, link: Link) -> None:
        super().__init__(store)
        self._link = link

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        """Store once the bytes that are new have passed: before, nobody finds them."""
        self._link.store(self.has([one.key for one in blocks]).count(False), self._link.clock.now())
        return super().put(blocks)

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        """Load, and return once the bytes that were there have passed."""
        since = self._link.clock.now()
        hits = super().get(blocks)
        self._link.load(sum(hits), since)
        return hits


_OF_PLACE = {"type", "name", "load_rate", "store_rate", "store_process"}
"""Settings that a tier behind a link has of its own."""


class LinkedSpec(StoreSpec):
    """A tier, `inner`, whose stores are behind a link."""

    inner: StoreSpec
    _link: Link = PrivateAttr()

    @classmethod
    def over(cls, inner: StoreSpec, link: Link) -> LinkedSpec:
        settings = {key: getattr(inner, key) for key in StoreSpec.model_fields.keys() - _OF_PLACE}
        # Rates are numbers by now, which the YAML's fields would refuse.
        spec = cls(type=inner.type, name=inner.tier_name, inner=inner).model_copy(update=settings)
        spec._link = link
        return spec

    @property
    def verifies(self) -> bool:  # type: ignore[override]
        return finds_damage(self.inner)

    @property
    def is_prompt(self) -> bool:  # type: ignore[override]
        return self.inner.is_prompt

    @property
    def hit_source(self) -> str:  # type: ignore[override]
        return self.inner.hit_source

    @property
    def host_local(self) -> bool | None:
        return self.inner.host_local

    def open(self, site: StoreContext) -> TierStore:
        return LinkedStore(self.inner.open(site), self._link)


class LinkedCopier:
    """A copier whose loads from the host pool pass over a link. Gathers take no time; the worker
    reports later that their blocks are stored."""

    def __init__(self, copier: Copier, link: Link) -> None:
        self._copier = copier
        self._link = link
        self._pool = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._copier, name)

    def gather(self, blocks: Sequence[int], rows: torch.Tensor, slots: Sequence[int]) -> Gather:
        """As the copier; only the host pool is ever gathered into."""
        self._pool = rows.data_ptr()
        return self._copier.gather(blocks, rows, slots)

    def scatter(
        self, rows: torch.Tensor, slots: Sequence[int], blocks: Sequence[int], after: Fence
    ) -> Copy:
        """As the copier, after the link's time."""
        if rows.data_ptr() == self._pool:
            self._link.load(len(slots), self._link.clock.now())
        return self._copier.scatter(rows, slots, blocks, after)


def copier_over(link: Link) -> OpenCopier:
    return lambda kv_caches, num_blocks: LinkedCopier(open_copier(kv_caches, num_blocks), link)
