"""Look keys up in a manager as the load policies look blocks up in a tier."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tiers.connector.policy.choice import stitched
from tiers.connector.scheduler.lookups import Lookup
from tiers.connector.scheduler.tier_manager import TierManager
from tiers.store import Block


def look_up(
    manager: TierManager, keys: Sequence[bytes], lookup: Lookup, first: int = 0
) -> int | None:
    """How many leading keys, from number `first` on, the tier holds; None: ask again."""
    asked = {0: partial(manager.coverage, lookup, keys)}
    found = stitched(asked, range(first, len(keys)))
    return None if found.looking else found.stop - first


class Names:
    """A store behind a network that keeps names, and counts those that it is asked for."""

    def __init__(self, *names: bytes) -> None:
        self.names = {*names}
        self.asked = self.calls = 0

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        self.asked += len(keys)
        self.calls += 1
        return [key in self.names for key in keys]

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        return [False] * len(blocks)

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        return [False] * len(blocks)

    def drop(self, keys: Sequence[bytes]) -> None: ...

    def close(self) -> None: ...


class IndexedNames(Names):
    """The same, with an index in memory."""

    peek = Names.has
