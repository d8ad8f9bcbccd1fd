"""Batches of puts end where groups of a prompt do, so that packs are whole."""

from __future__ import annotations

from collections.abc import Sequence

from tiers.connector.worker.put_batches import batches, held_before, in_packs
from tiers.store import Prefix
from tiers.testing import Memory, MemoryStore, make_key


def _numbered(first: int, count: int, group: int) -> list[Prefix | None]:
    keys = [make_key() for _ in range(first + count)]
    return [Prefix(keys, at, group) for at in range(first, first + count)]


def test_a_batch_ends_where_a_group_does_or_where_it_must() -> None:
    assert list(batches(_numbered(1, 30, 4), 16)) == [range(15), range(15, 30)]
    assert list(batches(_numbered(0, 48, 16), 16)) == [range(16), range(16, 32), range(32, 48)]
    assert list(batches(_numbered(1, 9, 64), 4)) == [range(4), range(4, 8), range(8, 9)]
    assert list(batches([None] * 5, 2)) == [range(2), range(2, 4), range(4, 5)]
    assert list(batches([], 4)) == []


def test_a_batch_ends_where_another_prompt_begins() -> None:
    """A group of that would be parted, and lie in two packs."""
    one, other = _numbered(0, 10, 16), _numbered(0, 10, 16)
    assert list(batches([*one, *other], 16)) == [range(10), range(10, 20)]
    assert list(batches([*one, None], 10)) == [range(10), range(10, 11)]


class Packing(MemoryStore):
    """Holds the first three blocks of each group, and no block by itself."""

    def pack_blocks(self) -> int:
        return 4

    def held_prefix(self, prompts: Sequence[Sequence[bytes]]) -> list[int]:
        return [min(3, len(keys)) for keys in prompts]


def test_a_store_that_packs_is_asked_for_groups() -> None:
    of_one, of_other = _numbered(1, 4, 4), _numbered(2, 2, 4)
    names = [make_key() for _ in range(6)]
    held = held_before(Packing(), names, of_one + of_other)
    assert held == [True, True, False, True, True, False]
    store = Packing()
    store.put(Memory(names[:1], 16).fill().blocks)
    held = held_before(store, names, [None, None, *of_one])
    assert held == [True, False, True, True, False, True]
    assert held_before(MemoryStore(), names, of_one + of_other) == [False] * 6


def test_blocks_of_one_prefix_are_put_in_a_row_and_others_as_they_came() -> None:
    one, other = _numbered(0, 2, 4), _numbered(0, 2, 4)
    assert in_packs([one[0], None, other[0], one[1], None, other[1]]) == [0, 3, 2, 5, 1, 4]
    assert in_packs([None] * 3) == [0, 1, 2]
