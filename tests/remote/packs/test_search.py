"""Look-ups: right for any packs that a prompt can have, in few round trips."""

from __future__ import annotations

import itertools
import random
from collections.abc import Generator, Sequence
from typing import TypeVar

import pytest

from tiers.remote.packs import search
from tiers.remote.packs.pack import Index, pack_index, parse_index
from tiers.testing import make_key

R = TypeVar("R")


def _packs(keys: Sequence[bytes], starts: Sequence[int], stop: int) -> dict[bytes, Index]:
    """Packs of these blocks that begin at `starts`, the last of which ends before `stop`."""
    if not stop:
        return {}
    ends = [*starts[1:], stop]
    return {
        keys[start]: parse_index(pack_index(keys[start:end], 1))
        for start, end in zip(starts, ends, strict=True)
    }


def _run(
    probe: Generator[Sequence[bytes], search.Found, R], packs: dict[bytes, Index]
) -> tuple[R, int, int]:
    """What a search finds, its round trips and its questions."""
    trips = asked = 0
    try:
        keys = next(probe)
        while True:
            trips, asked = trips + 1, asked + len(keys)
            keys = probe.send({key: packs.get(key) for key in keys})
    except StopIteration as end:
        return end.value, trips, asked


@pytest.mark.parametrize("group", [1, 4, 64])
def test_any_length_of_a_prompt_is_found(group: int) -> None:
    keys = [make_key() for _ in range(5 * group + 3)]
    for stop in range(len(keys) + 1):
        packs = _packs(keys, range(0, stop, group), stop)
        assert _run(search.held(keys, group), packs)[0] == stop


def test_packs_that_end_early_are_followed() -> None:
    chance = random.Random(7)
    for _ in range(300):
        group = chance.choice([4, 16, 64])
        keys = [make_key() for _ in range(chance.randrange(1, 4 * group))]
        stop = chance.randrange(1, len(keys) + 1)
        starts = {*range(0, stop, group), *chance.sample(range(stop), chance.randrange(stop))}
        assert _run(search.held(keys, group), _packs(keys, sorted(starts), stop))[0] == stop


@pytest.mark.parametrize("held", [0, 1, 1000, 2047, 4095, 4096])
def test_a_long_prompt_takes_few_round_trips(held: int) -> None:
    keys = [make_key() for _ in range(4096)]
    packs = _packs(keys, range(0, held, 4), held)
    found, trips, asked = _run(search.held(keys, 4), packs)
    assert found == held
    assert trips <= 6 and asked <= 120
    if not held:
        assert trips == 1 and asked <= search.FIRST_PROBES + 1


def _with_gaps(chance: random.Random, count: int, group: int) -> list[range]:
    """Packs of some of so many blocks: none goes beyond its group."""
    cuts = sorted({*range(0, count, group), *chance.sample(range(count), count // 5), count})
    rows = [range(*pair) for pair in itertools.pairwise(cuts)]
    return [row for row in rows if chance.random() < 0.6]


def test_packs_are_found_wherever_blocks_are_missing_in_two_round_trips() -> None:
    chance = random.Random(11)
    for _ in range(300):
        group = chance.choice([1, 4, 16, 64])
        keys = [make_key() for _ in range(chance.randrange(1, 4 * group + 2))]
        rows = _with_gaps(chance, len(keys), group)
        packs: dict[bytes, Index] = {}
        for row in rows:
            packs |= _packs(keys, [row.start], row.stop)
        there = {number for row in rows for number in row}
        spans, trips, asked = _run(search.find_all(keys, group), packs)
        found = [number for span in spans for number in range(span.at, span.stop)]
        assert sorted(there) == found, "each once"
        assert trips <= 2 and asked <= len(keys)
        stop = chance.randrange(min(group, len(keys))) + 1
        spans, _, _ = _run(search.find(keys[:group], stop), packs)
        found = [number for span in spans for number in range(span.at, span.stop)]
        assert {n for n in found if n < stop} == {n for n in there if n < stop}


def test_a_block_that_is_in_two_packs_is_read_from_one() -> None:
    """Else two reads would fill its memory at once, with what two engines have computed."""
    keys = [make_key() for _ in range(8)]
    packs = _packs(keys, [1], 6) | _packs(keys, [2], 5) | _packs(keys, [6], 8)
    for probe in (search.find(keys, 8), search.find_all(keys, 8)):
        spans, _, _ = _run(probe, packs)
        assert [(span.at, span.count) for span in spans] == [(1, 5), (6, 2)]


def test_a_window_of_whole_packs_takes_one_round_trip_and_a_read_for_each() -> None:
    keys = [make_key() for _ in range(512)]
    packs = _packs(keys, range(0, 512, 64), 512)
    spans, trips, asked = _run(search.find_all(keys, 64), packs)
    assert (sum(span.count for span in spans), trips, asked) == (512, 1, 8)


def test_blocks_that_come_one_by_one_are_not_looked_for_from_the_beginning() -> None:
    keys = [make_key() for _ in range(64)]
    packs = _packs(keys, range(40), 40)
    spans, trips, asked = _run(search.cover(keys, [40], packs.get), packs)
    assert (spans, trips, asked) == ([], 1, 1)
    packs |= _packs(keys, [40], 48)
    spans, trips, _ = _run(search.cover(keys, [40, 44], packs.get), packs)
    assert ([span.at for span in spans], trips) == ([40], 1), "asked for though it is known"


@pytest.mark.fault
def test_what_is_gone_before_is_no_prefix() -> None:
    """The head goes first by age; a search sees that before it sees the rest."""
    keys = [make_key() for _ in range(4096)]
    packs = _packs(keys, range(0, 4096, 4), 4096)
    del packs[keys[0]]
    assert _run(search.held(keys, 4), packs)[0] == 0
