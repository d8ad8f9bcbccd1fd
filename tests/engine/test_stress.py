"""Thousands of requests in far too little KV, with aborts, preemptions and flaky tiers."""

from __future__ import annotations

import random
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from spec.chain import ChainSpec, LoadPolicy
from tests.support.faulty_stores import Faults, FaultyStore, Pace, SlowStore
from tests.support.replay import ReplayEngine, ReplayModel, answer
from tests.support.replay.tables import STATE
from tests.support.replay_chains import HYBRID, MODEL, RECURRENT, SLOT, WINDOWS, measured
from tiers.connector.scheduler.offloading_scheduler import OffloadingScheduler
from tiers.cpu.spec import CpuSpec
from tiers.disk.spec import DiskSpec
from tiers.errors import TierFull, TierUnavailable
from tiers.gpu.copier import CpuCopier
from tiers.testing import GivenSpec, MemoryStore

pytestmark = pytest.mark.long


def flaky(indexed: bool) -> FaultyStore:
    """A store that is now and then slow, full, down, forgetful, broken and boastful."""
    rng = random.Random(7)

    def delay(verb: str, num_bytes: int) -> float:
        waits = verb in ("has", "put", "get") and rng.random() < 0.10
        return rng.random() * 0.01 if waits else 0.0

    faults = Faults(seed=7)
    for error, chance in (
        (TierUnavailable("down for a moment"), 0.005),
        (TierFull("full for a moment"), 0.02),
        (ZeroDivisionError("a defect"), 0.002),
    ):
        faults.fail("has", "put", "get", error=error, chance=chance)
    faults.missing, faults.refused = 0.05, 0.1
    faults.invented = 0.02 if indexed else 0.05
    return FaultyStore(SlowStore(MemoryStore(), Pace(delay), indexed=indexed), faults)


def flaky_tier(name: str, indexed: bool) -> GivenSpec:
    return GivenSpec(type="flaky", name=name).over(flaky(indexed))


class LateCopies(CpuCopier):
    """Copies that take their time, so that the engine is far ahead of them."""

    def _gather(self, *args: Any) -> None:
        time.sleep(random.random() * 0.004)
        super()._gather(*args)

    def scatter(self, *args: Any) -> Any:
        time.sleep(random.random() * 0.002)
        return super().scatter(*args)


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Prompts on a few shared prefixes, of 2 to 20 blocks."""
    roots = [[rng.randrange(1000) for _ in range(rng.randrange(8, 70))] for _ in range(12)]
    return [
        rng.choice(roots) + [rng.randrange(1000) for _ in range(rng.randrange(1, 10))]
        for _ in range(count)
    ]


HOST_BLOCKS = 24
"""Of the cpu tier: a few blocks of each group, so that some are loaded and many evicted."""

QUICK = (("hybrid", 2), ("windows", 1), ("states", 2))
"""Settings and steps in flight that run with all other tests; the rest are with the faults."""
SETTINGS: dict[str, tuple[ReplayModel, LoadPolicy, int, bool]] = {
    "cached": (MODEL, "first", 1, True),
    "uncached": (MODEL, "first", 1, False),
    "two ranks": (MODEL, "first", 2, True),
    "two ranks uncached": (MODEL, "first", 2, False),
    "hybrid": (HYBRID, "first", 2, True),
    "hybrid stitched": (HYBRID, "stitched", 1, False),
    "windows": (WINDOWS, "longest", 1, True),
    "compared": (MODEL, "stitched", 2, False),
    "windows compared": (WINDOWS, "stitched", 1, True),
    "states": (RECURRENT, "stitched", 1, True),
    "states uncached": (RECURRENT, "stitched", 2, False),
}
"""Model, load policy, ranks, and whether the engine caches prefixes itself."""


@pytest.mark.parametrize(
    "setting, in_flight",
    [
        pytest.param(*one, marks=() if one in QUICK else pytest.mark.faults)
        for one in product(SETTINGS, (1, 2))
    ],
)
def test_no_token_differs_and_nothing_is_left_behind(
    tmp_path: Path, setting: str, in_flight: int
) -> None:
    model, load, world_size, prefix_caching = SETTINGS[setting]
    # Of a prompt that has no room no windows are left, and nothing is of use.
    blocks = HOST_BLOCKS * (3 if model is HYBRID else 1)
    chain = ChainSpec(
        version=1,
        load_policy=load,
        load_when="sooner" if "compared" in setting else "always",
        staging=24 * SLOT,
        tiers=(
            CpuSpec(type="cpu", capacity=blocks * SLOT),
            flaky_tier("indexed", indexed=True),
            DiskSpec(type="disk", path=tmp_path, capacity=200 * SLOT),
            flaky_tier("asked", indexed=False),
        ),
    )
    engine = ReplayEngine(
        chain,
        model,
        num_blocks=30 * len(model.windows),
        # Steps end where prompts share states.
        batch_tokens=16 if STATE in model.windows else 256,
        prefix_caching=prefix_caching,
        world_size=world_size,
        open_copier=LateCopies,
        steps_in_flight=in_flight,
    )
    rng = random.Random(world_size)
    requests = []
    for prompt in prompts(rng, 150 if (setting, in_flight) in QUICK else 300):
        requests.append((engine.add(prompt, rng.randrange(1, 12)), prompt))
        for _ in range(rng.randrange(4)):
            engine.step()
        if rng.random() < 0.2:
            engine.scheduler.abort(rng.choice(requests)[0].request_id)
    engine.run()
    engine.settle()

    wrong = 0
    for request, prompt in requests:
        expected = answer(model, prompt, request.max_tokens, world_size)
        wrong += request.output != expected[: len(request.output)]
    assert wrong == 0
    assert engine.scheduler.preemptions > 0
    assert measured(engine, "evictions", "cpu") > 0
    cpu, *stores = (measured(engine, "loaded_tokens", name) for name in ("cpu", "indexed", "disk"))
    # What comes sooner depends on the machine. A store that fails is down for a while, and has what
    # the disk would load while it is not.
    assert any([cpu, *stores]) if "compared" in setting else cpu and any(stores)
    assert_nothing_left(engine, blocks)
    engine.close()


def assert_nothing_left(engine: ReplayEngine, host_blocks: int = HOST_BLOCKS) -> None:
    """No slot, pin, job or block belongs to a request any more; residents hold one reference."""
    assert engine.scheduler.pool.num_free == engine.num_blocks
    assert engine.connector is not None
    assert not engine.connector._requests._states
    tiers = [c for c in engine.connector.children if isinstance(c, OffloadingScheduler)]
    for tier in tiers:
        assert tier.jobs_in_flight == tier._stores.slots_pinned == 0
    pool = tiers[0].pool
    assert {pool.references(slot) for slot in range(pool.num_slots)} <= {0, 1}
    assert pool.in_use <= host_blocks
