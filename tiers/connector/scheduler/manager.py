"""A tier as the scheduler sees it: what it holds, and what goes in and out.

Two kinds: `HostManager` keeps blocks in the host pool, `StoreManager` asks a store. `NullManager`
stands in for a tier that is not open. Used by the scheduler's thread alone; nothing in them waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tiers.wrappers.guard import HEALTHY, Health


class TierManager(Protocol):
    """The scheduler's side of one tier."""

    completes_on_gather: bool
    """Whether stores end as soon as the slots are filled, so that the engine should step on."""

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
        """Note that the tier does not have this block: it failed to load."""
        ...

    def drop(self, keys: Sequence[bytes], generation: bytes) -> None:
        """Remove this engine's blocks of a generation from the tier, when there is time."""
        ...

    def reset(self) -> list[bytes]:
        """Forget all answers, and all blocks that are kept in this process, whose keys are told.

        The caller makes other keys from now on, so that nothing depends on what is left.
        """
        ...

    def clear(self, generation: bytes) -> None:
        """Remove this engine's blocks of a generation that is over, when there is time."""
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


class NullManager:
    """Stands in for a tier that is not open: has nothing, and wants nothing."""

    completes_on_gather = False

    def lookup(self, request_id: str, first: int, keys: Sequence[bytes]) -> int:
        """None of them."""
        return 0

    def held(self, request_id: str, first: int, keys: Sequence[bytes], count: int) -> list[bool]:
        """None of them."""
        return [False] * count

    def prepare_load(self, keys: Sequence[bytes]) -> list[int | None]:
        """Nothing is pinned."""
        return [None] * len(keys)

    def complete_load(self, keys: Sequence[bytes], slots: Sequence[int | None]) -> None:
        """Nothing was pinned."""

    def wants(self, keys: Sequence[bytes]) -> list[bool]:
        """None of them."""
        return [False] * len(keys)

    def heads(self, prefix: Sequence[bytes], numbers: Sequence[int]) -> dict[bytes, bytes]:
        """No block is kept."""
        return {}

    def complete_store(self, key: bytes, slot: int, stored: bool, head: bytes | None) -> bool:
        """The block is not held."""
        return False

    def settle(self, keys: Sequence[bytes]) -> None:
        """No block is kept."""

    def discard(self, key: bytes) -> None:
        """No block is kept."""

    def drop(self, keys: Sequence[bytes], generation: bytes) -> None:
        """No block is kept."""

    def reset(self) -> list[bytes]:
        """No block was kept."""
        return []

    def clear(self, generation: bytes) -> None:
        """No block is kept."""

    def expect(self, request_id: str, keys: Sequence[bytes]) -> None:
        """There is nobody to ask."""

    def health(self) -> Health:
        """What is not open does not fail."""
        return HEALTHY

    def slots_kept(self) -> int:
        """None."""
        return 0

    def forget_request(self, request_id: str) -> None:
        """Nothing is kept per request."""

    def close(self) -> None:
        """Nothing is open."""
