"""One batch of blocks in memory, and what keeps such batches on a disk: tiers, raw files, files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.disk_limits import RawLoop
from bench.disk_peers import FilePerBlock
from bench.report import Measure, rate
from spec.offloading import StoreContext
from tiers.block import NAMESPACE_BYTES, digest
from tiers.disk.slab import Durability, Io, slot_bytes
from tiers.disk.spec import DiskSpec
from tiers.host.slot_memory import SlotMemory
from tiers.store import Block, GatheredBlock, TierStore, batch_blocks
from tiers.wrappers.put_process import PutsApart


class Bench:
    """What the cases share: host memory of one batch, and a folder for all that is opened."""

    def __init__(
        self, folder: Path, count: int, payload_bytes: int, batches: int, stack: ExitStack
    ) -> None:
        """`count` payloads a batch; each tier, raw file or folder of files holds `batches`."""
        self.count = count
        self.payload_bytes = payload_bytes
        self.batches = batches
        self.num_bytes = self.count * self.payload_bytes
        memory = SlotMemory(self.count, self.payload_bytes, pin=False, touch=True)
        stack.callback(memory.close)
        self.payloads = [memory.payload(slot) for slot in range(self.count)]
        noise = os.urandom(self.payload_bytes)
        for payload in self.payloads:
            payload[:] = noise
        self._folder = folder
        self._stack = stack
        self._made = 0

    def place(self) -> Path:
        """A name that nothing has yet."""
        self._made += 1
        return self._folder / f"disk-{self._made}"

    def rate(self, move: Callable[[], object], before: Callable[[], object] = int) -> Measure:
        """GB/s of moving one batch; `before` is not timed."""
        return rate(self.num_bytes, move, before)

    def tier(self, io: Io, durability: Durability = "none", apart: bool = False) -> Tier:
        """A full tier; `apart`: another process stores."""
        return Tier(self, self.place(), io, durability, apart, self._stack)

    def raw(self, direct: bool) -> RawLoop:
        """A raw file, written once from end to end."""
        raw = RawLoop(self.place(), self.payload_bytes, self.batches, self.count, direct)
        self._stack.callback(raw.close)
        for _ in range(self.batches):
            raw.store(self.payloads)
        return raw

    def files(self) -> FilePerBlock:
        """A full folder of files."""
        files = FilePerBlock(self.place(), self.batches * self.count)
        self._stack.callback(files.close)
        for _ in range(self.batches):
            files.store(self.payloads)
        return files


class Tier:
    """One disk tier: each batch stored has new keys, each load is of the last one stored. Blocks
    bring their checksums, as a chain's do, which are computed once, behind the gather."""

    def __init__(
        self,
        bench: Bench,
        path: Path,
        io: Io,
        durability: Durability,
        apart: bool,
        stack: ExitStack,
    ) -> None:
        self.path = path
        capacity = bench.batches * bench.count * slot_bytes(bench.payload_bytes)
        spec = DiskSpec(path=path, capacity=capacity, io=io, durability=durability)
        site = StoreContext(bench.payload_bytes)
        self._store: TierStore = spec.open(site)
        self._at_once = bench.count
        if apart:
            self._at_once = batch_blocks(bench.payload_bytes)
            self._store = PutsApart(self._store, spec, site, "disk")
        stack.callback(self._store.close)
        self._bench = bench
        self._checksum = digest(bench.payloads[0])  # all have the same bytes
        self._batch = bench.batches
        for _ in range(bench.batches + 1):
            self.store()

    def _blocks(self, places: Sequence[int] | None = None) -> list[Block]:
        space, count, batches = bytes(NAMESPACE_BYTES), self._bench.count, self._bench.batches
        if places is None:
            places = range((batches - 1) * count, batches * count)
        # Place 0 is the oldest that is held.
        first = (self._batch - batches) * count
        keys = [space + (first + place).to_bytes(32) for place in places]
        pairs = zip(keys, self._bench.payloads, strict=True)
        return [GatheredBlock(key, payload, self._checksum) for key, payload in pairs]

    def store(self) -> None:
        """Store a batch."""
        self._batch += 1
        blocks = self._blocks()
        for start in range(0, len(blocks), self._at_once):
            _require(self._store.put(blocks[start : start + self._at_once]))

    def load(self, places: Sequence[int] | None = None) -> None:
        """Load the batch stored last, or what is at these places of all, the oldest first."""
        _require(self._store.get(self._blocks(places)))


def _require(answers: list[bool]) -> None:
    if not all(answers):
        raise RuntimeError("the tier did not take or have every block")


def chill(*paths: Path) -> None:
    """Take files out of the page cache, once all of them is written."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
