"""The capacity of an object tier: what it costs to keep, and what fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

obstore = pytest.importorskip("obstore")

from obstore.exceptions import GenericError, PermissionDeniedError  # noqa: E402

from spec.offloading import StoreContext  # noqa: E402
from tests.remote.packs.places import DAY, SIZE, FolderBucket, there  # noqa: E402
from tests.support.clock import Clock, wait_for  # noqa: E402
from tests.support.filling import fill_by_processes  # noqa: E402
from tiers.errors import TierRefused, TierUnavailable  # noqa: E402
from tiers.remote.object.obstore_bucket import ObstoreBucket  # noqa: E402
from tiers.remote.object_spec import ObjectSpec  # noqa: E402
from tiers.remote.packs.bucket import BucketMarks  # noqa: E402
from tiers.remote.packs.evictor import Evictor  # noqa: E402
from tiers.remote.packs.pack import name_of  # noqa: E402
from tiers.testing import Memory, make_key  # noqa: E402
from tiers.wrappers.guard import Guarded  # noqa: E402


@pytest.fixture
def place(tmp_path: Path) -> FolderBucket:
    return FolderBucket(tmp_path / "bucket")


# ---- what goes


def test_what_is_no_pack_of_the_prefix_is_neither_counted_nor_deleted(place: FolderBucket) -> None:
    """Marks, which no read makes younger here, the upkeep's own objects, a prefix below this one,
    one that begins alike, and what others have put there."""
    marks = BucketMarks(place.bucket())
    marks.mark([b"m" * 16])
    (mark,) = (path for path in place.path.rglob("*") if path.is_file())
    packs = place.fill([DAY] * 20)
    readme = place.path / "README"
    readme.write_bytes(bytes(50 * SIZE))
    others = [mark, readme, *FolderBucket(place.path / "nested").fill([9 * DAY] * 2)]
    alike = FolderBucket(place.path.with_name("bucket2")).fill([9 * DAY])
    for path in others:
        os.utime(path, (1, 1))
    upkeep = place.keeper(10 * SIZE, Clock())
    upkeep.step()
    assert all(there([*others, *alike])) and marks.marked([b"m" * 16]) == [True]
    assert sum(there(packs)) == 9 and list((place.path / "upkeep").iterdir())
    assert upkeep.room.count.used == 9 * SIZE


def test_a_pack_that_goes_while_others_are_deleted_ends_no_round(
    place: FolderBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule of the bucket deletes, too. Where that is an error, the rest go all the same."""
    packs = place.fill([DAY] * 20)
    real = obstore.delete

    def delete(store: Any, paths: Any) -> None:
        if isinstance(paths, list):
            packs[19].unlink()
            raise FileNotFoundError(packs[19])
        real(store, paths)

    monkeypatch.setattr(obstore, "delete", delete)
    place.keeper(10 * SIZE, Clock()).step()
    assert sum(there(packs)) in (8, 9)


# ---- the lease


@pytest.mark.parametrize("first", [0, 1])
def test_one_that_somebody_deletes_is_had_by_one_again(place: FolderBucket, first: int) -> None:
    leases = [place.lease(Clock()) for _ in range(2)]
    assert leases[0].beat() and not leases[1].beat()
    for term in (place.path / "upkeep").iterdir():
        term.unlink()
    both = leases[first], leases[1 - first]
    for _ in range(3):
        assert [lease.beat() for lease in both] == [True, False]
    both[1].resign()
    assert both[0].beat()


def test_who_watches_reads_and_lists_nothing(
    place: FolderBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing costs twelve reads."""
    one, other = (place.lease(Clock()) for _ in range(2))
    assert one.beat() and not other.beat()
    listed: list[str] = []
    real = ObstoreBucket.names

    def names(self: ObstoreBucket, folder: str) -> Sequence[str]:
        listed.append(folder)
        return real(self, folder)

    monkeypatch.setattr(ObstoreBucket, "names", names)
    for _ in range(10):
        assert one.beat()
        listed.clear()
        assert not other.beat() and not listed


@pytest.mark.fault
def test_a_beat_that_fails_loses_no_lease(
    place: FolderBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nobody evicts for minutes, each time the server is busy."""
    lease = place.lease(Clock())
    assert lease.beat()

    def busy(*given: object, **more: object) -> None:
        raise GenericError("status: 400 Bad Request")

    with monkeypatch.context() as patch:
        patch.setattr(obstore, "put", busy)
        with pytest.raises(TierUnavailable):
            lease.beat()
        assert not lease.is_held
    assert lease.beat()


@pytest.mark.fault
def test_a_cluster_that_is_full_still_has_its_upkeep(
    place: FolderBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    packs, clock = place.fill([DAY] * 9), Clock()
    upkeep = place.keeper(10 * SIZE, clock)
    upkeep.step()
    packs += place.fill([0] * 11)

    def full(*given: object, **more: object) -> None:
        raise GenericError("status: 507 Insufficient Storage: <Code>XMinioStorageFull</Code>")

    monkeypatch.setattr(obstore, "put", full)
    clock.now += 1000
    upkeep.step()
    assert sum(there(packs)) == 9


def test_a_cluster_that_is_full_is_sent_few_packs_and_serves(
    place: FolderBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is sent whole before it is refused."""
    key, sent, failing = make_key(), [], [True]
    real = obstore.put

    def put(*given: Any, **more: Any) -> Any:
        sent.append(given)
        if failing[0]:
            raise GenericError("status: 507 Insufficient Storage: <Code>XMinioStorageFull</Code>")
        return real(*given, **more)

    opened = ObjectSpec(url=f"file://{place.path}").open(StoreContext(SIZE))
    with closing(Guarded(opened, "object", retry_after=0.1, retry_after_max=0.2)) as store:
        kept = Memory([key], SIZE).fill()
        assert store.put(kept.blocks) == [True]
        monkeypatch.setattr(obstore, "put", put)
        for _ in range(50):
            assert store.put(Memory([make_key()], SIZE).fill().blocks) == [False]
        assert len(sent) < 25 and "507" in store.health.why
        assert store.get(Memory([key], SIZE).blocks) == [True]
        failing[0] = False
        wait_for(lambda: store.put(Memory([make_key()], SIZE).fill().blocks) == [True])


def test_to_delete_nothing_is_no_answer_of_a_server(place: FolderBucket) -> None:
    """Each load ends by a delete of what it found damaged; what a storm refuses would be sent again
    for that."""
    bucket = place.bucket()
    while bucket._budget.spend():
        pass
    for _ in range(20):
        bucket.delete([])
    assert not bucket._budget.spend()


# ---- what it costs, and what fails


def lists(monkeypatch: pytest.MonkeyPatch, clock: Clock, seconds: float) -> list[float]:
    """The times when packs were listed; each listing takes so long."""
    times: list[float] = []
    real = ObstoreBucket.list

    def listed(self: ObstoreBucket, refused: Callable[[TierRefused], None]) -> Any:
        times.append(clock.now)
        clock.now += seconds
        return real(self, refused)

    monkeypatch.setattr(ObstoreBucket, "list", listed)
    return times


@pytest.mark.parametrize(("seconds", "gap"), [(0, 60), (100, 500)])
def test_counts_are_a_minute_apart_and_a_fifth_of_the_time_at_most(
    place: FolderBucket, monkeypatch: pytest.MonkeyPatch, seconds: float, gap: float
) -> None:
    clock = Clock(1e3)
    place.fill([0])
    upkeep, times = place.keeper(10 * SIZE, clock), lists(monkeypatch, clock, seconds)
    while len(times) < 5:
        clock.now += upkeep.step() or 1
    gaps = [after - before for before, after in pairwise(times)]
    assert all(gap <= each <= gap + place.pace.beat for each in gaps)


@pytest.mark.parametrize(("packs", "gap"), [(1, 500), (20, 400)])
def test_what_fills_fast_is_counted_sooner(
    place: FolderBucket, monkeypatch: pytest.MonkeyPatch, packs: int, gap: float
) -> None:
    """Half of what is free is to last until then: of others' puts a process hears in no other way.
    A round lists once, or twice where it evicts; it is as long paused after, or four times so."""
    clock, rounds = Clock(1e3), list[float]()
    upkeep, times = place.keeper(100 * SIZE, clock), lists(monkeypatch, clock, 100)
    place.fill([0] * 60)
    while len(rounds) < 6:
        began, listed = clock.now, len(times)
        clock.now += upkeep.step()
        if len(times) > listed:
            rounds.append(began)
            place.fill([0] * packs)
    assert rounds[-1] - rounds[-2] == gap


def test_a_put_that_finds_no_room_has_all_counted_sooner(
    place: FolderBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not again and again, where nothing goes."""
    clock = Clock(1e3)
    place.fill([0] * 10)
    upkeep, times = place.keeper(10 * SIZE, clock), lists(monkeypatch, clock, 15)
    monkeypatch.setattr(obstore, "delete", lambda store, paths: None)
    while len(times) < 7:
        assert not upkeep.room.admits(20 * SIZE)
        clock.now += upkeep.step() and 1
    rounds = times[::2]  # each lists twice, to count and to delete, and is as long paused after
    assert [after - before for before, after in pairwise(rounds)] == [60.0] * 3


def test_a_listing_that_fails_is_paused_after_as_well(
    place: FolderBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, times = Clock(1e3), []

    def busy(self: ObstoreBucket, refused: Callable[[TierRefused], None]) -> Any:
        times.append(clock.now)
        raise TierUnavailable("503 SlowDown")

    monkeypatch.setattr(ObstoreBucket, "list", busy)
    upkeep = place.keeper(10 * SIZE, clock)
    for _ in range(4):
        with suppress(TierUnavailable):
            upkeep.step()
        clock.now += place.pace.beat
    assert len(times) == 2


@pytest.mark.fault
def test_a_listing_that_is_refused_for_the_moment_goes_on_where_it_was(
    place: FolderBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came is counted once: else a busy server would have too much deleted."""
    bucket, asked = place.bucket(), []
    facts = [
        {"path": name_of(bytes([number]) * 48), "size": SIZE, "last_modified": _Then()}
        for number in range(25)
    ]
    facts.sort(key=lambda each: str(each["path"]))

    def listing(store: Any, prefix: str | None, *, offset: str | None, chunk_size: int) -> Any:
        asked.append(offset)
        left = [each for each in facts if offset is None or str(each["path"]) > offset]
        for at in range(0, len(left), 10):
            if len(asked) == 1 and at:
                raise GenericError("status: 503 Service Unavailable: <Code>SlowDown</Code>")
            yield left[at : at + 10]

    monkeypatch.setattr(obstore, "list", listing)
    with pytest.raises(TierUnavailable, match="midst"):  # a folder's files have no order
        list(bucket.list(_never))
    asked.clear()
    monkeypatch.setattr("tiers.remote.object.obstore_bucket.LocalStore", Evictor)
    found = [pack.name for packs in bucket.list(_never) for pack in packs]
    assert found == [each["path"] for each in facts] and len(asked) == 2


class _Then:
    def timestamp(self) -> float:
        return 0.0


def _never(error: TierRefused) -> None:
    raise error


REFUSED = "DeleteObjects request failed for key x: Access Denied. (code: AccessDenied)"


@pytest.mark.fault
@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("delete", GenericError(REFUSED)),
        ("delete", PermissionDeniedError("status: 403 Forbidden: <Code>AccessDenied</Code>")),
        ("list", GenericError("status: 403 Forbidden: <Code>AccessDenied</Code>")),
        ("put", PermissionDeniedError("status: 403 Forbidden: <Code>AccessDenied</Code>")),
    ],
)
def test_what_credentials_may_not_do_is_named_and_ends_nothing(
    place: FolderBucket, monkeypatch: pytest.MonkeyPatch, call: str, error: Exception
) -> None:
    packs, clock = place.fill([DAY] * 20), Clock()
    upkeep, beside = place.keeper(10 * SIZE, clock), place.keeper(10 * SIZE, clock)

    def refused(*given: object, **more: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(obstore, call, refused)
        upkeep.step()
        beside.step()
        assert all(there(packs))
        assert "AccessDenied" in upkeep.warning() and "credentials" in upkeep.warning()
        assert "credentials" in beside.warning(), "the scheduler's process, which says so"
    clock.now += 1000
    upkeep.step()
    beside.step()
    assert not upkeep.warning() + beside.warning() and sum(there(packs)) == 9


def test_who_may_not_delete_does_not_put_beyond_the_capacity(
    place: FolderBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.fill([DAY] * 20)
    upkeep = place.keeper(10 * SIZE, Clock())

    def refused(*given: object, **more: object) -> None:
        raise GenericError(REFUSED)

    monkeypatch.setattr(obstore, "delete", refused)
    upkeep.step()
    assert not upkeep.room.admits(SIZE)


@pytest.mark.fault
@pytest.mark.parametrize("rounds", [0, 1])
def test_who_may_not_list_does_not_put_beyond_the_capacity(
    place: FolderBucket, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    """From the beginning, or since its credentials were replaced, which may write and read what
    says who evicts: the bucket is not empty then."""
    clock = Clock()
    upkeep = place.keeper(10 * SIZE, clock)
    packs = place.fill([DAY] * 6) if rounds else []
    for _ in range(rounds):
        upkeep.step()

    def refuses(_: object, refused: Callable[[TierRefused], None]) -> Sequence[Any]:
        refused(TierRefused("AccessDenied"))
        return ()

    monkeypatch.setattr(ObstoreBucket, "list", refuses)
    put = 0
    for _ in range(20):
        clock.now += 1000
        upkeep.step()
        if upkeep.room.admits(SIZE):
            upkeep.room.ends(SIZE, stored=True)
            put += 1
    assert put == 10 - len(packs)


def lists_that_fail(monkeypatch: pytest.MonkeyPatch, error: Exception) -> list[bool]:
    """Have each listing of all that a bucket has fail, until what is returned is `[False]`."""
    real, failing = obstore.list, [True]

    def listed(store: Any, prefix: str | None, **more: Any) -> Any:
        if failing[0] and not prefix:
            raise error
        return real(store, prefix, **more)

    monkeypatch.setattr(obstore, "list", listed)
    return failing


@pytest.mark.fault
def test_upkeep_that_finds_no_memory_goes_on(
    place: FolderBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.hurry(monkeypatch)
    failing = lists_that_fail(monkeypatch, MemoryError())
    packs = place.fill([DAY] * 20)
    with closing(place.kept(10 * SIZE)) as bucket:
        wait_for(lambda: "nothing can be evicted: MemoryError" in bucket.warning())
        failing[0] = False
        wait_for(lambda: sum(there(packs)) == 9)


@pytest.mark.fault
def test_a_buckets_upkeep_that_fails_ends_no_tier(
    place: FolderBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.hurry(monkeypatch)
    failing = lists_that_fail(monkeypatch, GenericError("status: 500 Internal Server Error"))
    packs = place.fill([DAY] * 20)
    with closing(place.kept(10 * SIZE)) as bucket:
        name = name_of(make_key())
        assert bucket.put(name, [b"x"])
        assert bucket.read(name, 0, [memoryview(bytearray(1))]) == 1
        wait_for(lambda: "nothing can be evicted" in bucket.warning())
        wait_for(lambda: "list or delete all" in _said_beside(place))
        assert "500 Internal Server Error" in bucket.warning() and all(there(packs))
        failing[0] = False
        wait_for(lambda: sum(there(packs)) < 10 and not bucket.warning() + _said_beside(place))


def _said_beside(place: FolderBucket) -> str:
    """What one says that hears of the holder."""
    watching = place.keeper(10 * SIZE, Clock())
    watching.step()
    return watching.warning()


# ---- the bound


def test_a_put_that_finds_no_room_is_a_miss(place: FolderBucket) -> None:
    capacity = 3 * 70_000
    store = Guarded(place.spec(capacity).open(StoreContext(65536)), "object")
    stored = [store.put(Memory([make_key()], 65536).fill().blocks)[0] for _ in range(8)]
    assert any(stored) and not all(stored)
    assert store.health.writes_up, "it did answer"
    assert place.held_bytes() <= capacity
    store.close()


@pytest.mark.parametrize("holder_dies", [False, True])
def test_several_processes_keep_it_together(place: FolderBucket, holder_dies: bool) -> None:
    payload, capacity = 8192, 30 * 11_000
    settings = place.tier(capacity)
    kept = fill_by_processes(settings, payload, holder_dies=holder_dies)
    assert min(kept) > 0
    assert sum(kept) * payload > capacity, "more was stored than there is room for"
    place.keeper(capacity, Clock()).step()
    assert capacity / 2 < place.held_bytes() <= capacity
    # A put of obstore's that was killed leaves a name with a "#", which no listing has.
    assert len([one for one in (place.path / "upkeep").iterdir() if "#" not in one.name]) == 1
