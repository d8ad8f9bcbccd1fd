"""The simulation's load policies, by runs of blocks, choose as those of the chain, block by block.

`stitched` and its sharing are written twice for speed: the simulation asks once for a run, and the
chain for each block.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from tiers.connector.policy import choice
from tiers.contract.block_groups import COMPLETE
from tiers.loading.shares import LoadPace, share
from tiers.traces.trace import TraceRequest
from tiers.tuning.machine import Machine, TierProfile
from tiers.tuning.simulation import loads as simulated
from tiers.tuning.simulation.sim_chain import SimChain, SimTier
from tiers.tuning.simulation.simulate import _tiers
from tiers.tuning.simulation.simulated_tier import SimulatedTier
from tiers.tuning.simulation.workload import Workload

LENGTHS = (3, 1, 6, 2)
BLOCKS = sum(LENGTHS)
PATH = range(len(LENGTHS))


def tiers(rng: random.Random) -> list[SimulatedTier]:
    """Tiers that hold random blocks of four runs, most of them."""
    prompts = [range(sum(LENGTHS[:n])) for n in range(1, len(LENGTHS) + 1)]
    requests = [TraceRequest(0.0, 16 * len(ids), 1, list(ids)) for ids in prompts]
    workload = Workload.of(requests, 16)
    assert list(workload.lengths) == list(LENGTHS)
    names = ["a", "b", "c"][: rng.randrange(1, 4)]
    profile = TierProfile(load_bandwidth=1.0, store_bandwidth=1.0)
    machine = Machine(
        kv_bytes_per_token=1, engine_cache=0, prefill_rate=1.0, tiers=dict.fromkeys(names, profile)
    )
    found = _tiers(SimChain(tuple(SimTier(name, name, False) for name in names)), machine, workload)
    part = rng.choice([0.3, 0.8, 0.97])
    for tier in found:
        for run, length in enumerate(LENGTHS):
            tier.held[run] = sum(1 << bit for bit in range(length) if rng.random() < part)
    return found


def held(tier: SimulatedTier) -> list[int]:
    """Whether it holds each block."""
    return [
        tier.held[run] >> bit & 1 for run, length in enumerate(LENGTHS) for bit in range(length)
    ]


def prefix(tier: SimulatedTier, first: int, most: int) -> int:
    """How many blocks it holds from `first` on, without a gap."""
    return [*held(tier)[first : first + most], 0].index(0)


def totals(shares: choice.Shares) -> dict[int, int]:
    return {child: sum(map(len, ranges)) for child, ranges in shares.items()}


@pytest.mark.parametrize("seed", range(300))
def test_policies_choose_as_those_of_the_chain(seed: int) -> None:
    rng = random.Random(seed)
    some = tiers(rng)
    first = rng.randrange(BLOCKS)
    at, skip = next(
        (run, first - sum(LENGTHS[:run])) for run in PATH if first < sum(LENGTHS[: run + 1])
    )
    most = rng.randrange(1, BLOCKS - first + 1)
    question = simulated.Question(PATH, at, skip, most)
    masks = [(1 << length) - 1 for length in LENGTHS]
    placed = list(enumerate(some))
    prefixes = [prefix(tier, first, most) for tier in some]
    longest, any_of = max(prefixes), [place for place, count in enumerate(prefixes) if count]
    expected = [(place, prefixes[place]) for place in any_of[:1]]
    runs = list(simulated.held_runs(placed, question, masks))
    assert (simulated.first(runs) if runs else []) == expected
    expected = [(prefixes.index(longest), longest)] if longest else []
    assert (simulated.longest(runs) if runs else []) == expected

    def coverage(tier: SimulatedTier) -> choice.Coverage:
        return lambda wave: [COMPLETE * has for has in held(tier)[wave.start : wave.stop]]

    children = {place: coverage(tier) for place, tier in placed}
    blocks = range(first, first + most)
    assert counts(simulated.stitched(runs)) == totals(choice.stitched(children, blocks).shares)
    costs = {place: LoadPace(rng.random(), rng.random() + 0.1) for place, _ in placed}
    pieces, _ = share(runs, costs, lambda place: place)
    stitch = choice.stitched(
        children, blocks, give=lambda some: share(some, costs, lambda place: place)[0]
    )
    assert counts(pieces) == totals(stitch.shares)


def counts(pieces: Sequence[tuple[int, int]]) -> dict[int, int]:
    found: Counter[int] = Counter()
    for place, count in pieces:
        found[place] += count
    return dict(found)
