"""The upkeep of a shared directory: who does it, what goes, and what never does."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from spec.offloading import StoreContext
from tests.support.clock import Clock, wait_for
from tests.support.holder import held_elsewhere
from tiers.errors import TierFull
from tiers.remote import directory_bucket, directory_files, evictor
from tiers.remote.directory_bucket import PACE, UNBOUNDED_PACE, DirectoryBucket, kept_directory
from tiers.remote.directory_files import TEMPORARY
from tiers.remote.directory_upkeep import TEMPORARY_SECONDS, DirectoryTerms
from tiers.remote.evictor import Evictor, Pause
from tiers.remote.lease import WATCH_BEATS, Count, Lease
from tiers.remote.packs.pack import name_of
from tiers.remote.shared_spec import SharedSpec
from tiers.testing import Memory, make_key

SIZE = 1000
BEAT_SECONDS = PACE.beat
WATCH_SECONDS = WATCH_BEATS * BEAT_SECONDS
AT_ONCE = PACE._replace(beat=0.01, usual=Pause(0.01, 1), full=Pause(0.01, 0))
DAY = 86400


@pytest.fixture
def place(tmp_path: Path) -> Path:
    path = tmp_path / "shared"
    path.mkdir(0o700)
    return path


def lease(place: Path, clock: Clock) -> Lease:
    return Lease(DirectoryTerms(str(place), 0o700), BEAT_SECONDS, clock)


def keeper(place: Path, capacity: int | None, clock: Clock) -> Evictor:
    pace = UNBOUNDED_PACE if capacity is None else PACE
    return Evictor(DirectoryBucket(place, clock), capacity, lease(place, clock), pace, clock)


def fill(place: Path, ages: Sequence[float]) -> list[Path]:
    """Put a pack for each of these ages, in seconds."""
    bucket, now = DirectoryBucket(place), os.stat(place).st_mtime
    packs = []
    for age in ages:
        name = name_of(make_key())
        bucket.put(name, [bytes(SIZE)])
        os.utime(place / name, (now - age, now - age))
        packs.append(place / name)
    return packs


def there(packs: Sequence[Path]) -> list[bool]:
    return [pack.exists() for pack in packs]


# ---- the lease


def test_one_process_has_it_as_long_as_it_lives(place: Path) -> None:
    """Whatever the clocks of both hosts say."""
    clocks = Clock(5), Clock(1e9)
    one, other = (lease(place, clock) for clock in clocks)
    assert one.beat() and not other.beat()
    for _ in range(100):
        clocks[0].now += BEAT_SECONDS
        clocks[1].now += BEAT_SECONDS * 3  # it runs too fast
        assert one.beat() and not other.beat()
    one.resign()
    assert not one.is_held and other.beat()
    clocks[0].now += WATCH_SECONDS - 1
    assert not one.beat() and not one.beat()


@pytest.mark.fault
def test_who_holds_it_and_is_silent_loses_it_by_the_watchers_clock(place: Path) -> None:
    clocks = [Clock(0), Clock(1e6), Clock(-50)]
    one, *others = (lease(place, clock) for clock in clocks)
    assert one.beat()
    clocks[1].now += 10 * WATCH_SECONDS
    assert not any(other.beat() for other in others), "they have not watched it yet"
    for clock in clocks:
        clock.now += WATCH_SECONDS - 1
    assert not any(other.beat() for other in others)
    for clock in clocks:
        clock.now += 1
    assert [other.beat() for other in others].count(True) == 1
    assert not one.beat(), "it was only stopped, and finds that it has lost it"
    assert sum(other.beat() for other in others) == 1


@pytest.mark.fault
def test_of_those_that_would_take_it_one_does(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if both looked before either took it."""
    clocks = Clock(), Clock()
    lease(place, Clock()).beat()
    one, other = (lease(place, clock) for clock in clocks)
    assert not one.beat() and not other.beat()
    for clock in clocks:
        clock.now += WATCH_SECONDS
    real = os.rename

    def meanwhile(source: str, target: str) -> None:
        monkeypatch.setattr(os, "rename", real)
        assert other.beat()
        real(source, target)

    monkeypatch.setattr(os, "rename", meanwhile)
    assert not one.beat() and other.beat()
    assert len(list((place / "upkeep").iterdir())) == 1


@pytest.mark.fault
def test_an_evictor_that_is_killed_is_followed_by_another(place: Path) -> None:
    with held_elsewhere("tiers.remote.directory_bucket", "kept_directory", place):
        clock = Clock()
        other = keeper(place, 10 * SIZE, clock)
        packs = fill(place, [20 * DAY - n * 1000 for n in range(20)])
        other.step()
        assert all(there(packs)), "another has it"
    for _ in range(2):
        clock.now += WATCH_SECONDS
        other.step()
    assert there(packs) == [False] * 11 + [True] * 9


# ---- what goes


def test_the_packs_used_last_are_kept(place: Path) -> None:
    packs = fill(place, [n * DAY for n in range(20)])
    DirectoryBucket(place).read(str(packs[19].relative_to(place)), 0, [memoryview(bytearray(9))])
    keeper(place, 10 * SIZE, Clock()).step()
    assert there(packs) == [n < 8 or n == 19 for n in range(20)]


def test_of_packs_of_one_age_no_more_go_than_must(place: Path) -> None:
    packs = fill(place, [DAY] * 20)
    keeper(place, 10 * SIZE, Clock()).step()
    assert sum(there(packs)) == 9


def test_below_its_capacity_nothing_goes(place: Path) -> None:
    packs = fill(place, range(20))
    keeper(place, 22 * SIZE, Clock()).step()
    keeper(place, None, Clock()).step()
    assert all(there(packs))


def test_what_is_not_the_tiers_stays(place: Path) -> None:
    fill(place, [DAY] * 20)
    others = [place / "notes", place / "models" / "7b" / f"{TEMPORARY}x", place / "a" / "ab" / "c"]
    for other in others:
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_bytes(bytes(50 * SIZE))
    (place / "empty" / "00").mkdir(parents=True)
    clock = Clock()
    upkeep = keeper(place, SIZE // 2, clock)
    for _ in range(3):
        upkeep.step()
        clock.now += 2 * TEMPORARY_SECONDS
    assert all(there(others)) and (place / "empty" / "00").is_dir()
    assert not list(place.glob("?" * 32 + "/*")), "folders that are empty go, too"


@pytest.mark.fault
def test_what_a_dead_writer_left_goes_once_it_was_watched(place: Path) -> None:
    """However old it says it is: its host's clock may be any."""
    (pack,) = fill(place, [0])
    left = [pack.with_name(f"{TEMPORARY}{n}") for n in range(2)]
    for file in left:
        file.write_bytes(b"x")
        os.utime(file, (0, 0))
    clock = Clock()
    upkeep = keeper(place, None, clock)
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


# ---- the bound


def test_one_process_alone_is_never_beyond_its_capacity(place: Path) -> None:
    upkeep = keeper(place, 10 * SIZE, Clock())
    assert [upkeep.admits(SIZE) for _ in range(12)] == [True] * 10 + [False] * 2


def test_a_process_knows_what_others_have_put(place: Path) -> None:
    clock = Clock()
    holder, other = keeper(place, 100 * SIZE, clock), keeper(place, 100 * SIZE, clock)
    fill(place, [0] * 94)
    holder.step()
    other.step()
    assert [other.admits(SIZE) for _ in range(8)] == [True] * 6 + [False] * 2
    fill(place, [0] * 6)
    clock.now += 100
    holder.step()
    clock.now += 100
    other.step()
    assert other.admits(SIZE), "room was made"
    assert not other.admits(8 * SIZE), "what it put lately may not be counted yet"


def test_what_a_count_may_have_missed_counts_until_the_next(place: Path) -> None:
    clock = Clock()
    upkeep = keeper(place, 10 * SIZE, clock)
    upkeep.step()
    assert upkeep.admits(6 * SIZE)
    upkeep.ends(6 * SIZE, True)  # into a folder that was walked just before
    clock.now += 100
    upkeep.step()
    assert not upkeep.admits(5 * SIZE)
    clock.now += 100
    upkeep.step()
    assert upkeep.admits(10 * SIZE), "it is counted, or gone, by now"


def test_a_tier_that_is_full_makes_room_and_serves(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_bucket, "PACE", AT_ONCE)
    monkeypatch.setattr(evictor, "GRAIN_SECONDS", 1e-3)  # else the one put last may be among them
    capacity = 40 * 70_000
    spec = SharedSpec(path=place, capacity=capacity)
    with closing(spec.open(StoreContext(65536))) as store:

        def stores(key: bytes) -> bool:
            try:
                return store.put(Memory([key], 65536).fill().blocks) == [True]
            except TierFull:
                return False

        for _ in range(100):
            key = make_key()
            wait_for(lambda key=key: stores(key))  # type: ignore[misc]
            sizes = [pack.stat().st_size for pack in place.glob("?" * 32 + "/*/*")]
            assert sum(sizes) <= capacity
        assert store.get(Memory([key], 65536).blocks) == [True]


@pytest.mark.fault
def test_upkeep_goes_on_where_no_file_can_be_made(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full file system: what is to go must be able to."""
    clock = Clock()
    lease(place, Clock()).beat()
    upkeep = keeper(place, 10 * SIZE, clock)
    packs = fill(place, [DAY] * 20)
    real = os.open

    def full(path: str, flags: int, *more: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, "full")
        return real(path, flags, *more)

    monkeypatch.setattr(os, "open", full)
    upkeep.step()
    assert all(there(packs))
    clock.now += WATCH_SECONDS
    upkeep.step()
    assert sum(there(packs)) == 9


@pytest.mark.fault
def test_upkeep_that_fails_ends_no_tier_and_goes_on(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_bucket, "PACE", AT_ONCE)
    real, failing = os.scandir, [True]

    def scandir(path: str) -> object:
        if failing[0]:
            raise OSError(errno.EIO, "no answer")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    packs = fill(place, [DAY] * 20)
    with closing(kept_directory(place, 10 * SIZE)) as bucket:
        name = name_of(make_key())
        assert bucket.put(name, [b"x"])
        assert bucket.read(name, 0, [memoryview(bytearray(1))]) == 1
        assert all(there(packs))
        failing[0] = False
        wait_for(lambda: sum(there(packs)) < 10)


# ---- what a defect of the upkeep would cost (tests/mutants)


def test_a_file_of_others_in_a_folder_of_packs_stays(place: Path) -> None:
    packs = fill(place, [DAY] * 20)
    notes = packs[0].with_name("notes")
    notes.write_bytes(bytes(SIZE))
    os.utime(notes, (0, 0))
    keeper(place, 10 * SIZE, Clock()).step()
    assert notes.exists() and sum(there(packs)) == 9


def test_a_put_that_failed_takes_no_room(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(kept_directory(place, 10 * SIZE)) as bucket:

        def full(*given: object) -> None:
            raise OSError(errno.ENOSPC, "full")

        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", full)
            for _ in range(20):
                with pytest.raises(TierFull, match="full"):
                    bucket.put(name_of(make_key()), [bytes(SIZE)])
        assert bucket.put(name_of(make_key()), [bytes(SIZE)])


def test_a_note_without_what_hinders_is_read_as_one_of_an_engine_of_before(place: Path) -> None:
    (place / "upkeep").mkdir()
    (place / "upkeep" / "term-3").write_bytes(b"a1b2 9 7 500 1000 ".ljust(95) + b"\n")
    assert lease(place, Clock()).last_count() == Count(7, 500, 1000)


def test_who_closes_it_leaves_the_lease_to_others_at_once(place: Path) -> None:
    bucket = kept_directory(place, 10 * SIZE)
    wait_for(lambda: bool(list(place.glob("upkeep/term-*"))))
    bucket.close()
    assert lease(place, Clock()).beat()


def test_a_long_walk_keeps_the_lease(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else evicts meanwhile; and who has lost it ends its walk."""
    packs, clock, watch = fill(place, [DAY] * 20), Clock(), Clock()
    holder, other = keeper(place, 10 * SIZE, clock), lease(place, watch)
    holder.step()
    assert not other.beat() and sum(there(packs)) == 9
    real = os.scandir

    def slow(path: str) -> object:
        if not path.endswith("upkeep"):
            clock.now += WATCH_SECONDS / 3
            watch.now += WATCH_SECONDS / 3
            assert not other.beat(), "the holder is at work, and another has its lease"
        return real(path)

    fill(place, [DAY] * 20)
    monkeypatch.setattr(os, "scandir", slow)
    clock.now += 1000
    holder.step()
    monkeypatch.undo()
    assert len([path for path in place.glob("?" * 32 + "/*/*") if path.is_file()]) == 9


def test_the_lease_is_of_the_directorys_group(place: Path) -> None:
    before = os.umask(0o077)
    try:
        Lease(DirectoryTerms(str(place), 0o2770), BEAT_SECONDS).beat()
    finally:
        os.umask(before)
    folder = place / "upkeep"
    modes = [path.stat().st_mode & 0o7777 for path in (folder, *folder.iterdir())]
    assert modes == [0o2770, 0o660]


def test_a_pack_that_goes_while_it_is_counted_ends_no_round(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packs = fill(place, [DAY] * 20)
    real = directory_files.entries

    def entries(folder: str) -> object:
        found = real(folder)
        for pack in packs[:3]:
            if folder == str(pack.parent):  # another host evicts it now
                pack.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(directory_files, "entries", entries)
    upkeep = keeper(place, 10 * SIZE, Clock())
    upkeep.step()
    assert sum(there(packs)) == 9


@pytest.mark.parametrize("size", [600, 1500, 3000, 5000])
def test_packs_that_are_large_beside_the_capacity_make_room_for_each_other(
    place: Path, size: int
) -> None:
    """Also where what is full is not full by more than a tenth."""
    clock, bucket = Clock(), DirectoryBucket(place)
    upkeep = keeper(place, 10_000, clock)
    names = []
    for number in range(30):
        upkeep.step()
        names.append(name := name_of(make_key()))
        assert upkeep.admits(size), "what was put last is counted by now"
        bucket.put(name, [bytes(size)])
        upkeep.ends(size, True)
        os.utime(place / name, (number * 100, number * 100))
        for _ in range(2):  # by the second count it knows what the first may have missed
            clock.now += 100
            upkeep.step()
    left = there([place / name for name in names])
    assert left == sorted(left) and any(left), "the last ones stay"


def test_who_has_another_capacity_than_the_one_that_evicts_is_told(place: Path) -> None:
    """Else a replica with a smaller one empties the directory for all without a word, or one that
    has none evicts nothing, and the others find no room."""
    clocks = [Clock() for _ in range(4)]
    sizes = 10 * SIZE, None, 20 * SIZE, 10 * SIZE
    holder, unbounded, larger, same = (
        keeper(place, size, clock) for size, clock in zip(sizes, clocks, strict=True)
    )
    assert not any(each.warning() for each in (holder, unbounded, larger, same))
    for each in (holder, unbounded, larger, same):
        each.step()
    told = [each.warning() for each in (holder, unbounded, larger, same)]
    assert [bool(each) for each in told] == [False, True, True, False]
    assert "capacity 9.766KiB evicts for all" in told[2] and "this one has 19.53KiB" in told[2]
    assert "this one has none" in told[1]
    holder._lease.resign()
    clocks[1].now += 100
    unbounded.step()
    clocks[2].now += 100
    larger.step()
    assert not unbounded.warning() and "capacity none evicts for all" in larger.warning()


@pytest.mark.parametrize("what", ["a namespace", "a folder", "a pack"])
def test_what_another_user_keeps_to_itself_ends_no_round_and_is_named(
    place: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where folders were made before the directory was opened to a group."""
    packs = fill(place, [DAY * number for number in range(20)])
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
        upkeep = keeper(place, 10 * SIZE, clock := Clock())
        upkeep.step()
        assert there(packs) == [number < 9 or number == 19 for number in range(20)]
        assert str(closed) in upkeep.warning()
        beside = keeper(place, 10 * SIZE, clock)
        beside.step()
        assert "list or delete all" in beside.warning(), "the scheduler's process, which says so"
    clock.now += 100
    upkeep.step()
    assert not upkeep.warning() and sum(there(packs)) == 9
