"""DiskStore: the disk tier's verbs, which move blocks between the caller's memory and slabs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple, TypeVar

from spec.fields import format_size
from spec.offloading import StoreContext
from tiers.block import digest, expect, pack_header, parse_header, verify
from tiers.concurrency.counter import LockedCounter
from tiers.concurrency.executors import BATCH_THREADS, spread
from tiers.concurrency.repeated_log import RepeatedLog
from tiers.disk.folder.open_folder import OpenFolder, require_own
from tiers.disk.folder.open_folders import open_folders
from tiers.disk.index.edit import Entry, Slot, index_key, index_key_prefix
from tiers.disk.index.index import UNREADABLE
from tiers.disk.slab import DEFAULT_ACCESS, PAGE, Access, run_slots, slot_bytes
from tiers.errors import RecordError, TierError, TierFull, TierUnusable
from tiers.store import Block, Capability, Capable, LocalIndex, PutCounts, RecentBlocks, Usage

logger = logging.getLogger(__name__)

Outcome = TypeVar("Outcome")

_CLEAR_BATCH = 256
PROCESSORS_A_WRITER = 4
"""Processors for each thread that fills the page cache. Of two, one thread fills it as fast as four
(9 GB/s), beside which an engine's launches take 2.8 times as long, and 1.3 beside one."""


class _SlotRead(NamedTuple):
    """A block to fill: its slot, its entry in the index, and its position in the batch."""

    slot: Slot
    block: Block
    entry: Entry
    place: int


class _SlotWrite(NamedTuple):
    """A block to store, and where."""

    slot: Slot
    block: Block


Job = TypeVar("Job", _SlotRead, _SlotWrite)


class DiskStore(Capable):
    """A TierStore in a folder, with every capability of `tiers.store`.

    Stores of one process on one folder share an `OpenFolder` (see `open_folders`); processes share
    the index. The capacity bounds the disk space of all slots, live and being written; the last
    store opened on a folder sets it. Blocks of any payload length share the folder.

    A block is stored by two transactions: the first reserves a slot, evicting its block if need
    be; the second, after the write, publishes the slot under the key. Loads take no lock: a record
    that differs from the index's entry, for whatever reason, is a miss.
    """

    def __init__(
        self, path: Path, capacity: int, site: StoreContext, access: Access = DEFAULT_ACCESS
    ) -> None:
        """Open the folder. Raises TierUnusable."""
        self._site = site
        self._require_room(path, capacity)
        self._folder = open_folders.acquire(path, capacity, access)
        self._closed = False
        processors = len(os.sched_getaffinity(0))
        copiers = max(1, min(BATCH_THREADS, processors // PROCESSORS_A_WRITER))
        self._writers = BATCH_THREADS if self._folder.slabs.is_direct else copiers
        self._damaged, self._put_counts = LockedCounter(), LockedCounter()
        where = f"disk tier {path}"
        self._failed_writes = RepeatedLog(logger, where, "writes failed")
        self._failed_reads = RepeatedLog(logger, where, "reads failed")
        self._failed_drops = RepeatedLog(logger, where, "times damaged blocks stayed")

    def _require_room(self, path: Path, capacity: int) -> None:
        """Raise TierUnusable if this holds less than one block of each process."""
        least = slot_bytes(self._site.payload_bytes) * self._site.num_ranks
        if capacity < least:
            raise TierUnusable(
                f"{path}: capacity {format_size(capacity)} is less than one block of each of "
                f"{self._site.num_ranks} process(es); set at least {least}B"
            )

    def resize(self, capacity: int) -> None:
        """Set the capacity of the folder, for all engines on it. Raises TierUnusable."""
        self._require_room(self._folder.path, capacity)
        with self._folder.in_use() as folder:
            folder.resize(capacity)

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        with self._folder.in_use() as folder:
            return folder.index.has([index_key(key) for key in keys])

    def capability(self, kind: type[Capability]) -> Capability | None:
        """As of other stores; a LocalIndex once its table is made. Until then lookups are made in
        the background: in the index one of 8,192 blocks among 50 million takes 60 ms, more where
        the kernel has to read pages of it."""
        if kind is LocalIndex and not self._folder.fingerprints.was_made:
            with self._folder.in_use() as folder:
                if not folder.fingerprints.is_ready():
                    return None
        return super().capability(kind)

    def peek(self, keys: Sequence[bytes]) -> list[bool]:
        """As `has`, from memory (see `fingerprint_index`), for many keys in under 0.2 us each."""
        with self._folder.in_use() as folder:
            return folder.fingerprints.peek(keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count blocks as used. The index learns of it within seconds; if the process is killed
        before, only recency is lost."""
        require_own(self._folder)
        self._folder.uses.record([index_key(key) for key in keys])

    def counts(self) -> PutCounts:
        """Of blocks evicted, those that no other store of the process on the folder has counted."""
        self._put_counts.count("evicted", self._folder.evicted.take())
        found = self._put_counts.by_kind()
        return PutCounts(found.get("renewed", 0), found.get("evicted", 0))

    def warning(self) -> str:
        return self._folder.short

    def usage(self) -> Usage:
        """Count live blocks, and the bytes of live and reserved slots, over all processes."""
        with self._folder.in_use() as folder:
            return folder.index.usage()

    def recent(self, namespace: bytes, count: int, before: int | None = None) -> RecentBlocks:
        """As `Recent` says; the index knows a block's use, and the block its whole key."""
        with self._folder.in_use() as folder:
            rows, after = folder.index.recent(index_key_prefix(namespace), count, before)
            keys = spread(lambda row: _key(folder, *row), rows, folder.threads, BATCH_THREADS)
        return RecentBlocks([key for key in keys if key.startswith(namespace)], after)

    def describe(self) -> str:
        io = "direct" if self._folder.slabs.is_direct else "buffered"
        return f"{self._folder.path}, io {io}, durability {self._folder.access.durability}"

    def drop(self, keys: Sequence[bytes]) -> None:
        with self._folder.in_use() as folder:
            folder.drop([index_key(key) for key in keys])

    def clear(self, namespace: bytes) -> bool:
        """Drop some of a namespace's blocks, for all processes on the folder, in one short edit."""
        with self._folder.in_use() as folder:
            beginning = index_key_prefix(namespace)
            rows = folder.index.rows(beginning, _CLEAR_BATCH)
            index_keys = [key for key, _ in rows if key.startswith(beginning)]
            folder.drop(index_keys)
            return len(index_keys) == _CLEAR_BATCH

    def close(self) -> None:
        """Release the folder; the process's last store on it syncs the index. Idempotent.

        Does nothing in a forked child: files and locks are the parent's.
        """
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._folder.pid:
            return
        with self._folder.upkeep.held_back():
            open_folders.leave(self._folder)

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        """Store blocks. Raises TierFull or TierUnavailable only if none is held afterwards."""
        batch: dict[bytes, Block] = {}
        index_keys = [index_key(block.key) for block in blocks]
        for name, block in zip(index_keys, blocks, strict=True):
            batch.setdefault(name, block)
        with self._folder.in_use() as folder:
            if all(folder.index.has(list(batch))):
                folder.uses.record(list(batch))
                self._put_counts.count("renewed", len(blocks))
                return [True] * len(blocks)
            held = self._store(folder, batch)
        return [name in held for name in index_keys]

    def _store(self, folder: OpenFolder, batch: dict[bytes, Block]) -> set[bytes]:
        sizes = {key: slot_bytes(len(block.payload)) for key, block in batch.items()}
        put = folder.reserve(sizes)
        outcomes: list[Entry | OSError] = []
        try:
            jobs = [_SlotWrite(slot, batch[key]) for key, slot in put.slots.items()]
            outcomes = self._write_all(folder, sorted(jobs, key=itemgetter(0)))
        finally:
            # Whatever happens, each reserved slot becomes a block or is freed.
            held = folder.commit(put, (done for done in outcomes if isinstance(done, Entry)))
        self._put_counts.count("renewed", len(held - put.slots.keys()))
        failed = [outcome for outcome in outcomes if isinstance(outcome, OSError)]
        self._log_failed(self._failed_writes, "write(s)", failed)
        if not held:
            raise failed[0] if failed else TierFull(f"{folder.path}: no slot could be freed")
        return held

    def _write_all(self, folder: OpenFolder, jobs: Sequence[_SlotWrite]) -> list[Entry | OSError]:
        of_runs = spread(partial(_write, folder), _runs(jobs), folder.threads, self._writers)
        outcomes = [*chain.from_iterable(of_runs)]
        if folder.access.durability == "sync":
            try:
                folder.slabs.sync({job.slot.size for job in jobs})
            except OSError as error:
                return [error] * len(jobs)  # nobody knows which reached the device
        return outcomes

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        """Load blocks. Raises TierUnavailable if every block that the index has fails to read."""
        with self._folder.in_use() as folder:
            entries = folder.index.find([index_key(block.key) for block in blocks])
            jobs = [
                _SlotRead(entry.slot, block, entry, place)
                for place, (block, entry) in enumerate(zip(blocks, entries, strict=True))
                if entry is not None and entry.payload_bytes == len(block.payload)
            ]
            jobs.sort(key=itemgetter(0))
            of_runs = spread(partial(_read, folder), _runs(jobs), folder.threads, BATCH_THREADS)
            outcomes = [*chain.from_iterable(of_runs)]
            self._drop_damaged(folder, jobs, outcomes)
            failed = [outcome for outcome in outcomes if isinstance(outcome, OSError)]
            if failed and len(failed) == len(outcomes):
                raise failed[0]
            self._log_failed(self._failed_reads, "read(s)", failed)
            done = zip(jobs, outcomes, strict=True)
            loaded = {job.place for job, outcome in done if outcome is None}
            folder.uses.record([index_key(blocks[place].key) for place in sorted(loaded)])
        return [place in loaded for place in range(len(blocks))]

    def _log_failed(self, log: RepeatedLog, what: str, failed: Sequence[OSError]) -> None:
        if failed:
            line = "disk tier %s: %d %s failed: %s"
            log.log(line, self._folder.path, len(failed), what, failed[0], count=len(failed))

    def _drop_damaged(
        self, folder: OpenFolder, jobs: Sequence[_SlotRead], outcomes: Sequence[object]
    ) -> None:
        # A slot that was evicted and written again while we read looks damaged, but then its
        # entry has changed too. The other loads are good even if the index takes no edit now.
        done = zip(jobs, outcomes, strict=True)
        damaged = {index_key(job.block.key): job.entry for job, o in done if _is_lost(o)}
        if not damaged:
            return
        try:
            with folder.translated():
                dropped = folder.drop(damaged, damaged)
        except TierError as error:
            self._failed_drops.log(
                "disk tier %s: damaged blocks can't be dropped: %s", folder.path, error
            )
        else:
            self._damaged.count("record", dropped)

    def damaged(self) -> int:
        """Number of records that were not those of the index, or unreadable, and were dropped."""
        return self._damaged.total


def _key(folder: OpenFolder, name: bytes, entry: Entry) -> bytes:
    """The key of the block with this name and entry in the index; empty: it has another by now, or
    can't be read."""
    try:
        header = parse_header(folder.slabs[entry.slot.size].header(entry.slot.number))
    except (RecordError, OSError):
        return b""
    return header.key if index_key(header.key) == name else b""


def _runs(jobs: Sequence[Job]) -> list[list[Job]]:
    """Part jobs, in the order of their slots, into those that one call can do: of slots in a row,
    whose payloads are whole pages."""
    runs: list[list[Job]] = []
    after: Slot | None = None
    for job in jobs:
        size, number = job.slot
        if job.slot == after and len(runs[-1]) < run_slots(size):
            runs[-1].append(job)
        else:
            runs.append([job])
        after = Slot(size, number + 1) if len(job.block.payload) + PAGE == size else None
    return runs


def _write(folder: OpenFolder, run: Sequence[_SlotWrite]) -> list[Entry | OSError]:
    """Store blocks in a run of slots; return the entry of each, or the error."""
    entries: list[Entry | OSError] = []
    headers, payloads = list[bytes](), list[memoryview]()
    for slot, block in run:
        size, checksum = len(block.payload), block.checksum or digest(block.payload)
        entries.append(Entry(slot, size, checksum))
        headers.append(pack_header(block.key, size, block.payload, checksum=checksum))
        payloads.append(block.payload)
    slot = run[0].slot
    try:
        folder.slabs[slot.size].write(slot.number, headers, payloads)
    except OSError as error:
        return [error] if len(run) == 1 else _one_by_one(_write, folder, run)
    return entries


def _read(folder: OpenFolder, run: Sequence[_SlotRead]) -> list[RecordError | OSError | None]:
    """Fill blocks' payloads from a run of slots; return the error of each, or None."""
    slot = run[0].slot
    try:
        payloads = [job.block.payload for job in run]
        found = folder.slabs[slot.size].read(slot.number, payloads)
    except (RecordError, OSError) as error:
        return [error] if len(run) == 1 else _one_by_one(_read, folder, run)
    return [_check(job, *record) for job, record in zip(run, found, strict=True)]


def _one_by_one(
    move: Callable[[OpenFolder, Sequence[Job]], list[Outcome]],
    folder: OpenFolder,
    run: Sequence[Job],
) -> list[Outcome]:
    """Move the blocks of a run that failed each by itself: one bad place is one block's."""
    return [outcome for job in run for outcome in move(folder, [job])]


def _check(job: _SlotRead, header: bytes, checksum: bytes) -> RecordError | None:
    """Why what was read is not the block; None: it is."""
    _, block, entry, _ = job
    try:
        record = expect(header, block.key, len(block.payload))
        if record.checksum != entry.checksum:
            raise RecordError("the record is another than the index names")
        verify(record, block.payload, checksum)
    except RecordError as error:
        return error
    return None


def _is_lost(outcome: object) -> bool:
    """Whether a block is lost for good. One on a bad sector would else count as held for ever."""
    is_unreadable = isinstance(outcome, OSError) and outcome.errno in UNREADABLE
    return is_unreadable or isinstance(outcome, RecordError)
