"""Lookups by the table in memory say what the index says, whoever changes it."""

from __future__ import annotations

import random
import threading
import time
import traceback
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.disk_audit import get, keys, open_disk, opened, put, run_child
from tests.support.disk_child import NUMBERS
from tiers.disk import edit
from tiers.disk.fingerprint_index import CELLS, FingerprintTable
from tiers.disk.index import Index, Snapshot
from tiers.disk.rows import ADDED, fingerprint, index_key
from tiers.disk.store import DiskStore
from tiers.wrappers.guard import Guarded

WAIT_S = 60.0
EVERY = keys(*range(300))


def settled(store: DiskStore) -> DiskStore:
    """The store, once it has a table that is up to date."""
    fingerprints = store._folder.fingerprints
    deadline = time.monotonic() + WAIT_S
    store.peek(EVERY)
    while fingerprints._renewing:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert fingerprints._table is not None
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
    words = b"".join(one[8:16] for one in index_keys[:known])
    # Far more than it was made for, so that buckets overflow.
    table = FingerprintTable(known, [words[: 8 * 3000], words[8 * 3000 :]] if known else [])
    for _ in range(40):
        some = chance.sample(index_keys, 400)
        changes = [fingerprint(one) | (0 if one in live else ADDED) for one in some]
        table.apply(array("q", changes))
        live ^= set(some)
        assert table.has([one[8:] for one in index_keys]) == [one in live for one in index_keys]
        assert table.count == len(live)
    assert len(table._overflow) > CELLS


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
        child = run_child("churn", tmp_path, 3, 60)
        while child.poll() is None:
            store.peek(EVERY)
        child.communicate()
        assert child.returncode == 0
        settled(store)
        held = agree(store)
        assert any(held[:NUMBERS])


def test_a_table_that_lost_the_log_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edit, "_LOG_PAGES", 1)
    with opened(tmp_path, slots=300) as store:
        settled(store)
        first = store._folder.fingerprints._table
        for start in range(0, 300, 2):
            put(store, keys(start, start + 1))
        agree(store)
        settled(store)
        assert store._folder.fingerprints._table is not first
        assert agree(store) == [True] * 300


def test_a_crowded_table_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiers.disk.fingerprint_index._FILL_MAX", 0.7)
    with opened(tmp_path, slots=300) as store:
        settled(store)
        put(store, keys(*range(200)))
        first = store._folder.fingerprints._table
        agree(store)
        assert agree(settled(store))[:200] == [True] * 200
        assert store._folder.fingerprints._table is not first


def test_no_lookup_waits_for_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, over = threading.Event(), threading.Event()
    original = Index.snapshot

    @contextmanager
    def slow(self: Index) -> Iterator[Snapshot]:
        begun.set()
        assert over.wait(WAIT_S)
        with original(self) as live:
            yield live

    monkeypatch.setattr(Index, "snapshot", slow)
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


def test_two_fingerprints_that_are_one_cost_a_miss(tmp_path: Path) -> None:
    store = open_disk(tmp_path)
    put(store, keys(0))
    settled(store)
    table = store._folder.fingerprints._table
    assert table is not None
    table.apply(array("q", [fingerprint(index_key(keys(1)[0])) | ADDED]))
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
