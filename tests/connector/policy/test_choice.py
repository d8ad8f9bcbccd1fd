"""Which tier serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tiers.connector.policy.choice import Choice, clip, first, longest, stitched
from tiers.contract.block_groups import WAVE

LOOKING = (None, False)
MISSING = (0, False)


def test_the_first_that_has_tokens_serves() -> None:
    assert first([MISSING, (3, True), (7, True)]) == Choice(1, 3, True)


def test_nobody_has_any() -> None:
    assert first([MISSING, MISSING]) == Choice(None, 0, False)


def test_a_lower_tier_that_is_looking_does_not_delay_a_higher_one() -> None:
    assert first([(3, True), LOOKING]) == Choice(0, 3, True)


def test_a_higher_tier_that_is_looking_is_waited_for() -> None:
    assert first([LOOKING, (3, True)]) == Choice(None, None, False)


def test_tiers_below_the_one_that_serves_are_not_asked() -> None:
    def answers() -> Iterator[tuple[int | None, bool]]:
        yield (3, True)
        raise AssertionError("asked a lower tier for nothing")

    assert first(answers()).child == 0


def test_tiers_below_one_that_is_looking_are_asked_so_that_lookups_overlap() -> None:
    asked = []

    def answers() -> Iterator[tuple[int | None, bool]]:
        for child in range(3):
            asked.append(child)
            yield LOOKING

    assert first(answers()).tokens is None
    assert asked == [0, 1, 2]


def test_the_longest_prefix_serves_and_of_several_the_first() -> None:
    assert longest([(3, True), (7, True), (7, True)], 9) == Choice(1, 7, True)
    assert longest([MISSING, MISSING], 9) == Choice(None, 0, False)


def test_longest_waits_for_a_tier_that_could_still_win() -> None:
    assert longest([(3, True), LOOKING], 9).tokens is None
    assert longest([LOOKING, (3, True)], 9).tokens is None


def test_longest_does_not_wait_when_a_tier_has_all() -> None:
    assert longest([LOOKING, (9, True), LOOKING], 9) == Choice(1, 9, True)

    def answers() -> Iterator[tuple[int | None, bool]]:
        yield (9, True)
        raise AssertionError("asked a lower tier for nothing")

    assert longest(answers(), 9).child == 0


Asked = list[range]


def tier(held: str | None, asked: Asked | None = None) -> Callable[[range], list[bool] | None]:
    """A tier that holds the blocks marked x; None: it is looking."""

    def coverage(blocks: range) -> list[bool] | None:
        if asked is not None:
            asked.append(blocks)
        return None if held is None else [held[block : block + 1] == "x" for block in blocks]

    return coverage


def stitch(*tiers: str | None, blocks: range | None = None) -> tuple[object, ...]:
    most = max(len(held or "") for held in tiers)
    made = stitched({i: tier(held) for i, held in enumerate(tiers)}, blocks or range(most))
    return made.shares, made.stop, made.looking


@pytest.mark.parametrize(
    ("tiers", "expected"),
    [
        (["xxxx"], ({0: [range(4)]}, 4, False)),
        ([".xxx"], ({}, 0, False)),
        (["xx..", "xxxx"], ({0: [range(2)], 1: [range(2, 4)]}, 4, False)),
        (["x..x", ".xx."], ({0: [range(1), range(3, 4)], 1: [range(1, 3)]}, 4, False)),
        (["x...", ".x..", "..x."], ({0: [range(1)], 1: [range(1, 2)], 2: [range(2, 3)]}, 3, False)),
        (["xx.x", "xx.x"], ({0: [range(2)]}, 2, False)),
    ],
)
def test_each_block_has_the_first_tier_that_holds_it(
    tiers: list[str], expected: tuple[object, ...]
) -> None:
    assert stitch(*tiers) == expected


def test_a_stitched_prefix_begins_where_it_is_asked_for() -> None:
    assert stitch("x..xx", "..x..", blocks=range(2, 5)) == (
        {1: [range(2, 3)], 0: [range(3, 5)]},
        5,
        False,
    )


def test_a_tier_that_looks_is_waited_for_only_where_the_others_leave_a_gap() -> None:
    assert stitch(None, "xxx") == ({1: [range(3)]}, 3, False)
    assert stitch("xxx", None) == ({0: [range(3)]}, 3, False)
    assert stitch("x.x", None) == ({0: [range(1)]}, 1, True)


def test_nobody_is_asked_for_more_than_it_can_add() -> None:
    upper: list[range] = []
    lower: list[range] = []
    whole = "x" * 9 * WAVE
    gap = "x" * WAVE + "." + "x" * 8 * WAVE
    stitched({0: tier(whole), 1: tier(whole, lower)}, range(9 * WAVE))
    assert lower == [], "the tier above has all"
    found = stitched({0: tier(gap, upper), 1: tier("", lower)}, range(9 * WAVE))
    assert found.stop == WAVE
    assert upper == [range(WAVE), range(WAVE, 5 * WAVE)], "not beyond the gap"
    assert lower == [range(WAVE, 5 * WAVE)]


def test_shares_shrink_with_what_the_engine_takes() -> None:
    shares = {0: [range(2, 4), range(6, 8)], 1: [range(4, 6)]}
    assert clip(shares, 6) == shares
    assert clip(shares, 5) == {0: [range(2, 4), range(6, 7)], 1: [range(4, 6)]}
    assert clip(shares, 2) == {0: [range(2, 4)]}
    assert clip(shares, 0) == clip({}, 3) == {}
