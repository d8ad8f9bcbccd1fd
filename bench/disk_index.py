"""The disk tier's index alone: how soon it is open again, what look-ups, stores and evictions
cost, what another process's stores cost this one, and how much memory a block takes; beside a
Python dict, which is one process's and survives nothing.

The index is one of small blocks that nobody wrote, whose slots are holes (see `index_fill`). Its
file is in the kernel's memory, where there is room for it.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from itertools import count as count_from
from os import sysconf
from pathlib import Path
from random import Random
from sys import getsizeof

from bench.index_fill import PAYLOAD, SIZE, block_key, fill
from bench.main import Scale
from bench.report import Case, Measure
from spec.offloading import StoreContext
from tiers.disk.disk_store import DiskStore
from tiers.disk.folder.open_folder import OpenFolder
from tiers.disk.index.edit import Entry, index_key
from tiers.disk.index.fingerprint_index import FingerprintTable
from tiers.disk.spec import DiskSpec
from tiers.store import LocalIndex, capability

PROMPT = 8192
"""Blocks of a prompt of 128k tokens."""
BATCH = 64
DICT_BLOCKS = 10_000_000
"""A dict of more would take over 2 GB."""

_CHECKOUT = Path(__file__).parents[1]
_OPEN_AND_STORE = "import sys, bench.disk_index as b; b.be_another(sys.argv[1], int(sys.argv[2]))"


def index_cases(scale: Scale) -> Generator[Case, None, None]:
    """One index of `scale.blocks`, by default a million."""
    count = 2000 if scale.smoke else scale.blocks or 1_000_000
    path = scale.folder / "index"
    fill(path, count)
    name = f"{count:,} blocks"
    yield from _opening(path, count, name)
    peer = _Dict(min(count, DICT_BLOCKS))
    with closing(_Opened(path, count)) as opened:
        yield from _memory_cases(opened, name, peer)
        yield from _lookup_cases(opened, name, peer)
        ours = _replacing(opened.store._folder, count)
        yield _case(f"replacing, {name}", "us/block", ours, peer.replacing, peer)
        yield from _following_cases(opened, name, 0.2 if scale.smoke else 3.0)
    killed = _after_a_kill(path, count)
    yield _case(f"reopen {name} after a kill", "s", killed, target=1.0, rounds=1)


def _opening(path: Path, count: int, name: str) -> Iterator[Case]:
    target = 1.0 if count <= 1_000_000 else None
    again = _reopening(path, count)
    yield _case(f"reopen {name}", "s", again, target=target, rounds=2, limit=_reading(path))
    yield _case(f"close {name}", "s", _closing(path, count), rounds=1, limit=_reading(path))


def _memory_cases(opened: _Opened, name: str, peer: _Dict) -> Iterator[Case]:
    own, mapped = opened.memory
    yield _case(
        f"memory of its own, {name}", "bytes/block", lambda: own, peer.memory, peer, rounds=0
    )
    yield _case(
        f"memory, {name} looked up", "bytes/block", lambda: own + mapped, target=200, rounds=0
    )
    pages = _pages(opened.store._folder) / opened.count
    yield _case(f"disk space, {name}", "bytes/block", lambda: pages, rounds=0)


def _lookup_cases(opened: _Opened, name: str, peer: _Dict) -> Iterator[Case]:
    asked, first = opened.asked, opened.first
    yield _case(f"asking for the table, {name} just opened", "ms", lambda: asked, rounds=0)
    yield _case(f"first look-up, in the background, {name}", "us/block", lambda: first, rounds=0)
    took, pause = opened.making
    yield _case(f"making the table of {name}", "us/block", lambda: took, rounds=0)
    yield _case(f"another thread's pauses meanwhile, p99.9, {name}", "ms", lambda: pause, rounds=0)
    store = opened.store
    for what, has in (("table", store.peek), ("index", store.has)):
        ours, theirs = _lookups(has, opened.count), _lookups(peer.has, peer.count)
        yield _case(f"look-ups by the {what}, {name}", "us/block", ours, theirs, peer)


def _following_cases(opened: _Opened, name: str, seconds: float) -> Iterator[Case]:
    store, count = opened.store, opened.count
    written = _written(store._folder, count)
    yield _case(f"index written for a replaced block, {name}", "bytes/block", written, rounds=1)
    following = _following(store._folder, count)
    yield _case(f"following a replaced block, {name}", "us/block", following, rounds=1)
    took, stored, made = _beside_another(opened, seconds)
    beside = "while another process stores"
    yield _case(f"look-ups by the table {beside}, {name}", "us/block", lambda: took, rounds=0)
    yield _case(f"that process, {name}", "us/block", lambda: stored, rounds=0)
    yield _case(f"tables that served meanwhile, {name}", "tables", lambda: made, target=1, rounds=0)


def _case(
    name: str,
    unit: str,
    ours: Measure,
    theirs: Measure | None = None,
    peer: _Dict | None = None,
    target: float | None = None,
    rounds: int = 99,
    limit: Measure | None = None,
) -> Case:
    return Case(
        "disk",
        f"index: {name}",
        unit,
        ours,
        limit=limit,
        peer=theirs,
        peer_name=peer.name if peer else "",
        target=target,
        of="ours",
        rounds=rounds,
    )


def _open(path: Path, count: int) -> DiskStore:
    return DiskSpec(path=path, capacity=count * SIZE, io="buffered").open(StoreContext(PAYLOAD))


def _pages(folder: OpenFolder) -> int:
    """Bytes of the pages that the index's tables are on."""
    index = folder.index
    with index.begin() as txn:
        stats = [txn.stat(table) for table in index.tables.values()]
    pages = sum(
        stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats
    )
    return int(pages * stats[0]["psize"])


class _Dict:
    """Slots by key in a dict of this process, and a ring of keys in the order of their use."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.name = f"Python dict of {count:,}"
        self._ring = [block_key(number) for number in range(count)]
        self._slots = {key: slot for slot, key in enumerate(self._ring)}
        self._next = count_from(count)

    def memory(self) -> float:
        """Bytes a block."""
        whole = getsizeof(self._slots) + getsizeof(self._ring)
        return whole / self.count + getsizeof(self._ring[-1]) + getsizeof(self.count)

    def has(self, keys: list[bytes]) -> list[bool]:
        return [key in self._slots for key in keys]

    def replacing(self) -> float:
        """us a block."""
        numbers = [next(self._next) for _ in range(min(PROMPT, self.count))]
        keys = [(block_key(number), number % self.count) for number in numbers]
        began = time.perf_counter()
        for key, place in keys:
            self._slots[key] = self._slots.pop(self._ring[place])
            self._ring[place] = key
        return (time.perf_counter() - began) / len(keys) * 1e6


class _Opened:
    """The store, with what is measured once: from before it is open until its table is made."""

    def __init__(self, path: Path, count: int) -> None:
        # What the first table of a process loads of torch is not the blocks'.
        FingerprintTable(1).has([bytes(16)])
        gc.collect()
        before = _resident()
        self.path = path
        self.count = count
        self.store = _open(path, count)
        self._prompts = _prompts(count)
        fingerprints = self.store._folder.fingerprints
        make: list[Callable[[], None]] = []
        fingerprints._submit, submit = make.append, fingerprints._submit
        began = time.perf_counter()
        capability(self.store, LocalIndex)
        self.asked = (time.perf_counter() - began) * 1e3
        self.first = _lookup(self.store.has, next(self._prompts))
        with _pauses() as pauses:
            began = time.perf_counter()
            for call in make:
                call()
            took = time.perf_counter() - began
        self.making = took / count * 1e6, _high(pauses)
        fingerprints._submit = submit
        grown = [after - then for then, after in zip(before, _resident(), strict=True)]
        # All pages with blocks are mapped by now: a table is made of all of them.
        self.memory = max(1, grown[0]) / count, max(1, grown[1]) / count

    def close(self) -> None:
        self.store.close()


@contextmanager
def _pauses() -> Iterator[list[float]]:
    """Seconds from one end of a sleep of half a millisecond to the next, on another thread."""
    gaps: list[float] = []
    ended = threading.Event()

    def run() -> None:
        last = time.perf_counter()
        while not gaps or not ended.is_set():
            time.sleep(0.0005)
            last, gap = (now := time.perf_counter()), now - last
            gaps.append(gap)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield gaps
    finally:
        ended.set()
        thread.join()


def _high(gaps: list[float]) -> float:
    """The 99.9th of a thousand, in ms."""
    return sorted(gaps)[len(gaps) * 999 // 1000] * 1e3


def _reopening(path: Path, count: int) -> Measure:
    def run() -> float:
        began = time.perf_counter()
        store = _open(path, count)
        held = store.usage().blocks
        took = time.perf_counter() - began
        store.close()
        if held < count - BATCH:  # that many may have been on their way when a process was killed
            raise RuntimeError("the index lost blocks")
        return took

    return run


def _closing(path: Path, count: int) -> Measure:
    def run() -> float:
        store = _open(path, count)
        began = time.perf_counter()
        store.close()
        return time.perf_counter() - began

    return run


def _reading(path: Path) -> Measure:
    """Reading the index's file once."""

    def run() -> float:
        buffer = bytearray(1 << 20)
        began = time.perf_counter()
        with (path / "index.mdb").open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
        return time.perf_counter() - began

    return run


def _after_a_kill(path: Path, count: int) -> Measure:
    """Opening after a process that stored batches was killed."""

    def run() -> float:
        with _another(path, count) as other:
            time.sleep(0.05)
            other.kill()
        return _reopening(path, count)()

    return run


@contextmanager
def _another(path: Path, count: int) -> Iterator[subprocess.Popen[str]]:
    """A process that stores batches on the tier from before the body until its input ends; then
    it says how many us a block took."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", _OPEN_AND_STORE, str(path), str(count)]
    other = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=_CHECKOUT)
    try:
        assert other.stdout is not None
        if other.stdout.readline() != "open\n":
            raise RuntimeError("the other process could not open the tier")
        yield other
    finally:
        other.kill()
        other.communicate()


def be_another(path: str, count: int) -> None:
    """The process of `_another`."""
    with closing(_open(Path(path), count)) as store:
        ended = threading.Event()

        def wait() -> None:
            sys.stdin.read()
            ended.set()

        threading.Thread(target=wait, daemon=True).start()
        print("open", flush=True)
        began, blocks = time.perf_counter(), 0
        for batch in _batches(10 * count):
            _replace(store._folder, batch)
            blocks += len(batch)
            if ended.is_set():
                break
        print((time.perf_counter() - began) / blocks * 1e6, flush=True)


def _beside_another(opened: _Opened, seconds: float) -> tuple[float, float, int]:
    """Look-ups while another process stores as fast as it can: us a block, the median; what a block
    takes it; and how many tables served, 1 if none had to be made anew."""
    fingerprints, times = opened.store._folder.fingerprints, []
    tables = {id(fingerprints._table)}
    prompts = _prompts(opened.count)
    with _another(opened.path, opened.count) as other:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            times.append(_lookup(opened.store.peek, next(prompts), all_held=False))
            tables.add(id(fingerprints._table))
            time.sleep(0.05)
        stored, _ = other.communicate(timeout=600)
    return statistics.median(times), float(stored), len(tables)


def _prompts(count: int) -> Iterator[list[bytes]]:
    """Prompts of blocks from anywhere, no two alike: few are in a processor's caches."""
    chance = Random(0)
    while True:
        yield [block_key(chance.randrange(count)) for _ in range(PROMPT)]


def _lookup(
    has: Callable[[list[bytes]], list[bool]], keys: list[bytes], all_held: bool = True
) -> float:
    began = time.perf_counter()
    found = has(keys)
    took = time.perf_counter() - began
    if all_held and not all(found):
        raise RuntimeError("the index lost blocks")
    return took / len(keys) * 1e6


def _lookups(has: Callable[[list[bytes]], list[bool]], count: int) -> Measure:
    prompts = _prompts(count)
    return lambda: _lookup(has, next(prompts))


def _batches(first: int) -> Iterator[list[bytes]]:
    """Index keys of blocks that nobody has stored, from number `first` on."""
    numbers = count_from(first)
    while True:
        yield [index_key(block_key(next(numbers))) for _ in range(BATCH)]


def _replace(folder: OpenFolder, batch: list[bytes]) -> None:
    """A store of a batch in a full tier, but for the writes: reserve, evicting, and publish."""
    put = folder.reserve(dict.fromkeys(batch, SIZE))
    folder.commit(put, (Entry(slot, PAYLOAD, bytes(16)) for slot in put.slots.values()))


def _replacing(folder: OpenFolder, count: int) -> Measure:
    batches = _batches(count)

    def run() -> float:
        some = [next(batches) for _ in range(max(1, min(count, PROMPT) // BATCH))]
        began = time.perf_counter()
        for batch in some:
            _replace(folder, batch)
        return (time.perf_counter() - began) / len(some) / BATCH * 1e6

    return run


def _written(folder: OpenFolder, count: int) -> Measure:
    """Bytes that LMDB gives the kernel to write."""
    batches = _batches(20 * count)

    def run() -> float:
        before = _bytes_written()
        for _ in range(BATCH):
            _replace(folder, next(batches))
        return (_bytes_written() - before) / BATCH**2

    return run


def _bytes_written() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def _following(folder: OpenFolder, count: int) -> Measure:
    """What the table does for each block that replaced another."""
    batches, fingerprints = _batches(30 * count), folder.fingerprints

    def run() -> float:
        with fingerprints._lock:  # or the background would follow
            while not fingerprints._follow():
                pass
            for _ in range(BATCH):
                _replace(folder, next(batches))
            began = time.perf_counter()
            while not fingerprints._follow():
                pass
            return (time.perf_counter() - began) / BATCH**2 * 1e6

    return run


def _resident() -> tuple[int, int]:
    """Bytes of this process's memory: its own, and mapped files'."""
    _, resident, shared = Path("/proc/self/statm").read_text().split()[:3]
    page = sysconf("SC_PAGE_SIZE")
    return (int(resident) - int(shared)) * page, int(shared) * page
