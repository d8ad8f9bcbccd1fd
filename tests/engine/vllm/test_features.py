"""Real vLLM engines that keep KV in other ways, over a disk that has the blocks of all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.vllm.checkpoints import write_int4, write_model, write_mtp
from tests.engine.vllm.tiny_vllm import GEMMA, LLAMA, QWEN_3, Run, documents
from tests.engine.vllm.vllm_chains import cpu, disk
from tests.support.compatibility import engine_version

pytestmark = [pytest.mark.vllm, pytest.mark.faults]

END = documents(1, 25, seed=9)[0]
PROMPTS = [[(document + END, 8)] for document in documents(3, 576)]
"""What is before their ends must matter."""
COMPLETE = 3 * 576
BOUND = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
MTP = {"method": "mtp", "num_speculative_tokens": 2}


def features(tiny_llama: Path, folder: Path) -> dict[str, tuple[dict[str, Any], int]]:
    """The options of each engine, and the tokens that it is to load."""
    found: dict[str, tuple[dict[str, Any], int]] = {
        "as it is": ({}, COMPLETE),
        "blocks of 128 tokens": ({"block_size": 128, "num_gpu_blocks_override": 10}, 3 * 512),
        "other hashes": ({"prefix_caching_hash_algo": "sha256_cbor"}, COMPLETE),
    }
    guessing = {"model": str(write_mtp(folder / "mtp", LLAMA)), "speculative_config": MTP}
    # vLLM computes the last block anew.
    found["its own guesses (MTP)"] = (guessing, COMPLETE - 3 * 32)
    # Both have blocks of 64 tokens, of which each of these ranks has all, or its part.
    two = {"model": str(write_model(folder, QWEN_3)), "tensor_parallel_size": 2, "env": BOUND}
    found["blocks of 64 tokens on two ranks"] = ({**two, "block_size": 64}, COMPLETE)
    if engine_version() >= "0.32":
        two |= {"decode_context_parallel_size": 2, "before": {"start": ["context_parallel"]}}
        found["tokens shared out among two ranks"] = (two, COMPLETE)
    if torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported():
        four_bits = {"model": str(write_int4(tiny_llama, folder / "int4")), "dtype": "bfloat16"}
        # As long as what is loaded: another chunk would round otherwise.
        found["weights of four bits"] = ({**four_bits, "max_num_batched_tokens": 576}, COMPLETE)
        for kind in ("fp8", "fp8_e5m2"):
            found[f"KV as {kind}"] = ({"kv_cache_dtype": kind}, COMPLETE)
        both = {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0", "3"]}
        found["KV of two precisions"] = ({**both}, COMPLETE)
        # Blocks of its layers have 32 tokens, or 128.
        gemma = {"model": str(write_model(folder, GEMMA)), "num_gpu_blocks_override": 100}
        found["KV of two precisions in two sizes"] = ({**both, **gemma}, 3 * 512)
    return found


def test_each_finds_its_own_blocks_alone(
    run_vllm: Callable[..., Run], tiny_llama: Path, tmp_path: Path
) -> None:
    tiers = [cpu(), disk(tmp_path / "disk")]
    forget = {"told": {3: [("reset_prefix_cache", {})]}, "on_reset": "keep"}
    for name, (own, expected) in features(tiny_llama, tmp_path).items():
        options = {"env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, **own}
        plain = run_vllm(PROMPTS, **options)
        assert len({tuple(one) for (one,) in plain.tokens}) == 3, name
        first = run_vllm(PROMPTS * 2, tiers, **forget, **options)
        assert first.tokens == plain.tokens * 2, name
        assert first.loaded() == {"cpu": expected}, name
        again = run_vllm(PROMPTS, tiers, **options)
        assert again.tokens == plain.tokens, name
        assert again.loaded() == {"disk": expected} == {"disk": again.external_hits}, name
