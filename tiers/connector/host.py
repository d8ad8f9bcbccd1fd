"""The worker's half of the host pool, shared by all tiers of a chain: one gather feeds them all."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import xxhash

from tiers.block import namespace
from tiers.connector.base import Copier, Copy, EngineInfo, Hello, StoreItem
from tiers.connector.pool_size import PoolSize
from tiers.pool import SlotMemory
from tiers.prefault import Prefault

logger = logging.getLogger(__name__)

OpenCopier = Callable[[Mapping[str, torch.Tensor], int], Copier]


MOMENT = 0.2
"""Seconds that a start waits for late facts: tiers of small models are there from the beginning."""


class HostSlots:
    """One worker's slots, their copier, and what each slot holds.

    Slots are handed out by the scheduler, which never gives away one that is still referenced
    here; so a slot's entries below have one writer at a time and need no lock.
    """

    def __init__(self, engine: EngineInfo, size: PoolSize, open_copier: OpenCopier) -> None:
        self.engine = engine
        self._size = size
        self._open_copier = open_copier
        self._users = 0
        self._copier: Copier | None = None
        self._memory: SlotMemory | None = None
        self._prefault: Prefault | None = None
        self._holds: dict[int, bytes] = {}
        self._gathers: dict[int, Copy] = {}
        self._seals: dict[int, bytes] = {}
        self._namespace: bytes | None = None
        self._began: float | None = None

    def open(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the engine's paged KV; the first tier of the chain to call this does the work."""
        self._users += 1
        if self._copier is not None:
            return
        self._copier = self._open_copier(kv_caches, self.engine.num_blocks)
        num_slots = self._size.slots(self.payload_bytes)
        self._memory = SlotMemory(num_slots, self.payload_bytes, self._copier.pin)
        if num_slots and not self._copier.pin:  # what is pinned is there already
            rows = self._memory.rows
            self._prefault = Prefault(rows.data_ptr(), num_slots * rows.stride(0))

    @property
    def copier(self) -> Copier:
        """The copier; only once the paged KV is registered."""
        assert self._copier is not None, "register_kv_caches comes first"
        return self._copier

    @property
    def memory(self) -> SlotMemory:
        """The slots' bytes; only once the paged KV is registered."""
        assert self._memory is not None, "register_kv_caches comes first"
        return self._memory

    @property
    def payload_bytes(self) -> int:
        """Bytes of one block on this rank."""
        return self.copier.payload_bytes

    def hello(self) -> Hello:
        """What the scheduler must know of this worker, for a tier that only this engine finds."""
        return Hello(self.engine.rank, b"", self.payload_bytes)

    def shared_hello(self, may_wait: bool = False) -> Hello | None:
        """The same for a tier whose blocks others find, by the worker's namespace.

        None: the engine's late facts are not known yet. With `may_wait` the first call, of all
        tiers', waits a moment for them. Called by the engine's thread.
        """
        if self._namespace is None:
            late = self._late_facts(MOMENT if may_wait and self._began is None else 0.0)
            if late is None:
                self._say_wait()
                return None
            facts = {**self.engine.facts, **late, "layout": self.copier.layout}
            facts["block_tokens"] = str(self.engine.block_tokens)
            self._namespace = namespace(facts, self.engine.rank, self.engine.world_size)
            self._say_known()
        return Hello(self.engine.rank, self._namespace, self.payload_bytes)

    def _late_facts(self, seconds: float) -> Mapping[str, str] | None:
        late = self.engine.late_facts
        return {} if late is None else late.known(seconds)

    def _say_wait(self) -> None:
        if self._began is None:
            self._began = time.monotonic()
            if self.engine.rank == 0:
                logger.info(
                    "the model's weights are being identified, beside the engine's work. Until "
                    "that is done, nothing is stored in, or loaded from, tiers that others share"
                )

    def _say_known(self) -> None:
        if self._began is not None and self.engine.rank == 0:
            logger.info(
                "the tiers that others share join now, %.1f s after the engine's memory was there",
                time.monotonic() - self._began,
            )

    def gather(self, items: Sequence[StoreItem]) -> Copy | None:
        """Begin filling the slots whose bytes no one has gathered yet."""
        fresh = [item for item in items if item.source is not None]
        if not fresh:
            return None
        slots = [item.slot for item in fresh]
        blocks = [item.source for item in fresh if item.source is not None]
        if self._prefault is not None:
            # The scheduler hands slots out from the first on, so the last is how far it has come.
            self._prefault.used((max(slots) + 1) * self.memory.rows.stride(0))
        for item in fresh:
            self._holds.pop(item.slot, None)
            self._seals.pop(item.slot, None)
        copy = self.copier.gather(blocks, self.memory.rows, slots)
        for item in fresh:
            self._gathers[item.slot] = copy
            self._holds[item.slot] = item.key
        return copy

    def settle(self, slots: Sequence[int], keys: Sequence[bytes]) -> list[bool]:
        """Wait for gathers of these slots; True for each that then holds its key's block.

        A slot that another tier should have gathered and did not is False, never stale bytes.
        """
        for slot, key in zip(slots, keys, strict=True):
            gather = self._gathers.get(slot)
            if gather is not None and self._holds.get(slot) == key:
                gather.wait()
        return [self._holds.get(s) == k for s, k in zip(slots, keys, strict=True)]

    def seal(self, slots: Sequence[int]) -> None:
        """Remember the checksums of these slots, whose gathers are settled."""
        for slot in slots:
            if slot not in self._seals:
                self._seals[slot] = xxhash.xxh3_128_digest(self.memory.payload(slot))

    def is_intact(self, slot: int) -> bool:
        """Whether the slot is sealed, and its bytes are still those."""
        return self._seals.get(slot) == xxhash.xxh3_128_digest(self.memory.payload(slot))

    def close(self) -> None:
        """Give back memory and threads once the last tier of the chain is closed."""
        self._users -= 1
        if self._users == 0 and self._copier is not None:
            self._copier.close()
            if self._prefault is not None:
                self._prefault.close()
            self.memory.close()
