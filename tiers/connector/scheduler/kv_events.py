"""KVEvents: tells the engine which blocks a tier comes to hold, and which it loses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from spec.offloading import HostSpec, OffloadingSpec, StoreSpec
from tiers.connector.contract.block_events import UNKNOWN, BlockEvent, Medium
from tiers.connector.policy.requests import RequestState, RequestTable


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
        """`describes`: whether events tell the origin of blocks, too."""
        self._evictions = 0
        self._place = place
        self._describes = describes
        self._wanted = requests.engine.kv_events
        self._requests = requests
        self._newly_held: dict[bytes, int] = {}
        self._events: list[BlockEvent] = []

    def stored(self, key: bytes, number: int) -> None:
        """The tier holds this block now, which has this number among its request's keys; the blocks
        of a job are told together."""
        if self._wanted:
            self._newly_held[key] = number

    def tell_stored(self, state: RequestState) -> None:
        """A job of this request has ended: tell its blocks, parents before children, since some
        routers ignore a block whose parent they do not know."""
        held, self._newly_held = self._newly_held, {}
        for group, first, keys in _runs(self._requests.groups.places(held.values()), held):
            self._events.append(self._stored(state, group, first, keys))

    def _stored(
        self, state: RequestState, group: int, first: int, keys: Sequence[bytes]
    ) -> BlockEvent:
        groups, engine = self._requests.groups, self._requests.engine
        size = engine.kv_groups[group].tokens
        origin, parent = UNKNOWN, None
        if self._describes:
            origin = engine.describe(state.request, first * size, size, len(keys))
            if first:
                parent, _ = groups.hash_of(state.keys[groups.number(group, first - 1)])
        hashes = tuple(groups.hash_of(key)[0] for key in keys)
        return BlockEvent(*self._place, True, hashes, size, group, parent, origin)

    def evicted(self, key: bytes) -> None:
        """The tier gave a block up for room."""
        self._evictions += 1
        # It may have come with the very job that is being ended: then nobody has heard of it.
        if self._wanted and self._newly_held.pop(key, None) is None:
            self.lost([key])

    def lost(self, keys: Sequence[bytes]) -> None:
        """These blocks turned out to be gone."""
        # Keys of before a reset are of no interest: the engine itself says that all is cleared.
        if not self._wanted:
            return
        requests = self._requests
        hashes: dict[int, list[bytes]] = {}
        for key in keys:
            if requests.generation.made(key):
                block_hash, group = requests.groups.hash_of(key)
                hashes.setdefault(group, []).append(block_hash)
        for group, found in sorted(hashes.items()):
            size = requests.engine.kv_groups[group].tokens
            self._events.append(BlockEvent(*self._place, False, tuple(found), size, group))

    def take_evictions(self) -> int:
        """How many blocks were evicted since the last call."""
        evictions, self._evictions = self._evictions, 0
        return evictions

    def take(self) -> list[BlockEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events


def _runs(
    places: Iterable[tuple[int, int]], keys: Iterable[bytes]
) -> Iterator[tuple[int, int, list[bytes]]]:
    """Join keys whose places, (group, position), follow each other: group, first position, keys."""
    run: list[bytes] = []
    begin = last = (-1, -1)
    for place, key in sorted(zip(places, keys, strict=True)):
        if run and place != (last[0], last[1] + 1):
            yield *begin, run
            run = []
        if not run:
            begin = place
        run.append(key)
        last = place
    if run:
        yield *begin, run
