"""Killed processes, cut files, flipped bits, failing writes: fewer hits, never a wrong block."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import lmdb
import pytest
from disk_audit import (
    PAYLOAD,
    SLOT,
    audit,
    get,
    key,
    keys,
    open_disk,
    put,
    run_child,
    slab_path,
)
from disk_child import NUMBERS, payload_of_number

from tiers.disk.index import label
from tiers.disk.slab import PAGE
from tiers.disk.store import DiskStore
from tiers.errors import TierFull, TierUnavailable, TierUnusable

pytestmark = pytest.mark.usefixtures("mode")


@contextmanager
def opened(path: Path, slots: int = 8) -> Iterator[DiskStore]:
    store = open_disk(path, slots)
    try:
        yield store
    finally:
        store.close()


@pytest.mark.parametrize("offset", [20, 500, PAGE, SLOT // 2, PAGE + PAYLOAD - 1])
def test_a_flipped_bit_is_a_miss_and_the_block_goes(tmp_path: Path, offset: int) -> None:
    with opened(tmp_path) as store:
        put(store, keys(0, 1, 2))
        slot = store._vault.index.find([label(key(1))])[0].slot.number  # type: ignore[union-attr]
        with slab_path(tmp_path).open("r+b") as slab:
            slab.seek(slot * SLOT + offset)
            byte = slab.read(1)[0]
            slab.seek(-1, os.SEEK_CUR)
            slab.write(bytes([byte ^ 4]))
        assert get(store, keys(0, 1, 2)) == [True, False, True]
        assert store.peek(keys(0, 1, 2)) == [True, False, True]
        audit(store)
        assert put(store, keys(1)) == [True]
        assert get(store, keys(1)) == [True]


def test_a_record_in_anothers_slot_is_a_miss(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, keys(0, 1))
        data = slab_path(tmp_path).read_bytes().ljust(2 * SLOT, b"\0")
        slab_path(tmp_path).write_bytes(data[SLOT : 2 * SLOT] + data[:SLOT])
        assert get(store, keys(0, 1)) == [False, False]
        audit(store)


def test_an_older_record_of_the_same_key_is_a_miss(tmp_path: Path) -> None:
    from tiers.testing import Memory

    with opened(tmp_path) as store:
        put(store, keys(0))
        old = slab_path(tmp_path).read_bytes()
        store.drop(keys(0))
        assert store.put(Memory(keys(0), PAYLOAD).fill(version=1).blocks) == [True]
        slab_path(tmp_path).write_bytes(old)
        assert get(store, keys(0)) == [False]


def test_a_slab_cut_while_open_is_a_miss(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, keys(0, 1, 2, 3))
        os.truncate(slab_path(tmp_path), SLOT + SLOT // 2)
        hits = get(store, keys(0, 1, 2, 3))
        assert sum(hits) == 1
        assert store.peek(keys(0, 1, 2, 3)) == hits
        assert put(store, keys(0, 1, 2, 3)) == [True] * 4
        assert get(store, keys(0, 1, 2, 3)) == [True] * 4
        audit(store)


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_slab_cut_while_closed_empties_the_tier(tmp_path: Path, damage: str) -> None:
    with opened(tmp_path) as store:
        put(store, keys(0, 1, 2))
    if damage == "cut":
        os.truncate(slab_path(tmp_path), 2 * SLOT)
    else:
        slab_path(tmp_path).unlink()
    with opened(tmp_path) as store:
        assert store.usage().blocks == 0
        assert put(store, keys(0, 1)) == [True, True]
        assert get(store, keys(0, 1, 2)) == [True, True, False]
        audit(store)


@pytest.mark.parametrize("damage", ["garbage", "cut", "short"])
def test_a_damaged_index_empties_the_tier(tmp_path: Path, damage: str) -> None:
    with opened(tmp_path) as store:
        put(store, keys(0, 1, 2))
    index = tmp_path / "index.mdb"
    if damage == "garbage":
        index.write_bytes(random.Random(7).randbytes(65536))
    else:
        os.truncate(index, 3 * 4096 if damage == "cut" else 100)
    with opened(tmp_path) as store:
        assert get(store, keys(0, 1, 2)) == [False] * 3
        assert put(store, keys(0, 1, 2)) == [True] * 3
        audit(store)


def test_an_index_of_another_format_is_left_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, keys(0))
    with lmdb.open(str(tmp_path / "index.mdb"), subdir=False, max_dbs=8) as env:
        meta = env.open_db(b"meta")
        with env.begin(db=meta, write=True) as txn:
            txn.put(b"format", b"kvtiers index 99")
    with pytest.raises(TierUnusable, match=r"format 'kvtiers index 99'.*this version"):
        open_disk(tmp_path)
    assert slab_path(tmp_path).stat().st_size > 0


def test_another_programs_index_is_left_alone(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path / "index.mdb"), subdir=False) as env, env.begin(write=True) as txn:
        txn.put(b"theirs", b"precious")
    with pytest.raises(TierUnusable, match="another program"):
        open_disk(tmp_path)
    with lmdb.open(str(tmp_path / "index.mdb"), subdir=False) as env, env.begin() as txn:
        assert txn.get(b"theirs") == b"precious"


@pytest.mark.parametrize("mode", ["buffered none", "direct batch", "direct sync"], indirect=True)
def test_killed_at_any_moment(tmp_path: Path) -> None:
    chance = random.Random(11)
    served = 0
    for round_ in range(8):
        child = run_child("churn", tmp_path, round_, 10**9)
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        time.sleep(chance.uniform(0.0, 0.15))
        child.kill()
        child.communicate()
        with opened(tmp_path, slots=16) as store:
            audit(store)
            for number in range(NUMBERS):
                served += sum(get(store, keys(number), payload_of_number(number)))
            audit(store)
            assert store.usage().blocks == sum(store.peek(keys(*range(NUMBERS))))
    assert served > 40


def test_processes_share_a_folder_and_one_is_killed(tmp_path: Path) -> None:
    children = [run_child("churn", tmp_path, seed, 60) for seed in range(2)]
    victim = run_child("churn", tmp_path, 9, 10**9)
    with opened(tmp_path, slots=16) as store:
        for number in range(0, 2 * NUMBERS, 3):
            put(store, keys(number % NUMBERS), payload_of_number(number % NUMBERS))
            get(store, keys(number % NUMBERS), payload_of_number(number % NUMBERS))
        assert victim.stdout is not None and victim.stdout.readline() == "ready\n"
        victim.kill()
        victim.communicate()
        for child in children:
            child.communicate(timeout=60)
            assert child.returncode == 0
    with opened(tmp_path, slots=16) as store:
        audit(store)
    assert list((tmp_path / "owners").iterdir()) == []


def test_reservations_of_the_living_stay_and_of_the_dead_go(tmp_path: Path) -> None:
    child = run_child("reserve", tmp_path)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    with opened(tmp_path) as store:
        assert store.usage().used == 2 * SLOT
        assert put(store, keys(*range(8))) == [True] * 6 + [False] * 2
        audit(store)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    with opened(tmp_path) as store:
        assert store.usage().used == 6 * SLOT
        assert put(store, keys(*range(8))) == [True] * 8
        audit(store)


def test_a_reboot_without_a_close_empties_the_tier(tmp_path: Path) -> None:
    child = run_child("churn", tmp_path, 1, 10**9)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    time.sleep(0.1)
    child.kill()
    child.communicate()
    (owner,) = (tmp_path / "owners").iterdir()
    boot = "0" * 8 + "-0000-0000-0000-" + "0" * 12
    owner.rename(owner.with_name(f"{boot}.{owner.name.partition('.')[2]}"))
    with opened(tmp_path, slots=16) as store:
        assert store.usage().blocks == store.usage().used == 0
        put(store, keys(0))
    with opened(tmp_path, slots=16) as store:
        assert get(store, keys(0)) == [True]


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """No write of this process gets beyond so many bytes of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_writes_that_fail_cost_their_own_blocks_only(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, keys(*range(8)))
        with file_limit(4 * SLOT):
            answers = put(store, keys(*range(10, 18)))
        assert sum(answers) == 4
        assert get(store, keys(*range(10, 18))) == answers
        assert store.usage().used == 4 * SLOT
        audit(store)
        assert all(put(store, keys(*range(20, 28))))
        audit(store)


def test_a_tier_that_can_not_grow_evicts(tmp_path: Path) -> None:
    with opened(tmp_path, slots=100) as store:
        with file_limit(6 * SLOT):
            for n in range(20):
                assert put(store, keys(n)) == [True]
            assert get(store, keys(18, 19, 0)) == [True, True, False]
            audit(store)
        assert all(put(store, keys(*range(20, 30))))
        assert store.usage().blocks == 16


def test_a_broken_slab_leaks_no_slot(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, keys(*range(8)))
        handle = store._vault.slabs[SLOT]._handle
        kept = os.dup(handle)
        broken = os.open("/dev/full", os.O_RDWR)
        os.dup2(broken, handle)
        with pytest.raises((TierFull, TierUnavailable)):
            put(store, keys(10, 11, 12))
        with pytest.raises(TierUnavailable):
            get(store, keys(10, 11, 12)) if any(store.peek(keys(10))) else put(store, keys(13))
        os.dup2(kept, handle)
        os.close(kept)
        os.close(broken)
        assert put(store, keys(20)) == [True]
        audit(store)
        assert put(store, keys(*range(30, 38))) == [True] * 8
        audit(store)


def test_a_full_index_declines_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiers.disk import vault
    from tiers.disk.index import Index

    monkeypatch.setattr(vault, "Index", partial(Index, map_bytes=20 * 4096))
    with opened(tmp_path, slots=3000) as store:
        with pytest.raises(TierFull):
            for n in range(600):
                put(store, [key(n) + bytes(80)], 1000)
        assert put(store, [key(0) + bytes(80)], 1000) == [True]


def test_a_folder_removed_under_the_store_kills_nothing(tmp_path: Path) -> None:
    store = open_disk(tmp_path / "t")
    put(store, keys(0, 1))
    shutil.rmtree(tmp_path / "t")
    assert get(store, keys(0, 1, 2)) == [True, True, False]
    put(store, keys(3))
    store.close()
    with opened(tmp_path / "t") as store:
        assert get(store, keys(0)) == [False]
