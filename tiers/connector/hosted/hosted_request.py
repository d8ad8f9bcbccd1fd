"""What a HostedTier knows of a request, and tells of its blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tiers.connector.scheduler.lookups import Lookup
from tiers.connector.scheduler.tier import StoreOrder
from tiers.host.slots import SlotPool


class Happened(NamedTuple):
    """A block, by the engine's name, came to a tier (`stored`) or went from it: host memory
    (`in_host`), or the store."""

    block: bytes
    in_host: bool
    stored: bool


class Prefix:
    """A request's keys, in the order in which the engine named them first. `order`: whether the
    store would evict them from the tail."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.order = StoreOrder()
        self._numbers: dict[bytes, int] = {}

    def number(self, key: bytes) -> int:
        """Return the index of `key`, which is appended if it is new."""
        number = self._numbers.setdefault(key, len(self.keys))
        if number == len(self.keys):
            self.keys.append(key)
        return number


class Gather(NamedTuple):
    """A block that workers copy into `slot`: block `number` of `prefix`."""

    slot: int
    prefix: Prefix
    number: int


@dataclass
class HostedRequest:
    """What is known of a request's blocks, by key.

    `pinned`: the slots of its hits, each with a reference. `missed`: misses, for good. `wanted`:
    to be looked up in the store at the end of the step. `asked`: being looked up. `promoted`: hits
    that came from the store. `prefix`: the blocks that it is known to have.
    `lookup`: what the store is being asked.
    """

    pinned: dict[bytes, int] = field(default_factory=dict)
    missed: set[bytes] = field(default_factory=set)
    wanted: dict[bytes, None] = field(default_factory=dict)
    asked: list[bytes] = field(default_factory=list)
    promoted: set[bytes] = field(default_factory=set)
    prefix: Prefix = field(default_factory=Prefix)
    lookup: Lookup = field(default_factory=Lookup)

    def pin(self, key: bytes, slot: int, pool: SlotPool) -> None:
        """Keep a hit in its slot until `unpin`."""
        if key not in self.pinned:
            pool.retain(slot)
            self.pinned[key] = slot

    def unpin(self, pool: SlotPool) -> None:
        """Release the slots of all hits."""
        for slot in self.pinned.values():
            pool.release(slot)
        self.pinned.clear()
