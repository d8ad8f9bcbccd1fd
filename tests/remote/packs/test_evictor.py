"""What an evictor keeps a place below: what goes, and what a process may put meanwhile."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from spec.offloading import StoreContext
from tests.remote.packs.places import DAY, KINDS, SIZE, Place, there
from tests.support.clock import Clock, wait_for
from tests.support.replay_chains import close, drive, measured, scheduler_of
from tiers.errors import TierFull, TierUnavailable, TierUnusable
from tiers.remote.packs import evictor
from tiers.remote.packs.evictor import Evictor
from tiers.remote.packs.pack import name_of
from tiers.testing import Memory, make_key


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    kind: type[Place] = request.param
    return kind(tmp_path / "kept")


# ---- what goes


def test_the_oldest_packs_go(place: Place) -> None:
    """A read saves one in a directory, whose files it makes younger, and none in a bucket."""
    packs = place.fill([n * DAY for n in range(20)])
    name = str(packs[19].relative_to(place.path))
    assert place.bucket().read(name, 0, [memoryview(bytearray(9))]) == 9
    place.keeper(10 * SIZE, Clock()).step()
    saved = int(place.renews)
    assert there(packs) == [n < 9 - saved or n >= 20 - saved for n in range(20)]


def test_of_packs_of_one_age_no_more_go_than_must(place: Place) -> None:
    packs = place.fill([DAY] * 20)
    place.keeper(10 * SIZE, Clock()).step()
    assert sum(there(packs)) == 9


def test_below_its_capacity_nothing_goes(place: Place) -> None:
    packs = place.fill(range(20))
    place.keeper(22 * SIZE, Clock()).step()
    place.keeper(None, Clock()).step()
    assert all(there(packs))


@pytest.mark.fault
def test_a_pack_that_can_t_be_deleted_keeps_no_other(place: Place) -> None:
    """Nor is it left uncounted."""
    clock, bucket = Clock(), place.bucket()
    packs = place.fill([n * DAY for n in range(40)])
    upkeep = Evictor(bucket, 30 * SIZE, place.lease(clock), place.pace, clock)
    stuck, really = str(packs[-1].relative_to(place.path)), bucket.delete

    def delete(names: Sequence[str]) -> None:
        really([name for name in names if name != stuck])
        if stuck in names:
            raise TierUnavailable("Input/output error")

    bucket.delete = delete
    with pytest.raises(TierUnavailable, match="Input/output"):
        upkeep.step()
    assert there(packs) == [n < 27 or n == 39 for n in range(40)]
    assert not upkeep.room.admits(3 * SIZE)
    clock.now += 200
    upkeep.step()
    assert [upkeep.room.admits(SIZE) for _ in range(3)] == [True, True, False]
    upkeep.room.ends(2 * SIZE, False)
    other = place.keeper(30 * SIZE, clock)
    for number in range(2 * evictor.FAILURES):
        is_told = number >= evictor.FAILURES
        assert ("can be evicted: Input/output error" in upkeep.warning()) == is_told
        place.fill([DAY] * 5)
        clock.now += 200
        with pytest.raises(TierUnavailable, match="Input/output"):
            upkeep.step()
        assert place.held_bytes() == 28 * SIZE
        other.step()
        assert ("can't list or delete all" in other.warning()) == is_told


@pytest.mark.parametrize("size", [600, 1500, 3000, 5000])
def test_packs_that_are_large_beside_the_capacity_make_room_for_each_other(
    place: Place, size: int
) -> None:
    """Also where what is full is not full by more than a tenth."""
    clock, bucket = Clock(), place.bucket()
    upkeep = place.keeper(10_000, clock)
    names = []
    for number in range(30):
        upkeep.step()
        names.append(name := name_of(make_key()))
        assert upkeep.room.admits(size), "what was put last is counted by now"
        bucket.put(name, [bytes(size)])
        upkeep.room.ends(size, True)
        os.utime(place.path / name, (number * 100, number * 100))
        for _ in range(2):  # by the second count it knows what the first may have missed
            clock.now += 100
            upkeep.step()
    left = there([place.path / name for name in names])
    assert left == sorted(left) and any(left), "the last ones stay"


# ---- the bound


def test_one_process_alone_is_never_beyond_its_capacity(place: Place) -> None:
    upkeep = place.keeper(10 * SIZE, Clock())
    assert [upkeep.room.admits(SIZE) for _ in range(12)] == [True] * 10 + [False] * 2


def test_a_put_without_room_is_one_round_more_and_no_other(place: Place) -> None:
    clock, bucket, listings = Clock(), place.bucket(), list[int]()
    upkeep = Evictor(bucket, 10 * SIZE, place.lease(clock), place.pace, clock)
    listed = bucket.list

    def count(*args: Any) -> Any:
        listings.append(1)
        return listed(*args)

    bucket.list = count
    upkeep.step()
    assert not upkeep.room.admits(11 * SIZE)
    clock.now += place.pace.full.seconds
    assert place.pace.full.seconds < place.pace.usual.seconds
    upkeep.step()
    assert len(listings) == 2
    clock.now += place.pace.full.seconds
    upkeep.step()
    assert len(listings) == 2


def test_a_process_knows_what_others_have_put(place: Place) -> None:
    clock = Clock()
    holder, other = place.keeper(100 * SIZE, clock), place.keeper(100 * SIZE, clock)
    place.fill([0] * 94)
    holder.step()
    other.step()
    assert [other.room.admits(SIZE) for _ in range(8)] == [True] * 6 + [False] * 2
    place.fill([0] * 6)
    clock.now += 100
    holder.step()
    clock.now += 100
    other.step()
    assert other.room.admits(SIZE), "room was made"
    assert not other.room.admits(8 * SIZE), "what it put lately may not be counted yet"


def test_what_a_count_may_have_missed_counts_until_the_next(place: Place) -> None:
    clock = Clock()
    upkeep = place.keeper(10 * SIZE, clock)
    upkeep.step()
    assert upkeep.room.admits(6 * SIZE)
    upkeep.room.ends(6 * SIZE, True)  # into a folder that was walked just before
    clock.now += 100
    upkeep.step()
    assert not upkeep.room.admits(5 * SIZE)
    clock.now += 100
    upkeep.step()
    assert upkeep.room.admits(10 * SIZE), "it is counted, or gone, by now"


def test_a_tier_that_is_full_makes_room_and_serves(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.hurry(monkeypatch)
    monkeypatch.setattr(evictor, "GRAIN_SECONDS", 1e-3)  # else the one put last may be among them
    capacity = 20 * 70_000
    with closing(place.spec(capacity).open(StoreContext(65536))) as store:

        def stores(key: bytes) -> bool:
            try:
                return all(store.put(Memory([key], 65536).fill().blocks))
            except TierFull:
                return False

        for _ in range(30):
            key = make_key()
            wait_for(lambda key=key: stores(key))  # type: ignore[misc]
            assert place.held_bytes() <= capacity
        assert store.get(Memory([key], 65536).blocks) == [True]


def test_a_capacity_in_which_no_block_has_room_is_refused(place: Place) -> None:
    block, ranks = 2048 + 512 + 4096, 2
    site = StoreContext(4096, ranks)
    with pytest.raises(TierUnusable, match=rf"less than one block .* at least {ranks * block}B"):
        place.spec(ranks * block - 1).open(site)
    place.spec(ranks * block).open(site).close()


def test_who_has_another_capacity_than_the_one_that_evicts_is_told(place: Place) -> None:
    """Else a replica with a smaller one empties the directory for all without a word, or one that
    has none evicts nothing, and the others find no room."""
    clocks = [Clock() for _ in range(4)]
    sizes = 10 * SIZE, None, 20 * SIZE, 10 * SIZE
    holder, unbounded, larger, same = (
        place.keeper(size, clock) for size, clock in zip(sizes, clocks, strict=True)
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


# ---- engines


def test_answers_stay_right_where_it_is_full(place: Place) -> None:
    # What the engine's process puts until another does is beyond it until the next count.
    engine = place.engine("64KiB", store_process="never")
    drive(engine, 3)
    engine.settle()
    assert measured(engine, "stored_blocks", str(place.tier(None)["type"])) > 0
    close(engine)
    assert 0 < place.held_bytes() <= 64 << 10


def test_an_engine_whose_capacity_is_not_that_of_the_evictor_says_so(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    one = place.engine("1MiB")
    wait_for(lambda: place.lease(Clock()).last_count().round > 0)
    other = place.engine("1GiB")
    wait_for(lambda: "capacity 1MiB evicts for all there" in caplog.text)
    drive(other, 1)
    assert scheduler_of(other, 1).condition()[0] == "degraded"
    close(one)
    close(other)
