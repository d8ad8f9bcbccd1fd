"""Opening: from a tier's settings and its workers' handshakes to its manager, and a log line."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

from spec.chain import ChainSpec
from spec.errors import describe_error, one_line, reason_of
from spec.fields import format_size
from spec.offloading import HostSpec, OffloadingSpec, StoreContext, StoreSpec
from tiers.connector.policy.request_state import lookup_seconds
from tiers.connector.scheduler.host_manager import HostManager
from tiers.connector.scheduler.inventory.inventory import Inventory
from tiers.connector.scheduler.store_manager import StoreManager
from tiers.connector.scheduler.tier_manager import TierManager
from tiers.contract.block_groups import BlockGroups
from tiers.contract.engine_info import EngineInfo
from tiers.contract.generation import Generation
from tiers.contract.messages import WorkerHandshake
from tiers.contract.pool_size import PoolSize
from tiers.errors import KVTiersError, TierUnusable
from tiers.host.slots import ALIGNMENT, SlotPool, slot_stride, slots_within
from tiers.store import Clear, Described, Measured, TierStore, capability
from tiers.wrappers.journals import forget, journals
from tiers.wrappers.opening import log_name, open_guarded

logger = logging.getLogger(__name__)

OnEvict = Callable[[bytes], None]
"""Called with the key of each block that a tier evicts, if the tier knows."""


class OpenTier(NamedTuple):
    """An open tier. `pool`: the chain's slots. `block_bytes`: of a block, over all ranks that store
    a part of it. `inventory`: of what was announced; None: the engine takes no events.
    `one_writer`: several ranks have the same part, which one stores. `max_blocks`: that it has room
    for; 0: no bound is known here."""

    manager: TierManager
    pool: SlotPool
    block_bytes: int
    inventory: Inventory | None = None
    one_writer: bool = False
    max_blocks: int = 0


NOT_OPEN = OpenTier(TierManager(), SlotPool(0), block_bytes=0)
"""Stands in for a tier whose workers are not known yet, or which can't be used."""


class TierOpener:
    """Opens the tiers of one chain in the scheduler's process, each once its workers are known. The
    first that opens makes the chain's slots, since only then it is known how large a block is."""

    def __init__(
        self, chain: ChainSpec, engine: EngineInfo, generation: Generation, now: Callable[[], float]
    ) -> None:
        """`now`: the clock of the stores' answers, in seconds."""
        self.size = PoolSize.of(chain, engine)
        self.block_bytes = self.slot_bytes = 0
        """Bytes of one key's block, and of its slots, over all ranks; 0 until a tier opens."""
        self._engine = engine
        self._generation = generation
        self._now = now
        self._events = chain.events
        self._pool: SlotPool | None = None
        # Without it a tier that a change brings and one that joins late, on the scheduler's thread,
        # could each make slots, and both hand out the same memory.
        self._making = threading.Lock()
        self._resizes = 0
        self._hosts: dict[HostManager, int] = {}
        """How many blocks each may keep."""
        self._stores: dict[StoreManager, bool] = {}
        """Those whose blocks are announced, and whether as of this host alone."""

    def open(
        self,
        chain: ChainSpec,
        tier: OffloadingSpec,
        handshakes: Sequence[WorkerHandshake],
        in_step: bool,
        on_evict: OnEvict,
    ) -> OpenTier:
        """Open a tier of `chain` for the workers of these `handshakes`, by rank. Raises
        TierUnusable.

        `in_step`: the engine has begun to serve, so that opening may take a moment only.
        """
        with self._making:
            pool = self._open_pool(chain, handshakes) if self._pool is None else self._pool
        payload = self.block_bytes // len(handshakes)
        inventory: Inventory | None = None
        one_writer = False
        if isinstance(tier, HostSpec):
            if shortages := [shake.shortage for shake in handshakes if shake.shortage]:
                raise TierUnusable(shortages[0])
            slots = slots_within(tier.capacity, payload, len(handshakes))
            if slots == 0:
                raise TierUnusable(
                    f"capacity {format_size(tier.capacity)} over {len(handshakes)} rank(s) is less "
                    f"than one block of {format_size(payload)}"
                )
            log_host(chain, tier, slots)
            host = HostManager(tier.residency(pool, slots), pool, on_evict)
            self._hosts[host] = slots
            manager: TierManager = host
        elif isinstance(tier, StoreSpec):
            manager, inventory = self._open_store(chain, tier, handshakes, in_step)
            # Only if they report it themselves: else none would find what another has stored.
            one_writer = len({handshake.namespace for handshake in handshakes}) == 1
        else:
            raise TierUnusable(f"type {tier.type!r} is neither a StoreSpec nor a HostSpec")
        stored = handshakes[:1] if one_writer else handshakes
        block_bytes = sum(handshake.payload_bytes for handshake in stored)
        room = self._room(tier, len(stored))
        return OpenTier(manager, pool, block_bytes, inventory, one_writer, room)

    def _room(self, tier: OffloadingSpec, writers: int) -> int:
        """How many blocks a tier has room for, of which `writers` ranks store a part."""
        # A store keeps a page with each rank's part for its record's header.
        part = self.block_bytes // self._engine.world_size + ALIGNMENT * isinstance(tier, StoreSpec)
        return slots_within(tier.capacity_bytes, part, writers)

    def resize(self, opened: OpenTier, tier: OffloadingSpec) -> OpenTier:
        """The tier, open or not, as it is with the capacity of `tier`, whose workers are prepared.
        Does not wait."""
        ranks = self._engine.world_size
        room = self._room(tier, 1 if opened.one_writer else ranks)
        if isinstance(tier, HostSpec):
            self.size = self.size.resized(tier.tier_name, tier.capacity_bytes)
            self._resizes += 1
            if self._pool is not None:
                self._pool.resize(self.size.slots(self.block_bytes // ranks))
            if isinstance(opened.manager, HostManager):
                self._hosts[opened.manager] = room
            for host, blocks in self._hosts.items():  # all have slots beyond its end
                host.resize(self.size.capacity, blocks)
        else:
            opened.manager.resize(tier.capacity_bytes, room)
        return opened._replace(max_blocks=room)

    def _open_pool(self, chain: ChainSpec, workers: Sequence[WorkerHandshake]) -> SlotPool:
        # Ranks whose blocks are larger have fewer slots: what fits those fits all.
        payload_bytes = max(handshake.payload_bytes for handshake in workers)
        ranks, size = len(workers), self.size.slots(payload_bytes)
        made = [handshake.slots for handshake in workers if handshake.slots is not None]
        self._pool = SlotPool(min([size, *made]))
        self._pool.resizes = self._resizes
        self.block_bytes = payload_bytes * ranks
        self.slot_bytes = slot_stride(payload_bytes) * ranks
        log_chain(chain, payload_bytes, ranks, self._pool.num_slots)
        return self._pool

    def _open_store(
        self, chain: ChainSpec, tier: StoreSpec, workers: Sequence[WorkerHandshake], in_step: bool
    ) -> tuple[StoreManager, Inventory | None]:
        # Whether only the host that stored them finds the blocks. Where the settings leave it open,
        # so it is for a store that answers from memory, or is of its host alone.
        is_local = tier.is_prompt if tier.host_local is None else tier.host_local
        if is_local:
            self._require_one_host(workers)
        context = StoreContext(self.block_bytes // len(workers), len(workers))
        spaces = list(dict.fromkeys(handshake.namespace for handshake in workers))
        store = open_guarded(tier, context, in_step, partial(log_store, chain, tier, spaces))
        groups = BlockGroups(self._engine)
        args = store, spaces, self._generation, self._now, lookup_seconds(chain.max_wait)
        opened: TierStore | StoreManager = store
        try:
            if tier.host_local is None and not is_local and capability(store, Clear) is not None:
                self._require_one_host(workers)
            opened = manager = StoreManager(
                *args, in_order=groups.in_order, in_rows=groups.in_rows, window=groups.ends
            )
            if self._engine.kv_events:
                self._stores[manager] = bool(tier.host_local)
            return manager, self._inventory(tier, manager, workers[0].namespace)
        except (TierUnusable, RuntimeError) as error:  # the latter: no thread can be had
            opened.close()
            raise TierUnusable(reason_of(error)) from error

    def _require_one_host(self, handshakes: Sequence[WorkerHandshake]) -> None:
        """Raise TierUnusable, naming who is where, if the scheduler and the ranks are not all on
        one host. Who reports no host counts as being with the others."""
        here = self._engine.host
        who: dict[str, list[str]] = {here: ["the scheduler"]} if here else {}
        ranks: dict[str, list[str]] = {}
        for handshake in handshakes:
            if handshake.host:
                ranks.setdefault(handshake.host, []).append(str(handshake.rank))
        for host, numbers in ranks.items():
            named = f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
            who.setdefault(host, []).append(named)
        if len(who) > 1:
            places = "; ".join(f"{' and '.join(names)} on {host}" for host, names in who.items())
            raise TierUnusable(
                "its blocks can be found on the host alone that stored them, and this engine is on "
                f"several ({places}). Use a tier that all hosts share, like redis, or cpu"
            )

    def _inventory(
        self, tier: StoreSpec, manager: StoreManager, namespace: bytes
    ) -> Inventory | None:
        """Keep what is announced of a tier, in files where the operator has given it a folder for
        that. Of encrypted tiers nothing lies there: tokens would be in the clear beside what hides
        them. None: the engine takes no events."""
        if not self._engine.kv_events:
            return None
        places = [] if tier.encryption else journals(tier, self._events.folder)
        folder = Path(f"{places[0]}{namespace.hex()}") if places else None
        elsewhere = partial(self._others_hold, manager)
        return Inventory(tier.tier_name, folder, manager.announceable, elsewhere)

    def _others_hold(self, manager: StoreManager, keys: Sequence[bytes]) -> list[bool] | None:
        """Which of these keys another store of the chain holds, or may hold, of those whose events
        look the same; None: there is no other."""
        if self._events.ownership:
            return None
        local = self._stores[manager] if self._events.locality else None
        alike = [
            other
            for other, is_local in self._stores.items()
            if other is not manager and local in (None, is_local)
        ]
        if not alike:
            return None
        answers = [other.holds(keys) or [True] * len(keys) for other in alike if keys]
        return [*map(any, zip(*answers, strict=True))]


def log_chain(chain: ChainSpec, payload_bytes: int, ranks: int, slots: int) -> None:
    """The workers are known: blocks have `payload_bytes` on each of `ranks` processes, and each of
    those has `slots` slots of host memory."""
    logger.info(
        "chain of %d tier(s): load policy %s, blocks of %s on each of %d rank(s), %d slots of "
        "host memory on each",
        len(chain.tiers),
        chain.load_policy,
        format_size(payload_bytes),
        ranks,
        slots,
    )


def log_host(chain: ChainSpec, tier: HostSpec, slots: int) -> None:
    """A host tier, which begins empty, may keep `slots` blocks."""
    _log_open(chain, tier, [f"capacity {format_size(tier.capacity)}", f"room for {slots} blocks"])


def log_store(chain: ChainSpec, tier: StoreSpec, spaces: Sequence[bytes], store: TierStore) -> None:
    """A store has opened, for workers of these namespaces. Called on the thread that opened it,
    since the store is asked, and what was announced before its tier was encrypted is removed."""
    if tier.encryption is not None:
        try:
            forget(tier, None, [b""])
            forget(tier, chain.events.folder, _noted(tier, spaces))
        except (KVTiersError, OSError) as error:
            line = "tier %r: what was announced before it was encrypted lies there in the clear: %s"
            logger.warning(line, log_name(tier), error)
    try:
        _log_open(chain, tier, _facts(store))
    except Exception as error:  # noqa: BLE001 - a plugin's: a failure ends nothing
        _log_open(chain, tier, [f"it can't tell what it holds: {describe_error(error)}"])


def _noted(tier: StoreSpec, spaces: Sequence[bytes]) -> Sequence[bytes]:
    """The namespaces that engines noted beside a tier's blocks, where notes are files, else these:
    in a folder for all engines another's tier may have this one's name."""
    if not tier.is_prompt or (records := tier.records()) is None:
        return spaces
    with closing(records):
        return [*records.notes()]


def _log_open(chain: ChainSpec, tier: OffloadingSpec, facts: list[str]) -> None:
    place = 1 + [spec.tier_name for spec in chain.tiers].index(tier.tier_name)
    logger.info(
        "tier %r is open, load priority %d of %d: %s",
        log_name(tier),
        place,
        len(chain.tiers),
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
