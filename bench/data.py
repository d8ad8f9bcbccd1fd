"""Suite data: what tools do on a disk tier, beside the disk's own speed and beside loads.

`verify` has to find every one of the damaged records in each round, or the suite fails.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

from bench.disk_limits import Lanes
from bench.main import Scale
from bench.report import Case, Measure
from spec.offloading import StoreContext
from tiers.block import NAMESPACE_BYTES
from tiers.data.verification import verify_tier
from tiers.disk.records import DiskRecords
from tiers.disk.slab import PAGE, slot_bytes, supports_direct
from tiers.disk.spec import DiskSpec
from tiers.host.slot_memory import SlotMemory
from tiers.store import Block, GatheredBlock, TierStore

RATE = 200e6
"""Bytes a second that `verify` reads beside engines unless it is told otherwise."""
BATCH = 8
"""Blocks of a load in the foreground."""
_VERIFYING = """
import sys
from pathlib import Path
from tiers.data.verification import verify_tier
from tiers.disk.records import DiskRecords
records, begun = DiskRecords(Path(sys.argv[1])), []
def progress(count, size):
    if not begun:
        begun.append(print("reads", flush=True))
while True:
    verify_tier(records, float(sys.argv[2]) or None, progress)
"""


def cases(scale: Scale, stack: ExitStack) -> Iterator[Case]:
    """Verifying beside a sequential read, loads beside verifying, and what scrubbing leaves."""
    size, count, damaged = (64 << 10, 24, 10) if scale.smoke else (1 << 20, 1250, 1000)
    tier = _Tier(scale.folder / "kv", size, count, stack)
    probe = scale.folder / "probe"
    probe.touch()
    why = "" if supports_direct(probe) else "this file system has no direct I/O"
    loads = 4 if scale.smoke else 300
    for rate, name in ((RATE, "at 200 MB/s"), (0.0, "as fast as it goes")):
        yield Case(
            "data",
            f"load of {BATCH} x {size >> 10} KiB, p99, verify beside it {name}",
            "ms",
            None if why else _beside_verify(tier, rate, loads),
            limit=None if why else tier.foreground(loads),
            target=1 / 1.1 if rate == RATE else None,
            why=why,
        )
    flipped = tier.damage(damaged)
    yield Case(
        "data",
        f"verify, {damaged:,} of {count:,} records damaged, beside a sequential read",
        "GB/s",
        None if why else _verify(tier, flipped),
        limit=None if why else _sequential(tier, stack),
        target=0.8,
        why=why,
    )
    yield Case(
        "data",
        f"scrub, blocks dropped of {damaged:,} damaged",
        "blocks",
        _scrub(tier, flipped),
        target=damaged,
        of="ours",
        rounds=0,
    )


class _Tier:
    """A disk tier of `count` blocks of noise, in whose folder tools work."""

    def __init__(self, path: Path, size: int, count: int, stack: ExitStack) -> None:
        self.path, self.size, self.count = path, size, count
        self._spec = DiskSpec(path=path, capacity=(count + BATCH) * slot_bytes(size), io="direct")
        self._memory = SlotMemory(BATCH, size, pin=False, touch=True)
        stack.callback(self._memory.close)
        noise = random.Random(0).randbytes(size)
        for slot in range(BATCH):
            self._memory.payload(slot)[:] = noise
        with closing(self._open()) as store:
            for first in range(0, count, BATCH):
                places = range(first, min(count, first + BATCH))
                _require(all(store.put(self._blocks(places))))
        self.slab = path / f"slab-{slot_bytes(size)}.dat"
        handle = os.open(self.slab, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)

    def _open(self) -> TierStore:
        store: TierStore = self._spec.open(StoreContext(self.size))
        return store

    def _blocks(self, places: range | list[int]) -> list[Block]:
        space = bytes(NAMESPACE_BYTES)
        return [
            GatheredBlock(space + place.to_bytes(32), self._memory.payload(slot), None)
            for slot, place in enumerate(places)
        ]

    def foreground(self, loads: int) -> Measure:
        """Milliseconds of a load of blocks at random, the 99th percentile."""
        chance = random.Random(1)

        def run() -> float:
            took: list[float] = []
            with closing(self._open()) as store:
                for _ in range(loads):
                    places = chance.sample(range(self.count), BATCH)
                    began = time.perf_counter()
                    _require(all(store.get(self._blocks(places))))
                    took.append(time.perf_counter() - began)
            took.sort()
            return 1e3 * took[int(0.99 * (loads - 1))]

        return run

    def damage(self, count: int) -> set[bytes]:
        """Flip a bit of so many records; their names."""
        chance, slot = random.Random(2), slot_bytes(self.size)
        with closing(DiskRecords(self.path)) as records:
            every = [record for piece in records.listed() for record in piece]
        some = chance.sample(every, count)
        with self.slab.open("r+b") as slab:
            for record in some:
                place = record.entry.slot.number * slot + PAGE + chance.randrange(self.size)
                slab.seek(place)
                (byte,) = slab.read(1)
                slab.seek(place)
                slab.write(bytes([byte ^ 1 << chance.randrange(8)]))
            slab.flush()
            os.fsync(slab.fileno())
        return {record.name for record in some}

    def held(self) -> set[bytes]:
        """The names of all records that it has."""
        with closing(DiskRecords(self.path)) as records:
            return {record.name for piece in records.listed() for record in piece}


def _beside_verify(tier: _Tier, rate: float, loads: int) -> Measure:
    foreground = tier.foreground(loads)

    def run() -> float:
        command = [sys.executable, "-c", _VERIFYING, str(tier.path), str(rate)]
        verifying = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert verifying.stdout is not None
            _require(verifying.stdout.readline() == "reads\n")
            return foreground()
        finally:
            verifying.kill()
            verifying.communicate()

    return run


def _timed(size: int, work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return size / (time.perf_counter() - began) / 1e9


def _verify(tier: _Tier, flipped: set[bytes]) -> Measure:
    def run() -> float:
        with closing(DiskRecords(tier.path)) as records:
            records.others()  # which opens the folder
            began = time.perf_counter()
            report = verify_tier(records, None, lambda *_: None)
            seconds = time.perf_counter() - began
        _require({bytes.fromhex(name) for name, _ in report.found} == flipped)
        return report.bytes / seconds / 1e9

    return run


def _sequential(tier: _Tier, stack: ExitStack) -> Measure:
    """The slab file from end to end past the page cache, a slot at a time, on as many threads."""
    lanes, slot = Lanes(), slot_bytes(tier.size)
    stack.callback(lanes.close)
    handle = os.open(tier.slab, os.O_RDONLY | os.O_DIRECT)
    stack.callback(os.close, handle)
    memory = SlotMemory(BATCH, slot, pin=False, touch=True)
    stack.callback(memory.close)

    def read(item: int) -> None:
        _require(os.preadv(handle, [memory.payload(item % BATCH)], item * slot) == slot)

    return lambda: _timed(tier.count * slot, lambda: lanes.each(read, tier.count))


def _scrub(tier: _Tier, flipped: set[bytes]) -> Measure:
    def run() -> float:
        before = tier.held()
        with closing(DiskRecords(tier.path)) as records:
            report = verify_tier(records, None, lambda *_: None, drops=True)
        _require(before - tier.held() == flipped)
        return report.dropped

    return run


def _require(holds: bool) -> None:
    if not holds:
        raise RuntimeError("a tier or a tool did not do what it had to")
