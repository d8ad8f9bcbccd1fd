"""How tiers share a prefix: the last block comes soonest, and each block from one that holds it."""

from __future__ import annotations

import itertools
import random

import pytest

from tiers.loading.shares import HeldRun, LinkCost, fill, share


def in_order(tier: int) -> int:
    return 0


def best_end(stretches: list[HeldRun], paces: dict[int, LinkCost]) -> float:
    """When the last block comes at best, over all ways to give them out."""
    holders = [holders for holders, count in stretches for _ in range(count)]
    ends = []
    for owners in itertools.product(*holders):
        used = {tier: owners.count(tier) for tier in owners}
        ends.append(max(paces[t].ready + n * paces[t].each for t, n in used.items()))
    return min(ends)


def random_paces(rng: random.Random, tiers: int) -> dict[int, LinkCost]:
    return {
        tier: LinkCost(
            rng.choice([0.0, rng.random() * 5]), rng.choice([1e-9, 0.5, 1.0, rng.random()])
        )
        for tier in range(tiers)
    }


@pytest.mark.parametrize("seed", range(60))
def test_nobody_could_give_the_blocks_out_better(seed: int) -> None:
    """Where the holders of one stretch are all among those of the next, as in a chain whose lower
    tiers have what the upper ones have."""
    rng = random.Random(seed)
    paces = random_paces(rng, 3)
    stretches = [((2,), rng.randrange(3)), ((1, 2), rng.randrange(3)), ((0, 1, 2), 3)]
    rng.shuffle(stretches)
    stretches = [one for one in stretches if one[1]]
    pieces, seconds = share(stretches, paces, in_order)
    assert seconds == pytest.approx(best_end(stretches, paces), abs=1e-6)
    owners = [tier for tier, count in pieces for _ in range(count)]
    holders = [holders for holders, count in stretches for _ in range(count)]
    assert all(owner in those for owner, those in zip(owners, holders, strict=True))


@pytest.mark.parametrize("seed", range(40))
def test_all_blocks_are_given_out_however_many_they_are(seed: int) -> None:
    rng = random.Random(seed)
    paces = random_paces(rng, rng.randrange(1, 6))
    count = rng.randrange(1, 100_000)
    shares = fill(paces, count)
    assert sum(shares.values()) == count and min(shares.values()) >= 0


def test_neighbours_of_one_tier_are_one_row_in_load_priority_order() -> None:
    paces = dict.fromkeys(range(3), LinkCost(0.0, 1.0))
    assert share([((0, 1, 2), 9)], paces, in_order)[0] == [(0, 3), (1, 3), (2, 3)]
    assert share([((0, 1, 2), 9)], paces, lambda t: t == 0)[0] == [(1, 3), (2, 3), (0, 3)]
