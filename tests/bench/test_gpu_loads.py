"""What `bench gpu` measures of whole loads, over memory of this machine."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from bench.gpu_loads import WholeLoad, tiers
from spec.offloading import OffloadingSpec

COUNT, BLOCK_BYTES = 8, 64 << 10


@pytest.mark.parametrize("tier", tiers(COUNT, BLOCK_BYTES), ids=lambda tier: tier.tier_name)
def test_a_whole_load_brings_the_blocks_back_behind_what_was_launched(
    tier: OffloadingSpec,
) -> None:
    with ExitStack() as stack:
        load = WholeLoad(tier, "cpu", COUNT, BLOCK_BYTES, stack)
        before = {name: layer.clone() for name, layer in load.paged.items()}
        launched: list[str] = []
        for layer in load.paged.values():
            layer[load.table] = 0
        assert load.seconds(lambda: launched.append("a forward")) > 0
        assert launched == ["a forward"]
        assert all((layer == before[name]).all() for name, layer in load.paged.items())
