"""What a process does for a folder in the background, and that it does it in short steps."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from spec.offloading import StoreContext
from tests.disk.audit import (
    SLOT,
    Other,
    allocated,
    audit,
    fill_index,
    folder_of,
    get,
    key,
    keys,
    open_disk,
    opened,
    put,
    refused,
    run_code,
    settled,
)
from tests.support.clock import wait_for
from tiers.disk.disk_store import DiskStore
from tiers.disk.folder import upkeep
from tiers.disk.index import slot_allocator
from tiers.disk.index.edit import Edit, index_key
from tiers.disk.spec import DiskSpec
from tiers.errors import TierNotOpen, TierUnavailable

SHORT_S = 0.02
WAIT_S = 30.0
OPEN = """
store = open_disk(path)
assert put(store, keys(0)) == [True]
say("open")
wait()
assert get(store, keys(0)) == [True]
assert put(store, keys(1)) == [True]
audit(store)
store.close()
"""


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is done in the background be done at once."""
    monkeypatch.setattr(upkeep, "EVERY_S", SHORT_S)
    monkeypatch.setattr(upkeep, "FILES_EVERY_S", SHORT_S)


@pytest.mark.fault
@pytest.mark.parametrize("name", ["index.mdb", "index.mdb-lock"])
def test_no_process_joins_where_a_file_was_removed(tmp_path: Path, name: str) -> None:
    other = Other(OPEN, tmp_path)
    assert other.hear() == "open"
    (tmp_path / name).unlink()
    refused(tmp_path, f"{name} was removed, which other processes have open; end them all")
    assert not (tmp_path / name).exists()
    other.tell()
    other.end()
    with opened(tmp_path) as store:
        assert put(store, keys(3)) == [True]
        assert get(store, keys(3)) == [True]


@pytest.mark.usefixtures("often")
def test_what_is_removed_under_an_open_tier_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as store:
        put(store, keys(0))
        (tmp_path / "index.mdb-lock").unlink()
        end = time.monotonic() + WAIT_S
        while "removed while" not in caplog.text and time.monotonic() < end:
            time.sleep(SHORT_S)
        time.sleep(5 * SHORT_S)
        assert get(store, keys(0)) == [True]
    assert caplog.text.count("removed while the tier is open: index.mdb-lock;") == 1


@pytest.mark.usefixtures("often")
def test_a_folder_above_which_a_file_came_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all else of upkeep fails, too."""
    monkeypatch.setattr(upkeep, "PLACE_EVERY_S", SHORT_S)
    (tmp_path / "mount").mkdir()
    with opened(tmp_path / "mount" / "tier") as store:
        put(store, keys(0))
        (tmp_path / "mount").rename(tmp_path / "elsewhere")
        (tmp_path / "mount").write_text("a file")
        end = time.monotonic() + WAIT_S
        with pytest.raises(TierNotOpen, match="was removed or replaced"):
            while time.monotonic() < end:
                get(store, keys(0))
                time.sleep(SHORT_S)


@pytest.mark.fault
@pytest.mark.usefixtures("often")
def test_an_open_folder_that_others_may_write_to_is_told(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    with opened(tier) as store:
        assert store.warning() == ""
        tier.chmod(0o777)
        wait_for(lambda: "mode 0777, so others can write to it; chmod" in store.warning())
        tier.chmod(0o700)
        wait_for(lambda: not store.warning())
        (tier / "lock").chmod(0o666)
        wait_for(lambda: "lock has mode 0666, so others can use it" in store.warning())


@pytest.mark.fault
@pytest.mark.usefixtures("often")
def test_of_two_warnings_none_outlives_its_cause(tmp_path: Path) -> None:
    """And a lack of room does not hide that others may write."""
    tier = tmp_path / "tier"
    with opened(tier, slots=1 << 40) as store:
        wait_for(lambda: "its file system has room for" in store.warning())
        tier.chmod(0o777)
        wait_for(lambda: "mode 0777" in store.warning())
        tier.chmod(0o700)
        wait_for(lambda: "its file system has room for" in store.warning())
        tier.chmod(0o777)
        wait_for(lambda: "mode 0777" in store.warning())
        store.resize(8 * SLOT)
        tier.chmod(0o700)
        wait_for(lambda: not store.warning())


@pytest.mark.fault
@pytest.mark.usefixtures("often")
def test_a_capacity_that_another_process_sets_is_told_though_there_was_no_room(
    tmp_path: Path,
) -> None:
    """The old words stayed, with a capacity that no longer held."""
    with opened(tmp_path, slots=1 << 40) as store:
        wait_for(lambda: "its file system has room for" in store.warning())
        other = Other(OPEN, tmp_path)
        assert other.hear() == "open"
        wait_for(lambda: "another engine on its folder has set capacity" in store.warning())
        other.tell()
        other.end()


@pytest.mark.fault
@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("killed", [False, True])
def test_a_smaller_capacity_holds_until_the_process_that_set_it_ends(
    tmp_path: Path, killed: bool
) -> None:
    with opened(tmp_path, slots=100) as store:
        third = Other(OPEN.replace("open_disk(path)", "open_disk(path, slots=100)"), tmp_path)
        assert third.hear() == "open"
        other = Other(OPEN, tmp_path)
        assert other.hear() == "open"
        wait_for(lambda: "another engine on its folder has set capacity" in store.warning())
        smaller = store.usage().capacity
        time.sleep(10 * SHORT_S)
        assert store.usage().capacity == smaller == 8 * SLOT, "of one that is there"
        if killed:
            other.kill()
        else:
            other.tell()
            other.end()
        wait_for(lambda: store.usage().capacity == 100 * SLOT)
        wait_for(lambda: not store.warning())
        third.tell()
        third.end()


@pytest.mark.usefixtures("often")
def test_no_file_of_an_open_tier_looks_old(tmp_path: Path) -> None:
    """What cleans /tmp would remove the owner's file and the lock, and let another process in."""
    with opened(tmp_path) as store:
        put(store, keys(0))
        files = [file for file in tmp_path.rglob("*") if file.is_file()]
        assert {"index.mdb", "index.mdb-lock", "lock"} < {file.name for file in files}
        for file in files:
            os.utime(file, (0, 0))
        end = time.monotonic() + WAIT_S
        while any(file.stat().st_mtime < 1 for file in files) and time.monotonic() < end:
            time.sleep(SHORT_S)
        assert [file.name for file in files if min(file.stat()[7:9]) < 1] == []


def test_a_link_above_the_folder_that_leads_elsewhere_keeps_nothing_open(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    link = tmp_path / "link"
    link.symlink_to("old")
    with opened(link / "tier") as store:
        put(store, keys(0))
        link.unlink()
        link.symlink_to("new")
        with opened(link / "tier") as other:
            assert get(other, keys(0)) == [False]
        assert get(store, keys(0)) == [True]
    assert list((tmp_path / "old" / "tier" / "owners").iterdir()) == []
    with opened(tmp_path / "old" / "tier") as store:
        assert get(store, keys(0)) == [True]


@pytest.mark.fault
def test_a_folder_that_came_in_its_place_is_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is noticed, this one may meet a size of slots for the first time."""
    monkeypatch.setattr(upkeep.Keeping, "look", lambda keeping: None)
    tier = tmp_path / "tier"
    with opened(tier) as store:
        shutil.rmtree(tier)
        run_code("with opened(path) as store: put(store, keys(0, 1, 2))", tier)
        with suppress(TierUnavailable):
            put(store, keys(3, 4, 5))
            store.drop(keys(3, 4, 5))
    with opened(tier) as store:
        assert get(store, keys(0, 1, 2)) == [True] * 3
        audit(store)


def test_a_folder_that_was_moved_is_closed(tmp_path: Path) -> None:
    with opened(tmp_path / "tier") as store:
        put(store, keys(0))
        (tmp_path / "tier").rename(tmp_path / "moved")
        (tmp_path / "tier").symlink_to("moved")
    assert list((tmp_path / "moved" / "owners").iterdir()) == []
    with opened(tmp_path / "moved") as store:
        assert get(store, keys(0)) == [True]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The most often that one transaction did each of these."""
    most: Counter[str] = Counter()
    here: dict[int, Counter[str]] = {}

    def watch(name: str) -> None:
        original = getattr(Edit, name)

        def counting(edit: Edit, *args: object) -> object:
            mine = here.setdefault(id(edit), Counter())
            mine[name] += 1
            most[name] = max(most[name], mine[name])
            return original(edit, *args)

        monkeypatch.setattr(Edit, name, counting)

    for name in ("retire", "renew"):
        watch(name)
    save = Edit.save_state

    def saving(edit: Edit) -> None:
        here.pop(id(edit), None)
        save(edit)

    monkeypatch.setattr(Edit, "save_state", saving)
    return most


def stamp(store: DiskStore, name: bytes) -> int:
    (found,) = folder_of(store).index.find([index_key(name)])
    return 0 if found is None else found.stamp


TOUCHING = """
from tiers.disk.folder import upkeep
upkeep.EVERY_S = 0.02
store = open_disk(path, slots=64)
hot = keys(*range(1000, 1008))
say("touches")
import threading
while True:
    store.touch(hot)
    threading.Event().wait(0.005)
"""


@pytest.mark.parametrize("by", ["another process", "this process"])
def test_what_is_touched_alone_outlives_what_is_stored(
    tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler's process touches and never stores; a worker's process stores."""
    monkeypatch.setattr(upkeep, "EVERY_S", SHORT_S)
    store = open_disk(tmp_path, slots=64)
    hot = keys(*range(1000, 1008))
    assert all(put(store, hot))
    toucher = None
    if by == "another process":
        toucher = Other(TOUCHING, tmp_path)
        assert toucher.hear() == "touches"
    for first in range(0, 320, 32):
        put(store, keys(*range(first, first + 32)))
        newest = stamp(store, key(first))
        if toucher is None:
            store.touch(hot)
        while stamp(store, hot[-1]) < newest:
            assert store.has(hot) == [True] * 8, "evicted: no touch has reached the index"
            time.sleep(0.005)
    assert get(store, hot) == [True] * 8
    if toucher is not None:
        toucher.kill()
    audit(store)
    store.close()


def test_what_is_used_outlives_a_tier_that_turns_over_before_uses_are_written(
    tmp_path: Path,
) -> None:
    store, hot = open_disk(tmp_path, slots=64), keys(*range(1000, 1008))
    assert all(put(store, hot))
    with folder_of(store).upkeep.held_back():
        for first in range(0, 320, 32):
            store.touch(keys(*range(10_000, 13_000)))
            store.touch(hot)
            assert all(put(store, keys(*range(first, first + 32))))
        assert store.has(hot) == [True] * 8
    store.close()


def test_no_edit_writes_all_uses_down(tmp_path: Path, counted: Counter[str]) -> None:
    """A put after very many loads waits for some of their uses, not for all."""
    fill_index(tmp_path, 3000)
    store = DiskSpec(path=tmp_path, capacity=3000 * 8192).open(StoreContext(4096))
    with folder_of(store).upkeep.held_back():
        store.touch(keys(*range(3000)))
        counted.clear()
        put(store, keys(5000), 4096)
    while folder_of(store).uses:
        time.sleep(0.005)
    with folder_of(store).edit():  # the last of them are committed
        pass
    assert 0 < counted["renew"] <= slot_allocator.USE_BATCH + 2
    before = max(stamp(store, key(n)) for n in range(100))
    for _ in range(100):
        store.touch(keys(90, 91, 92))
    store.close()
    with opened(tmp_path) as store:
        assert stamp(store, key(90)) - before <= 30, (
            "each was renewed by every edit, not by every use"
        )


def test_a_put_is_not_charged_with_what_others_used(tmp_path: Path, counted: Counter[str]) -> None:
    """And it evicts what was used longest ago, written down or not."""
    fill_index(tmp_path, 3000)
    store = DiskSpec(path=tmp_path, capacity=3100 * 8192).open(StoreContext(4096))
    with folder_of(store).upkeep.held_back():
        store.touch(keys(*range(3000)))
        counted.clear()
        assert all(put(store, keys(*range(5000, 5100)), 4096))
        assert all(put(store, keys(*range(6000, 6064)), 4096))
        assert counted["renew"] <= 100, "those that it stores, in case they are there already"
        assert [n for n in range(3000) if not store.has(keys(n))[0]] == [*range(2936, 3000)]
    store.close()


def test_uses_that_are_left_are_written_at_the_close(tmp_path: Path) -> None:
    store = open_disk(tmp_path, slots=4)
    put(store, keys(3, 2, 1, 0))
    with folder_of(store).upkeep.held_back():
        for _ in range(10_000):
            store.touch(keys(3))
        store.touch(keys(1))
    store.close()
    with opened(tmp_path, slots=4) as store:
        put(store, keys(4, 5))
        assert store.has(keys(0, 1, 2, 3)) == [False, True, False, True]


READING = """
store = open_disk(path)
with folder_of(store).index.begin() as txn:
    txn.get(b"a key")
    say("reads")
    wait()
"""


@pytest.mark.fault
def test_a_reader_that_died_holds_no_page_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "EVERY_S", SHORT_S)
    with opened(tmp_path, slots=64) as store:
        put(store, keys(*range(64)))
        dead = Other(READING, tmp_path)
        assert dead.hear() == "reads"
        dead.kill()
        environment = folder_of(store).index._env
        grown, pages = 0, environment.info()["last_pgno"]
        # It grows until the reader is cleared, and then, but for a few pages, no more.
        for batch in range(600):
            put(store, keys(*range(64 * (batch % 2), 64 * (batch % 2) + 64)))
            now = environment.info()["last_pgno"]
            grown = 0 if now > pages else grown + 1
            pages = now
            if grown == 60:
                return
        pytest.fail("the index grows without end")


def test_a_tier_shrinks_in_steps(tmp_path: Path, counted: Counter[str]) -> None:
    fill_index(tmp_path, 3000)
    counted.clear()
    spec = DiskSpec(path=tmp_path, capacity=500 * 8192)
    store = spec.open(StoreContext(4096))
    assert store.usage().capacity == 500 * 8192
    assert put(store, keys(5000), 4096) == [True], "what is stored meanwhile replaces"
    settled(store)
    assert counted["retire"] <= 256
    assert [n for n in range(3000) if store.has([key(n)])[0]] == list(range(2501, 3000))
    audit(store)
    store.close()


def test_another_size_waits_until_the_tier_has_shrunk(tmp_path: Path) -> None:
    """It evicts no more than a few blocks of other sizes meanwhile, and takes no space."""
    fill_index(tmp_path, 3000)
    store = DiskSpec(path=tmp_path, capacity=3000 * 8192).open(StoreContext(4096))
    folder = folder_of(store)
    with folder.upkeep.held_back():
        folder.resize(500 * 8192)
        before = store.usage()
        with pytest.raises(Exception, match="no slot could be freed"):
            put(store, keys(5000), 60_000)
        now = store.usage()
        assert before.blocks - 20 < now.blocks < before.blocks
        assert now.used == now.blocks * 8192, "no slot stays reserved"
    settled(store)
    assert put(store, keys(5000), 60_000) == [True]
    audit(store)
    store.close()


KILLED = """
from tiers.disk.slab import Slab
import os, signal
store = open_disk(path, slots=2000)
def die(slab, number, count):
    allocate(slab, 0, 200)  # what a commit that never came would have counted
    os.kill(os.getpid(), signal.SIGKILL)
put(store, keys(*range(400)), 4096)
store.drop(keys(*range(399)))
allocate, Slab.allocate = Slab.allocate, die
put(store, keys(5000), 4096)
"""


def test_space_behind_free_slots_is_given_back_in_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiers.disk.folder.open_folder._PUNCH_BATCH", 30)
    child = Other(KILLED, tmp_path)
    assert child.hear() == ""
    child.kill()
    assert allocated(tmp_path) > 150 * 8192
    store = open_disk(tmp_path, slots=2000)
    while allocated(tmp_path) > store.usage().used:
        time.sleep(0.005)
    assert store.has([key(399)]) == [True]
    store.close()


def test_a_close_finds_no_step_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is closed when `close` returns, whatever the background does just then."""
    # Not 0: a thread that never rests takes its own lock again before a close that waits for it.
    monkeypatch.setattr(upkeep, "EVERY_S", 1e-3)
    others = set(threading.enumerate())
    for _ in range(10):
        store = open_disk(tmp_path, slots=4)
        store.touch(keys(0))
        store.close()
        assert (tmp_path / "index.seal").exists()
    while set(threading.enumerate()) - others:
        time.sleep(0.005)  # each ends by itself


@pytest.mark.fault
def test_a_close_does_not_wait_for_a_step_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "EVERY_S", SHORT_S)
    monkeypatch.setattr(upkeep, "_CLOSE_WAIT_S", 0.1)
    begun, over = threading.Event(), threading.Event()
    store = open_disk(tmp_path)
    original = Edit.renew

    def hanging(edit: Edit, name: bytes) -> None:
        if threading.current_thread().name == "kvtiers-disk-upkeep":
            begun.set()
            assert over.wait(60)
        original(edit, name)

    monkeypatch.setattr(Edit, "renew", hanging)
    put(store, keys(0))
    store.touch(keys(0))
    assert begun.wait(60)
    store.close()
    assert not (tmp_path / "index.seal").exists()
    over.set()
    while not (tmp_path / "index.seal").exists():
        time.sleep(0.005)
    with opened(tmp_path) as store:
        assert get(store, keys(0)) == [True]
        assert store.usage().used == SLOT
