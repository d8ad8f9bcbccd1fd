"""A tier as the scheduler sees it: what it holds, and what goes in and out.

Two kinds: `HostManager` keeps blocks in the host pool, `StoreManager` asks a store. Used by the
scheduler's thread alone; nothing in them waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tiers.wrappers.guard import Health


class TierManager(Protocol):
    """The scheduler's side of one tier."""

    completes_on_gather: bool
    """Whether stores end as soon as the slots are filled, so that the engine should step on."""
    on_evict: Callable[[bytes], None] | None
    """Told of each block that the tier gave up for room, if it knows."""

    def lookup(self, request_id: str, first: int, keys: Sequence[bytes]) -> int | None:
        """How many leading `keys` the tier holds; None: not known yet, ask again.

        `first` is the block index of `keys[0]` in its request.
        """
        ...

    def held(
        self, request_id: str, first: int, keys: Sequence[bytes], count: int
    ) -> list[bool] | None:
        """Which of the first `count` keys the tier holds, gaps or not; None: ask again.

        `first` is as for `lookup`; `keys` are all that the request may yet be asked for.
        """
        ...

    def prepare_load(self, keys: Sequence[bytes]) -> list[int | None]:
        """Pin these blocks; the slot of each that is in the host pool."""
        ...

    def complete_load(self, keys: Sequence[bytes], slots: Sequence[int | None]) -> None:
        """Unpin blocks of an ended load."""
        ...

    def wants(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether the tier should be given each block; those it has count as used."""
        ...

    def heads(self, prefix: Sequence[bytes], numbers: Sequence[int]) -> dict[bytes, bytes]:
        """For a request's keys, `prefix`, of these numbers, in order: the nearest block before each
        that the tier keeps, where that matters and there is one."""
        ...

    def complete_store(self, key: bytes, slot: int, stored: bool, head: bytes | None) -> bool:
        """Note how storing a block ended; the slot is still referenced. Whether it is held now.

        `head`: what `heads` said of it; the block is the first of the two to go.
        """
        ...

    def settle(self, keys: Sequence[bytes]) -> None:
        """A prefix was stored in several steps: let its head be the last to go."""
        ...

    def discard(self, key: bytes) -> None:
        """Forget a block that failed to load."""
        ...

    def drop(self, key: bytes, generation: bytes) -> None:
        """Give up a block that was stored for a generation that is over."""
        ...

    def give_up(self, keys: Sequence[bytes]) -> None:
        """Give up blocks for which their tenant has no more room."""
        ...

    def reset(self) -> list[bytes]:
        """Forget all answers, and all blocks that are kept in this process, whose keys are told.

        The caller makes other keys from now on, so that nothing depends on what is left.
        """
        ...

    def clear(self, generation: bytes) -> None:
        """Give up, when there is time, the blocks of a generation that is over."""
        ...

    def expect(self, request_id: str, keys: Sequence[bytes]) -> None:
        """A request with these blocks will be looked up soon."""
        ...

    def health(self) -> Health:
        """Whether the tier works, as far as this process knows."""
        ...

    def slots_kept(self) -> int:
        """Slots of the host pool that the tier keeps blocks in."""
        ...

    def forget_request(self, request_id: str) -> None:
        """Drop what is kept for a request."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...
