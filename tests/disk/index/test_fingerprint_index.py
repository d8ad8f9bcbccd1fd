"""Lookups by the table in memory say what the index says, whoever changes it."""

from __future__ import annotations

import random
import threading
import traceback
from array import array
from collections.abc import Callable, Sequence
from contextlib import closing
from errno import ENOMEM
from pathlib import Path

import lmdb
import pytest

from tests.disk.audit import LMDB_PAGE, Other, folder_of, get, keys, open_disk, opened, put
from tests.disk.child import NUMBERS, running
from tests.support.clock import wait_for
from tiers.concurrency.executors import BATCH_THREADS
from tiers.disk.disk_store import DiskStore
from tiers.disk.folder import upkeep
from tiers.disk.folder.upkeep import Upkeep
from tiers.disk.index import edit, fingerprint_index
from tiers.disk.index.edit import ADDED, fingerprint, index_key
from tiers.disk.index.fingerprint_index import (
    _ROW_BATCH,
    FingerprintIndex,
    FingerprintTable,
)
from tiers.disk.index.index import Index, Piece
from tiers.store import Clear, LocalIndex, capability
from tiers.wrappers.guard import Guarded
from tiers.wrappers.integrity import VerifiedStore

WAIT_S = 60.0
EVERY_NUMBER = range(300)
EVERY = keys(*EVERY_NUMBER)


class Later:
    """In place of the executor that makes tables: keeps what it is given until it is told to run
    it. `tables`: those that were begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Callable[[], None]] = []
        self.tables: list[FingerprintTable] = []
        original = FingerprintTable

        def made(room: int) -> FingerprintTable:
            self.tables.append(original(room))
            return self.tables[-1]

        monkeypatch.setattr(fingerprint_index, "IoExecutor", lambda count, name: self)
        monkeypatch.setattr(fingerprint_index, "FingerprintTable", made)

    def submit(self, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def run(self) -> None:
        while self.calls:
            self.calls.pop()()

    def shutdown(self) -> None: ...


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Later:
    return Later(monkeypatch)


def settled(store: DiskStore) -> DiskStore:
    """The store, once it has a table; one of few blocks is made at once."""
    wait_for(lambda: capability(store, LocalIndex) is not None)
    return store


def agree(store: DiskStore) -> list[bool]:
    answers = store.peek(EVERY)
    assert answers == store.has(EVERY)
    return answers


@pytest.mark.parametrize("known", [0, 5000])
def test_a_table_is_a_set(known: int) -> None:
    chance = random.Random(known)
    index_keys = [bytes(8) + chance.randbytes(16) for _ in range(12_000)]
    live = set(index_keys[:known])
    # Far more than it was made for, so that buckets overflow.
    table = FingerprintTable(known // 2)
    for start in range(0, known, 1000):  # each key twice
        table.add(b"".join(index_keys[max(0, start - 1000) : start + 1000]))
    for _ in range(40):
        some = chance.sample(index_keys, 400)
        changes = [fingerprint(one) | (0 if one in live else ADDED) for one in some]
        table.apply(array("q", changes))
        table.apply(array("q", changes))
        live ^= set(some)
        assert table.has([one[8:] for one in index_keys]) == [one in live for one in index_keys]
        few = chance.sample(index_keys, 30) + [one for one in some if one in live][:2]
        assert table.has([one[8:] for one in few]) == [one in live for one in few]
        assert table.count == len(live)


def test_it_follows_stores_evictions_and_drops(tmp_path: Path) -> None:
    chance = random.Random(1)
    with opened(tmp_path, slots=40) as store:
        put(store, keys(*range(20)))
        settled(store)
        for _ in range(30):
            put(store, keys(*chance.sample(range(300), 5)))
            store.drop(keys(*chance.sample(range(300), 3)))
            agree(store)
        assert store.clear(EVERY[0][:16]) is False
        assert agree(store) == [False] * 300
        assert put(store, keys(7)) == [True]
        assert agree(store)[7]
    with opened(tmp_path, slots=40) as store:
        settled(store)
        assert [n for n, held in enumerate(agree(store)) if held] == [7]


def test_it_sees_what_other_processes_do(tmp_path: Path) -> None:
    with opened(tmp_path, slots=16) as store:
        settled(store)
        child = running("churn", tmp_path, 3, 60)
        while child.lives:
            store.peek(EVERY)
        assert child.gone() == 0
        settled(store)
        held = agree(store)
        assert any(held[:NUMBERS])


STORES_WHEN_TOLD = """
from tiers.disk.index import edit, fingerprint_index
edit._LOG_BYTES = int(args[1])
with opened(path, slots=200) as store:
    say("open")
    for number in range(200, 5000, 5):
        if not wait():
            break
        put(store, keys(*range(number, number + 5)))
        say("stored")
"""


@pytest.mark.parametrize(("at_a_piece", "tables"), [(1, 1), (50, 2)])
def test_another_process_stores_while_a_table_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_a_piece: int, tables: int
) -> None:
    """At each piece of the index the other stores. The log is shorter than all that, and a table is
    made anew only if it is shorter than what is stored at one piece."""
    log = LMDB_PAGE if at_a_piece == 1 else 4096  # of several rows, or of one where pages are large
    monkeypatch.setattr(edit, "_LOG_BYTES", log)
    monkeypatch.setattr("tiers.disk.index.fingerprint_index._KEY_BATCH", 5)
    made: list[FingerprintTable] = []
    original = FingerprintTable.add

    def add(table: FingerprintTable, some: bytes) -> None:
        if table not in made:
            made.append(table)
        for _ in range(at_a_piece if len(made) < 4 and (at_a_piece == 1 or len(made) == 1) else 0):
            other.tell()
            assert other.hear() == "stored"
        original(table, some)

    monkeypatch.setattr(FingerprintTable, "add", add)
    with opened(tmp_path, slots=200) as store:
        put(store, keys(*range(200)))
        other = Other(STORES_WHEN_TOLD, tmp_path, log)
        assert other.hear() == "open"
        settled(store)
        every = keys(*range(5000))
        wait_for(lambda: store.peek(every) == store.has(every))
        assert len(made) == tables and made[-1].count == store.usage().blocks
        other.end()


def test_a_table_follows_the_log_though_nobody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: Later
) -> None:
    monkeypatch.setattr(edit, "_LOG_BYTES", LMDB_PAGE)
    monkeypatch.setattr(upkeep, "EVERY_S", 0.02)
    applied: list[int] = []
    original = FingerprintTable.apply

    def apply(table: FingerprintTable, changes: array[int]) -> None:
        original(table, changes)
        applied.append(len(changes))

    monkeypatch.setattr(FingerprintTable, "apply", apply)
    with opened(tmp_path, slots=200) as store:
        put(store, keys(*range(100)))
        settled(store)
        for number in range(100, 200):  # the log keeps some 60 of these rows
            put(store, keys(number))
            if number % 20 == 0:
                wait_for(lambda count=number - 99: sum(applied) >= count)  # type: ignore[misc]
        agree(store)
        assert len(later.tables) == 1


def asks_no_index(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    with monkeypatch.context() as patched:
        patched.delattr(Index, "has")
        return store.peek(EVERY)


def test_a_table_that_lost_the_log_serves_until_another_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: Later
) -> None:
    monkeypatch.setattr(edit, "_LOG_BYTES", 4096)
    monkeypatch.setattr(Upkeep, "start", lambda self: None)
    with opened(tmp_path, slots=300) as store:
        put(store, keys(0, 1))
        settled(store)
        for start in range(2, 300, 2):
            put(store, keys(start, start + 1))
        for _ in range(2):
            assert asks_no_index(store, monkeypatch) == [True] * 2 + [False] * 298
        assert len(later.calls) == 1
        later.run()
        assert len(later.tables) == 2
        assert agree(store) == [True] * 300


def test_a_lookup_follows_some_of_the_log_and_leaves_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: Later
) -> None:
    monkeypatch.setattr(Upkeep, "start", lambda self: None)
    with opened(tmp_path, slots=300) as store:
        settled(store)
        puts = _ROW_BATCH + 5
        for number in range(puts):
            put(store, keys(number))
        followed = [number < _ROW_BATCH for number in EVERY_NUMBER]
        assert asks_no_index(store, monkeypatch) == followed
        assert len(later.calls) == 1
        later.run()
        assert len(later.tables) == 1
        assert asks_no_index(store, monkeypatch) == [number < puts for number in EVERY_NUMBER]
        assert not later.calls


def test_a_local_index_only_once_its_table_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: Later
) -> None:
    """No lookup of the engine's thread goes to an index of millions of blocks."""
    guarded = Guarded(open_disk(tmp_path, slots=40), "disk")
    with closing(guarded) as store:
        assert capability(store, LocalIndex) is not None  # of few blocks: at once
    with opened(tmp_path, slots=40) as store:
        put(store, keys(*range(30)))
        monkeypatch.setattr("tiers.disk.index.fingerprint_index._KEY_BATCH", 10)
        guarded = Guarded(store, "disk")
        assert [capability(guarded, LocalIndex) for _ in range(2)] == [None, None]
        assert capability(guarded, Clear) is not None
        (make,) = later.calls
        make()
        assert capability(guarded, LocalIndex) is not None
        assert agree(store) == [number < 30 for number in EVERY_NUMBER]


def made_slowly(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Have tables wait while they are made: the events of having begun, and of going on."""
    begun, over = threading.Event(), threading.Event()
    original = Index.piece

    def slow(self: Index, row: int | None, after: bytes, limit: int) -> Piece | None:
        begun.set()
        assert over.wait(WAIT_S)
        return original(self, row, after, limit)

    monkeypatch.setattr(Index, "piece", slow)
    return begun, over


def test_a_table_takes_no_thread_of_reads_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, over = made_slowly(monkeypatch)
    with opened(tmp_path) as store:
        put(store, keys(0))
        store.peek(keys(0))
        assert begun.wait(WAIT_S)
        meeting = threading.Barrier(BATCH_THREADS)
        met = [folder_of(store).threads.submit(meeting.wait, WAIT_S) for _ in range(BATCH_THREADS)]
        assert sorted(one.result() for one in met) == list(range(BATCH_THREADS))
        over.set()


@pytest.mark.parametrize(
    "error",
    [
        lmdb.ReadersFullError("readers"),
        OSError(ENOMEM, "memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_where_no_other_table_can_be_made_the_index_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A table that has lost the log would name what went, and miss what came, from then on."""
    monkeypatch.setattr(edit, "_LOG_BYTES", 4096)
    monkeypatch.setattr(Upkeep, "start", lambda self: None)

    def fails(*_: object) -> None:
        raise error

    store = open_disk(tmp_path, slots=300)
    with closing(Guarded(VerifiedStore(store, 64), "disk")) as wrapped:
        put(store, keys(0, 1))
        assert capability(wrapped, LocalIndex) is not None
        store.drop(keys(0))
        for start in range(2, 300, 2):
            put(store, keys(start, start + 1))
        monkeypatch.setattr("tiers.disk.index.fingerprint_index.FingerprintTable", fails)
        wrapped.peek(EVERY)
        wait_for(lambda: wrapped.peek(EVERY) == [False] + [True] * 299)
        assert not wrapped.failures.total


@pytest.mark.parametrize("looks", range(5))
def test_a_lookup_whose_table_goes_at_any_moment_is_answered(
    tmp_path: Path, looks: int, later: Later, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that can't make another, or read the index, drops it."""
    monkeypatch.setattr(Upkeep, "start", lambda self: None)
    with opened(tmp_path) as store:
        put(store, keys(*range(4)))
        table = settled(store)._folder.fingerprints._table
        put(store, keys(4))
        left = iter([table] * looks)
        going = property(lambda _: next(left, None), lambda _, made: None)
        monkeypatch.setattr(FingerprintIndex, "_table", going, raising=False)
        agree(store)


def test_closing_waits_for_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, stopped = threading.Event(), threading.Event()
    original = FingerprintIndex.stop

    def add(table: FingerprintTable, some: bytes) -> None:
        begun.set()
        assert stopped.wait(WAIT_S)
        pieces.append(some)

    def stop(self: FingerprintIndex) -> None:
        original(self)
        stopped.set()

    pieces: list[bytes] = []
    monkeypatch.setattr("tiers.disk.index.fingerprint_index._KEY_BATCH", 1)
    monkeypatch.setattr(FingerprintTable, "add", add)
    monkeypatch.setattr(FingerprintIndex, "stop", stop)
    with opened(tmp_path) as store:
        put(store, keys(*range(8)))
        store.peek(keys(0))
        assert begun.wait(WAIT_S)
    assert len(pieces) == 1


def test_a_lookup_reads_the_log_where_somebody_has_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    original = Index.changes

    def changes(index: Index, row: int, limit: int) -> tuple[list[array[int]] | None, int]:
        read.append(row)
        return original(index, row, limit)

    with opened(tmp_path) as store, opened(tmp_path) as other:
        settled(store)
        monkeypatch.setattr(Index, "changes", changes)
        for writer, number in ((store, 1), (other, 2)):
            put(writer, keys(number))
            assert store.peek(keys(number)) == [True]
            before = len(read)
            assert store.peek(keys(number, 3)) == [True, False]
            assert len(read) == before > 0
            read.clear()


def test_a_commit_that_the_reading_did_not_see_yet_is_read_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB tells of a commit a moment before it lets transactions see it."""
    original = Index.changes

    def too_early(index: Index, row: int, limit: int) -> tuple[list[array[int]], int]:
        monkeypatch.undo()
        _, commit = original(index, row, limit)
        return [], commit - 1

    with opened(tmp_path) as store:
        settled(store)
        put(store, keys(1))
        monkeypatch.setattr(Index, "changes", too_early)
        assert [store.peek(keys(1)) for _ in range(2)] == [[False], [True]]


def test_closing_is_not_forgotten_while_a_table_catches_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: Later
) -> None:
    store = settled(open_disk(tmp_path))
    fingerprints = folder_of(store).fingerprints
    follows: list[threading.Thread] = []

    def endless(index: Index, row: int, limit: int) -> tuple[list[array[int]], int]:
        follows.append(threading.Thread(target=fingerprints.stop))
        if len(follows) == 3:  # of which the first two are lookups
            follows[-1].start()
            follows[-1].join(0.05)
        return [array("q")] * (limit if len(follows) < 200 else 0), 0

    put(store, EVERY[:1])
    monkeypatch.setattr(Index, "changes", endless)
    store.peek(EVERY)
    later.run()
    assert 3 <= len(follows) < 200, "it went on"
    store.close()


def test_a_crowded_table_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: Later
) -> None:
    monkeypatch.setattr("tiers.disk.index.fingerprint_index._FILL_MAX", 0.7)
    with opened(tmp_path, slots=300) as store:
        settled(store)
        put(store, keys(*range(200)))
        assert agree(store)[:200] == [True] * 200  # it serves until the larger one is made
        assert len(later.tables) == 1
        later.run()
        assert agree(store)[:200] == [True] * 200
        assert len(later.tables) == 2 and not later.calls


def test_a_table_learns_what_the_one_before_followed_while_it_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: Later
) -> None:
    original = FingerprintIndex._make

    def make(index: FingerprintIndex) -> tuple[FingerprintTable, int] | None:
        made = original(index)
        put(store, keys(250))
        assert store.peek(keys(250)) == [True], "in the table before"
        return made

    with opened(tmp_path, slots=300) as store:
        settled(store)
        monkeypatch.setattr("tiers.disk.index.fingerprint_index._FILL_MAX", 0.7)
        monkeypatch.setattr(FingerprintIndex, "_make", make)
        put(store, keys(*range(200)))
        store.peek(keys(0))
        later.run()
        assert len(later.tables) == 2
        assert store.peek(keys(250)) == [True]


def test_no_lookup_waits_for_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, over = made_slowly(monkeypatch)
    with opened(tmp_path) as store:
        put(store, keys(0))
        assert store.peek(keys(0, 1)) == [True, False]
        assert begun.wait(WAIT_S)
        put(store, keys(1))
        store.drop(keys(0))
        assert store.peek(keys(0, 1)) == [False, True]
        over.set()
        settled(store)
        assert agree(store)[:3] == [False, True, False]


def test_two_fingerprints_that_are_one_cost_a_miss(tmp_path: Path, later: Later) -> None:
    store = open_disk(tmp_path)
    put(store, keys(0))
    settled(store)
    later.tables[-1].apply(array("q", [fingerprint(index_key(keys(1)[0])) | ADDED]))
    assert store.peek(keys(0, 1)) == [True, True]
    assert get(store, keys(0, 1)) == [True, False]
    store.close()


def test_a_peek_reaches_the_table_in_four_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread asks at each step, so nothing in between only hands on."""
    frames: list[str] = []

    def has(table: FingerprintTable, digests: Sequence[bytes]) -> list[bool]:
        frames.extend(frame.name for frame in traceback.extract_stack())
        return [True] * len(digests)

    with opened(tmp_path) as store:
        settled(store)
        monkeypatch.setattr(FingerprintTable, "has", has)
        assert Guarded(store, "disk").peek(keys(0)) == [True]
    here = frames.index("test_a_peek_reaches_the_table_in_four_frames")
    assert frames[here + 1 :] == ["peek", "peek", "peek", "has"]
