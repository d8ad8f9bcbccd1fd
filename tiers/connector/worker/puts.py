"""Puts: feeds a store from the host pool, in batches, at the rate that the tier may take."""

from __future__ import annotations

from collections.abc import Sequence

from tiers.concurrency.rate_limit import RateLimit
from tiers.connector.contract.generation import space_of
from tiers.connector.contract.messages import StoreItem, StoreJob
from tiers.connector.worker.host_slots import HostSlots
from tiers.store import GatheredBlock, batch_blocks
from tiers.wrappers.guard import Guarded


class Puts:
    """Puts blocks into one tier's store; used by its writer's thread.

    Where the engine takes events it also notes which blocks the store had before: those were told
    by the engine that stored them, and a tier that engines share is told once. One rank notes it
    for all, since a block is one event.
    """

    def __init__(self, host: HostSlots, rate_limit: RateLimit) -> None:
        self._host = host
        self._rate_limit = rate_limit
        self._looks = host.engine.kv_events and host.engine.rank == 0

    def put(
        self, store: Guarded, namespace: bytes, job: StoreJob, items: Sequence[StoreItem]
    ) -> tuple[list[bool], set[bytes]]:
        """Put these of the job's items; which are held now, and the keys that were before."""
        space = space_of(namespace, job.generation)
        memory, size = self._host.memory, self._host.payload_bytes
        step = batch_blocks(size)
        stored: list[bool] = []
        known: set[bytes] = set()
        for start in range(0, len(items), step):
            part = items[start : start + step]
            names = [space + item.key for item in part]
            if self._looks:
                had = store.has(names)
                known.update(item.key for item, was in zip(part, had, strict=True) if was)
            self._rate_limit.take(len(part) * size)
            slots = [item.slot for item in part]
            payloads = map(memory.payload, slots)
            stored += store.put([*map(GatheredBlock, names, payloads, self._host.checksums(slots))])
        return stored, known
