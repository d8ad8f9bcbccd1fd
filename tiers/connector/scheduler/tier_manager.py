"""A tier as the scheduler sees it: what it holds, and what moves in and out."""

from __future__ import annotations

from collections.abc import Container, Sequence

from spec.offloading import OffloadingSpec
from tiers.connector.scheduler.lookups import Lookup, LookupPace
from tiers.contract.messages import NO_PLACE, PromptPlace, SlotMove
from tiers.store import RecentBlocks, Usage
from tiers.wrappers.guard import HEALTHY, Health

NOTHING_USED = Usage(0, 0, None)

DOWN = -1
"""The version of a tier's coverage that may not be looked up: it covers nothing."""


class TierManager:
    """The scheduler's side of one tier. These defaults stand in for a tier that is not open, which
    has nothing and wants nothing.

    Two kinds: `HostManager` keeps blocks in the host pool, `StoreManager` asks a store. Used by the
    scheduler's thread alone; nothing in them waits but `wait_a_moment`.
    """

    in_host_memory = False
    """Whether blocks stay in the host pool: stores end as soon as their slots are filled."""
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
        """`coverage` of a request is the same while this is; None: it is not known."""
        return 0

    def place(self, keys: Sequence[bytes], numbers: Sequence[int]) -> PromptPlace:
        """Where blocks of these numbers, one at least, are in a request, of all of whose `keys`
        these are; nothing, unless the tier's store asks."""
        return NO_PLACE

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
        that the tier keeps. Empty where the tier itself decides what is evicted."""
        return {}

    def complete_store(self, key: bytes, slot: int, stored: bool, before: bytes | None) -> bool:
        """Note how storing a block ended; the slot is still referenced. Whether it is held now.

        `before`: its predecessor (see `predecessors`); the block is evicted before it.
        """
        return stored

    def stored(self, keys: Sequence[bytes]) -> None:
        """Note that the tier holds these blocks of a job that has ended."""

    def touch_prefix(self, keys: Sequence[bytes]) -> None:
        """A prefix was stored in several steps: have its first block evicted last."""

    def recent(self, count: int, before: int | None) -> RecentBlocks | None:
        """Keys of the blocks used last, see `store.Recent`; None: the tier can't tell. It does I/O,
        on the caller's thread."""
        return None

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
        """Let these blocks be evicted next, the last of them first, unless they are used again;
        return how many were not yet."""
        return 0

    def loaded(self, any_arrived: bool, lost: Sequence[bytes]) -> None:
        """Note how a load ended; `lost`: what the tier turned out not to have."""
        for key in lost:
            self.discard(key)

    def discard(self, key: bytes) -> None:
        """Note that the tier does not have this block: it failed to load."""

    def drop(self, keys: Sequence[bytes], generation: bytes) -> None:
        """Stop keeping these blocks, and remove this engine's of a generation from the tier, when
        there is time."""
        for key in keys:
            self.discard(key)

    def reset(self) -> None:
        """Forget all blocks known or kept in this process. The caller makes other keys and other
        `Lookup`s from now on."""

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

    def resize(self, capacity: int, max_blocks: int) -> None:
        """Keep `capacity` bytes over all ranks, or `max_blocks` in the host pool, from now on. Does
        not wait: what is beyond them is evicted step by step, or beside the steps."""

    is_shrinking = False
    """Whether the next step can bring a tier that is made smaller on."""

    def shrink(self, most: int) -> Sequence[SlotMove]:
        """Do a step's part of giving slots back; return blocks to move, `most` at most."""
        return ()

    def moved(self, moves: Sequence[SlotMove], failed: Container[int]) -> None:
        """Moves have ended; some, by their numbers, failed."""

    def evicted(self) -> int:
        """Blocks evicted so far that were not reported to this process one by one."""
        return 0

    def failures(self) -> int:
        """Operations that failed so far in this process."""
        return 0

    def slots_kept(self) -> int:
        """Slots of the host pool that the tier keeps blocks in."""
        return 0

    def retune(self, spec: OffloadingSpec, lookup_deadline: float) -> None:
        """Work by these settings of the tier from now on; a lookup is a miss after so many
        seconds."""

    def close(self) -> None:
        """Release everything."""
