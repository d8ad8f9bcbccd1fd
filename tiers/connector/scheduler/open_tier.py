"""Opening: from a tier's settings and its workers' handshakes to its manager, and a log line."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import or_
from pathlib import Path
from typing import NamedTuple

from spec.chain import ChainSpec, EventsSpec
from spec.errors import describe_error, one_line
from spec.fields import format_size
from spec.offloading import HostSpec, OffloadingSpec, StoreContext, StoreSpec
from tiers.connector.scheduler.host_manager import HostManager
from tiers.connector.scheduler.inventory.inventory import Inventory
from tiers.connector.scheduler.store_manager import StoreManager
from tiers.connector.scheduler.tier_manager import TierManager
from tiers.contract.generation import Generation
from tiers.contract.messages import WorkerHandshake
from tiers.contract.pool_size import PoolSize
from tiers.errors import TierUnusable
from tiers.host.slot_memory import ALIGNMENT, slot_stride, slots_within
from tiers.host.slots import SlotPool
from tiers.store import Clear, Described, Measured, TierStore, capability
from tiers.wrappers.opening import log_name, open_guarded
from tiers.wrappers.residency import open_residency

OnEvict = Callable[[bytes], None]
"""Is told the key of each block that a tier evicts, if the tier knows."""
OpenManager = Callable[[Sequence[WorkerHandshake], bool, OnEvict], "OpenTier"]
"""`TierOpener.open` for one tier."""


class OpenTier(NamedTuple):
    """An open tier. `pool`: the chain's slots. `block_bytes`: of a block, over all ranks that store
    a part of it. `slot_bytes`: of its slots in the pool, over all ranks. `inventory`: keeps what
    events tell of it; None: the engine takes none. `one_writer`: several ranks have the same part,
    which one stores. `max_blocks`: that it has room for; 0: it has no bound that is known here."""

    manager: TierManager
    pool: SlotPool
    block_bytes: int
    inventory: Inventory | None = None
    one_writer: bool = False
    max_blocks: int = 0
    slot_bytes: int = 0


NOT_OPEN = OpenTier(TierManager(), SlotPool(0), block_bytes=0)
"""Stands in for a tier whose workers are not known yet, or which can't be used."""


class ChainPool:
    """The chain's slots; made when the first tier learns how large a block is."""

    def __init__(self, size: PoolSize, announcer: Announcer) -> None:
        self._size = size
        self._announcer = announcer
        self._pool: SlotPool | None = None
        self.block_bytes = self.slot_bytes = 0
        """Bytes of one key's block, and of its slots, over all ranks; 0 until a tier opens."""

    def open(self, payload_bytes: int, handshakes: Sequence[WorkerHandshake]) -> SlotPool:
        """The slots, as many as every worker has; blocks have `payload_bytes` on a rank."""
        if self._pool is None:
            made = [handshake.slots for handshake in handshakes if handshake.slots is not None]
            self._pool = SlotPool(min([self._size.slots(payload_bytes), *made]))
            self.block_bytes = payload_bytes * len(handshakes)
            self.slot_bytes = slot_stride(payload_bytes) * len(handshakes)
            self._announcer.chain(payload_bytes, len(handshakes), self._pool.num_slots)
        return self._pool


class TierOpener:
    """Opens the tiers of one chain in the scheduler's process, each once its workers are known."""

    def __init__(
        self,
        pool: ChainPool,
        generation: Generation,
        lookup_deadline: float,
        host: str,
        announcer: Announcer,
        now: Callable[[], float] = time.monotonic,
        events: EventsSpec | None = None,
    ) -> None:
        """`lookup_deadline`: seconds after which a lookup in flight counts as a miss. `host`: where
        this process is (see `EngineInfo`). `now`: the clock of the stores' answers, in seconds.
        `events`: what KV events say; None: the engine takes none."""
        self._events = events
        self._stores: list[StoreManager] = []
        self._pool = pool
        self._generation = generation
        self._lookup_deadline = lookup_deadline
        self._host = host
        self._announcer = announcer
        self._now = now

    def open(
        self,
        tier: OffloadingSpec,
        handshakes: Sequence[WorkerHandshake],
        in_step: bool,
        on_evict: OnEvict,
    ) -> OpenTier:
        """Open `tier` for the workers of these `handshakes`, by rank. Raises TierUnusable.

        `in_step`: the engine has begun to serve, so that opening may take a moment only.
        """
        # Ranks whose blocks are larger have fewer slots: what fits those fits all.
        payload = max(handshake.payload_bytes for handshake in handshakes)
        pool = self._pool.open(payload, handshakes)
        inventory: Inventory | None = None
        one_writer = False
        if isinstance(tier, HostSpec):
            manager: TierManager = self._host_manager(tier, payload, pool, handshakes, on_evict)
        elif isinstance(tier, StoreSpec):
            manager = self._store_manager(tier, payload, handshakes, in_step)
            inventory = self._inventory(tier, manager, handshakes[0].namespace)
            # Only if they say so themselves: else none would find what another has stored.
            one_writer = len({handshake.namespace for handshake in handshakes}) == 1
        else:
            raise TierUnusable(f"type {tier.type!r} is neither a StoreSpec nor a HostSpec")
        stored = handshakes[:1] if one_writer else handshakes
        block_bytes = sum(handshake.payload_bytes for handshake in stored)
        max_blocks = _max_blocks(tier, payload, len(stored))
        slot_bytes = self._pool.slot_bytes
        return OpenTier(manager, pool, block_bytes, inventory, one_writer, max_blocks, slot_bytes)

    def _host_manager(
        self,
        tier: HostSpec,
        payload: int,
        pool: SlotPool,
        handshakes: Sequence[WorkerHandshake],
        on_evict: OnEvict,
    ) -> HostManager:
        shortages = [handshake.shortage for handshake in handshakes if handshake.shortage]
        if shortages:
            raise TierUnusable(shortages[0])
        slots = slots_within(tier.capacity, payload, len(handshakes))
        if slots == 0:
            raise TierUnusable(
                f"capacity {format_size(tier.capacity)} over {len(handshakes)} rank(s) is less "
                f"than one block of {format_size(payload)}"
            )
        residency = open_residency(tier, pool, slots)
        self._announcer.host(tier, slots)
        return HostManager(residency, pool, on_evict)

    def _store_manager(
        self,
        tier: StoreSpec,
        payload: int,
        handshakes: Sequence[WorkerHandshake],
        in_step: bool,
    ) -> StoreManager:
        self._refuse_several(tier, None, handshakes)
        context = StoreContext(payload, len(handshakes))
        store = open_guarded(tier, context, in_step, partial(self._announcer.store, tier))
        try:
            self._refuse_several(tier, store, handshakes)
        except TierUnusable:
            store.close()
            raise
        spaces = list(dict.fromkeys(handshake.namespace for handshake in handshakes))
        manager = StoreManager(store, spaces, self._generation, self._now, self._lookup_deadline)
        self._stores.append(manager)
        return manager

    def _inventory(
        self, tier: StoreSpec, manager: TierManager, namespace: bytes
    ) -> Inventory | None:
        """Keep what is announced of a tier, in files where the operator has given it a folder for
        that. Of encrypted tiers nothing lies there: tokens would be in the clear beside what hides
        them."""
        events = self._events
        if events is None or not isinstance(manager, StoreManager):
            return None
        beside = tier.notes_folder
        folder: Path | None = None
        if tier.encryption is None and events.folder is not None:
            folder = events.folder / f"{tier.tier_name}.{namespace.hex()}"
        elif tier.encryption is None and beside is not None:
            folder = beside / namespace.hex()
        elsewhere = partial(self._others_hold, manager)
        return Inventory(tier.tier_name, folder, manager.holds, elsewhere, events.announce_rate)

    def _others_hold(self, manager: StoreManager, keys: Sequence[bytes]) -> list[bool] | None:
        """Which of these keys another store of the chain holds, as far as it can say now; None:
        there is no other."""
        if len(self._stores) < 2:
            return None
        if not keys:
            return []
        held = [False] * len(keys)
        for other in self._stores:
            if other is not manager:
                held = list(map(or_, held, other.holds(keys) or held))
        return held

    def _refuse_several(
        self, tier: StoreSpec, store: TierStore | None, handshakes: Sequence[WorkerHandshake]
    ) -> None:
        if is_local(tier, store):
            refuse_several(handshakes, self._host)


def _max_blocks(tier: OffloadingSpec, payload: int, writers: int) -> int:
    """See `OpenTier`; a store keeps a page with each rank's part for its record's header."""
    capacity = getattr(tier, "capacity", None)
    if not isinstance(capacity, int):
        return 0
    return slots_within(capacity, payload + ALIGNMENT * isinstance(tier, StoreSpec), writers)


def is_local(tier: StoreSpec, store: TierStore | None) -> bool:
    """Whether the tier's blocks are found on the host alone that stored them.

    Where its settings don't tell, a store that answers from memory, or is of its host alone, is
    taken for one; None: not opened yet.
    """
    if tier.host_local is not None:
        return tier.host_local
    return tier.is_prompt or (store is not None and capability(store, Clear) is not None)


def refuse_several(handshakes: Sequence[WorkerHandshake], scheduler: str) -> None:
    """Raise TierUnusable, naming who is where, if the scheduler and the ranks of an engine are not
    all on one host. Who does not say where it is counts as being with the others."""
    ranks: dict[str, list[int]] = {scheduler: []} if scheduler else {}
    for handshake in handshakes:
        if handshake.host:
            ranks.setdefault(handshake.host, []).append(handshake.rank)
    if len(ranks) < 2:
        return
    places = [
        f"{' and '.join(_who(numbers, host == scheduler))} on {host}"
        for host, numbers in ranks.items()
    ]
    raise TierUnusable(
        "its blocks can be found on the host alone that stored them, and this engine is on several "
        f"({'; '.join(places)}). Use a tier that all hosts share, like redis, or cpu"
    )


def _who(ranks: list[int], has_scheduler: bool) -> list[str]:
    who = ["the scheduler"] if has_scheduler else []
    if ranks:
        who.append(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}")
    return who


logger = logging.getLogger(__name__)


class Announcer:
    """Tells the operator what opened, by one line each at level INFO. Thread-safe."""

    def __init__(self, chain: ChainSpec) -> None:
        self._chain = chain

    def chain(self, payload_bytes: int, ranks: int, slots: int) -> None:
        """The workers are known: blocks have `payload_bytes` on each of `ranks` processes, and
        each of those has `slots` slots of host memory."""
        logger.info(
            "chain of %d tier(s): load policy %s, blocks of %s on each of %d rank(s), %d slots of "
            "host memory on each",
            len(self._chain.tiers),
            self._chain.load_policy,
            format_size(payload_bytes),
            ranks,
            slots,
        )

    def host(self, tier: HostSpec, slots: int) -> None:
        """A host tier, which begins empty, may keep `slots` blocks."""
        self._say(tier, [f"capacity {format_size(tier.capacity)}", f"room for {slots} blocks"])

    def store(self, tier: StoreSpec, store: TierStore) -> None:
        """A store has opened. Called on the thread that opened it, since the store is asked."""
        try:
            self._say(tier, _facts(store))
        except Exception as error:  # noqa: BLE001 - a plugin's: what it can't tell ends nothing
            self._say(tier, [f"it can't tell what it holds: {describe_error(error)}"])

    def _say(self, tier: OffloadingSpec, facts: list[str]) -> None:
        place = 1 + [one.tier_name for one in self._chain.tiers].index(tier.tier_name)
        logger.info(
            "tier %r is open, load priority %d of %d: %s",
            log_name(tier),
            place,
            len(self._chain.tiers),
            one_line(", ".join(facts)) or f"type {tier.type}",
        )


def _facts(store: TierStore) -> list[str]:
    facts = []
    if (described := capability(store, Described)) is not None:
        facts.append(described.describe())
    if (measured := capability(store, Measured)) is not None:
        usage = measured.usage()
        if usage.capacity is not None:
            facts.append(f"capacity {format_size(usage.capacity)}")
        facts.append(f"{usage.blocks} blocks held ({format_size(usage.used)})")
    return facts
