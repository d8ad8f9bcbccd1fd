"""Cut files and failing reads and writes of slabs: fewer hits, never a wrong block."""

from __future__ import annotations

import os
import resource
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.disk.audit import (
    PAYLOAD,
    SLOT,
    audit,
    folder_of,
    get,
    keys,
    open_disk,
    opened,
    put,
    slab_path,
)
from tiers.disk import slab as slab_files
from tiers.disk.slab import PAGE

pytestmark = pytest.mark.usefixtures("mode")


def test_a_block_that_is_stored_anew_while_it_is_read_is_not_damaged(tmp_path: Path) -> None:
    """Evicted, overwritten and back in its slot with the same bytes: the reader saw another's."""
    with opened(tmp_path, slots=1) as store, pytest.MonkeyPatch.context() as patched:
        put(store, keys(0))
        read = slab_files.Slab.read

        def overtaken(slab: slab_files.Slab, *args: Any) -> object:
            patched.undo()
            put(store, keys(1))
            found = read(slab, *args)
            put(store, keys(0))
            return found

        patched.setattr(slab_files.Slab, "read", overtaken)
        assert get(store, keys(0)) == [False]
        assert store.damaged() == 0 and store.has(keys(0)) == [True]
        assert get(store, keys(0)) == [True]


@pytest.mark.fault
def test_an_older_record_of_the_same_key_is_a_miss(tmp_path: Path) -> None:
    from tiers.testing import Memory

    with opened(tmp_path) as store:
        put(store, keys(0))
        old = slab_path(tmp_path).read_bytes()
        store.drop(keys(0))
        assert store.put(Memory(keys(0), PAYLOAD).fill(version=1).blocks) == [True]
        slab_path(tmp_path).write_bytes(old)
        assert get(store, keys(0)) == [False]


@pytest.mark.fault
@pytest.mark.parametrize("piece", [8 << 20, 2 * PAGE], ids=["whole", "in pieces"])
def test_a_slab_cut_while_open_is_a_miss(
    tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab_files, "_PIECE", piece)
    with opened(tmp_path) as store:
        put(store, keys(0, 1, 2, 3))
        os.truncate(slab_path(tmp_path), SLOT + SLOT // 2)
        hits = get(store, keys(0, 1, 2, 3))
        assert sum(hits) == 1
        assert store.peek(keys(0, 1, 2, 3)) == hits
        assert put(store, keys(0, 1, 2, 3)) == [True] * 4
        assert get(store, keys(0, 1, 2, 3)) == [True] * 4
        audit(store)


@pytest.mark.fault
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_slab_cut_while_closed_empties_the_tier(tmp_path: Path, damage: str) -> None:
    with opened(tmp_path) as store:
        put(store, keys(0, 1, 2))
    if damage == "cut":
        os.truncate(slab_path(tmp_path), 2 * SLOT)
    else:
        slab_path(tmp_path).unlink()
    before = set(threading.enumerate())
    with opened(tmp_path) as store:
        assert store.usage().blocks == 0
        begun = set(threading.enumerate()) - before
        names = [thread.name.rstrip("0123456789") for thread in begun]
        assert names.count("kvtiers-disk_") == 4 and names.count("kvtiers-disk-table_") == 1
        assert put(store, keys(0, 1)) == [True, True]
        assert get(store, keys(0, 1, 2)) == [True, True, False]
        audit(store)


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """No write of this process gets beyond so many bytes of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.fault
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


@pytest.mark.fault
def test_a_tier_that_can_not_grow_evicts(tmp_path: Path) -> None:
    with opened(tmp_path, slots=100) as store:
        with file_limit(6 * SLOT):
            for n in range(20):
                assert put(store, keys(n)) == [True]
            assert get(store, keys(18, 19, 0)) == [True, True, False]
            audit(store)
        assert all(put(store, keys(*range(20, 30))))
        assert store.usage().blocks == 16


@pytest.mark.fault
def test_a_folder_removed_under_the_store_kills_nothing(tmp_path: Path) -> None:
    store = open_disk(tmp_path / "t")
    put(store, keys(0, 1))
    with folder_of(store).upkeep.held_back():  # it would close what it finds gone
        shutil.rmtree(tmp_path / "t")
        assert get(store, keys(0, 1, 2)) == [True, True, False]
        put(store, keys(3))
    store.close()
    with opened(tmp_path / "t") as store:
        assert get(store, keys(0)) == [False]
