"""KVEvents: reports to the engine which blocks a tier comes to hold, and which it loses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from spec.offloading import HostSpec, OffloadingSpec, StoreSpec
from tiers.connector.policy.request_state import RequestState
from tiers.connector.policy.request_table import RequestTable
from tiers.connector.scheduler.inventory.inventory import Inventory
from tiers.connector.scheduler.inventory.journal import Run
from tiers.contract.protocols import UNKNOWN, BlockEvent, Medium


class Place(NamedTuple):
    """Where a tier keeps its blocks: see `BlockEvent`."""

    tier: str
    medium: Medium
    is_local: bool


def place_of(tier: OffloadingSpec) -> Place:
    """Where a tier keeps its blocks, by its settings."""
    is_host = isinstance(tier, HostSpec)
    is_local = is_host or (isinstance(tier, StoreSpec) and bool(tier.host_local))
    return Place(tier.tier_name, "CPU" if is_host else "STORAGE", is_local)


class KVEvents:
    """One tier's events, for an engine that takes any; used by the scheduler's thread alone."""

    def __init__(self, place: Place, requests: RequestTable, describes: bool = True) -> None:
        """`describes`: whether events have the origin of blocks, too."""
        self._evictions = 0
        self._place = place
        self._describes = describes
        self.wanted = requests.engine.kv_events
        self._requests = requests
        self._newly_held: dict[bytes, int] = {}
        self._lost: dict[int, list[bytes]] = {}  # hashes that are yet to be announced, by group
        self._inventory: Inventory | None = None
        self._dropped = 0
        self._events: list[BlockEvent] = []

    def keep_in(self, inventory: Inventory | None) -> None:
        """Keep announcements in this inventory from now on, and make those that are due in it.
        Closes the inventory before."""
        if self._inventory is not None:
            self._inventory.close()
        self._inventory = inventory

    def stored(self, key: bytes, number: int) -> None:
        """The tier holds this block now, which has this number among its request's keys; the blocks
        of a job are announced together. Called only where events are `wanted`."""
        self._newly_held[key] = number

    def announce_stored(self, request_state: RequestState) -> None:
        """A job of this request has ended: announce its blocks, parents before children, since some
        routers ignore a block whose parent they do not know."""
        held, self._newly_held = self._newly_held, {}
        if not held:
            return
        self._announce_lost()  # before those that are there again
        for group, first, keys in self._in_order(held):
            run = self._run(request_state, group, first, keys)
            self._announce(run)
            if self._inventory is not None:
                # Blocks of a generation are found by this engine alone, and not after a restart.
                self._inventory.note(run, lasts=not self._requests.generation.tag)

    def _in_order(self, held: dict[bytes, int]) -> Iterable[tuple[int, int, list[bytes]]]:
        """These keys as rows of blocks that follow each other: group, first one's place, keys."""
        numbers, keys = list(held.values()), list(held)
        if numbers[0] > numbers[-1]:
            numbers, keys = numbers[::-1], keys[::-1]
        if self._requests.groups.is_plain and numbers == [*range(numbers[0], numbers[-1] + 1)]:
            # Mostly so, and a whole long prompt has thousands.
            return [(0, numbers[0], keys)]
        return _runs(self._requests.groups.places(held.values()), held)

    def _run(
        self, request_state: RequestState, group: int, first: int, keys: Sequence[bytes]
    ) -> Run:
        engine, request = self._requests.engine, request_state.request
        size = engine.kv_groups[group].tokens
        origin, parent = UNKNOWN, None
        if self._describes:
            origin = engine.describe(request, first * size, size, len(keys))
            if first:
                parent = bytes(request.block_hashes[first * size // engine.hash_tokens - 1])
        block_hash, _ = self._requests.groups.hash_of(keys[0])
        return Run(keys, len(block_hash), group, size, parent, origin)

    def _announce(self, run: Run, held: bool = True) -> None:
        event = BlockEvent(*self._place, held, run.hashes, run.block_tokens, run.group)
        self._events.append(replace(event, parent=run.parent, origin=run.origin) if held else event)

    def evicted(self, key: bytes) -> None:
        self._evictions += 1
        # It may have come with the very job that is being ended: then nobody has heard of it.
        if self.wanted and self._newly_held.pop(key, None) is None:
            self.lost([key])

    def lost(self, keys: Iterable[bytes]) -> None:
        """These blocks turned out to be gone; those of a step are announced together."""
        if not self.wanted or (self._inventory is not None and self._inventory.withdraws):
            return
        # Keys of before a reset are of no interest: the engine itself reports that all is cleared.
        requests = self._requests
        for key in keys:
            if requests.generation.owns(key):
                block_hash, group = requests.groups.hash_of(key)
                self._lost.setdefault(group, []).append(block_hash)

    def _announce_lost(self) -> None:
        lost, self._lost = self._lost, {}
        for group, found in sorted(lost.items()):
            size = self._requests.engine.kv_groups[group].tokens
            self._events.append(BlockEvent(*self._place, False, tuple(found), size, group))

    def take_measures(self) -> dict[str, float]:
        """How many blocks were evicted since the last call, and how many are not kept of those
        that were announced (see `contract.stats`)."""
        dropped = self._inventory.dropped if self._inventory is not None else self._dropped
        counted = {"evictions": self._evictions, "events_not_kept": dropped - self._dropped}
        self._evictions, self._dropped = 0, dropped
        return {name: float(count) for name, count in counted.items() if count}

    @property
    def is_announcing(self) -> bool:
        """Whether steps are needed to announce blocks held before this engine started."""
        return self._inventory is not None and self._inventory.is_announcing

    def take(self) -> list[BlockEvent]:
        """The events since the last call, and some of those that are due of earlier ones."""
        self._announce_lost()
        if self._inventory is not None:
            for run, held, but in self._inventory.take():
                # Of before a reset: this engine finds them no more, and what it has stored since
                # under the same hashes is not gone.
                if not self._requests.generation.owns(run.keys[0]):
                    continue
                gone = [key not in but for key in run.keys]
                for part in [run] if held else run.held(gone):
                    self._announce(part, held)
        events, self._events = self._events, []
        return events


def _runs(
    places: Iterable[tuple[int, int]], keys: Iterable[bytes]
) -> Iterator[tuple[int, int, list[bytes]]]:
    """Join keys whose places, (group, position), follow each other: group, first position, keys."""
    blocks = enumerate(sorted(zip(places, keys, strict=True)))
    for _, row in groupby(blocks, lambda block: (block[1][0][0], block[1][0][1] - block[0])):
        run = [placed for _, placed in row]
        yield *run[0][0], [key for _, key in run]
