"""Latent attention in a real vLLM: ranks that have the same KV store it once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.vllm.tiny_vllm import DEEPSEEK, EngineFailed, Run, documents, hosted
from tests.support.damage import keys_on
from tiers.block import NAMESPACE_BYTES

pytestmark = [pytest.mark.vllm, pytest.mark.faults, pytest.mark.timeout(600)]

LONG = documents(2, 600)
END = LONG[0][576:]
PROMPTS = [*LONG, LONG[1][:576] + END]
"""The last ends as the first does: only what is before tells them apart."""
BLOCKS = 18
"""Full blocks of a prompt."""


HAS_AMX = torch.cpu._is_amx_tile_supported()


@pytest.mark.skipif(not HAS_AMX, reason="this processor has no AMX")
def test_two_ranks_keep_one_record_of_each_block(
    run_vllm: Callable[..., Run], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    tiers = [{"type": "disk", "capacity": "64MiB", "path": str(tmp_path)}]
    options = {
        "model": str(tiny_model(DEEPSEEK)),
        "dtype": "float16",
        # As long as what is loaded: another chunk would round otherwise.
        "max_num_batched_tokens": BLOCKS * 32,
        "max_model_len": 704,
        "num_gpu_blocks_override": 100,
        "enable_prefix_caching": False,
        "tensor_parallel_size": 2,
        "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    }
    requests = [[(prompt, 8)] for prompt in PROMPTS]
    plain = run_vllm(requests, **options)
    assert plain.tokens[0] != plain.tokens[2], "the prefix must matter"
    first = run_vllm(requests, tiers, **options)
    again = run_vllm(requests, tiers, **options)
    assert first.tokens == again.tokens == plain.tokens
    assert again.loaded() == {"disk": len(PROMPTS) * BLOCKS * 32}
    keys = keys_on(tmp_path)
    assert len({key[:NAMESPACE_BYTES] for key in keys}) == 1
    assert len(keys) == 2 * BLOCKS


CPU = {"type": "cpu", "capacity": "64MiB"}


@pytest.mark.parametrize(
    "chain", [{"tiers": [CPU]}, {"kv_transfer_config": hosted(CPU)}], ids=["ours", "hosted"]
)
def test_without_amx_it_is_refused(
    run_vllm: Callable[..., Run], tiny_model: Callable[..., Path], chain: dict[str, Any]
) -> None:
    """vLLM would compute the end of a prompt as if nothing were before it."""
    options = {"model": str(tiny_model(DEEPSEEK)), "max_model_len": 704, **chain}
    options |= {"before": {"start": ["without_amx"]}, "num_gpu_blocks_override": 100}
    with pytest.raises(EngineFailed, match="needs AMX"):
        run_vllm([[(PROMPTS[0], 1)]], env={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, **options)
