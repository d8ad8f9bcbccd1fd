"""The upkeep of a shared directory: what never goes, what is left there, and what fails."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.remote.packs.places import DAY, SIZE, SharedDirectory, there
from tests.support.clock import Clock, wait_for
from tiers.errors import TierFull, TierUnavailable
from tiers.remote.packs.pack import name_of
from tiers.remote.shared import files as directory_files
from tiers.remote.shared.files import TEMPORARY
from tiers.remote.shared.upkeep import TEMPORARY_SECONDS, PacksAndLeftovers
from tiers.testing import make_key


@pytest.fixture
def place(tmp_path: Path) -> SharedDirectory:
    return SharedDirectory(tmp_path / "shared")


def test_what_is_not_the_tiers_stays(place: SharedDirectory) -> None:
    place.fill([DAY] * 20)
    others = [
        place.path / "notes",
        place.path / "models" / "7b" / f"{TEMPORARY}x",
        place.path / "a" / "ab" / "c",
    ]
    for other in others:
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_bytes(bytes(50 * SIZE))
    (place.path / "empty" / "00").mkdir(parents=True)
    clock = Clock()
    upkeep = place.keeper(SIZE // 2, clock)
    for _ in range(6):
        upkeep.step()
        clock.now += 2 * TEMPORARY_SECONDS
    assert all(there(others)) and (place.path / "empty" / "00").is_dir()
    assert not list(place.path.glob("?" * 32)), "folders that are empty go, too"


def test_a_folder_that_a_reset_left_empty_is_a_moment_for_a_beat(tmp_path: Path) -> None:
    """Thousands would take longer than the lease lasts."""
    for number in range(3):
        (tmp_path / f"{number:032x}").mkdir()
    listed = PacksAndLeftovers(str(tmp_path)).list(lambda error: None)
    assert [[*packs] for packs in listed] == [[]] * 3


def test_a_file_of_others_in_a_folder_of_packs_stays(place: SharedDirectory) -> None:
    packs = place.fill([DAY] * 20)
    notes = packs[0].with_name("notes")
    notes.write_bytes(bytes(SIZE))
    os.utime(notes, (0, 0))
    place.keeper(10 * SIZE, Clock()).step()
    assert notes.exists() and sum(there(packs)) == 9


@pytest.mark.fault
def test_what_a_dead_writer_left_goes_once_it_was_watched(place: SharedDirectory) -> None:
    """However old it says it is: its host's clock may be any."""
    (pack,) = place.fill([0])
    left = [pack.with_name(f"{TEMPORARY}{n}") for n in range(2)]
    for file in left:
        file.write_bytes(b"x")
        os.utime(file, (0, 0))
    clock = Clock()
    upkeep = place.keeper(None, clock)
    upkeep.step()
    clock.now += TEMPORARY_SECONDS - 1
    upkeep.step()
    assert there(left) == [True, True]
    left[1].write_bytes(b"xx")  # it is being written
    clock.now += TEMPORARY_SECONDS
    upkeep.step()
    assert there(left) == [False, True] and pack.exists()
    clock.now += TEMPORARY_SECONDS
    upkeep.step()
    assert not left[1].exists()


def test_a_pack_that_goes_while_it_is_counted_ends_no_round(
    place: SharedDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    packs = place.fill([DAY] * 20)
    real = directory_files.entries

    def entries(folder: str) -> object:
        found = real(folder)
        for pack in packs[:3]:
            if folder == str(pack.parent):  # another host evicts it now
                pack.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(directory_files, "entries", entries)
    upkeep = place.keeper(10 * SIZE, Clock())
    upkeep.step()
    assert sum(there(packs)) == 9


def test_a_long_walk_keeps_the_lease(
    place: SharedDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else evicts meanwhile; and who has lost it ends its walk."""
    packs, clock, watch = place.fill([DAY] * 20), Clock(), Clock()
    holder, other = place.keeper(10 * SIZE, clock), place.lease(watch)
    holder.step()
    assert not other.beat() and sum(there(packs)) == 9
    real = os.scandir

    def slow(path: str) -> object:
        if not path.endswith("upkeep"):
            clock.now += place.watch_seconds / 3
            watch.now += place.watch_seconds / 3
            assert not other.beat(), "the holder is at work, and another has its lease"
        return real(path)

    place.fill([DAY] * 20)
    monkeypatch.setattr(os, "scandir", slow)
    clock.now += 1000
    holder.step()
    monkeypatch.undo()
    assert len([path for path in place.path.glob("?" * 32 + "/*/*") if path.is_file()]) == 9


@pytest.mark.parametrize("what", ["a namespace", "a folder", "a pack"])
def test_what_another_user_keeps_to_itself_ends_no_round_and_is_named(
    place: SharedDirectory, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where folders were made before the directory was opened to a group."""
    packs = place.fill([DAY * number for number in range(20)])
    theirs = packs[19]
    closed = {"a namespace": theirs.parents[1], "a folder": theirs.parent, "a pack": theirs}[what]
    real: dict[str, Any] = {call: getattr(os, call) for call in ("scandir", "unlink")}

    def guarded(call: str) -> Any:
        def doing(path: str) -> object:
            if path == str(closed):
                raise PermissionError(errno.EACCES, "Permission denied", path)
            return real[call](path)

        return doing

    with monkeypatch.context() as patch:
        for call in real:
            patch.setattr(os, call, guarded(call))
        upkeep = place.keeper(10 * SIZE, clock := Clock())
        upkeep.step()
        assert there(packs) == [number < 9 or number == 19 for number in range(20)]
        assert str(closed) in upkeep.warning()
        beside = place.keeper(10 * SIZE, clock)
        beside.step()
        assert "list or delete all" in beside.warning(), "the scheduler's process, which says so"
    clock.now += 100
    upkeep.step()
    assert not upkeep.warning() and sum(there(packs)) == 9


def test_a_put_that_failed_takes_no_room(
    place: SharedDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(place.kept(10 * SIZE)) as bucket:

        def full(*given: object) -> None:
            raise OSError(errno.ENOSPC, "full")

        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", full)
            for _ in range(20):
                with pytest.raises(TierFull, match="full"):
                    bucket.put(name_of(make_key()), [bytes(SIZE)])
        assert bucket.put(name_of(make_key()), [bytes(SIZE)])


@pytest.mark.fault
@pytest.mark.parametrize("call", ["open", "pwrite", "close"])
def test_upkeep_goes_on_where_no_file_can_be_made(
    place: SharedDirectory, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """On a full file system: what is to go must be able to. A full CephFS refuses each write."""
    clock = Clock()
    place.lease(Clock()).beat()
    upkeep = place.keeper(10 * SIZE, clock)
    packs = place.fill([DAY] * 20)
    no_room(monkeypatch, call)
    upkeep.step()
    assert all(there(packs))
    clock.now += place.watch_seconds
    upkeep.step()
    assert sum(there(packs)) == 9


@pytest.mark.fault
@pytest.mark.parametrize("call", ["pwrite", "close"])
def test_a_lease_that_can_not_be_written_is_held_by_one_and_lost_by_the_silent(
    place: SharedDirectory, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    clocks = Clock(), Clock()
    place.lease(Clock()).beat()
    one, other = map(place.lease, clocks)
    with monkeypatch.context() as patch:
        no_room(patch, call)
        assert not one.beat() and not other.beat()
        for holder, watcher in ((one, other), (other, one)):
            for clock in clocks:
                clock.now += place.watch_seconds
            assert holder.beat() and not watcher.beat()
            for _ in range(10):
                time.sleep(0.01)  # beside a file system's clock
                for clock in clocks:
                    clock.now += place.pace.beat
                assert holder.beat() and not watcher.beat()
    clocks[1].now += place.pace.beat
    assert other.beat() and not one.beat()


def no_room(patch: pytest.MonkeyPatch, call: str) -> None:
    """Let this call of `os` find no room: for a new file, for bytes, or as an NFS says it late."""
    real = getattr(os, call)

    def full(*given: Any) -> Any:
        wants = True
        if call == "open":
            wants = bool(given[1] & os.O_CREAT)
        elif call == "close":
            wants = fcntl.fcntl(given[0], fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
            real(*given)
        if wants:
            raise OSError(errno.ENOSPC, "full")
        return None if call == "close" else real(*given)

    patch.setattr(os, call, full)


@pytest.mark.fault
def test_a_pipe_or_a_link_in_the_place_of_a_lease_holds_up_no_thread_and_leads_nowhere(
    place: SharedDirectory, tmp_path: Path
) -> None:
    terms = place.terms()
    assert terms.take(0, b"note")
    elsewhere = tmp_path / "elsewhere"
    (place.path / "upkeep").rename(elsewhere)
    (place.path / "upkeep").symlink_to(elsewhere)
    for write in (terms.take, terms.write):
        with pytest.raises(TierUnavailable, match="upkeep is a link"):
            write(1, b"mine")
    assert (elsewhere / "term-1").read_bytes().startswith(b"note ")
    (place.path / "upkeep").unlink()
    (place.path / "upkeep").mkdir()
    os.mkfifo(place.path / "upkeep" / "term-1")
    for use, note in ((terms.read, []), (terms.write, [b"mine"])):
        with pytest.raises(OSError, match=r"Illegal seek|No such device"):
            use(1, *note)


@pytest.mark.fault
def test_upkeep_that_fails_ends_no_tier_and_goes_on(
    place: SharedDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.hurry(monkeypatch)
    real, failing = os.scandir, [True]

    def scandir(path: str) -> object:
        if failing[0]:
            raise OSError(errno.EIO, "no answer")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    packs = place.fill([DAY] * 20)
    with closing(place.kept(10 * SIZE)) as bucket:
        name = name_of(make_key())
        assert bucket.put(name, [b"x"])
        assert bucket.read(name, 0, [memoryview(bytearray(1))]) == 1
        assert all(there(packs))
        failing[0] = False
        wait_for(lambda: sum(there(packs)) < 10)
