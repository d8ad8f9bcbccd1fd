"""The capacity of an object tier: one process of all evicts what was stored first."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

obstore = pytest.importorskip("obstore")

from obstore.exceptions import GenericError, PermissionDeniedError  # noqa: E402

from spec.offloading import StoreContext  # noqa: E402
from tests.support.clock import Clock, wait_for  # noqa: E402
from tests.support.filling import AT_ONCE, fill_by_processes  # noqa: E402
from tests.support.holder import held_elsewhere  # noqa: E402
from tests.support.replay_chains import (  # noqa: E402
    MODEL,
    chain_of,
    close,
    cpu,
    drive,
    measured,
    scheduler_of,
)
from tiers.errors import TierFull, TierRefused, TierUnavailable, TierUnusable  # noqa: E402
from tiers.lab.replay import ReplayEngine  # noqa: E402
from tiers.remote import evictor, object_upkeep  # noqa: E402
from tiers.remote.evictor import Evictor, KeptBucket  # noqa: E402
from tiers.remote.lease import WATCH_BEATS, Lease  # noqa: E402
from tiers.remote.object_spec import ObjectSpec  # noqa: E402
from tiers.remote.object_upkeep import PACE, ObjectTerms, kept_objects  # noqa: E402
from tiers.remote.obstore_bucket import ObstoreBucket  # noqa: E402
from tiers.remote.packs.marks import BucketMarks  # noqa: E402
from tiers.remote.packs.pack import name_of  # noqa: E402
from tiers.testing import Memory, make_key  # noqa: E402
from tiers.wrappers.guard import Guarded  # noqa: E402

SIZE = 1000
DAY = 86400
WATCH_SECONDS = WATCH_BEATS * PACE.beat


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


def bucket_at(place: Path) -> ObstoreBucket:
    bucket = ObjectSpec(url=f"file://{place}")._bucket(0)
    assert isinstance(bucket, ObstoreBucket)
    return bucket


def kept_at(place: Path, capacity: int) -> KeptBucket:
    return kept_objects(bucket_at(place), capacity)


def keeper(place: Path, capacity: int | None, clock: Clock) -> Evictor:
    bucket = bucket_at(place)
    lease = Lease(ObjectTerms(bucket), PACE.beat, clock)
    return Evictor(bucket, capacity, lease, PACE, clock)


def fill(place: Path, ages: Sequence[float]) -> list[Path]:
    """Put a pack for each of these ages, in seconds."""
    bucket, now, packs = bucket_at(place), time.time(), []
    for age in ages:
        name = name_of(make_key())
        bucket.put(name, [bytes(SIZE)])
        os.utime(place / name, (now - age, now - age))
        packs.append(place / name)
    return packs


def there(packs: Sequence[Path]) -> list[bool]:
    return [pack.exists() for pack in packs]


def held_bytes(place: Path) -> int:
    found = (path for path in place.glob("?" * 32 + "/*/*") if path.is_file())
    return sum(path.stat().st_size for path in found)


# ---- what goes


def test_what_was_stored_first_goes_and_a_read_saves_none(place: Path) -> None:
    packs = fill(place, [n * DAY for n in range(20)])
    name = str(packs[19].relative_to(place))
    assert bucket_at(place).read(name, 0, [memoryview(bytearray(9))]) == 9
    keeper(place, 10 * SIZE, Clock()).step()
    assert there(packs) == [n < 9 for n in range(20)]


def test_below_its_capacity_nothing_goes(place: Path) -> None:
    packs = fill(place, range(20))
    keeper(place, 22 * SIZE, Clock()).step()
    assert all(there(packs))


def test_what_is_no_pack_of_the_prefix_is_neither_counted_nor_deleted(place: Path) -> None:
    """Marks, which no read makes younger here, the upkeep's own objects, a prefix below this one,
    one that begins alike, and what others have put there."""
    marks = BucketMarks(bucket_at(place))
    marks.mark([b"m" * 16])
    (mark,) = (path for path in place.rglob("*") if path.is_file())
    packs = fill(place, [DAY] * 20)
    others = [mark]
    for other in ("nested", "README"):
        others += fill(place / other, [9 * DAY] * 2) if other == "nested" else [place / other]
    alike = fill(place.with_name("bucket2"), [9 * DAY])
    (place / "README").write_bytes(bytes(50 * SIZE))
    for path in others:
        os.utime(path, (1, 1))
    upkeep = keeper(place, 10 * SIZE, Clock())
    upkeep.step()
    assert all(there([*others, *alike])) and marks.marked([b"m" * 16]) == [True]
    assert sum(there(packs)) == 9 and list((place / "upkeep").iterdir())
    assert upkeep._count.used == 9 * SIZE


def test_a_pack_that_goes_while_others_are_deleted_ends_no_round(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule of the bucket deletes, too. Where that is an error, the rest go all the same."""
    packs = fill(place, [DAY] * 20)
    real = obstore.delete

    def delete(store: Any, paths: Any) -> None:
        if isinstance(paths, list):
            packs[19].unlink()
            raise FileNotFoundError(packs[19])
        real(store, paths)

    monkeypatch.setattr(obstore, "delete", delete)
    keeper(place, 10 * SIZE, Clock()).step()
    assert sum(there(packs)) in (8, 9)


# ---- the lease


def test_one_process_has_it_as_long_as_it_lives(place: Path) -> None:
    """Whatever the clocks of both hosts say."""
    clocks = Clock(5), Clock(1e9)
    one, other = (Lease(ObjectTerms(bucket_at(place)), PACE.beat, clock) for clock in clocks)
    assert one.beat() and not other.beat()
    for _ in range(50):
        clocks[0].now += PACE.beat
        clocks[1].now += PACE.beat * 3  # it runs too fast
        assert one.beat() and not other.beat()
    one.resign()
    assert other.beat() and not one.is_held
    assert not one.beat()


@pytest.mark.parametrize("first", [0, 1])
def test_one_that_somebody_deletes_is_had_by_one_again(place: Path, first: int) -> None:
    leases = [Lease(ObjectTerms(bucket_at(place)), PACE.beat, Clock()) for _ in range(2)]
    assert leases[0].beat() and not leases[1].beat()
    for term in (place / "upkeep").iterdir():
        term.unlink()
    both = leases[first], leases[1 - first]
    for _ in range(3):
        assert [lease.beat() for lease in both] == [True, False]
    both[1].resign()
    assert both[0].beat()


@pytest.mark.fault
def test_who_is_silent_loses_it_by_the_watchers_clock_to_one(place: Path) -> None:
    clocks = [Clock(0), Clock(1e6), Clock(-50)]
    one, *others = (Lease(ObjectTerms(bucket_at(place)), PACE.beat, clock) for clock in clocks)
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
    assert len(list((place / "upkeep").iterdir())) == 1, "former terms go"


@pytest.mark.fault
def test_of_those_that_would_take_a_buckets_lease_one_does(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if both looked before either took it."""
    one, other = (Lease(ObjectTerms(bucket_at(place)), PACE.beat, Clock()) for _ in range(2))
    real = ObjectTerms.take

    def meanwhile(self: ObjectTerms, term: int, note: bytes) -> bool:
        monkeypatch.setattr(ObjectTerms, "take", real)
        assert other.beat()
        return real(self, term, note)

    monkeypatch.setattr(ObjectTerms, "take", meanwhile)
    assert not one.beat() and other.beat()


def test_who_watches_reads_and_lists_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing costs twelve reads."""
    one, other = (Lease(ObjectTerms(bucket_at(place)), PACE.beat, Clock()) for _ in range(2))
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
def test_a_beat_that_fails_loses_no_lease(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nobody evicts for minutes, each time the server is busy."""
    lease = Lease(ObjectTerms(bucket_at(place)), PACE.beat, Clock())
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
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packs, clock = fill(place, [DAY] * 9), Clock()
    upkeep = keeper(place, 10 * SIZE, clock)
    upkeep.step()
    packs += fill(place, [0] * 11)

    def full(*given: object, **more: object) -> None:
        raise GenericError("status: 507 Insufficient Storage: <Code>XMinioStorageFull</Code>")

    monkeypatch.setattr(obstore, "put", full)
    clock.now += 1000
    upkeep.step()
    assert sum(there(packs)) == 9


def test_a_cluster_that_is_full_is_sent_few_packs_and_serves(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is sent whole before it is refused."""
    key, sent, failing = make_key(), [], [True]
    real = obstore.put

    def put(*given: Any, **more: Any) -> Any:
        sent.append(given)
        if failing[0]:
            raise GenericError("status: 507 Insufficient Storage: <Code>XMinioStorageFull</Code>")
        return real(*given, **more)

    opened = ObjectSpec(url=f"file://{place}").open(StoreContext(SIZE))
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


def test_to_delete_nothing_is_no_answer_of_a_server(place: Path) -> None:
    """Each load ends by a delete of what it found damaged; what a storm refuses would be sent again
    for that."""
    bucket = bucket_at(place)
    while bucket._budget.spend():
        pass
    for _ in range(20):
        bucket.delete([])
    assert not bucket._budget.spend()


@pytest.mark.fault
def test_a_buckets_evictor_that_is_killed_is_followed(place: Path) -> None:
    with held_elsewhere("tests.remote.test_object_capacity", "kept_at", place):
        clock = Clock()
        other = keeper(place, 10 * SIZE, clock)
        packs = fill(place, [20 * DAY - n * 1000 for n in range(20)])
        other.step()
        assert all(there(packs)), "another has it"
    for _ in range(2):
        clock.now += WATCH_SECONDS
        other.step()
    assert there(packs) == [False] * 11 + [True] * 9


def test_who_closes_it_leaves_the_lease_to_others_at_once(place: Path) -> None:
    kept = kept_at(place, 10 * SIZE)
    wait_for(lambda: bool(list(place.glob("upkeep/term-*"))))
    kept.close()
    wait_for(Lease(ObjectTerms(bucket_at(place)), PACE.beat, Clock()).beat)


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
    place: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, gap: float
) -> None:
    clock = Clock(1e3)
    fill(place, [0])
    upkeep, times = keeper(place, 10 * SIZE, clock), lists(monkeypatch, clock, seconds)
    while len(times) < 5:
        clock.now += upkeep.step() or 1
    gaps = [after - before for before, after in pairwise(times)]
    assert all(gap <= each <= gap + PACE.beat for each in gaps)


@pytest.mark.parametrize(("packs", "gap"), [(1, 500), (20, 400)])
def test_what_fills_fast_is_counted_sooner(
    place: Path, monkeypatch: pytest.MonkeyPatch, packs: int, gap: float
) -> None:
    """Half of what is free is to last until then: of others' puts a process hears in no other way.
    A round lists once, or twice where it evicts; it is as long paused after, or four times so."""
    clock, rounds = Clock(1e3), list[float]()
    upkeep, times = keeper(place, 100 * SIZE, clock), lists(monkeypatch, clock, 100)
    fill(place, [0] * 60)
    while len(rounds) < 6:
        began, listed = clock.now, len(times)
        clock.now += upkeep.step()
        if len(times) > listed:
            rounds.append(began)
            fill(place, [0] * packs)
    assert rounds[-1] - rounds[-2] == gap


def test_a_put_that_finds_no_room_has_all_counted_sooner(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not again and again, where nothing goes."""
    clock = Clock(1e3)
    fill(place, [0] * 10)
    upkeep, times = keeper(place, 10 * SIZE, clock), lists(monkeypatch, clock, 15)
    monkeypatch.setattr(obstore, "delete", lambda store, paths: None)
    while len(times) < 7:
        assert not upkeep.admits(20 * SIZE)
        clock.now += upkeep.step() and 1
    rounds = times[::2]  # each lists twice, to count and to delete, and is as long paused after
    assert [after - before for before, after in pairwise(rounds)] == [60.0] * 3


def test_a_listing_that_fails_is_paused_after_as_well(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, times = Clock(1e3), []

    def busy(self: ObstoreBucket, refused: Callable[[TierRefused], None]) -> Any:
        times.append(clock.now)
        raise TierUnavailable("503 SlowDown")

    monkeypatch.setattr(ObstoreBucket, "list", busy)
    upkeep = keeper(place, 10 * SIZE, clock)
    for _ in range(4):
        with suppress(TierUnavailable):
            upkeep.step()
        clock.now += PACE.beat
    assert len(times) == 2


@pytest.mark.fault
def test_a_listing_that_is_refused_for_the_moment_goes_on_where_it_was(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came is counted once: else a busy server would have too much deleted."""
    bucket, asked = bucket_at(place), []
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
    monkeypatch.setattr("tiers.remote.obstore_bucket.LocalStore", Evictor)
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
    place: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: Exception
) -> None:
    packs, clock = fill(place, [DAY] * 20), Clock()
    upkeep, beside = keeper(place, 10 * SIZE, clock), keeper(place, 10 * SIZE, clock)

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
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(place, [DAY] * 20)
    upkeep = keeper(place, 10 * SIZE, Clock())

    def refused(*given: object, **more: object) -> None:
        raise GenericError(REFUSED)

    monkeypatch.setattr(obstore, "delete", refused)
    upkeep.step()
    assert not upkeep.admits(SIZE)


@pytest.mark.fault
def test_a_buckets_upkeep_that_fails_ends_no_tier(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_upkeep, "PACE", AT_ONCE)
    real, failing = obstore.list, [True]

    def listed(store: Any, prefix: str | None, **more: Any) -> Any:
        if failing[0] and not prefix:
            raise GenericError("status: 500 Internal Server Error")
        return real(store, prefix, **more)

    monkeypatch.setattr(obstore, "list", listed)
    packs = fill(place, [DAY] * 20)
    with closing(kept_at(place, 10 * SIZE)) as bucket:
        name = name_of(make_key())
        assert bucket.put(name, [b"x"])
        assert bucket.read(name, 0, [memoryview(bytearray(1))]) == 1
        wait_for(lambda: "nothing can be evicted" in bucket.warning())
        wait_for(lambda: "list or delete all" in _said_beside(place))
        assert "500 Internal Server Error" in bucket.warning() and all(there(packs))
        failing[0] = False
        wait_for(lambda: sum(there(packs)) < 10 and not bucket.warning() + _said_beside(place))


def _said_beside(place: Path) -> str:
    """What one says that hears of the holder."""
    watching = keeper(place, 10 * SIZE, Clock())
    watching.step()
    return watching.warning()


# ---- the bound


def test_a_put_that_finds_no_room_is_a_miss(place: Path) -> None:
    capacity = 3 * 70_000
    spec = ObjectSpec(url=f"file://{place}", capacity=capacity)
    store = Guarded(spec.open(StoreContext(65536)), "object")
    stored = [store.put(Memory([make_key()], 65536).fill().blocks)[0] for _ in range(8)]
    assert any(stored) and not all(stored)
    assert store.health.writes_up, "it did answer"
    assert held_bytes(place) <= capacity
    store.close()


def test_a_tier_that_is_full_makes_room_and_serves(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_upkeep, "PACE", AT_ONCE)
    monkeypatch.setattr(evictor, "GRAIN_SECONDS", 1e-3)  # else the one put last may be among them
    capacity = 20 * 70_000
    spec = ObjectSpec(url=f"file://{place}", capacity=capacity)
    with closing(spec.open(StoreContext(65536))) as store:

        def stores(key: bytes) -> bool:
            try:
                return store.put(Memory([key], 65536).fill().blocks) == [True]
            except TierFull:
                return False

        for _ in range(50):
            key = make_key()
            wait_for(lambda key=key: stores(key))  # type: ignore[misc]
            assert held_bytes(place) <= capacity
        assert store.get(Memory([key], 65536).blocks) == [True]


@pytest.mark.parametrize("holder_dies", [False, True])
def test_several_processes_keep_it_together(place: Path, holder_dies: bool) -> None:
    payload, capacity = 8192, 30 * 11_000
    settings = {"url": f"file://{place}", "capacity": capacity}
    kept = fill_by_processes(settings, payload, holder_dies=holder_dies)
    assert min(kept) > 0
    assert sum(kept) * payload > capacity, "more was stored than there is room for"
    keeper(place, capacity, Clock()).step()
    assert capacity / 2 < held_bytes(place) <= capacity
    # A put of obstore's that was killed leaves a name with a "#", which no listing has.
    assert len([one for one in (place / "upkeep").iterdir() if "#" not in one.name]) == 1


def test_a_capacity_in_which_no_block_has_room_is_refused(place: Path) -> None:
    block, ranks = 2048 + 512 + 4096, 2
    site = StoreContext(4096, ranks)
    with pytest.raises(TierUnusable, match=rf"less than one block .* at least {ranks * block}B"):
        ObjectSpec(url=f"file://{place}", capacity=ranks * block - 1).open(site)
    ObjectSpec(url=f"file://{place}", capacity=ranks * block).open(site).close()


def _engine(place: Path, capacity: str) -> ReplayEngine:
    tier = {"type": "object", "url": f"file://{place}", "capacity": capacity}
    return ReplayEngine(chain_of(cpu(12), tier), MODEL, num_blocks=24, prefix_caching=False)


def test_answers_stay_right_where_the_bucket_is_full(place: Path) -> None:
    engine = _engine(place, "64KiB")
    drive(engine, 3)
    engine.settle()
    assert measured(engine, "stored_blocks", "object") > 0
    close(engine)
    assert 0 < held_bytes(place) <= 64 << 10


def test_an_engine_whose_capacity_is_not_that_of_the_evictor_says_so(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = _engine(place, "1MiB")
    wait_for(lambda: bool(list(place.glob("upkeep/*"))))
    wait_for(lambda: Lease(ObjectTerms(bucket_at(place)), 1).last_count().round > 0)
    other = _engine(place, "1GiB")
    wait_for(lambda: "capacity 1MiB evicts for all there" in caplog.text)
    drive(other, 1)
    assert scheduler_of(other, 1).condition()[0] == "degraded"
    close(one)
    close(other)
