"""The guard around a plugin's host tier: a fault of its bookkeeping ends that tier alone.

The plugin sees the host pool through `TierSlots`, which records its references: it can't release
those of others, and all of its own can be released for it. It runs on the engine's scheduler
thread, so nothing can be done about a plugin that hangs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from spec.errors import describe_error
from spec.offloading import HostSpec
from tiers.errors import TierError, TierUnusable
from tiers.host.slots import Demotes, Residency, SlotPool
from tiers.wrappers.guard import FAILED, HEALTHY, Health
from tiers.wrappers.opening import log_name

T = TypeVar("T")

logger = logging.getLogger(__name__)


class TierSlots:
    """The host pool as a plugin's tier sees it: `Slots`. The tier keeps `max_slots` blocks at most,
    each by one reference on its slot, and can release no other reference."""

    def __init__(self, pool: SlotPool, max_slots: int, ask: Asking) -> None:
        self.num_slots = pool.num_slots
        self._pool = pool
        self._max_slots = max_slots
        self._ask = ask
        self.kept: set[int] = set()
        """Slots on which the tier has a reference."""

    def add_evictor(
        self, evict_one: Callable[[], bool], idle: Callable[[int], None] | None = None
    ) -> None:
        report = None if idle is None else partial(self._report, idle)
        self._pool.add_evictor(lambda: self._evict(evict_one), report)

    def _evict(self, evict_one: Callable[[], bool]) -> bool:
        self._ask(evict_one, False)
        return self._pool.in_use < self._pool.end

    def _report(self, idle: Callable[[int], None], slot: int) -> None:
        if slot in self.kept:
            self._ask(lambda: idle(slot), None)

    def key(self, slot: int) -> bytes | None:
        return self._pool.key(slot)

    def find_all(self, keys: Sequence[bytes]) -> list[int | None]:
        return self._pool.find_all(keys)

    def references(self, slot: int) -> int:
        return self._pool.references(slot)

    def retain(self, slot: int) -> None:
        """Keep the block in a slot that is in use. Raises TierError."""
        if slot in self.kept or self._pool.key(slot) is None:
            raise TierError(f"slot {slot} is kept already, or holds no block")
        if len(self.kept) >= self._max_slots:
            raise TierError(f"{self._max_slots} blocks are kept, which is all that its capacity is")
        self._pool.retain(slot)
        self.kept.add(slot)

    def release(self, slot: int) -> None:
        """Stop keeping the block in a slot. Raises TierError."""
        if slot not in self.kept:
            raise TierError(f"slot {slot} is not kept")
        self.kept.remove(slot)
        self._pool.release(slot)


Asking = Callable[[Callable[[], object], object], object]
"""Calls a plugin; returns its result, or the other value if it fails."""


class GuardedResidency:
    """A Residency over a plugin's. After the plugin's first fault it stays empty for good."""

    def __init__(self, spec: HostSpec, pool: SlotPool, max_slots: int) -> None:
        """Raises TierUnusable."""
        self.on_evict: Callable[[bytes], None] | None = None
        self.health = HEALTHY
        self._name = log_name(spec)
        self._pool = pool
        self._slots = TierSlots(pool, max_slots, self._ask)
        try:
            self._residency = spec.residency(self._slots, max_slots)
            self._residency.on_evict = self._evicted
        except Exception as error:
            raise TierUnusable(f"{self._name}: residency raised {describe_error(error)}") from error

    def find(self, key: bytes) -> int | None:
        return self._slots_of([key], lambda keys: [self._residency.find(keys[0])])[0]

    def find_all(self, keys: Sequence[bytes]) -> list[int | None]:
        return self._slots_of(keys, self._residency.find_all)

    def touch(self, keys: Sequence[bytes]) -> list[int | None]:
        return self._slots_of(keys, self._residency.touch)

    def admit(self, key: bytes, slot: int, predecessor: int | None = None) -> None:
        self._ask(lambda: self._residency.admit(key, slot, predecessor), None)

    def demote(self, keys: Sequence[bytes]) -> int:
        """As the plugin, if it takes hints."""
        residency = self._residency

        def ask() -> int:
            found: object = residency.demote(keys) if isinstance(residency, Demotes) else 0
            if type(found) is not int or not 0 <= found <= len(keys):
                raise TierError(f"demote answered {found!r:.100} of {len(keys)} blocks")
            return found

        return self._ask(ask, 0)

    def discard(self, key: bytes) -> None:
        self._ask(lambda: self._residency.discard(key), None)

    def clear(self) -> list[bytes]:
        """As the plugin, which must give all of its slots back."""
        keys = self._keys()
        self._ask(self._clear, None)
        return keys

    def __len__(self) -> int:
        return len(self._slots.kept)

    def _clear(self) -> None:
        self._residency.clear()
        if self._slots.kept:
            raise TierError(f"clear has kept {len(self._slots.kept)} blocks")

    def _keys(self) -> list[bytes]:
        return [key for slot in self._slots.kept if (key := self._pool.key(slot)) is not None]

    def _slots_of(
        self, keys: Sequence[bytes], ask: Callable[[Sequence[bytes]], list[int | None]]
    ) -> list[int | None]:
        nothing: list[int | None] = [None] * len(keys)
        return self._ask(lambda: self._check(keys, ask(keys)), nothing)

    def _check(self, keys: Sequence[bytes], slots: object) -> list[int | None]:
        if not isinstance(slots, list) or len(slots) != len(keys):
            raise TierError(f"{len(keys)} slots, or None, were asked for, not {slots!r:.100}")
        for key, slot in zip(keys, slots, strict=True):
            if slot is not None and not (slot in self._slots.kept and self._pool.key(slot) == key):
                raise TierError(f"slot {slot!r:.100} does not hold the block that was asked for")
        return slots

    def _evicted(self, key: bytes) -> None:
        if self.on_evict is not None:
            self.on_evict(key)

    def _ask(self, call: Callable[[], T], otherwise: T) -> T:
        if self.health is FAILED:
            return otherwise
        try:
            return call()
        except (KeyboardInterrupt, SystemExit):
            raise
        # The one place for host tiers: nothing may reach the engine, not even a panic of Rust code.
        except BaseException as error:  # noqa: BLE001
            self._fail(error)
            return otherwise

    def _fail(self, error: BaseException) -> None:
        self.health = FAILED
        logger.error(
            "tier %s has failed and the chain serves without it: %s: %s",
            self._name,
            type(error).__name__,
            error,
            exc_info=error,
        )
        for key in self._keys():
            self._evicted(key)
        for slot in list(self._slots.kept):
            self._slots.release(slot)


def open_residency(spec: HostSpec, pool: SlotPool, max_slots: int) -> Residency:
    """A host tier's bookkeeping, guarded unless it is trusted. Raises TierUnusable."""
    if not spec.is_trusted:
        return GuardedResidency(spec, pool, max_slots)
    trusted: Residency = spec.residency(pool, max_slots)
    return trusted


def health_of(residency: Residency) -> Health:
    return residency.health if isinstance(residency, GuardedResidency) else HEALTHY
