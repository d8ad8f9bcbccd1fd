"""An index that is damaged, full, locked or not ours, and the uses that wait for it."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import lmdb
import pytest

from tests.disk.audit import (
    LMDB_PAGE,
    SLOT,
    Other,
    audit,
    folder_of,
    get,
    key,
    keys,
    make_index,
    open_disk,
    opened,
    put,
    slab_path,
)
from tiers.disk.folder.owner import Owner
from tiers.disk.index import edit, slot_allocator
from tiers.disk.index.edit import index_key
from tiers.disk.index.index import translated
from tiers.disk.index.slot_allocator import PendingUses
from tiers.disk.spec import DiskSpec
from tiers.errors import TierError, TierFull, TierNotOpen, TierUnavailable, TierUnusable

pytestmark = [
    pytest.mark.usefixtures("mode"),
    pytest.mark.parametrize("mode", ["buffered none"], indirect=True),
]
"""How slabs are read and written is nothing to the index."""


@pytest.mark.fault
@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("damage", ["garbage", "cut", "short"])
def test_a_damaged_index_empties_the_tier(tmp_path: Path, damage: str, sealed: bool) -> None:
    with opened(tmp_path) as store:
        put(store, keys(0, 1, 2))
    index = tmp_path / "index.mdb"
    if not sealed:
        (tmp_path / "index.seal").unlink()
    if damage == "garbage":
        index.write_bytes(random.Random(7).randbytes(65536))
    else:
        os.truncate(index, 3 * LMDB_PAGE if damage == "cut" else 100)
    with opened(tmp_path) as store:
        assert get(store, keys(0, 1, 2)) == [False] * 3
        assert put(store, keys(0, 1, 2)) == [True] * 3
        audit(store)


@pytest.mark.fault
def test_an_index_of_another_format_is_left_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, keys(0))
    (tmp_path / "index.seal").unlink()  # as whoever changes the index does
    with lmdb.open(str(tmp_path / "index.mdb"), subdir=False, max_dbs=8) as env:
        meta = env.open_db(b"meta")
        with env.begin(db=meta, write=True) as txn:
            txn.put(b"format", b"kvtiers index 99")
    for _ in range(2):
        with pytest.raises(TierUnusable, match=r"format 'kvtiers index 99'.*this version"):
            open_disk(tmp_path)
        Owner(tmp_path / "owners", synced=False).leave(clean=False)  # of a process that was killed
    assert slab_path(tmp_path).stat().st_size > 0


def overwritten(content: bytes, page: bytes, having: bytes) -> bytes:
    """An index in which `page` is wherever a page has these bytes."""
    pages = [content[n : n + LMDB_PAGE] for n in range(0, len(content), LMDB_PAGE)]
    assert any(having in one for one in pages)
    return b"".join(page if having in one else one for one in pages)


@pytest.mark.fault
@pytest.mark.parametrize("lost", ["tables", "format", "its text"])
def test_a_torn_index_that_a_dead_process_left_is_not_taken_for_another_programs(
    tmp_path: Path, lost: str
) -> None:
    """The device has a page as it was before, another table's. It was refused for good."""
    index = tmp_path / "index.mdb"
    child = Other(
        "store = open_disk(path); put(store, keys(*range(8))); say('open'); wait()", tmp_path
    )
    assert child.hear() == "open"
    child.kill()
    content, named = index.read_bytes(), b"kvtiers index 3"
    older = content.index(index_key(key(0))) // LMDB_PAGE * LMDB_PAGE
    if lost == "its text":
        index.write_bytes(content.replace(named, bytes(len(named))))
    else:
        having = named if lost == "format" else b"recency"
        index.write_bytes(overwritten(content, content[older : older + LMDB_PAGE], having))
    found = [
        one for one in DiskSpec(path=tmp_path, capacity=SLOT).examine() if "index" in one.found
    ]
    (note,) = (one.found for one in found if one.gravity in ("note", "error"))
    assert note.startswith("it will start empty: ") and "the index is damaged" in note
    with opened(tmp_path) as store:
        assert get(store, keys(*range(8))) == [False] * 8
        assert put(store, keys(0)) == [True]
        audit(store)


@pytest.mark.fault
@pytest.mark.parametrize("place", [16, 24])
def test_an_index_of_another_lmdb_is_left_alone(tmp_path: Path, place: int) -> None:
    """Whose magic number may be elsewhere: LMDB calls that no file of its own."""
    with opened(tmp_path) as store:
        put(store, keys(0))
    (tmp_path / "index.seal").unlink()
    index = tmp_path / "index.mdb"
    content = bytearray(index.read_bytes())
    for meta in (0, LMDB_PAGE):  # a magic number, then the data format's version
        magic = content[meta + 16 : meta + 20]
        content[meta + 16 : meta + 24] = bytes(8)
        content[meta + place : meta + place + 8] = magic + (7).to_bytes(4, "little")
    index.write_bytes(content)
    for _ in range(2):
        with pytest.raises(TierUnusable, match=r"index.mdb has LMDB's format 7, .*another folder"):
            open_disk(tmp_path)
        assert index.read_bytes() == content
        Owner(tmp_path / "owners", synced=False).leave(clean=False)  # of a process that was killed


@pytest.mark.fault
def test_an_index_that_another_lmdb_has_open_opens_behind_it(tmp_path: Path) -> None:
    """As of two versions of an engine, the second of which waits for the first."""
    child = Other("store = open_disk(path); put(store, keys(0)); say('open'); wait()", tmp_path)
    assert child.hear() == "open"
    with (tmp_path / "index.mdb-lock").open("r+b") as lock:
        lock.seek(4)  # behind a magic number is the format of what follows
        lock.write(b"\7")
    with pytest.raises(TierNotOpen, match=r"processes with another version of LMDB .*; end them"):
        open_disk(tmp_path)
    child.kill()
    with opened(tmp_path) as store:
        assert get(store, keys(0)) == [True]


@pytest.mark.fault
@pytest.mark.parametrize("name", [b"theirs", b"meta"])
def test_another_programs_index_is_left_alone(tmp_path: Path, name: bytes) -> None:
    index = str(tmp_path / "index.mdb")
    with lmdb.open(index, subdir=False, mode=0o600) as env, env.begin(write=True) as txn:
        txn.put(name, b"precious")
    with pytest.raises(TierUnusable, match="another program"):
        open_disk(tmp_path)
    with lmdb.open(str(tmp_path / "index.mdb"), subdir=False) as env, env.begin() as txn:
        assert txn.get(name) == b"precious"


@pytest.mark.parametrize(("free", "kind"), [(3, TierFull), (1 << 20, TierUnavailable)])
def test_a_write_that_a_full_file_system_took_in_part_is_no_error_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, kind: type[TierError]
) -> None:
    """As a commit on a tmpfs of 40 MB said, which others had filled. Else the log has an
    input/output error, writes are down, and nothing is evicted for a new block."""
    room = SimpleNamespace(f_bavail=free)
    monkeypatch.setattr(os, "statvfs", lambda path: room)
    with pytest.raises(kind, match="mdb"), translated(tmp_path):
        raise lmdb.Error(f"mdb_txn_commit: {os.strerror(errno.EIO)}")
    monkeypatch.undo()
    with pytest.raises(TierUnavailable, match="mdb"), translated(tmp_path / "gone"):
        raise lmdb.Error(f"mdb_txn_commit: {os.strerror(errno.EIO)}")


@pytest.mark.fault
def test_a_full_index_declines_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiers.disk.index.index.MAP_BYTES", 20 * LMDB_PAGE)
    with opened(tmp_path, slots=3000) as store:
        with pytest.raises(TierFull):
            for n in range(600 * LMDB_PAGE // 4096):
                put(store, [key(n) + bytes(80)], 1000)
        assert put(store, [key(0) + bytes(80)], 1000) == [True]


@pytest.mark.parametrize("page", [1 << 12, 1 << 15])
def test_an_index_of_a_machine_with_other_pages_serves_and_its_log_is_as_long(
    tmp_path: Path, page: int
) -> None:
    """LMDB has pages of the system's size, and of 32 KiB where that is 64 KiB, as on aarch64."""
    make_index(tmp_path / "index.mdb", page)
    with opened(tmp_path) as store:
        for start in (0, 8):
            assert all(put(store, keys(*range(start, start + 8))))
    with opened(tmp_path) as store:
        assert get(store, keys(*range(16))) == [False] * 8 + [True] * 8
        audit(store)
        index = folder_of(store).index
        with index.edit(b"owner") as changed:
            for row in range(400):
                changed._log(array("q", [row] * 500))
        with index.begin("changes") as txn:
            log = txn.stat()
        assert log["psize"] == page and log["entries"] > 100
        assert (log["leaf_pages"] + log["overflow_pages"]) * page <= 1 << 20


def test_of_uses_that_nobody_writes_down_the_last_ones_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slot_allocator, "_MAX_USES", 4)
    uses = PendingUses()
    uses.record(keys(1, 0))
    uses.record(keys(4, 3, 2))
    uses.record(keys(0, 1))
    assert len(uses) == 4 and keys(2)[0] not in uses
    assert uses.take() == keys(3, 4, 1, 0)


@pytest.mark.parametrize("take", [PendingUses.take, lambda uses: uses.take_before(1)[:1]])
def test_a_use_that_is_recorded_as_others_take_is_not_lost(
    take: Callable[[PendingUses], list[bytes]],
) -> None:
    """Between the two steps of a record others may run."""
    uses, taken = PendingUses(), list[bytes]()

    class Slow(bytes):
        """A key that lets others run as it is looked for."""

        def __hash__(self) -> int:
            if not taker.is_alive() and not taken:
                taker.start()
            time.sleep(0.01)
            return super().__hash__()

    taker = threading.Thread(target=lambda: taken.extend(take(uses)))
    uses.record([Slow(b"key")])
    taker.join()
    assert taken == [b"key"] and not uses


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EIO])
def test_a_lock_that_the_file_system_can_t_give_costs_that_write_alone(
    tmp_path: Path, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as store:
        put(store, keys(0))
        with monkeypatch.context() as patch:

            def lockf(handle: int, mode: int, length: int) -> None:
                raise OSError(error, os.strerror(error))

            patch.setattr(fcntl, "lockf", lockf)
            with pytest.raises(TierUnavailable, match=os.strerror(error)):
                put(store, keys(1))
            assert get(store, keys(0)) == [True]
        assert put(store, keys(1)) == [True]
        audit(store)


def test_beside_many_uses_of_what_is_gone_a_block_is_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step looks at a few of them only, and each block was used since."""
    monkeypatch.setattr(slot_allocator, "MAX_SKIPPED", 5)
    with opened(tmp_path, slots=2) as store:
        put(store, keys(0, 1))
        store.touch(keys(0, 1, *range(100, 120)))
        assert put(store, keys(2)) == [True]
        assert sum(store.has(keys(0, 1))) == 1


def test_the_time_is_noted_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In few bytes: of the older half every second note goes."""
    monkeypatch.setattr(edit, "_MOMENTS", 8)
    now = [1e6]
    monkeypatch.setattr(time, "time", lambda: now[0])
    with opened(tmp_path) as store:
        index = folder_of(store).index
        for n in range(3):
            put(store, keys(n))
        assert [at for at, _ in index.times()] == [10**6]
        for _ in range(8):
            now[0] += edit.MOMENT_EVERY
            put(store, keys(8))
            store.drop(keys(8))
        times = index.times()
        assert [(at - 10**6) // edit.MOMENT_EVERY for at, _ in times] == [0, 2, 4, 5, 6, 7, 8]
        assert sorted(stamp for _, stamp in times) == [stamp for _, stamp in times]
