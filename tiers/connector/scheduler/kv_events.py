"""KVEvents: tells the engine which blocks a tier comes to hold, and which it loses."""

from __future__ import annotations

from collections.abc import Sequence

from tiers.connector.contract.block_groups import BlockGroups
from tiers.connector.contract.engine import EngineInfo
from tiers.connector.contract.generation import Generation
from tiers.connector.contract.messages import BlockEvent


class KVEvents:
    """One tier's events, for an engine that takes any; used by the scheduler's thread alone."""

    def __init__(
        self, tier: str, engine: EngineInfo, parts: BlockGroups, generation: Generation
    ) -> None:
        self._evictions = 0
        self._tier = tier
        self._groups = engine.kv_groups
        self._wanted = engine.kv_events
        self._parts = parts
        self._generation = generation
        self._newly_held: list[bytes] = []
        self._events: list[BlockEvent] = []

    def stored(self, key: bytes) -> None:
        """The tier holds this block now; those of a job are told together, in reverse."""
        self._newly_held.append(key)

    def tell_stored(self) -> None:
        """The job has ended."""
        held, self._newly_held = self._newly_held[::-1], []
        self._note(True, held)

    def evicted(self, key: bytes) -> None:
        """The tier gave a block up for room."""
        self._evictions += 1
        if self._wanted:
            # It may have come with the very job that is being ended.
            self.tell_stored()
            self._note(False, [key])

    def lost(self, keys: Sequence[bytes]) -> None:
        """These blocks turned out to be gone."""
        self._note(False, keys)

    def _note(self, stored: bool, keys: Sequence[bytes]) -> None:
        # Keys of before a reset are of no interest: the engine itself says that all is cleared.
        if not self._wanted:
            return
        hashes: dict[int, list[bytes]] = {}
        for key in keys:
            if self._generation.made(key):
                block_hash, group = self._parts.hash_of(key)
                hashes.setdefault(group, []).append(block_hash)
        for group, found in sorted(hashes.items()):
            name = group if len(self._groups) > 1 else None
            tokens = self._groups[group].tokens
            self._events.append(BlockEvent(self._tier, stored, tuple(found), tokens, name))

    def take_evictions(self) -> int:
        """How many blocks were evicted since the last call."""
        evictions, self._evictions = self._evictions, 0
        return evictions

    def take(self) -> list[BlockEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events
