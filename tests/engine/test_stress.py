"""Thousands of requests in far too little KV, with aborts, preemptions and flaky tiers."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from spec.chain import ChainSpec
from spec.offloading import StoreContext, StoreSpec
from tiers.connector.offloading import OffloadingConnector
from tiers.cpu.spec import CpuSpec
from tiers.disk.spec import DiskSpec
from tiers.engine.replay import ReplayEngine, ReplayModel, answer
from tiers.errors import TierFull, TierUnavailable
from tiers.gpu.copier import CpuCopier
from tiers.store import Block

PLAIN = ReplayModel()
HYBRID = ReplayModel(windows=(None, 14, 7))
WINDOWS = ReplayModel(windows=(14,))
SLOT = 4096


class FlakyStore:
    """Keeps blocks, now and then: slow, full, down, forgetful, broken, and boastful."""

    def __init__(self, seed: int) -> None:
        self._blocks: dict[bytes, bytes] = {}
        self._random = random.Random(seed)

    def _misbehave(self) -> None:
        chance = self._random.random()
        if chance < 0.10:
            time.sleep(self._random.random() * 0.01)
        elif chance < 0.105:
            raise TierUnavailable("down for a moment")
        elif chance < 0.125:
            raise TierFull("full for a moment")
        elif chance < 0.127:
            raise ZeroDivisionError("a defect")

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        self._misbehave()
        return [key in self._blocks or self._random.random() < 0.05 for key in keys]

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        self._misbehave()
        stored = [self._random.random() < 0.9 for _ in blocks]
        for block, good in zip(blocks, stored, strict=True):
            if good:
                self._blocks[block.key] = bytes(block.payload)
        return stored

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        self._misbehave()
        hits = []
        for block in blocks:
            found = self._blocks.get(block.key)
            hits.append(found is not None and self._random.random() < 0.95)
            # A miss may leave anything behind.
            block.payload[:] = found if hits[-1] and found else b"\xa5" * len(block.payload)
        return hits

    def drop(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._blocks.pop(key, None)

    def close(self) -> None:
        pass


class FlakyIndexedStore(FlakyStore):
    """The same, asked on the scheduler's thread."""

    def peek(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self._blocks or self._random.random() < 0.02 for key in keys]


class FlakySpec(StoreSpec):
    indexed: bool = False
    _stores: dict[int, FlakyStore] = {}  # noqa: RUF012 - both halves of an engine share it

    def open(self, site: StoreContext) -> FlakyStore:
        made = FlakyIndexedStore if self.indexed else FlakyStore
        return self._stores.setdefault(0, made(seed=7))


class LateCopies(CpuCopier):
    """Copies that take their time, so that the engine is far ahead of them."""

    def _gather(self, *args: Any) -> None:
        time.sleep(random.random() * 0.004)
        super()._gather(*args)

    def scatter(self, *args: Any) -> None:
        time.sleep(random.random() * 0.002)
        super().scatter(*args)


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Prompts on a few shared prefixes, of 2 to 20 blocks."""
    roots = [[rng.randrange(1000) for _ in range(rng.randrange(8, 70))] for _ in range(12)]
    return [
        rng.choice(roots) + [rng.randrange(1000) for _ in range(rng.randrange(1, 10))]
        for _ in range(count)
    ]


QUICK = ("two ranks uncached", "hybrid", "windows")
"""Settings that are run with all other tests; the rest are with the faults."""
SETTINGS = {
    "cached": (PLAIN, "first", 1, True),
    "uncached": (PLAIN, "first", 1, False),
    "two ranks": (PLAIN, "first", 2, True),
    "two ranks uncached": (PLAIN, "first", 2, False),
    "hybrid": (HYBRID, "first", 2, True),
    "hybrid stitched": (HYBRID, "stitched", 1, False),
    "windows": (WINDOWS, "longest", 1, True),
}
"""Model, load policy, ranks, and whether the engine caches prefixes itself."""


@pytest.mark.parametrize(
    "setting",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.faults) for name in SETTINGS],
)
def test_no_token_differs_and_nothing_is_left_behind(tmp_path: Path, setting: str) -> None:
    model, load, world_size, prefix_caching = SETTINGS[setting]
    chain = ChainSpec(
        version=1,
        load_policy=load,
        staging=24 * SLOT,
        tiers=(
            CpuSpec(type="cpu", capacity=16 * SLOT),
            FlakySpec(type="flaky", name="indexed", indexed=True),
            DiskSpec(type="disk", path=tmp_path, capacity=200 * SLOT),
            FlakySpec(type="flaky", name="asked"),
        ),
    )
    engine = ReplayEngine(
        chain,
        model,
        num_blocks=30 * len(model.windows),
        prefix_caching=prefix_caching,
        world_size=world_size,
        open_copier=LateCopies,
    )
    rng = random.Random(world_size)
    requests = []
    for prompt in prompts(rng, 500):
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
    assert engine.stats["cpu"]["evictions"] > 0
    assert all(engine.stats[tier]["loaded_tokens"] > 0 for tier in ("cpu", "indexed", "disk"))
    assert_nothing_left(engine)
    engine.close()


def assert_nothing_left(engine: ReplayEngine) -> None:
    """No slot, pin, job or block belongs to a request any more; residents hold one reference."""
    assert engine.scheduler.pool.num_free == engine.num_blocks
    assert engine.connector is not None
    tiers = [c for c in engine.connector.children if isinstance(c, OffloadingConnector)]
    for tier in tiers:
        assert tier.scheduler.jobs_under_way == tier.scheduler.slots_pinned == 0
        assert not tier.scheduler._requests
    pool = tiers[0].scheduler.pool
    assert {pool.references(slot) for slot in range(pool.num_slots)} <= {0, 1}
    assert pool.in_use <= 16
