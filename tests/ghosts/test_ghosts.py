"""What ghosts tell of requests is what a cache of whole prefixes would have of them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from tests.support.clock import Clock, wait_for
from tiers.ghosts.ghosts import HALF_LIFE, PUBLISH_SECONDS, SAMPLES, Ghosts, Setting

BLOCK_BYTES = 100
SETTINGS = [
    Setting("small", "small", SAMPLES // 2 * BLOCK_BYTES, 1),
    Setting("large", "large", 4 * SAMPLES * BLOCK_BYTES, 1),
]
"""The first follows all blocks, the second a quarter of them."""


class Followed:
    """Ghosts of an engine with two hashes a block, and prompts of eight blocks for them."""

    def __init__(self, settings: Sequence[Setting] = SETTINGS) -> None:
        self.clock, self.rng = Clock(), random.Random(7)
        self.block_bytes = BLOCK_BYTES
        self.ghosts = Ghosts(settings, 4, 2, lambda: self.block_bytes, self.clock)

    def _block(self) -> list[bytes]:
        return [self.rng.randbytes(16), self.rng.randbytes(16)]

    def put(self, prompts: int, shared: int) -> None:
        """Prompts that share their first blocks, and whose answers fill one more."""
        system = [self._block()[1] for _ in range(shared)]
        for number in range(prompts):
            blocks = [[self.rng.randbytes(16), block] for block in system]
            blocks += [self._block() for _ in range(8 + 2 - shared)]
            # The last token of an answer is not computed.
            self.ghosts.put([one for block in blocks for one in block], 35, 37 + number % 4)

    def published(self) -> Mapping[str, Mapping[str, float]]:
        """What is told once that is counted which was put."""
        wait_for(lambda: not len(self.ghosts._handoff))
        self.clock.now += PUBLISH_SECONDS
        wait_for(lambda: self.ghosts._published is not self.ghosts._taken)
        return self.ghosts.take_measures()

    def close(self) -> Mapping[str, Mapping[str, float]]:
        self.ghosts.close()
        return self.ghosts.take_measures()


def test_prompts_that_share_their_first_blocks() -> None:
    followed = Followed()
    followed.put(400, shared=6)
    small, large = followed.close().values()
    hits, stores = 399 * 6 / 3200, (6 + 400 * 3) / 3200
    assert small["ghost_hit_ratio"] == pytest.approx(hits)
    assert small["ghost_store_ratio"] == pytest.approx(stores)
    assert small["ghost_hit_error"] == 0
    assert large["ghost_hit_ratio"] == pytest.approx(hits, abs=0.05)
    assert large["ghost_store_ratio"] == pytest.approx(stores, abs=0.05)
    assert abs(large["ghost_hit_ratio"] - hits) < 2 * large["ghost_hit_error"] < 0.1
    alone = Followed(SETTINGS[1:])
    alone.put(400, shared=6)
    assert alone.close() == {"large": large}, "where no tier follows all blocks"


def test_nothing_is_counted_before_a_tier_has_opened() -> None:
    followed = Followed()
    followed.block_bytes = 0
    followed.put(100, shared=0)
    assert followed.published() == {}
    followed.block_bytes = BLOCK_BYTES
    followed.put(10, shared=6)
    assert followed.close()["small"]["ghost_hit_ratio"] == pytest.approx(54 / 80)


def test_what_was_half_a_life_ago_weighs_half(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    followed = Followed()
    followed.put(10, shared=6)
    assert followed.published()["small"]["ghost_hit_ratio"] == pytest.approx(54 / 80)
    followed.clock.now += HALF_LIFE - 2 * PUBLISH_SECONDS
    for _ in range(2):
        assert followed.published()["small"]["ghost_hit_ratio"] == pytest.approx(54 / 80)
    followed.put(10, shared=0)
    told = followed.close()["small"]
    assert told["ghost_hit_ratio"] == pytest.approx(27 / 120, rel=1e-2)
    assert told["ghost_store_ratio"] == pytest.approx((18 + 90) / 120, rel=1e-2)
    assert caplog.text.count("ghosts: small would have") == 2, "ten minutes apart, and at the end"
