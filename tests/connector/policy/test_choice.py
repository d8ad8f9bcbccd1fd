"""Which tier serves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tiers.connector.policy.choice import behind, clip, stitched
from tiers.contract.block_groups import COMPLETE, WAVE

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
    lower.clear()
    levels = {0: lambda blocks: [COMPLETE] * len(blocks), 1: tier(whole, lower)}
    assert stitched(levels, range(9 * WAVE), window=1).stop == 9 * WAVE
    assert lower == [], "windows, too"


def test_shares_shrink_with_what_the_engine_takes() -> None:
    shares = {0: [range(2, 4), range(6, 8)], 1: [range(4, 6)]}
    assert clip(shares, 6) == shares
    assert clip(shares, 5) == {0: [range(2, 4), range(6, 7)], 1: [range(4, 6)]}
    assert clip(shares, 2) == {0: [range(2, 4)]}
    assert clip(shares, 0) == clip({}, 3) == {}


def test_of_a_prefix_another_tier_loads_the_first_blocks() -> None:
    shares = {0: [range(2), range(4, 6)], 1: [range(2, 4)]}
    assert behind(shares, {1: [range(2)]}) == {1: [range(2), range(2, 4)], 0: [range(4, 6)]}
    assert behind(shares, {1: [range(1)]})[0] == [range(1, 2), range(4, 6)]
