"""How tiers share a prefix: the last block comes soonest, and each block from one that holds it."""

from __future__ import annotations

import itertools
import random

import pytest

from tiers.loading import shares
from tiers.loading.shares import HeldRun, LoadPace, fill, share


def in_order(tier: int) -> int:
    return 0


def best_end(stretches: list[HeldRun], paces: dict[int, LoadPace]) -> float:
    """When the last block comes at best, over all ways to give them out."""
    holders = [holders for holders, count in stretches for _ in range(count)]
    ends = []
    for owners in itertools.product(*holders):
        used = {tier: owners.count(tier) for tier in owners}
        ends.append(max(paces[t].ready + n * paces[t].each for t, n in used.items()))
    return min(ends)


def random_paces(rng: random.Random, tiers: int) -> dict[int, LoadPace]:
    return {
        tier: LoadPace(
            rng.choice([0.0, rng.random() * 5]), rng.choice([1e-9, 0.5, 1.0, rng.random()])
        )
        for tier in range(tiers)
    }


@pytest.mark.parametrize("seed", range(60))
def test_nobody_could_give_the_blocks_out_better(seed: int) -> None:
    """Where the holders of one stretch are all among those of the next, as in a chain whose lower
    tiers have what the upper ones have; they may hold more than one stretch."""
    rng = random.Random(seed)
    paces = random_paces(rng, 3)
    every = (0, 1, 2)
    stretches = [((2,), rng.randrange(3)), ((1, 2), rng.randrange(3)), (every, 2), (every, 1)]
    rng.shuffle(stretches)
    stretches = [one for one in stretches if one[1]]
    pieces, seconds = share(stretches, paces, in_order)
    assert seconds == pytest.approx(best_end(stretches, paces), abs=1e-6)
    owners = [tier for tier, count in pieces for _ in range(count)]
    ends = [paces[tier].ready + owners.count(tier) * paces[tier].each for tier in {*owners}]
    assert seconds == pytest.approx(max(ends)), "nobody loads more than it was counted with"
    holders = [holders for holders, count in stretches for _ in range(count)]
    assert all(owner in those for owner, those in zip(owners, holders, strict=True))


@pytest.mark.parametrize("seed", range(40))
def test_all_blocks_are_given_out_however_many_they_are(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not one by one: a request waits for it in a step of the engine."""
    asked: list[int] = []
    soonest = shares._next

    def counted(pace: LoadPace, blocks: int) -> float:
        asked.append(blocks)
        return soonest(pace, blocks)

    monkeypatch.setattr(shares, "_next", counted)
    rng = random.Random(seed)
    paces = random_paces(rng, rng.randrange(1, 6))
    count = rng.randrange(1, 100_000)
    filled = fill(paces, count)
    assert sum(filled.values()) == count and min(filled.values()) >= 0
    assert len(asked) <= len(paces) ** 2


def test_neighbours_of_one_tier_are_one_row_in_load_priority_order() -> None:
    paces = dict.fromkeys(range(3), LoadPace(0.0, 1.0))
    assert share([((0, 1, 2), 9)], paces, in_order)[0] == [(0, 3), (1, 3), (2, 3)]
    assert share([((0, 1, 2), 9)], paces, lambda t: t == 0)[0] == [(1, 3), (2, 3), (0, 3)]
