"""Direct I/O by the disk tier's threads and by one io_uring: python -m bench.uring --folder DIR

Both move records, a page of header and the payload, between memory and slots at random of one
preallocated file, and checksum the payload, as the tier does: threads each their own blocks, the
ring's one thread what has arrived while the rest is under way. In the tier a header has other
memory than its payload; "in one" is a ring that need not care. Needs `uring-api`, which the
project does not depend on. The ways take turns; figures are medians, with (max - min) / median.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from itertools import islice
from operator import truediv
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tiers.block import digest
from tiers.disk.folder.open_folder import THREADS
from tiers.disk.slab import PAGE, slot_bytes

HELD_BYTES, BATCH_BYTES = 2 << 30, 128 << 20
DEPTHS = (8, 32)


class Slots:
    """A file of slots, written from end to end, and the memory of one batch of records."""

    def __init__(self, path: Path, payload_bytes: int) -> None:
        self.size = slot_bytes(payload_bytes)
        self.count = HELD_BYTES // self.size
        self.batch = BATCH_BYTES // payload_bytes
        self.handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self.handle, 0, self.count * self.size)
        memory = memoryview(mmap.mmap(-1, self.batch * self.size))
        noise = os.urandom(self.size)
        self.whole: list[memoryview] = []
        self.records: list[tuple[memoryview, memoryview]] = []
        for start in range(0, len(memory), self.size):
            record = memory[start : start + self.size]
            record[:] = noise
            self.whole.append(record)
            self.records.append((record[:PAGE], record[PAGE:]))
        for place in range(self.count):
            os.pwritev(self.handle, self.records[place % self.batch], place * self.size)


def by_threads(slots: Slots, threads: ThreadPoolExecutor, verb: str, places: Sequence[int]) -> None:
    """One system call a record."""
    lanes = threads._max_workers

    def run(lane: int) -> None:
        for item in range(lane, len(places), lanes):
            record, offset = slots.records[item], places[item] * slots.size
            if verb == "load":
                os.preadv(slots.handle, record, offset)
            digest(record[1])
            if verb == "store":
                os.pwritev(slots.handle, record, offset)

    list(threads.map(run, range(lanes)))


def by_ring(
    slots: Slots, ring: Any, depth: int, in_one: bool, verb: str, places: Sequence[int]
) -> None:
    """Two requests a record, as the binding has none for two pieces of memory, or one; `depth`
    records are under way at most."""
    prepare = ring.prepare_read if verb == "load" else ring.prepare_write
    waiting = iter(enumerate(places))
    missing: dict[int, int] = {}

    def begin(most: int) -> None:
        for item, place in islice(waiting, most):
            header, payload = slots.records[item]
            if verb == "store":
                digest(payload)
            offset = place * slots.size
            for part in (slots.whole[item],) if in_one else (header, payload):
                prepare(slots.handle, part, offset, item)
                offset += len(part)
            missing[item] = slots.size
            ring.submit()

    begin(depth)
    while missing:
        ended = []
        for one in ring.wait():
            if one.res <= 0:
                raise OSError(-one.res, os.strerror(-one.res))
            item = one.user_data
            missing[item] -= one.res
            if not missing[item]:
                del missing[item]
                ended.append(item)
        begin(len(ended))
        if verb == "load":
            for item in ended:
                digest(slots.records[item][1])


def measure(folder: Path, payload_bytes: int, rounds: int) -> None:
    """Print GB/s of each way, loads and stores."""
    slots = Slots(folder / str(payload_bytes), payload_bytes)
    ring = import_module("uring_api").Ring(4 * max(DEPTHS))
    chance = random.Random(0)
    ways: dict[str, Callable[[str, Sequence[int]], None]] = {}
    for count in (THREADS, THREADS + 2, 2 * THREADS):
        threads = ThreadPoolExecutor(count)
        ways[f"{count} threads"] = partial(by_threads, slots, threads)
    for depth in DEPTHS:
        ways[f"ring of {depth}"] = partial(by_ring, slots, ring, depth, False)
        ways[f"ring of {depth}, in one"] = partial(by_ring, slots, ring, depth, True)
    for verb in ("load", "store"):
        figures: dict[str, list[float]] = {way: [] for way in ways}
        for round_ in range(rounds + 1):
            for way, move in ways.items():
                places = chance.sample(range(slots.count), slots.batch)
                began = time.perf_counter()
                move(verb, places)
                if round_:
                    figures[way].append(BATCH_BYTES / (time.perf_counter() - began) / 1e9)
        for way, found in figures.items():
            middle = statistics.median(found)
            spread = (max(found) - min(found)) / middle
            beside = statistics.median(map(truediv, found, figures[f"{THREADS} threads"]))
            print(
                f"{verb}, {payload_bytes >> 10} KiB, {way}: {middle:.2f} GB/s ({spread:.0%}), "
                f"best {max(found):.2f}, {beside:.2f} of {THREADS} threads in the same round"
            )
    os.close(slots.handle)


def main() -> None:
    """Measure blocks of 2 MiB and of 64 KiB."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with TemporaryDirectory(dir=args.folder) as folder:
        for payload_bytes in (2 << 20, 64 << 10):
            measure(Path(folder), payload_bytes, args.rounds)


if __name__ == "__main__":
    main()
