"""The seal on a closed index: damage that LMDB would walk into empties the tier instead."""

from __future__ import annotations

import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.disk.audit import (
    SLOT,
    Other,
    audit,
    folder_of,
    get,
    handles_of,
    key,
    keys,
    open_disk,
    opened,
    put,
    put_row,
    run_code,
)
from tests.support.clock import wait_for
from tiers.disk.folder.clean_close import condemn
from tiers.disk.folder.folder import Folder
from tiers.disk.folder.open_folder import OpenFolder
from tiers.disk.folder.owner import scan_owners
from tiers.disk.index import index
from tiers.disk.index.edit import Entry, index_key, parse_entry
from tiers.disk.spec import DiskSpec
from tiers.errors import TierNotOpen, TierUnavailable

pytestmark = [
    pytest.mark.usefixtures("mode"),
    pytest.mark.parametrize("mode", ["buffered none"], indirect=True),
]
"""How slabs are read and written is nothing to the index."""

FUZZ = """
import random, shutil
master, folder, seed, rounds = path, Path(args[1]), *map(int, args[2:])
chance = random.Random(seed)
content = (master / "index.mdb").read_bytes()
for _ in range(rounds):
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(master, folder)
    damaged = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 8))):
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
    (folder / "index.mdb").write_bytes(damaged)
    with opened(folder, 32) as store:
        assert not any(get(store, keys(*range(40))))
        assert any(put(store, keys(*range(30, 40))))
        assert all(get(store, keys(*range(30, 40))))
        audit(store)
"""


def fuzz(tmp_path: Path, rounds: int) -> None:
    """In a process of its own, so that its death is seen."""
    with opened(tmp_path / "master", 32) as store:
        put(store, keys(*range(30)))
        store.drop(keys(3, 4, 5))
    where = [tmp_path / "master", tmp_path / "folder"]
    run_code(FUZZ, *where, 17, rounds, timeout=500)


@pytest.mark.fault
def test_bits_flipped_in_a_closed_index(tmp_path: Path) -> None:
    fuzz(tmp_path, 15)


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.fault
def test_bits_flipped_in_a_closed_index_hundreds_of_times(tmp_path: Path) -> None:
    fuzz(tmp_path, 300)


@pytest.mark.fault
def test_a_damaged_seal_counts_and_a_missing_one_does_not(tmp_path: Path) -> None:
    seal = tmp_path / "index.seal"
    for content, kept in ((None, True), (b"", False), (b"0" * 32, False)):
        with opened(tmp_path) as store:
            put(store, keys(0))
            assert not seal.exists()
        if content is None:
            seal.unlink()
        else:
            seal.write_bytes(content)
        with opened(tmp_path) as store:
            assert get(store, keys(0)) == [kept]


@pytest.mark.fault
@pytest.mark.parametrize("killed", [False, True])
def test_a_copy_of_a_folder_that_was_open_starts_empty(
    tmp_path: Path, killed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its index may be torn; the folder itself is not, and a copy of a closed one has all."""
    first, copy = tmp_path / "first", tmp_path / "copy"
    other = Other(OTHER, first)
    assert other.hear() == "open"
    if not killed:
        shutil.copytree(first, copy)
    other.kill()
    if killed:
        shutil.copytree(first, copy)
    examined = DiskSpec(path=copy, capacity=SLOT).examine()
    assert [one.found for one in examined if "will start empty" in one.found]
    for folder, held in ((copy, False), (first, True)):
        with opened(folder) as store:
            assert get(store, keys(0)) == [held]
            put(store, keys(0))
    assert "it was copied while it was in use" in caplog.text
    shutil.rmtree(copy)
    shutil.copytree(first, copy)
    with opened(copy) as store:
        assert get(store, keys(0)) == [True]


@pytest.mark.fault
def test_a_garbage_lock_file(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, keys(0))
    lock = tmp_path / "index.mdb-lock"
    lock.write_bytes(random.Random(3).randbytes(lock.stat().st_size))
    with opened(tmp_path) as store:
        assert get(store, keys(0)) == [True]
        assert put(store, keys(1)) == [True]


def test_the_last_process_out_seals(tmp_path: Path) -> None:
    seal = tmp_path / "index.seal"
    other = Other(OTHER, tmp_path)
    assert other.hear() == "open"
    with opened(tmp_path) as store:
        assert get(store, keys(0)) == [True]
    assert not seal.exists(), "the other one still changes the index"
    other.end()
    assert seal.exists()
    with opened(tmp_path) as store:
        assert get(store, keys(0, 1)) == [True, True]


OTHER = """
with opened(path) as store:
    put(store, keys(0))
    say("open")
    wait()
    put(store, keys(1))
"""


@pytest.mark.fault
def test_damage_found_while_open_is_not_kept(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, keys(0, 1, 2))
        put_row(tmp_path, "blocks", index_key(key(1)), b"a row of another length")
        with pytest.raises(TierUnavailable, match="damaged"):
            get(store, keys(0, 1))
        with pytest.raises(TierNotOpen, match="damaged"):
            get(store, keys(0, 2))
        wait_for(lambda: not handles_of(tmp_path, "*"))  # LMDB would go on in what is damaged
    with opened(tmp_path) as store:
        assert store.usage().blocks == 0
        assert put(store, keys(0, 1)) == [True, True]
        audit(store)
    with opened(tmp_path) as store:
        assert get(store, keys(0, 1)) == [True, True]


@pytest.mark.fault
def test_what_this_process_has_yet_to_leave_is_no_other_containers(tmp_path: Path) -> None:
    """Nor is it in the way where the folder was replaced."""
    with opened(tmp_path / "tier") as store:
        put(store, keys(0))
        with folder_of(store).in_use():
            put_row(tmp_path / "tier", "blocks", index_key(key(0)), b"a row of another length")
            with pytest.raises(TierUnavailable, match="damaged"):
                get(store, keys(0))
            with pytest.raises(TierNotOpen, match=r"damaged.*; the tier opens when its last"):
                open_disk(tmp_path / "tier")
            (tmp_path / "tier").rename(tmp_path / "elsewhere")
            with opened(tmp_path / "tier") as new:
                assert put(new, keys(0)) == [True]
    with opened(tmp_path / "tier") as store:
        assert get(store, keys(0)) == [True]
    with opened(tmp_path / "elsewhere") as store:
        assert get(store, keys(0)) == [False]


@pytest.mark.fault
def test_damage_that_another_store_of_the_process_finds_as_it_opens(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, keys(0))
        with folder_of(store).upkeep.held_back():  # which would meet it, too
            put_row(tmp_path, "meta", b"state", b"a row of another length")
            with pytest.raises(TierUnavailable, match="damaged"):
                open_disk(tmp_path)
        wait_for(lambda: not handles_of(tmp_path, "*"))
    with opened(tmp_path) as store:
        assert get(store, keys(0)) == [False]


@pytest.mark.fault
def test_threads_that_meet_the_same_damage_condemn_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each said so, and all but one that the index could not be marked."""
    together = threading.Barrier(4)

    def parsed(row: bytes) -> Entry:
        together.wait(60)
        return parse_entry(row)

    with opened(tmp_path) as store, ThreadPoolExecutor(4) as threads:
        put(store, keys(0))
        with folder_of(store).upkeep.held_back():
            put_row(tmp_path, "blocks", index_key(key(0)), b"a row of another length")
            monkeypatch.setattr(index, "parse_entry", parsed)
            for one in [threads.submit(get, store, keys(0)) for _ in range(4)]:
                with pytest.raises(TierUnavailable, match="damaged"):
                    one.result()
    assert sum("is emptied when" in line for line in caplog.messages) == 1
    assert "can't be marked" not in caplog.text


@pytest.mark.fault
def test_an_index_that_can_t_be_marked_is_said_unless_another_has_marked_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another process may have taken the draft that all write to."""
    folder = Folder(tmp_path)
    draft = tmp_path / "index.draft"
    for is_said in (True, False):
        draft.mkdir()
        condemn(folder, ValueError("a bad row"))
        assert ("can't be marked as damaged" in caplog.text) == is_said
        draft.rmdir()
        condemn(folder, ValueError("a bad row"))
        caplog.clear()


@pytest.mark.fault
def test_an_index_that_another_has_made_anew_is_not_condemned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a process that met the damage of the one before as it opened it, and had left by then."""
    with opened(tmp_path) as store:
        put(store, keys(0, 1))
    (tmp_path / "index.seal").unlink()
    put_row(tmp_path, "blocks", index_key(key(1)), b"a row of another length")
    abandon = OpenFolder.abandon

    def abandoned(folder: OpenFolder) -> None:
        abandon(folder)
        run_code("with opened(path) as store:\n    assert all(put(store, keys(7)))", tmp_path)

    monkeypatch.setattr(OpenFolder, "abandon", abandoned)
    with opened(tmp_path, slots=1) as store:
        assert get(store, keys(7)) == [True]
        audit(store)


STAYS = """
from tiers.disk.folder import upkeep
upkeep.EVERY_S = upkeep.PLACE_EVERY_S = 0.02
store = open_disk(path)
with folder_of(store).upkeep.held_back():
    say("open")
    wait()
try:
    for _ in range(1000):
        store.has(keys(0))
        time.sleep(0.01)
    say("it stays")
except TierNotOpen as error:
    say(error)
wait()
store.close()
with opened(path) as store:
    say(get(store, keys(0)))
    wait()
"""


@pytest.mark.fault
@pytest.mark.parametrize("found", ["in use", "as it joins", "as it starts"])
def test_no_process_stays_in_an_index_that_another_found_damaged(
    tmp_path: Path, found: str
) -> None:
    """Nor joins the others there: under restarts one by one the damage stayed for ever."""
    other = Other(STAYS, tmp_path)
    assert other.hear() == "open"
    damage = ("reserved", b"no slot") if found == "as it joins" else ("blocks", index_key(key(1)))
    with opened(tmp_path) as store:
        put(store, keys(0, 1))
        if found == "in use":
            put_row(tmp_path, *damage, b"a row of another length")
            with pytest.raises(TierUnavailable, match="damaged"):
                get(store, keys(1))
    if found != "in use":
        put_row(tmp_path, *damage, b"a row of another length")
        with pytest.raises(TierNotOpen, match="the index is damaged"):
            open_disk(tmp_path, slots=1)
    with pytest.raises(TierNotOpen, match=r"the index is damaged; .* when no process has it open"):
        open_disk(tmp_path)
    (one,) = (
        one for one in DiskSpec(path=tmp_path, capacity=SLOT).examine() if "empty" in one.found
    )
    assert "was found to be damaged when it was last in use" in one.found
    other.tell()
    assert other.hear() == f"{tmp_path} has an index that is damaged"
    wait_for(lambda: not scan_owners(tmp_path / "owners", one_host=True).alive)
    with opened(tmp_path) as store:
        assert get(store, keys(0)) == [False]
        assert put(store, keys(0)) == [True]
        other.tell()
        assert other.hear() == "[True]"
        other.end()
        audit(store)
