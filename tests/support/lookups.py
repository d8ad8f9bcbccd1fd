"""Look keys up in a manager as the load policies look blocks up in a tier."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tiers.connector.policy.choice import stitched
from tiers.connector.scheduler.lookups import Lookup
from tiers.connector.scheduler.manager import TierManager


def look_up(
    manager: TierManager, keys: Sequence[bytes], lookup: Lookup, first: int = 0
) -> int | None:
    """How many leading keys, from number `first` on, the tier holds; None: ask again."""
    asked = {0: partial(manager.coverage, lookup, keys)}
    found = stitched(asked, range(first, len(keys)))
    return None if found.looking else found.stop - first
