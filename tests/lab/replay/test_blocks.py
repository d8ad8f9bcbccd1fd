"""The replay engine's block tables: the prefix that every group has in place."""

from __future__ import annotations

import random

import pytest

from tests.support.replay.tables import STATE, CachePool, WindowTables
from tiers.lab.replay.blocks import chain_hash

SIZE = 4


@pytest.mark.parametrize("windows", [(None,), (None, 9), (6, None, STATE), (6,)], ids=str)
def test_a_prefix_is_as_long_as_every_group_has_it(windows: tuple[int | None, ...]) -> None:
    rng = random.Random(1)
    for _ in range(200):
        pool = CachePool(64, prefix_caching=True, has_null=True)
        tables = WindowTables(pool, SIZE, windows)
        hashes = [chain_hash(b"", [number], "") for number in range(10)]
        held = [[rng.random() < 0.9 for _ in hashes] for _ in windows]
        for group, row in enumerate(held):
            for block_hash, is_held in zip(hashes, row, strict=True):
                if is_held:
                    taken = pool.take(1)
                    assert taken is not None
                    pool.know(taken[0], block_hash + bytes([group]))

        def whole(group: int, count: int, held: list[list[bool]] = held) -> bool:
            window, tokens = windows[group], count * SIZE
            first = 0 if window is None else max(0, tokens - max(window, 1) + 1) // SIZE
            first = count - 1 if window == STATE else first
            return all(held[group][first:count])

        groups = range(len(windows))
        expected = next(n for n in range(10, -1, -1) if n == 0 or all(whole(g, n) for g in groups))
        assert [len(table) for table in tables.find_prefix(hashes)] == [expected] * len(windows)
