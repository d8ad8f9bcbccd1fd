"""Suite disk: the disk tier beside memcpy, raw loops over one file, and one file per block.

Every store measured is a full one: each batch evicts the oldest. Each part has a file or folder
of its own on the file system that `--folder` names. For a working set larger than the page cache,
run the suite under a memory limit of 1 GiB or so (`systemd-run --scope -p MemoryMax=1G`): then the
cases named `auto` have targets, too.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.cpu import memcpy
from bench.disk_index import index_cases
from bench.disk_limits import FilePerBlock, Payloads, RawLoop
from bench.main import Scale
from bench.report import Case, Measure
from spec.offloading import StoreSite
from tiers.block import NAMESPACE_BYTES
from tiers.disk.access import spare_memory, takes_direct
from tiers.disk.slab import slot_bytes
from tiers.disk.spec import DiskSpec, Durability, Io
from tiers.pool import SlotMemory
from tiers.store import Block

BATCHES = 16
"""How many batches fit into a tier, a raw file, or a folder of files."""

_CHECKSUM = (
    "every block is checksummed on the way in and out, at about twice the speed of memcpy; "
    "without a second idle core that is a third of the time"
)
_SYNCED = "the index is synced as well, twice a batch: before the blocks are written and after"


class Bench:
    """What the cases share: host memory of one batch, and a folder for all that is opened."""

    def __init__(self, scale: Scale, stack: ExitStack) -> None:
        self.count = 8 if scale.smoke else 64
        self.payload_bytes = 64 << 10 if scale.smoke else 2 << 20
        self.num_bytes = self.count * self.payload_bytes
        memory = SlotMemory(self.count, self.payload_bytes, pin=False, touch=True)
        stack.callback(memory.close)
        self.payloads = [memory.payload(slot) for slot in range(self.count)]
        noise = os.urandom(self.payload_bytes)
        for payload in self.payloads:
            payload[:] = noise
        self._folder = scale.folder
        self._stack = stack
        self._made = 0

    def place(self) -> Path:
        """A name that nothing has yet."""
        self._made += 1
        return self._folder / f"disk-{self._made}"

    def rate(self, move: Callable[[], object], before: Callable[[], object] = int) -> Measure:
        """GB/s of moving one batch; `before` is not timed."""

        def run() -> float:
            before()
            began = time.perf_counter()
            move()
            return self.num_bytes / (time.perf_counter() - began) / 1e9

        return run

    def tier(self, io: Io, durability: Durability = "none") -> Tier:
        """A full tier."""
        return Tier(self, self.place(), io, durability, self._stack)

    def raw(self, direct: bool) -> RawLoop:
        """A raw file, written once from end to end."""
        raw = RawLoop(self.place(), self.payload_bytes, BATCHES, self.count, direct)
        self._stack.callback(raw.close)
        for _ in range(BATCHES):
            raw.store(self.payloads)
        return raw

    def files(self) -> FilePerBlock:
        """A full folder of files."""
        files = FilePerBlock(self.place(), BATCHES * self.count)
        self._stack.callback(files.close)
        for _ in range(BATCHES):
            files.store(self.payloads)
        return files


class Tier:
    """One disk tier: each batch stored has new keys, each load is of the last one stored."""

    def __init__(
        self, bench: Bench, path: Path, io: Io, durability: Durability, stack: ExitStack
    ) -> None:
        self.path = path
        capacity = BATCHES * bench.count * slot_bytes(bench.payload_bytes)
        spec = DiskSpec(path=path, capacity=capacity, io=io, durability=durability)
        self._store = spec.open(StoreSite(bench.payload_bytes))
        stack.callback(self._store.close)
        self._bench = bench
        self._batch = BATCHES
        for _ in range(BATCHES + 1):
            self.store()

    def _blocks(self, places: Sequence[int] | None = None) -> list[Block]:
        space, count = bytes(NAMESPACE_BYTES), self._bench.count
        if places is None:
            places = range((BATCHES - 1) * count, BATCHES * count)
        # Place 0 is the oldest that is held.
        first = (self._batch - BATCHES) * count
        keys = [space + (first + place).to_bytes(32) for place in places]
        return [Block(k, p) for k, p in zip(keys, self._bench.payloads, strict=True)]

    def store(self) -> None:
        """Store a batch."""
        self._batch += 1
        _require(self._store.put(self._blocks()))

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


@contextmanager
def cases(scale: Scale) -> Iterator[Iterator[Case]]:
    """Buffered, direct, synced and cold; then the index alone."""
    with ExitStack() as stack:
        yield _all(scale, stack)


def _all(scale: Scale, stack: ExitStack) -> Iterator[Case]:
    bench = Bench(scale, stack)
    yield from _buffered(bench)
    yield from _synced(bench, "buffered")
    yield from _cold(bench)
    probe = bench.place()
    probe.touch()
    if takes_direct(probe):
        yield from _direct(bench)
        yield from _synced(bench, "direct")
        yield from _working_set(bench)
    yield from index_cases(scale)


def _case(
    bench: Bench,
    name: str,
    target: float | None,
    ours: Measure,
    limit: Measure | None = None,
    peer: Measure | None = None,
    why: str = "",
) -> Case:
    return Case(
        "disk",
        f"{name}, {bench.count} x {bench.payload_bytes >> 10} KiB",
        "GB/s",
        ours,
        limit,
        peer,
        peer_name="files" if peer else "",
        target=target,
        of="peer" if peer else "limit",
        why=why,
    )


def _buffered(bench: Bench) -> Iterator[Case]:
    tier, files, copy = bench.tier("buffered"), bench.files(), memcpy(bench.num_bytes)
    store, load = bench.rate(tier.store), bench.rate(tier.load)
    yield _case(bench, "store, buffered, and memcpy", 0.75, store, copy, why=_CHECKSUM)
    yield _case(bench, "warm load, buffered, and memcpy", 0.85, load, copy, why=_CHECKSUM)
    peer = bench.rate(lambda: files.store(bench.payloads))
    yield _case(bench, "store, buffered, and one file per block", 4.0, store, peer=peer)
    peer = bench.rate(lambda: files.load(bench.payloads))
    yield _case(bench, "warm load, and one file per block", 1.0, load, peer=peer, why=_CHECKSUM)


def _working_set(bench: Bench) -> Iterator[Case]:
    """Loads at random from all that is held, and replacement; targets where memory is short."""
    tier, files, raw = bench.tier("auto"), bench.files(), bench.raw(direct=True)
    every = range(BATCHES * bench.count)

    def anywhere(load: Callable[[Payloads, Sequence[int]], object]) -> Measure:
        chance = random.Random(0)
        return bench.rate(lambda: load(bench.payloads, chance.sample(every, bench.count)))

    short = len(every) * slot_bytes(bench.payload_bytes) > spare_memory() // 2
    ways = [
        (
            "random load, auto",
            anywhere(lambda _, places: tier.load(places)),
            anywhere(raw.load),
            anywhere(files.load),
        ),
        (
            "replacement, auto",
            bench.rate(tier.store),
            bench.rate(lambda: raw.store(bench.payloads)),
            bench.rate(lambda: files.store(bench.payloads)),
        ),
    ]
    for name, ours, limit, peer in ways:
        yield _case(bench, f"{name}, and direct", 0.9 if short else None, ours, limit)
        yield _case(bench, f"{name}, and files", 1.4 if short else None, ours, peer=peer)


def _direct(bench: Bench) -> Iterator[Case]:
    tier, raw = bench.tier("direct"), bench.raw(direct=True)
    limit = bench.rate(lambda: raw.store(bench.payloads))
    yield _case(bench, "store, direct", 0.9, bench.rate(tier.store), limit)
    limit = bench.rate(lambda: raw.load(bench.payloads))
    yield _case(bench, "load, direct", 0.9, bench.rate(tier.load), limit)


def _synced(bench: Bench, io: Io) -> Iterator[Case]:
    tier, raw = bench.tier(io, "sync"), bench.raw(direct=io == "direct")
    limit = bench.rate(lambda: raw.store(bench.payloads, sync=True))
    yield _case(bench, f"synced store, {io}", 0.9, bench.rate(tier.store), limit, why=_SYNCED)


def _cold(bench: Bench) -> Iterator[Case]:
    tier, raw = bench.tier("buffered"), bench.raw(direct=False)
    ours = bench.rate(tier.load, before=lambda: chill(*tier.path.glob("slab-*.dat")))
    limit = bench.rate(lambda: raw.load(bench.payloads), before=lambda: chill(raw.path))
    yield _case(bench, "cold load, buffered", 0.9, ours, limit)
