"""HostManager: a tier whose blocks stay in the host pool, as the scheduler sees it."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from tiers.connector.scheduler.lookups import HeldLog, Lookup, LookupPace
from tiers.connector.scheduler.tier_manager import TierManager
from tiers.contract.messages import SlotMove
from tiers.cpu.residency import SlotResidency
from tiers.host.slots import SlotPool
from tiers.wrappers.guard import Health, warned

LOOK_BACK = 64
"""How many blocks before a stored one are searched for a predecessor that is kept."""

TRIMMED = 256
"""Blocks that a step takes from a tier that is made smaller, or was reset, in a millisecond."""


class HostManager(TierManager):
    """A tier whose blocks stay in the host pool, each evicted before its predecessor."""

    in_host_memory = True

    def __init__(
        self,
        residency: SlotResidency,
        pool: SlotPool,
        on_evict: Callable[[bytes], None] | None = None,
    ) -> None:
        """`on_evict` is called with the key of each block that is evicted."""
        self._residency = residency
        self._pool = pool
        self._changes = HeldLog()
        self._on_evict = on_evict
        self._pinned: dict[bytes, int] = {}
        self._max_blocks = pool.num_slots
        self.pace = LookupPace(ranks=1)
        residency.on_evict = self._evicted

    def _evicted(self, key: bytes) -> None:
        self._changes.note(key, held=False)
        if self._on_evict is not None:
            self._on_evict(key)

    def coverage(self, lookup: Lookup, keys: Sequence[bytes], asked: range) -> list[bool]:
        """Look those up in the residency that were not asked for before."""
        lookup.follow(self._changes, keys)
        if unknown := lookup.unknown(asked, self._changes):
            lookup.add(self._find(keys, unknown))
        return lookup.of(asked)

    def version(self, lookup: Lookup, keys: Sequence[bytes]) -> int:
        lookup.follow(self._changes, keys)
        return lookup.version

    def _find(self, keys: Sequence[bytes], asked: range) -> list[bool]:
        slots = self._residency.find_all(keys[asked.start : asked.stop])
        missing = slots.count(None)
        if missing in (0, len(slots)):  # by far most often
            return [not missing] * len(slots)
        return [slot is not None for slot in slots]

    def prepare_load(self, keys: Sequence[bytes]) -> list[int | None]:
        """Take a reference on each resident slot, so that it is not evicted."""
        slots = self._residency.touch(keys)
        for slot in slots:
            if slot is not None:
                self._pool.retain(slot)
        return slots

    def complete_load(self, slots: Sequence[int | None]) -> None:
        for slot in slots:
            if slot is not None:
                self._pool.release(slot)

    def touch_and_list_missing(self, keys: Sequence[bytes]) -> list[bool]:
        return [slot is None for slot in self._residency.touch(keys)]

    def predecessors(self, prefix: Sequence[bytes], numbers: Sequence[int]) -> dict[bytes, bytes]:
        """Look back, a little, from each that does not follow another."""
        found: dict[bytes, bytes] = {}
        predecessor, last = None, -1
        for number in numbers:
            if number > last + 1:
                predecessor = self._nearest(prefix, number)
            if predecessor is not None:
                found[prefix[number]] = predecessor
            last = number
        return found

    def _nearest(self, prefix: Sequence[bytes], before: int) -> bytes | None:
        for index in range(before - 1, max(-1, before - 1 - LOOK_BACK), -1):
            if self._residency.find(prefix[index]) is not None:
                return prefix[index]
        return None

    def complete_store(self, key: bytes, slot: int, stored: bool, before: bytes | None) -> bool:
        find = self._residency.find
        predecessor = None if before is None else find(before)
        held = self._residency.admit(key, slot, predecessor) if stored else find(key) is not None
        self._changes.note(key, held)
        return held

    def pinnable(self, keys: Sequence[bytes]) -> list[bytes]:
        slots = self._residency.find_all(keys)
        return [key for key, slot in zip(keys, slots, strict=True) if slot is not None]

    def pin(self, keys: Sequence[bytes]) -> None:
        """Take a reference on each slot, as a load does."""
        for key, slot in zip(keys, self._residency.find_all(keys), strict=True):
            if slot is not None and key not in self._pinned:
                self._pool.retain(slot)
                self._pinned[key] = slot

    def unpin(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            slot = self._pinned.pop(key, None)
            if slot is not None:
                self._pool.release(slot)

    def demote(self, keys: Sequence[bytes]) -> int:
        return self._residency.demote(keys)

    def discard(self, key: bytes) -> None:
        self.unpin((key,))
        slot = self._residency.find(key)
        self._residency.discard(key)
        if slot is not None:  # which a store may have in use yet; what is computed anew has another
            self._pool.forget(slot)
        self._changes.note(key, held=False)

    def reset(self) -> None:
        """Stop keeping all blocks; the slot of one that is being loaded is freed when that ends."""
        self._changes.forget()
        self.unpin([*self._pinned])
        self._residency.outdate()

    # -- another size ------------------------------------------------------------------------

    def resize(self, capacity: int, max_blocks: int) -> None:
        """Keep `max_blocks` at most, in the slots that the pool has now."""
        self._residency.resize(max_blocks)
        self._max_blocks = max_blocks
        self.is_shrinking = True

    def shrink(self, most: int) -> list[SlotMove]:
        """Give back slots of before a reset, evict blocks beyond the capacity, then move those
        beyond the pool's end, so that the policy alone decides which blocks stay."""
        is_smaller = self._pool.is_vacating or len(self._residency) > self._max_blocks
        trimmed = self._residency.trim(TRIMMED)
        beyond = [] if trimmed else self._pool.beyond(most)
        moves = [move for slot in beyond if (move := self._vacate(slot))]
        # What was dropped leaves the pool's search when that looks at it again.
        is_some_free = not all(map(self._pool.references, beyond))
        goes_on = trimmed or moves or is_some_free or self._pool.is_searching
        self.is_shrinking = is_smaller and bool(goes_on)
        return moves

    def _vacate(self, slot: int) -> SlotMove | None:
        """Begin to move the block in a slot; None: it is in use, or another tier's, or evicted."""
        pool, key = self._pool, self._pool.key(slot)
        if key is None or pool.references(slot) > 1 or self._residency.find(key) != slot:
            return None
        target = pool.reserve()
        if target is None:
            return None
        if pool.key(slot) != key:  # it was evicted for that
            pool.release(target)
            return None
        pool.retain(slot)
        return SlotMove(key, slot, target)

    def moved(self, moves: Sequence[SlotMove], failed: Container[int]) -> None:
        """Serve blocks from their new slots; drop those that are in none."""
        pool, residency = self._pool, self._residency
        for number, (key, slot, target) in enumerate(moves):
            is_kept = residency.find(key) == slot  # else it was dropped meanwhile
            if is_kept and number not in failed:
                pool.move(slot, target)
                residency.move(slot, target)
                pool.release(slot)
                if self._pinned.get(key) == slot:  # by a hint, meanwhile
                    self._pinned[key] = target
                    pool.retain(target)
                    pool.release(slot)
            else:
                pool.release(target)
                if is_kept:
                    self.unpin((key,))
                    residency.discard(key)
                    self._evicted(key)
            pool.release(slot)

    def health(self) -> Health:
        """Memory works; a plugin's policy may not."""
        return warned(self._residency.warning())

    def slots_kept(self) -> int:
        return len(self._residency)
