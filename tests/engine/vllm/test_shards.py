"""A real vLLM engine whose two worker processes hold a share of each block."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.vllm.tiny_vllm import Run, documents
from tests.support.damage import damage_blocks, keys_on
from tiers.block import NAMESPACE_BYTES

pytestmark = pytest.mark.vllm

PROMPTS = [(prompt, 8) for prompt in documents(4, 600)]
"""Of 18 full blocks each."""
TWO = {"tensor_parallel_size": 2, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}


@pytest.mark.faults
@pytest.mark.fault
def test_a_shard_damaged_on_one_rank_costs_its_own_request_alone(
    run_vllm: Callable[..., Run], tmp_path: Path
) -> None:
    tiers = [{"type": "disk", "capacity": "64MiB", "path": str(tmp_path)}]
    first = run_vllm([[prompt] for prompt in PROMPTS], tiers, num_gpu_blocks_override=100, **TWO)
    keys = keys_on(tmp_path)
    ranks = {key[:NAMESPACE_BYTES] for key in keys}
    assert len(ranks) == 2 and len(keys) == 2 * 4 * 18, "each rank stored its share"

    bad = keys[50]
    assert damage_blocks(tmp_path, bad.__eq__) == 1
    second = run_vllm([PROMPTS], tiers, num_gpu_blocks_override=100, **TWO)
    assert second.tokens == [[answer for (answer,) in first.tokens]]
    assert second.count("disk", "load_failures") > 0
    assert 3 * 18 * 32 <= second.loaded()["disk"] < 4 * 18 * 32
