"""HostSlots: the worker's half of the host pool. All tiers of a chain share it and its gathers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import torch

from spec.fields import format_size
from tiers.block import digest, namespace
from tiers.concurrency.executors import IoExecutor
from tiers.connector.worker.checksums import Checksums
from tiers.connector.worker.namespace_notes import note_of
from tiers.connector.worker.weight_watch import WeightWatch
from tiers.contract.block_copier import ENDED, Copier, Copy, Gather, OpenCopier
from tiers.contract.engine_info import MOMENT, OF_BYTES, EngineInfo
from tiers.contract.messages import JobResult, SlotMove, StoreItem, WorkerHandshake
from tiers.contract.pool_size import PoolSize
from tiers.errors import TierUnusable
from tiers.host.slot_memory import NotPinned, SlotMemory
from tiers.host.slots import slot_stride
from tiers.host.spare_memory import for_slots, reservable_memory, spare_memory
from tiers.records import NamespaceNote

logger = logging.getLogger(__name__)


class HostSlots:
    """One worker's slots, their copier, and what each slot holds.

    The scheduler hands out slots, and never one that is still used here. So each slot's entries
    have one writer at a time and need no lock.
    """

    def __init__(
        self,
        engine: EngineInfo,
        size: PoolSize,
        open_copier: OpenCopier,
        root: Path = Path("/"),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`root`: see `spare_memory`. `now`: the clock of the tiers' loads, in seconds."""
        self.engine = engine
        self.now = now
        self.watch = WeightWatch(engine.weights, engine.world_size, engine.adapters, engine.rank)
        self._size = self._next_size = size
        self._kept = self._wanted = self._resizes = 0
        """Slots that the scheduler may hand out; those that a change in preparation asks for; and
        how many changes there were."""
        # Held while memory is taken or given back, by threads other than the engine's.
        self._fitting = threading.Lock()
        self._mover = IoExecutor(1, "move")
        self._open_copier = open_copier
        self._root = root
        self._shortage = ""
        self._refused: dict[str, str] = {}
        self._users = 0
        self._copier: Copier | None = None
        self._memory: SlotMemory | None = None
        self._last = -1
        """The last slot that was ever filled, of those that there are. They are handed out from the
        first on, so that those before it have their memory."""
        self._holds: dict[int, bytes] = {}
        self._gathers: dict[int, Copy] = {}
        self.checksums = Checksums(lambda: self.memory)
        self._namespace: bytes | None = None
        self._weights = ""
        self._note: NamespaceNote | None = None
        self._began: float | None = None

    def open(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the engine's paged KV; the first tier of the chain to call this does the work."""
        self._users += 1
        if self._copier is not None:
            return
        self.watch.begin()
        self._copier = self._open_copier(kv_caches, self.engine.num_blocks)
        self._memory = memory = self._allocate(self._copier.pin)
        self._mover.bind(self._copier.cpus)
        self.checksums.bind(self._copier.cpus)
        self._kept = len(memory.rows)
        rows = memory.rows
        # A shortage for which a host tier is refused is logged anyhow.
        if self._shortage and not self._size.capacity and self.engine.rank == 0:
            line = "staging has only %d slots for blocks in flight: %s"
            logger.warning(line, len(rows), self._shortage)

    def _allocate(self, pin: bool) -> SlotMemory:
        """Allocate the slots, or fewer if memory is short; the handshake reports the shortage."""
        before, why = self._size, ""
        for size in (self._size, *self._size.smaller()):
            slots = size.slots(self.payload_bytes)
            for name, capacity in set(before.hosts) - set(size.hosts):
                self._refused[name] = f"capacity {format_size(capacity)}: {why}"
            before = size
            try:
                self._check_room(slots, pin)
                reserve = reservable_memory(self._root) if size.hosts else 0
                reserve //= slot_stride(self.payload_bytes)
                more = self._check_step, reserve, self.copier.cpus, self.copier.device
                return SlotMemory(slots, self.payload_bytes, pin, False, *more)
            except (TierUnusable, OSError) as error:
                why = self._describe(slots, error)
                self._shortage = self._shortage or why
        return SlotMemory(0, self.payload_bytes, pin=False)

    def _check_room(self, slots: int, pin: bool, there: int = 0) -> None:
        """Raise TierUnusable unless memory is left for these slots, of which `there` bytes are
        taken already."""
        need = slots * slot_stride(self.payload_bytes) - there
        # Other ranks may have pinned theirs already; memory that is not pinned is taken later.
        ranks = 1 if pin else self._ranks_here
        spare = spare_memory(self._root, ranks)
        if need * ranks > for_slots(spare):
            raise TierUnusable(f"{format_size(spare)} can be had, a sixteenth of which stays free")

    def _check_step(self, size: int) -> None:
        if size > spare_memory(self._root):
            raise TierUnusable("it was used up while it was pinned")

    @property
    def _ranks_here(self) -> int:
        return self.engine.ranks_here or self.engine.world_size

    def _describe(self, slots: int, why: Exception) -> str:
        if isinstance(why, NotPinned):
            return str(why)
        ranks = self._ranks_here
        need = format_size(slots * slot_stride(self.payload_bytes) * ranks)
        return (
            f"with what is beside it it would take {need} on this host, of {ranks} rank(s), more "
            f"than its memory, NUMA nodes or control group's limit allow ({why}); lower it"
        )

    # -- another size ------------------------------------------------------------------------

    def prepare_resize(self, tier: str, capacity: int) -> str:
        """See `OffloadingWorker`. Memory for more slots is taken here, beside the engine."""
        if self._shortage:
            return f"memory was short at the start, so that it can't be resized: {self._shortage}"
        before = self._next_size, self._wanted
        self._next_size = self._next_size.resized(tier, capacity)
        self._wanted = slots = self._next_size.slots(self.payload_bytes)
        with self._fitting:
            if slots <= len(self.memory.rows):
                return ""
            pin = self.copier.pin  # else memory is taken when it is used
            try:
                there = len(self.memory.rows) if pin else self._last + 1
                self._check_room(slots, pin, there * slot_stride(self.payload_bytes))
                self.memory.grow(slots, self._check_step)
            except (TierUnusable, OSError) as error:
                self._next_size, self._wanted = before
                return f"capacity {format_size(capacity)}: {self._describe(slots, error)}"
        return ""

    def resize(self, tier: str, capacity: int) -> None:
        """Have what was prepared for a tier. Fewer slots stay until they are `vacated`."""
        self._size = self._size.resized(tier, capacity)
        self._kept = max(self._kept, self._size.slots(self.payload_bytes))
        self._resizes += 1
        if self._size == self._next_size:
            self._wanted = 0

    def abort_resize(self) -> None:
        """Give back what was prepared."""
        self._next_size, self._wanted = self._size, 0
        self._mover.submit(self._fit)

    def vacated(self, slots: int, resizes: int) -> None:
        """Give back what is beyond `slots`, unless there was another change since."""
        if resizes == self._resizes:
            self._kept = slots
            self._mover.submit(self._fit)

    def _fit(self) -> None:
        """Give back memory of slots that nobody uses, or asks for. A change that is prepared takes
        its memory afterwards, so that none of it is given back."""
        with self._fitting:
            stride, before = slot_stride(self.payload_bytes), len(self.memory.rows)
            # What is wanted first, each time: `resize` keeps it before it is wanted no more.
            keep = max(self._wanted, self._kept)
            self._last = min(self._last, keep - 1)
            for slot in range(keep, before):
                if slot % 1024 == 0:
                    time.sleep(0.001)  # let the engine's thread have the interpreter
                self._holds.pop(slot, None)
                self._gathers.pop(slot, None)
                self.checksums.keep(slot, None)
            try:
                while self.memory.shrink(max(self._wanted, self._kept)):
                    pass
            except TierUnusable as error:
                logger.warning("host memory that is not used any more stays pinned: %s", error)
        if keep < before and self.engine.rank == 0:
            logger.info("host memory: %s were given back", format_size((before - keep) * stride))

    def move(self, moves: Sequence[SlotMove]) -> Future[JobResult]:
        """Begin to copy blocks to other slots. Does not wait."""
        return self._mover.submit(self._move, moves)

    def _move(self, moves: Sequence[SlotMove]) -> JobResult:
        failed: set[int] = set()
        for number, (key, source, target) in enumerate(moves):
            self._holds.pop(target, None)
            self._gathers.pop(target, None)
            if self._holds.get(source) != key:
                failed.add(number)
                continue
            # Waits for the target's last block, too.
            checksum, _ = self.checksums.of([source, target])
            self.memory.move(source, target)
            self.checksums.keep(target, checksum)
            self._holds[target] = key
        return JobResult(1, failed)

    @property
    def copier(self) -> Copier:
        """The copier; only once the paged KV is registered."""
        assert self._copier is not None, "register_kv_caches comes first"
        return self._copier

    def copier_warning(self) -> str:
        """See `Copier.warning`; may be asked before the paged KV is registered."""
        return "" if self._copier is None else self._copier.warning()

    @property
    def memory(self) -> SlotMemory:
        """The slots' bytes; only once the paged KV is registered."""
        assert self._memory is not None, "register_kv_caches comes first"
        return self._memory

    @property
    def payload_bytes(self) -> int:
        """Bytes of one block on this rank."""
        return self.copier.payload_bytes

    @property
    def note(self) -> NamespaceNote:
        """What to note of the worker's namespace; only once `shared_handshake` knows it."""
        assert self._note is not None, "shared_handshake comes first"
        return self._note

    def handshake(self, tier: str = "") -> WorkerHandshake:
        """What the scheduler must know of this worker, for a tier that only this engine finds.
        `tier`: its name, where memory may be there for some tiers alone."""
        shortage = self._refused.get(tier, "") if self._size.hosts else self._shortage
        return replace(self._handshake(b""), shortage=shortage)

    def shared_handshake(self, may_wait: bool = False) -> WorkerHandshake | None:
        """As `handshake`, for a tier whose blocks other engines find by the worker's namespace.

        None: the engine's late facts are not known yet. With `may_wait` the first call by any tier
        waits a moment for them. Called by the engine's thread.
        """
        if self._namespace is None:
            seconds = MOMENT if may_wait and self._began is None else 0.0
            late_facts = self.engine.late_facts
            late = {} if late_facts is None else late_facts.known(seconds)
            if late is None:
                self._log_wait()
                return None
            facts = {**self.engine.facts, **late}
            if "weights" in facts:
                used = {fact: facts[fact] for fact in facts if not fact.startswith(OF_BYTES)}
                self._weights = namespace(used, 0, 1).hex()
            facts["layout"] = self.copier.layout
            facts["block_tokens"] = str(self.engine.block_tokens)
            rank = 0 if self.engine.replicated else self.engine.rank
            self._namespace = namespace(facts, rank, self.engine.world_size)
            engine = self.engine
            size = engine.block_tokens, self.payload_bytes
            self._note = note_of(facts, engine.model, *size, rank, engine.world_size)
            if self._began is not None and self.engine.rank == 0:
                logger.info(
                    "the tiers that others share join now, %.1f s after the engine's memory was "
                    "there",
                    time.monotonic() - self._began,
                )
        return self._handshake(self._namespace)

    def _handshake(self, space: bytes) -> WorkerHandshake:
        rank, host, slots = self.engine.rank, self.engine.host, len(self.memory.rows)
        size, weights = self.payload_bytes, self._weights
        return WorkerHandshake(rank, space, size, host, slots, weights=weights)

    def _log_wait(self) -> None:
        if self._began is None:
            self._began = time.monotonic()
            if self.engine.rank == 0:
                logger.info(
                    "the model's weights are being identified, beside the engine's work. Until "
                    "that is done, nothing is stored in, or loaded from, tiers that others share"
                )

    def gather(self, items: Sequence[StoreItem]) -> Gather | None:
        """Begin to gather the items that have a source into their slots; None: none has."""
        fresh = [item for item in items if item.source is not None]
        if not fresh:
            return None
        slots = [item.slot for item in fresh]
        blocks = [item.source for item in fresh if item.source is not None]
        self.empty(slots)
        copy = self.copier.gather(blocks, self.memory.rows, slots)
        for item in fresh:
            self._gathers[item.slot] = copy
            self._holds[item.slot] = item.key
        self.checksums.begin(slots, copy)
        return copy

    def empty(self, slots: Sequence[int]) -> None:
        """Let these slots hold nothing: they are about to be filled."""
        if (last := max(slots, default=-1)) > self._last:  # else the mover may have lowered it
            self._last = last
        for slot in slots:
            self._holds.pop(slot, None)
            self._gathers.pop(slot, None)

    def filled(self, slots: Sequence[int], keys: Sequence[bytes]) -> None:
        """These slots hold these blocks now, verified."""
        self._holds.update(zip(slots, keys, strict=True))
        self.checksums.begin(slots, ENDED)

    def wait_and_verify(self, slots: Sequence[int], keys: Sequence[bytes]) -> list[bool]:
        """Wait for the gathers of these slots; True for each that then holds its key's block.

        A slot that another tier should have gathered, and did not, is False.
        """
        ended: Copy | None = None
        for slot, key in zip(slots, keys, strict=True):
            gather = self._gathers.get(slot)
            if gather is not None and self._holds.get(slot) == key:
                if gather is not ended:  # a step has one
                    gather.wait()
                    ended = gather
                # A gather that failed stays: its `wait` raises for the other tiers, too.
                self._gathers.pop(slot, None)
        return [self._holds.get(s) == k for s, k in zip(slots, keys, strict=True)]

    def is_intact(self, slot: int) -> bool:
        """Whether the slot has a checksum, and its bytes still match."""
        return self.checksums.of([slot]) == [digest(self.memory.payload(slot))]

    def close(self) -> None:
        """Release memory and threads once the last tier of the chain closes."""
        self._users -= 1
        if self._users == 0 and self._copier is not None:
            self._copier.close()
            self.checksums.close()
            self._wanted = len(self.memory.rows) + self._kept  # what is given back goes at once
            self._mover.shutdown(wait=True, cancel_futures=True)
            self.memory.close()
