"""The disk tier's index alone: how soon it is open again, what look-ups and evictions cost, and how
much memory a block takes; beside a Python dict, which is one process's and survives nothing.

The index is one of small blocks that nobody wrote, whose slots are holes.
"""

from __future__ import annotations

import gc
import hashlib
import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from itertools import count as count_from
from pathlib import Path
from random import Random
from sys import getsizeof

from bench.main import Scale
from bench.report import Case, Measure
from spec.offloading import StoreContext
from tiers.block import NAMESPACE_BYTES
from tiers.disk.access import Access
from tiers.disk.fingerprint_index import FingerprintIndex, FingerprintTable
from tiers.disk.open_folder import OpenFolder
from tiers.disk.registry import open_folders
from tiers.disk.rows import ENTRY, STAMP, STATE, Entry, index_key
from tiers.disk.rows import SIZE as SIZE_ROW
from tiers.disk.slab import slot_bytes
from tiers.disk.spec import DiskSpec
from tiers.disk.store import DiskStore

PAYLOAD = 4096
SIZE = slot_bytes(PAYLOAD)
PROMPT = 8192
"""Blocks of a prompt of 128k tokens."""
BATCH = 64
DICT = "Python dict"
DICT_BLOCKS = 10_000_000
"""A dict of more would take over 2 GB."""

_AT_ONCE = 10_000
_FILLED_AT_ONCE = 500_000


def index_cases(scale: Scale) -> Generator[Case, None, None]:
    """One index of `scale.blocks`, by default a million."""
    count = 2000 if scale.smoke else scale.blocks or 1_000_000
    path = scale.folder / "index"
    _fill(path, count)
    name = f"{count:,} blocks"
    peer = _Dict(count) if count <= DICT_BLOCKS else None
    yield from _memory_cases(path, count, name, peer)
    yield _case(f"reopen {name}", "s", _reopen(path, count), target=1.0)
    with closing(_open(path, count)) as store:
        _settle(store)
        pages = _pages(store._folder) / count
        yield _case(f"disk space, {name}", "bytes/block", lambda: pages, rounds=1)
        made = _making(store, count)
        yield _case(f"making the table of {name}", "us/block", made, rounds=2)
        theirs = _lookups(peer.has, count) if peer else None
        for what, has in (("table", store.peek), ("index", store.has)):
            ours = _lookups(has, count)
            yield _case(f"look-ups by the {what}, {name}", "us/block", ours, theirs)
        ours, theirs = _replacing(store._folder, count), peer.replacing if peer else None
        yield _case(f"replacing, {name}", "us/block", ours, theirs)


def _memory_cases(path: Path, count: int, name: str, peer: _Dict | None) -> Iterator[Case]:
    theirs = peer.memory if peer else None
    own, mapped = _memory(path, count, 0), _memory(path, count, 1)
    yield _case(f"memory of its own, {name}", "bytes/block", own, theirs, rounds=1)
    looked_up = f"memory, {name} looked up"
    yield _case(looked_up, "bytes/block", mapped, target=200, rounds=1)


def _case(
    name: str,
    unit: str,
    ours: Measure,
    theirs: Measure | None = None,
    target: float | None = None,
    rounds: int = 99,
) -> Case:
    return Case(
        "disk",
        f"index: {name}",
        unit,
        ours,
        peer=theirs,
        peer_name=DICT if theirs else "",
        target=target,
        of="ours",
        rounds=rounds,
    )


def _open(path: Path, count: int) -> DiskStore:
    return DiskSpec(path=path, capacity=count * SIZE, io="buffered").open(StoreContext(PAYLOAD))


def _key(number: int) -> bytes:
    return bytes(NAMESPACE_BYTES) + hashlib.sha256(number.to_bytes(8)).digest() + b"\0"


def _fill(path: Path, count: int) -> None:
    """The rows that `count` stores would leave, many at once: one by one millions take minutes."""
    folder = open_folders.acquire(path, count * SIZE, Access("buffered"))
    index = folder.index
    for start in range(0, count, _FILLED_AT_ONCE):
        stop = min(count, start + _FILLED_AT_ONCE)
        keys = [index_key(_key(number)) for number in range(start, stop)]
        rows = [(key, ENTRY.pack(n, PAYLOAD, bytes(16), n)) for n, key in enumerate(keys, start)]
        with index._env.begin(write=True) as txn:
            recency = [(STAMP.pack(number), key) for number, key in enumerate(keys, start)]
            txn.cursor(index._tables["recency"]).putmulti(recency, append=True)
            txn.cursor(index._tables["blocks"]).putmulti(sorted(rows))
            txn.put(SIZE_ROW.pack(SIZE), SIZE_ROW.pack(stop), db=index._tables["lengths"])
            state = STATE.pack(count * SIZE, stop * SIZE, stop)
            txn.put(b"state", state, db=index._tables["meta"])
    folder.slabs[SIZE]  # makes the file
    os.truncate(path / f"slab-{SIZE}.dat", count * SIZE)
    # Without the pages that so large edits leave free, which stores of batches don't.
    index._env.copy(str(path / "compact"), compact=True)
    open_folders.release(folder)
    (path / "compact").chmod(0o600)
    (path / "compact").rename(path / "index.mdb")
    (path / "index.seal").unlink()


def _pages(folder: OpenFolder) -> int:
    """Bytes of the pages that the index's tables are on."""
    index = folder.index
    with index._env.begin() as txn:
        stats = [txn.stat(table) for table in index._tables.values()]
    pages = sum(
        stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats
    )
    return pages * int(stats[0]["psize"])


class _Dict:
    """Slots by key in a dict of this process, and a ring of keys in the order of their use."""

    def __init__(self, count: int) -> None:
        self._ring = [_key(number) for number in range(count)]
        self._slots = {key: slot for slot, key in enumerate(self._ring)}
        self._next = count_from(count)

    def memory(self) -> float:
        """Bytes a block."""
        whole = getsizeof(self._slots) + getsizeof(self._ring)
        return whole / len(self._ring) + getsizeof(self._ring[-1]) + getsizeof(len(self._ring))

    def has(self, keys: list[bytes]) -> list[bool]:
        return [key in self._slots for key in keys]

    def replacing(self) -> float:
        """us a block."""
        numbers = [next(self._next) for _ in range(min(PROMPT, len(self._ring)))]
        keys = [(_key(number), number % len(self._ring)) for number in numbers]
        began = time.perf_counter()
        for key, place in keys:
            self._slots[key] = self._slots.pop(self._ring[place])
            self._ring[place] = key
        return (time.perf_counter() - began) / len(keys) * 1e6


def _reopen(path: Path, count: int) -> Measure:
    def run() -> float:
        began = time.perf_counter()
        store = _open(path, count)
        found = store.has([_key(0), _key(count - 1)])
        took = time.perf_counter() - began
        store.close()
        if found != [True, True]:
            raise RuntimeError("the index lost blocks")
        return took

    return run


def _settle(store: DiskStore) -> None:
    store.peek([_key(0)])
    while store._folder.fingerprints._renewing:
        time.sleep(0.01)


def _making(store: DiskStore, count: int) -> Measure:
    """A table beside the one that the store has."""

    def run() -> float:
        fingerprints = FingerprintIndex(store._folder.index, submit=lambda make: None)
        fingerprints.peek([_key(0)])
        began = time.perf_counter()
        fingerprints._renew()
        return (time.perf_counter() - began) / count * 1e6

    return run


def _lookups(has: Callable[[list[bytes]], list[bool]], count: int) -> Measure:
    """Prompts of blocks from anywhere, no two alike: few are in a processor's caches."""
    chance = Random(0)

    def run() -> float:
        keys = [_key(chance.randrange(count)) for _ in range(PROMPT)]
        began = time.perf_counter()
        found = has(keys)
        took = time.perf_counter() - began
        if not all(found):
            raise RuntimeError("the index lost blocks")
        return took / len(keys) * 1e6

    return run


def _replacing(folder: OpenFolder, count: int) -> Measure:
    """A store of a batch in a full tier, but for the writes: reserve, evicting, and publish."""
    numbers = count_from(count)

    def run() -> float:
        batches = max(1, min(count, PROMPT) // BATCH)
        names = [[index_key(_key(next(numbers))) for _ in range(BATCH)] for _ in range(batches)]
        began = time.perf_counter()
        for batch in names:
            slots = folder.reserve(dict.fromkeys(batch, SIZE))
            written = {key: Entry(slot, PAYLOAD, bytes(16), 0) for key, slot in slots.items()}
            folder.commit(batch, slots, written)
        return (time.perf_counter() - began) / batches / BATCH * 1e6

    return run


def _memory(path: Path, count: int, mapped: int) -> Measure:
    """Memory that grows from before the tier is open until all is looked up and the table made."""

    def run() -> float:
        # What the first table of a process loads of torch is not the blocks'.
        FingerprintTable(1).has([bytes(16)])
        gc.collect()
        before = _resident()
        store = _open(path, count)
        _settle(store)
        for start in range(0, count, _AT_ONCE) if mapped else ():
            store.has([_key(number) for number in range(start, min(count, start + _AT_ONCE))])
        grown = [after - then for then, after in zip(before, _resident(), strict=True)]
        store.close()
        return sum(grown[: 1 + mapped]) / count

    return run


def _resident() -> tuple[int, int]:
    """Bytes of this process's memory: its own, and mapped files'."""
    _, resident, shared = Path("/proc/self/statm").read_text().split()[:3]
    page = os.sysconf("SC_PAGE_SIZE")
    return (int(resident) - int(shared)) * page, int(shared) * page
