"""Which queue of the cpu tier evicts next? Its policies say so, as a plugin's may."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from spec.plugins import is_ours
from spec.policies import EvictionPolicy, eviction_policy
from tiers.guarded_policies import GuardedEviction
from tiers.host.arc_queues import AGAIN, ONCE, Arc


class LruEviction(EvictionPolicy):
    """Evicts the least recently used block first."""

    queues: ClassVar[int] = 1

    def enter(self, key: bytes) -> int:
        return 1

    def used(self, queue: int) -> int:
        return 1

    def next(self, lengths: Sequence[int]) -> int:
        return 1


class ArcEviction(EvictionPolicy):
    """Two queues by recency, of blocks used once and of those used since they were stored."""

    queues: ClassVar[int] = 2

    def __init__(self, capacity: int) -> None:
        self._arc: Arc[bytes] = Arc(capacity)

    def resize(self, capacity: int) -> None:
        self._arc.resize(capacity)

    def enter(self, key: bytes) -> int:
        return AGAIN if self._arc.enter(key) else ONCE

    def used(self, queue: int) -> int:
        return AGAIN

    def next(self, lengths: Sequence[int]) -> int:
        return self._arc.next(lengths[0], lengths[1])

    def evicted(self, key: bytes, queue: int) -> None:
        self._arc.evicted(queue, key)


def make_eviction(name: str, capacity: int, tier: str) -> EvictionPolicy:
    """The policy of this name for a tier of `capacity` blocks; a plugin's is guarded."""
    policy = eviction_policy(name)
    if is_ours(policy):
        return policy(capacity)
    return GuardedEviction(policy, capacity, LruEviction(capacity), f"tier {tier!r}: {name}")
