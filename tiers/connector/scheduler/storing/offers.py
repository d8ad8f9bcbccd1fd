"""What one tier keeps of each request, and which of its blocks are offered to the tier."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from tiers.connector.policy.requests import RequestState, RequestTable, Scheduled
from tiers.connector.scheduler.looking_up.lookups import Lookup
from tiers.connector.scheduler.managers.store_order import StoreOrder
from tiers.contract.protocols import NULL_BLOCK


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


class Offers(NamedTuple):
    """Parts of a request's blocks to store: of each its number among the request's keys, its key
    and its paged block. In columns: 8,192 new tuples would call Python's garbage collector."""

    numbers: Sequence[int]
    keys: Sequence[bytes]
    paged: Sequence[int]

    def without(self, overwritten: set[int]) -> Offers:
        """Those that are in none of these paged blocks."""
        safe = [place for place, block in enumerate(self.paged) if block not in overwritten]
        return Offers(
            [self.numbers[i] for i in safe],
            [self.keys[i] for i in safe],
            [self.paged[i] for i in safe],
        )


NOTHING = Offers((), (), ())


def new_offers(requests: RequestTable, own: TierRequest, scheduled: Scheduled) -> Offers:
    """All parts of the blocks that are complete and were not offered yet."""
    state, before, last = scheduled.state, scheduled.before, scheduled.complete
    first = own.offered
    if last <= first:  # most steps of an answer complete no block
        return NOTHING
    keys = requests.keys(state)
    if not state.shared:
        return NOTHING
    own.offered = last
    if requests.groups.is_plain:
        (table,) = state.tables
        return Offers(range(first, last), keys[first:last], table[first:last])
    size = len(requests.groups)
    offers = _kept(requests, state, range(first * size, last * size), before)
    left = [one for one in scheduled.states if first * size <= one[0] < last * size]
    if not left:
        return offers
    of_states = [(number, keys[number], paged) for number, paged in left]
    return Offers(*zip(*sorted([*zip(*offers, strict=True), *of_states]), strict=True))


def offers_again(
    requests: RequestTable, own: TierRequest, scheduled: Scheduled, most: int
) -> Offers:
    """At most so many of the parts that had no room; what is still refused must be noted again.

    Its request runs in this step, so that these blocks are its own.
    """
    last = scheduled.complete * len(requests.groups)
    # After a preemption it may not have got as far again.
    taken = [number for number in islice(own.refused, most) if number < last]
    offers = _kept(requests, own.state, taken, scheduled.before)
    for number in set(taken) - set(offers.numbers):
        del own.refused[number]  # the engine has given it away
    return offers


def _kept(
    requests: RequestTable, state: RequestState, numbers: Iterable[int], before: int
) -> Offers:
    """Those of these parts that the engine has not given away."""
    groups = requests.groups
    kept_numbers: list[int] = []
    places: list[int] = []
    at, paged, kept = -1, [NULL_BLOCK], [False]
    for number in numbers:
        block, part = divmod(number, len(groups))
        if block != at:
            # Its block table as we know it still names what the engine has given away since.
            at, kept = block, groups.kept(block, before)
            paged = groups.paged(state.tables, block)
        if kept[part] and (paged[part] != NULL_BLOCK or not groups.window):
            kept_numbers.append(number)
            places.append(paged[part])
    return Offers(kept_numbers, [state.keys[number] for number in kept_numbers], places)
