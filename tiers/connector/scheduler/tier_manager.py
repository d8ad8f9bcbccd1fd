"""A tier as the scheduler sees it: what it holds, and what goes in and out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tiers.connector.scheduler.lookups import Lookup
from tiers.store import Usage
from tiers.wrappers.guard import HEALTHY, Health

NOTHING_USED = Usage(0, 0, None)

DOWN = -1
"""The version of what a tier says that may not be looked up: it has nothing."""


class LookupPace:
    """Names that an index may be asked for now; used by the scheduler's thread.

    A name costs that thread 0.2 to 0.4 us, and its block another microsecond, so that a long prompt
    would hold up all requests that decode. It is looked up over several steps instead, while it
    waits for its turn; and so is what a hint is about. A short question costs a step little, and is
    not held back by those of others.
    """

    OF_A_BLOCK = 3
    """So many names cost what else a block does: its key, and the question to the tiers above."""
    AT_ONCE = 16_384
    """Names of a step, at most: about 5 ms."""
    A_SECOND = 1_600_000.0
    """For each second that is not spent on such a question: half of the thread's time or less, so
    that an idle engine answers about as soon."""
    FEW = 4096
    """Names of a question that is never held back."""

    def __init__(self, ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`ranks`: names of a block. `clock`: of the machine, since it is its time that is spent,
        in seconds."""
        self._names = ranks + self.OF_A_BLOCK
        self._clock = clock
        self._left, self._at = float(self.AT_ONCE), clock()

    def is_short(self, blocks: int) -> bool:
        """Whether a question of so many blocks is never held back."""
        return blocks * self._names <= self.FEW

    @property
    def is_spent(self) -> bool:
        """Whether nothing was left when something was last looked up."""
        return self._left <= 0

    def take(self, blocks: int) -> int:
        """How many of so many blocks are looked up now."""
        now = self._clock()
        self._left = min(self._left + (now - self._at) * self.A_SECOND, self.AT_ONCE)
        self._at = now
        if not self.is_short(blocks):
            # Not a few names for each that waits: a call costs as much as a hundred.
            may = int(self._left) if self._left >= self.FEW else 0
            blocks = min(blocks, may // self._names)
        self._left -= blocks * self._names
        return blocks

    def took(self) -> None:
        """Those were looked up. The time that took allows for nothing: each of many long prompts
        that wait would otherwise be given as much as the first, all in one step."""
        self._at = self._clock()


class TierManager:
    """The scheduler's side of one tier. These defaults stand in for a tier that is not open, which
    has nothing and wants nothing.

    Two kinds: `HostManager` keeps blocks in the host pool, `StoreManager` asks a store. Used by the
    scheduler's thread alone; nothing in them waits but `wait_a_moment`.
    """

    completes_on_gather = False
    """Whether stores end as soon as the slots are filled, so that the engine should step on."""
    pace = LookupPace(ranks=1)
    """How much of its index this thread looks through in one step."""

    def coverage(
        self, lookup: Lookup, keys: Sequence[bytes], asked: range
    ) -> Sequence[bool] | None:
        """Which of the keys of these numbers (`asked`) the tier holds; None: ask again.

        `lookup` keeps the tier's answers for the request, whose keys are all of `keys`.
        """
        return [False] * len(asked)

    def version(self, lookup: Lookup, keys: Sequence[bytes]) -> int | None:
        """What `coverage` says of a request is the same while this is; None: it is not known."""
        return 0

    def prepare_load(self, keys: Sequence[bytes]) -> list[int | None]:
        """Pin these blocks; the slot of each that is in the host pool."""
        return [None] * len(keys)

    def complete_load(self, slots: Sequence[int | None]) -> None:
        """Unpin blocks of an ended load."""

    def touch_and_list_missing(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether the tier should be given each block; those it has count as used."""
        return [False] * len(keys)

    def predecessors(self, prefix: Sequence[bytes], numbers: Sequence[int]) -> dict[bytes, bytes]:
        """For a request's keys, `prefix`, of these numbers, in order: the nearest block before each
        that the tier keeps. Empty where the tier itself decides what goes."""
        return {}

    def complete_store(self, key: bytes, slot: int, stored: bool, head: bytes | None) -> bool:
        """Note how storing a block ended; the slot is still referenced. Whether it is held now.

        `head`: what `heads` said of it; the block is the first of the two to go.
        """
        return False

    def touch_prefix(self, keys: Sequence[bytes]) -> None:
        """A prefix was stored in several steps: let its head be the last to go."""

    def pinnable(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of these blocks that the tier has and can pin for a hint."""
        return []

    def pin(self, keys: Sequence[bytes]) -> None:
        """Keep these blocks from eviction until `unpin`; they may be pinned already."""

    def unpin(self, keys: Sequence[bytes]) -> None:
        """Let these be evicted again; those that are not pinned are ignored."""

    def renew_pins(self, blocks: int, max_blocks: int) -> None:
        """The tier stored some `blocks`, and has room for `max_blocks`."""

    def demote(self, keys: Sequence[bytes]) -> int:
        """Let these blocks be the next to go, the last of them first, unless they are used again;
        return how many were not yet."""
        return 0

    def discard(self, key: bytes) -> None:
        """Note that the tier does not have this block: it failed to load."""

    def drop(self, keys: Sequence[bytes], generation: bytes) -> None:
        """Remove this engine's blocks of a generation from the tier, when there is time."""

    def reset(self) -> list[bytes]:
        """Forget all blocks that are known or kept in this process; the keys of those kept.

        The caller makes other keys and other `Lookup`s from now on.
        """
        return []

    def clear(self, generation: bytes) -> None:
        """Remove this engine's blocks of a generation that is over, when there is time."""

    def prefetch_lookup(self, lookup: Lookup, keys: Sequence[bytes]) -> None:
        """Begin to look these keys up, if that takes time: they are asked for soon."""

    def wait_a_moment(self) -> None:
        """The engine's step has nothing to compute: wait for a lookup in flight, for
        `executors.IDLE_WAIT` seconds at most."""

    def health(self) -> Health:
        """Whether the tier works, as far as this process knows."""
        return HEALTHY

    def usage(self) -> Usage:
        """What the tier holds elsewhere than in the host pool, as of a moment ago."""
        return NOTHING_USED

    def evicted(self) -> int:
        """Blocks evicted so far that this process was not told of one by one."""
        return 0

    def slots_kept(self) -> int:
        """Slots of the host pool that the tier keeps blocks in."""
        return 0

    def close(self) -> None:
        """Release everything."""
