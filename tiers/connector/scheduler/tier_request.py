"""TierRequest: what one tier keeps of a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from tiers.connector.policy.request_state import RequestState
from tiers.connector.scheduler.lookups import Lookup


@dataclass
class StoreOrder:
    """Whether a store will evict a request's blocks from their tail.

    A store evicts last what was stored last. A prefix that came in several steps is therefore told
    to it again, head last. Doing that with each step of a long answer would take time by the square
    of its length, so it is done when the prefix has doubled, and when the request has ended.
    """

    in_flight: int = 0
    """Jobs that are storing its blocks."""
    finished: bool = False
    """Whether the engine is done with the request."""
    stale: bool = False
    """Whether something came after what should be the last to go."""
    _touched: int = 0

    def ended(self, keys: int | None) -> None:
        """A job has ended. `keys`: how many it stored, if those were all keys so far and the store
        took them in one call; else None."""
        self.in_flight -= 1
        if keys is None:
            self.stale = True
        else:
            self._touched = keys

    def touch_due(self, keys: int) -> bool:
        """Whether to tell the tier the order of the first `keys` keys now."""
        over = self.finished and not self.in_flight
        if not self.stale or not (over or keys >= 2 * self._touched):
            return False
        self._touched, self.stale = keys, self.in_flight > 0
        return True


@dataclass(eq=False)
class TierRequest:
    """What one tier keeps of a request; `state` is what the whole chain knows of it.

    `offered`: leading blocks that were offered for storing. `refused`: which keys of those found no
    room, and why (a counter's name). `cut`: why a block was refused for good, so that none behind
    it is stored. `recompute`: this tier failed to load it and is not asked
    again, so a request is loaded in vain once per tier at most. `answered`: whether any lookup was.
    `looked_up`, `hit`: whether it is counted among the tier's lookups and hits. `order`: that in
    which its blocks were stored. `lookup`: the answers of the tier.
    """

    state: RequestState
    offered: int = 0
    refused: dict[int, str] = field(default_factory=dict)
    cut: str | None = None
    recompute: bool = False
    answered: bool = False
    looked_up: bool = False
    hit: bool = False
    order: StoreOrder = field(default_factory=StoreOrder)
    lookup: Lookup = field(default_factory=Lookup)

    @property
    def behind(self) -> str | None:
        """Why nothing more of the request is stored for now."""
        return self.cut or next(iter(self.refused.values()), None)
