"""Blocks of several KV cache groups: their keys, what is kept of them, and what is of use."""

from __future__ import annotations

from functools import partial

from tiers.connector.policy.choice import stitched
from tiers.contract.block_groups import COMPLETE, MISSING, NO_WINDOW, BlockGroups, usable
from tiers.contract.engine_info import EngineInfo, KVGroup


def parts_of(*groups: KVGroup, block_tokens: int = 16, hash_tokens: int = 16) -> BlockGroups:
    return BlockGroups(EngineInfo({}, block_tokens, hash_tokens, num_blocks=99, groups=groups))


def _held(levels: list[int], blocks: range) -> list[int]:
    return levels[blocks.start : blocks.stop]


HYBRID = parts_of(KVGroup(16), KVGroup(16, window=40), KVGroup(16, window=20))
HASHES = [bytes([i]) * 32 for i in range(8)]


def test_an_ordinary_block_has_one_part() -> None:
    plain = parts_of()
    (key,) = plain.keys(HASHES, range(3, 4), b"")
    assert plain.hash_of(key) == (HASHES[3], 0)
    assert (len(plain), plain.window) == (1, 0)


def test_parts_of_a_block_never_share_a_key() -> None:
    keys = HYBRID.keys(HASHES, range(8), b"")
    assert len(set(keys)) == 8 * 3
    assert HYBRID.hash_of(keys[5]) == (HASHES[1], 2)
    assert not set(keys) & set(HYBRID.keys(HASHES, range(8), b"an adapter's mark"))


def test_groups_with_blocks_of_their_own_size() -> None:
    """A block is as long as the longest; the others' are named by the hash at their own end."""
    mixed = parts_of(KVGroup(32), KVGroup(16, window=20), block_tokens=32, hash_tokens=16)
    assert [mixed.hash_of(key) for key in mixed.keys(HASHES, range(1, 2), b"")] == [
        (HASHES[3], 0),
        (HASHES[2], 1),
        (HASHES[3], 1),
    ]
    tables = [[7, 8], [0, 0, 5, 6]]
    assert mixed.paged(tables, 1) == [8, 5, 6]
    assert mixed.blocks_in(tables) == 2
    assert mixed.blocks_in([[7, 8], [1, 2, 3]]) == 1
    found = {1}
    mixed.add_written(found, tables, 48)
    assert found == {1, 8, 6}


def test_a_window_needs_blocks_up_to_its_reach() -> None:
    """The token after the prefix sees itself and 39 before it: two blocks and a part of a third."""
    assert HYBRID.window == 3
    assert parts_of(KVGroup(16, window=33)).window == 2


def test_what_no_window_reaches_from_the_end_of_a_block_is_no_part() -> None:
    """As of DeepSeek V4, whose blocks of 4 tokens have windows of 8."""
    groups = KVGroup(64), KVGroup(16, window=20), KVGroup(4, window=8), KVGroup(16, window=1)
    mixed = parts_of(*groups, block_tokens=64, hash_tokens=4)
    hashes = [bytes([i]) * 32 for i in range(32)]
    found = [mixed.hash_of(key) for key in mixed.keys(hashes, range(1, 2), b"")]
    at = [(31, 0), (27, 1), (31, 1), (30, 2), (31, 2), (31, 3)]
    assert found == [(hashes[number], group) for number, group in at]
    tables = [[7, 8], [0, 0, 0, 0, 0, 0, 5, 6], [*[0] * 30, 3, 4], [*[0] * 7, 9]]
    assert mixed.paged(tables, 1) == [8, 5, 6, 3, 4, 9]
    assert [*mixed.places(range(6, 12))] == [(0, 1), (1, 6), (1, 7), (2, 30), (2, 31), (3, 7)]
    assert (mixed.window, mixed.blocks_in(tables)) == (1, 2)
    written: set[int] = set()
    mixed.add_written(written, [[7, 8], [1] * 8, [*range(20, 52)], [2] * 8], 68)
    assert written == {8, 1, 2, *range(37, 52)}, "also what is no part"


def test_windowed_parts_are_given_away_behind_the_window() -> None:
    """After 64 tokens a window of 40 begins at token 25, one of 20 at token 45."""
    assert HYBRID.kept(0, 64) == [True, False, False]
    assert HYBRID.kept(1, 64) == [True, True, False]
    assert HYBRID.kept(2, 64) == [True, True, True]


def test_a_block_without_its_windowed_parts_is_a_body() -> None:
    held = [True, True, True, True, False, True, False, True, True]
    assert HYBRID.coverage(held) == [COMPLETE, NO_WINDOW, MISSING]
    windows_only = parts_of(KVGroup(16, window=40))
    assert windows_only.coverage([True, False]) == [COMPLETE, NO_WINDOW], (
        "nothing else is needed of it"
    )


def test_a_prefix_ends_where_its_last_blocks_are_whole() -> None:
    assert usable([COMPLETE] * 4, 2) == 4
    assert usable([NO_WINDOW, NO_WINDOW, COMPLETE, COMPLETE, NO_WINDOW], 2) == 4
    assert usable([NO_WINDOW] * 4, 2) == 0
    assert usable([COMPLETE, NO_WINDOW, COMPLETE], 2) == 1, "a short prefix is all window"
    assert usable([COMPLETE, MISSING, COMPLETE, COMPLETE], 2) == 1
    assert usable([NO_WINDOW, NO_WINDOW, MISSING], 0) == 2


def test_a_stitched_prefix_takes_bodies_and_whole_blocks_from_different_tiers() -> None:
    tiers = {
        0: [NO_WINDOW, NO_WINDOW, NO_WINDOW, NO_WINDOW, NO_WINDOW, COMPLETE],
        1: [COMPLETE, MISSING, MISSING, COMPLETE, COMPLETE, MISSING],
    }
    found = stitched(
        {i: partial(_held, levels) for i, levels in tiers.items()},
        range(6),
        window=2,
    )
    assert found.stop == 6
    assert found.shares == {0: [range(4), range(5, 6)], 1: [range(4, 5)]}

    shorter = stitched({0: lambda blocks: tiers[0]}, range(6), window=2)
    assert (shorter.stop, shorter.shares) == (0, {})


def test_a_state_is_what_the_engine_hands_over_and_a_prefix_needs_the_last_alone() -> None:
    mixed = parts_of(KVGroup(16), KVGroup(16, 16, is_state=True), KVGroup(16, 16, is_state=True))
    assert mixed.window == 1
    assert [mixed.state(1, 48), mixed.state(2, 48)] == [2 * 3 + 1, 2 * 3 + 2]
    assert [mixed.state(0, 48), mixed.state(1, 40), mixed.state(1, 0)] == [None] * 3
    assert mixed.kept(2, 48) == [True, False, False], "its block table does not say where it is"
    assert mixed.blocks_in([[4, 5, 6], [0, 0, 9], [8]]) == 3
    held = [True, False, False, True, True, True, True, True, False]
    assert usable(mixed.coverage(held), mixed.window) == 2

    states_only = parts_of(KVGroup(16, 16, is_state=True))
    assert usable(states_only.coverage([False, True, False]), states_only.window) == 2
