"""Which block does the cpu tier evict? Its policy names a queue; this keeps the queues."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, compress
from operator import ne

from spec.policies import EvictionPolicy
from tiers.guarded_policies import GuardedEviction
from tiers.host.slots import SlotPool

NOWHERE = 0
"""Not in any queue."""


class SlotQueues:
    """Queues numbered from 1, with each slot in one of them or NOWHERE: 17 bytes a slot.

    Linked lists in arrays, of which Python's garbage collector sees nothing: with a million
    blocks in an OrderedDict each of its full collections stopped the engine for 62 ms.
    """

    def __init__(self, num_slots: int, queues: int) -> None:
        self.where = bytearray(num_slots)
        """The queue of each slot; for reading."""
        # Behind the slots' entries one for each queue: what follows it is the queue's first slot.
        self._ends = num_slots - 1
        self._after = array("q", bytes(8 * num_slots))
        self._after.extend(range(num_slots, num_slots + queues))
        self._before = self._after[:]
        self.lengths = [0] * (queues + 1)
        """Of each queue, by its number; for reading."""
        self._count = 0

    def append(self, slot: int, queue: int) -> None:
        self._put(slot, queue, self._ends + queue)

    def insert(self, slot: int, before: int) -> None:
        """Put a slot that is NOWHERE into a queue, right before one that is in it."""
        self._put(slot, self.where[before], before)

    def _put(self, slot: int, queue: int, after: int) -> None:
        before = self._before[after]
        self._after[before] = self._before[after] = slot
        self._before[slot], self._after[slot] = before, after
        self.where[slot] = queue
        self.lengths[queue] += 1
        self._count += 1

    def remove(self, slot: int) -> None:
        before, after = self._before[slot], self._after[slot]
        self._after[before], self._before[after] = after, before
        self.lengths[self.where[slot]] -= 1
        self.where[slot] = NOWHERE
        self._count -= 1

    def move(self, slot: int, queue: int) -> None:
        self.remove(slot)
        self.append(slot, queue)

    def move_all(self, slots: Sequence[int], queue: int) -> None:
        """Move these slots, one after the other, to the end of a queue: the last is its last.

        The blocks of a prompt are used together and so lie one behind the other. Each run of such
        neighbours is moved in one piece, in a third of the time that one by one takes.
        """
        if len(set(slots)) < len(slots):  # requests share a prefix: the last use counts
            slots = [*dict.fromkeys(reversed(slots))][::-1]
        after, before, where, end = self._after, self._before, self.where, self._ends + queue
        breaks = map(ne, map(after.__getitem__, slots), slots[1:])
        stops = [*compress(range(1, len(slots)), breaks), len(slots)] if slots else []
        start = 0
        for stop in stops:  # inlined, for where the run is of one slot
            first, last = slots[start], slots[stop - 1]
            left, right = before[first], after[last]
            after[left], before[right] = right, left
            left = before[end]
            after[left], before[first] = first, left
            after[last], before[end] = end, last
            if (was := where[first]) != queue:  # that of the whole run
                self.lengths[was] -= stop - start
                self.lengths[queue] += stop - start
                for slot in slots[start:stop]:
                    where[slot] = queue
            start = stop

    def replace(self, slot: int, target: int) -> None:
        """Put a slot that is NOWHERE, `target`, into the place of another one."""
        self.insert(target, slot)
        self.remove(slot)

    def grow(self, num_slots: int) -> None:
        """Have entries for as many slots, if there are fewer."""
        more = num_slots - len(self.where)
        if more <= 0:
            return
        self.where.extend(bytes(more))
        for links in (self._after, self._before):
            links.frombytes(bytes(8 * more))
        # The last first: the new places of some are the old ones of others.
        for old in range(self._ends + len(self.lengths) - 1, self._ends, -1):
            new, first, last = old + more, self._after[old], self._before[old]
            is_empty = first == old
            self._after[new], self._before[new] = (new, new) if is_empty else (first, last)
            if not is_empty:
                self._before[first] = self._after[last] = new
        self._ends += more

    def first(self, queue: int) -> int:
        """The oldest slot of a queue, which is not empty."""
        return self._after[self._ends + queue]

    def slots(self) -> Iterator[int]:
        """All slots that are in a queue; none may move meanwhile."""
        return compress(range(len(self.where)), self.where)

    def __len__(self) -> int:
        return self._count


class SlotResidency:
    """The blocks that the tier keeps in the pool; `policy` decides the order in which they are
    evicted. Used by the scheduler's thread alone: nothing here may wait.

    What it owes the pool:

    - It registers an evictor when it is made. Without one a full pool takes no more blocks, of any
      tier.
    - It holds one reference on the slot of each block that it keeps, and evicts only slots that
      have no other.
    - It calls `on_evict`, if set, with the key of each block that it evicts for room, and no other.

    The head of a prefix must outlive its tail, which is useless without it. Blocks of a prefix are
    admitted head last, and touched head first.

    A slot is resident if it is in a queue; the pool knows whose block it holds. Beside the policy's
    queues there are two for blocks that the policy chose: those in use, which an eviction skips,
    and those in use no more or demoted, which are evicted before all others. So a block in use
    keeps its place, and no eviction looks at it twice.
    """

    SCAN = 1024
    """Most blocks that one eviction looks at, so that a pool whose blocks are all in use costs
    little."""

    def __init__(self, pool: SlotPool, max_slots: int, policy: EvictionPolicy) -> None:
        self.on_evict: Callable[[bytes], None] | None = None
        self._pool = pool
        self._max_slots = max_slots
        self._policy = policy
        self._skipped, self._overdue = policy.queues + 1, policy.queues + 2
        self._queues = SlotQueues(pool.num_slots, self._overdue)
        self._outdated: Iterator[int] = iter(())  # slots in no queue that are to be given back
        pool.add_evictor(self.evict_one, self._idle)

    def warning(self) -> str:
        """What became of a plugin's policy; see `Warns`."""
        return self._policy.asked.warning if isinstance(self._policy, GuardedEviction) else ""

    def _used(self, slots: Sequence[int]) -> None:
        """Count these resident slots as used now, the last of them most."""
        chosen = [self._policy.used(queue) for queue in range(self._skipped)]
        if len(set(chosen)) == 1:
            self._queues.move_all(slots, chosen[0])
            return
        # Queues that are not the policy's count as none.
        goes = [*chosen, chosen[0], chosen[0]]
        where = self._queues.where
        targets = [goes[where[slot]] for slot in slots]
        for target in set(targets):
            here = [slot for slot, to in zip(slots, targets, strict=True) if to == target]
            self._queues.move_all(here, target)

    def find(self, key: bytes) -> int | None:
        """The slot of a block that is kept, or None. Not a use."""
        slot = self._pool.find(key)
        return slot if slot is not None and self._queues.where[slot] else None

    def find_all(self, keys: Sequence[bytes]) -> list[int | None]:
        where = self._queues.where
        slots = [*map(self._pool.find, keys)]
        return [slot if slot is not None and where[slot] else None for slot in slots]

    def admit(self, key: bytes, slot: int, predecessor: int | None = None) -> bool:
        """Keep the block in `slot`, unless it is kept already, or the slot holds another key, or
        the tier is full and its next victim is `predecessor` or all its blocks are in use. Whether
        a block of that key is kept now.

        `predecessor`: the slot of the nearest block before it in its prefix that is kept, which
        must stay longer.
        """
        queues = self._queues
        if queues.where[slot] != NOWHERE or self._pool.key(slot) != key:
            return self.find(key) is not None
        if len(queues) >= self._max_slots:
            victim = self._victim()
            if victim is None or victim == predecessor:
                return False
            self._evict(victim)
        self._pool.retain(slot)
        # Right before its predecessor, where that one is in the same queue or leaves before all
        # others; else at the end.
        queue = self._policy.enter(key)
        near = NOWHERE if predecessor is None else queues.where[predecessor]
        if predecessor is not None and (near == queue or near >= self._skipped):
            queues.insert(slot, predecessor)
        else:
            queues.append(slot, queue)
        return True

    def touch(self, keys: Sequence[bytes]) -> list[int | None]:
        """Count these blocks as used now, the first as the most recent; return their slots."""
        slots = self.find_all(keys)
        self._used([slot for slot in reversed(slots) if slot is not None])
        return slots

    def demote(self, keys: Sequence[bytes]) -> int:
        """Let these blocks be the next victims, the last of them first, unless they are used again;
        return how many were not yet."""
        where, overdue = self._queues.where, self._overdue
        slots = [s for s in self.find_all(keys) if s is not None and where[s] != overdue]
        self._queues.move_all(slots[::-1], overdue)
        return len(slots)

    def discard(self, key: bytes) -> None:
        """Stop keeping this block, if it is kept."""
        slot = self.find(key)
        if slot is not None:
            self._queues.remove(slot)
            self._pool.release(slot)

    def outdate(self) -> None:
        """Stop keeping any block, since nobody asks for these again; `trim`, or who needs a slot,
        gives the slots back. A slot that is being copied is freed by its last user."""
        if len(self._queues):  # else resets of an engine that idles would pile up
            old, self._queues = self._queues, SlotQueues(self._pool.num_slots, self._overdue)
            self._outdated = chain(self._outdated, old.slots())

    def _give_back(self) -> bool:
        """Give the next slot of an outdated block back, if there is any."""
        slot = next(self._outdated, None)
        if slot is not None:
            self._pool.release(slot)
        return slot is not None

    def evict_one(self) -> bool:
        if self._give_back():
            return True
        victim = self._victim()
        if victim is None:
            return False
        self._evict(victim)
        return True

    def resize(self, max_slots: int) -> None:
        """Keep `max_slots` blocks at most, in slots of the pool, which may have grown; `trim`
        evicts those beyond it."""
        self._max_slots = max_slots
        self._policy.resize(max_slots)
        self._queues.grow(self._pool.num_slots)

    def trim(self, most: int) -> int:
        """Give outdated blocks back and evict those that are too many, `most` at most; how many."""
        for gone in range(most):
            if not self._give_back() and (len(self) <= self._max_slots or not self.evict_one()):
                return gone
        return most

    def move(self, slot: int, target: int) -> None:
        """The block in `slot` lies in `target` now, with all references of the tier, and keeps its
        place in the order of eviction."""
        self._queues.replace(slot, target)
        self._idle(target)  # an eviction may have skipped it, as in use, while it was copied

    def _victim(self) -> int | None:
        queues, lengths, overdue = self._queues, self._queues.lengths, self._overdue
        for _ in range(self.SCAN):
            if lengths[self._skipped] == len(queues):
                break
            queue = overdue if lengths[overdue] else self._policy.next(lengths[1 : self._skipped])
            slot = queues.first(queue)
            if self._pool.references(slot) == 1:
                return slot
            queues.move(slot, self._skipped)
        return None

    def _idle(self, slot: int) -> None:
        """Note that nothing copies the block in this slot any more."""
        if self._queues.where[slot] == self._skipped:
            self._queues.move(slot, self._overdue)

    def _evict(self, slot: int) -> None:
        key = self._pool.key(slot)
        assert key is not None, f"resident slot {slot} has no key"
        queue = self._queues.where[slot]
        self._queues.remove(slot)
        self._pool.release(slot)
        if queue < self._skipped:
            self._policy.evicted(key, queue)
        if self.on_evict is not None:
            self.on_evict(key)

    def __len__(self) -> int:
        return len(self._queues)
