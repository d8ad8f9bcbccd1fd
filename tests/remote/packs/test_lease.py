"""A lease: of all processes on a place one has it, whoever dies, and whatever clocks say."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.remote.packs.places import DAY, KINDS, SIZE, Place, SharedDirectory, there
from tests.support.clock import Clock, wait_for
from tiers.remote.packs.evictor import Evictor
from tiers.remote.packs.lease import Count, Lease, Terms
from tiers.remote.shared.upkeep import DirectoryTerms


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    kind: type[Place] = request.param
    return kind(tmp_path / "kept")


def test_one_process_has_it_as_long_as_it_lives(place: Place) -> None:
    """Whatever the clocks of both hosts say."""
    clocks = Clock(5), Clock(1e9)
    one, other = map(place.lease, clocks)
    assert one.beat() and not other.beat()
    for _ in range(50):
        clocks[0].now += place.pace.beat
        clocks[1].now += place.pace.beat * 3  # it runs too fast
        assert one.beat() and not other.beat()
    one.resign()
    assert not one.is_held and other.beat()
    clocks[0].now += place.watch_seconds - 1
    assert not one.beat() and not one.beat()


@pytest.mark.fault
def test_who_holds_it_and_is_silent_loses_it_by_the_watchers_clock(place: Place) -> None:
    clocks = [Clock(0), Clock(1e6), Clock(-50)]
    one, *others = map(place.lease, clocks)
    assert one.beat()
    clocks[1].now += 10 * place.watch_seconds
    assert not any(other.beat() for other in others), "they have not watched it yet"
    for clock in clocks:
        clock.now += place.watch_seconds - 1
    assert not any(other.beat() for other in others)
    for clock in clocks:
        clock.now += 1
    assert [other.beat() for other in others].count(True) == 1
    assert not one.beat(), "it was only stopped, and finds that it has lost it"
    assert sum(other.beat() for other in others) == 1
    assert len(list((place.path / "upkeep").iterdir())) == 1, "former terms go"


@pytest.mark.fault
@pytest.mark.parametrize("was_held", [False, True])
def test_of_those_that_would_take_it_one_does(
    place: Place, was_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if both looked before either took it."""
    clocks = Clock(), Clock()
    one, other = map(place.lease, clocks)
    if was_held:
        assert place.lease(Clock()).beat()
        assert not one.beat() and not other.beat()
        for clock in clocks:
            clock.now += place.watch_seconds
    terms = type(place.terms())
    real = terms.take

    def meanwhile(self: Terms, term: int, note: bytes) -> bool:
        monkeypatch.setattr(terms, "take", real)
        assert other.beat()
        return bool(real(self, term, note))

    monkeypatch.setattr(terms, "take", meanwhile)
    assert not one.beat() and other.beat()
    assert not one.beat() and len(list((place.path / "upkeep").iterdir())) == 1


def test_where_all_terms_were_removed_one_takes_it_anew(place: Place) -> None:
    clock = Clock()
    one, other = place.lease(clock), place.lease(clock)
    assert one.beat() and not other.beat()
    for term in place.path.glob("upkeep/term-*"):
        term.unlink()
    assert [one.beat(), one.beat()][1] != other.beat()
    assert len(list(place.path.glob("upkeep/term-*"))) == 1


@pytest.mark.fault
def test_an_evictor_that_is_killed_is_followed_by_another(place: Place) -> None:
    with place.held_elsewhere():
        clock = Clock()
        other = place.keeper(10 * SIZE, clock)
        packs = place.fill([20 * DAY - n * 1000 for n in range(20)])
        other.step()
        assert all(there(packs)), "another has it"
    for _ in range(2):
        clock.now += place.watch_seconds
        other.step()
    assert there(packs) == [False] * 11 + [True] * 9


@pytest.mark.parametrize("listing", [1, 2], ids=["as it counts", "as it evicts"])
def test_an_evictor_that_was_stopped_in_a_listing_ends_it_where_another_has_the_lease(
    place: Place, listing: int
) -> None:
    """What it has counted is of the time before, and the other evicts as much itself."""
    clock, packs = Clock(), place.fill([DAY] * 20)
    bucket, other, listings = place.bucket(), place.lease(clock), list[int]()
    stopped = Evictor(bucket, 10 * SIZE, place.lease(clock), place.pace, clock)
    honest = bucket.list

    def take(*args: Any) -> Iterator[Any]:
        listings.append(1)
        if len(listings) == listing:
            other.beat()
            clock.now += place.watch_seconds
            assert other.beat()
            assert other.beat(Count(7, 5 * SIZE, 10 * SIZE))
        yield from honest(*args)

    bucket.list = take
    stopped.step()
    assert all(there(packs)) and len(listings) == listing
    assert place.lease(clock).last_count() == other.count


def test_who_closes_it_leaves_the_lease_to_others_at_once(place: Place) -> None:
    kept = place.kept(10 * SIZE)
    wait_for(lambda: bool(list(place.path.glob("upkeep/term-*"))))
    kept.close()
    wait_for(place.lease(Clock()).beat)


def test_the_lease_is_of_the_directorys_group(tmp_path: Path) -> None:
    place = SharedDirectory(tmp_path / "kept")
    before = os.umask(0o077)
    try:
        Lease(DirectoryTerms(str(place.path), 0o2770), place.pace.beat).beat()
    finally:
        os.umask(before)
    folder = place.path / "upkeep"
    modes = [path.stat().st_mode & 0o7777 for path in (folder, *folder.iterdir())]
    assert modes == [0o2770, 0o660]
