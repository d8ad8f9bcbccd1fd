"""DeepSeek V4 in a real vLLM: compressed KV, and windows of which a block has many."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.vllm.tiny_vllm import DEEPSEEK_V4, Run, documents
from tests.support.compatibility import engine_version  # noqa: F401 - in the text below

pytestmark = [
    pytest.mark.vllm,
    # A text, which is looked at as a test runs: without vLLM none does.
    pytest.mark.skipif("engine_version() < '0.32'", reason="this vLLM has it on devices alone"),
    pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this processor has no AMX"),
]

CPU = {"type": "cpu", "capacity": "64MiB"}
BLOCK = 256
END = documents(1, 90, seed=9)[0]
LONG = [prompt + END for prompt in documents(3, 2 * BLOCK)]
"""They end alike: only what is before tells them apart."""


@pytest.fixture(scope="module")
def run_v4(run_vllm: Callable[..., Run], tiny_model: Callable[..., Path]) -> Callable[..., Run]:
    def run(batches: Any, tiers: Any = None, **more: Any) -> Run:
        options = {
            "max_model_len": 1024,
            "max_num_batched_tokens": BLOCK,
            "num_gpu_blocks_override": 300,
            "dtype": "bfloat16",
            "before": {"start": ["deepseek_v4"]},
            "env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            **more,
        }
        return run_vllm(batches, tiers, model=str(tiny_model(DEEPSEEK_V4)), **options)

    return run


def disk(folder: Path) -> dict[str, Any]:
    return {"type": "disk", "path": str(folder / "disk"), "capacity": "256MiB"}


def test_compressed_attention_comes_back_from_every_tier(
    run_v4: Callable[..., Run], tmp_path: Path
) -> None:
    """Prompts twice, and what follows an answer that ends behind a block, after a restart."""
    once = [[(prompt, 8)] for prompt in LONG]
    talk = [(LONG[0], BLOCK - len(END) + 20)]
    plain = run_v4([*once, talk])
    assert len({tuple(answer) for (answer,) in plain.tokens[:3]}) == len(LONG)
    ((turn,),) = plain.tokens[3:]
    later = [(LONG[0] + turn + END, 8)]
    answers = run_v4([later]).tokens

    told = {"told": {"4": [("reset_prefix_cache", {})]}, "steps_in_flight": 2}
    first = run_v4([*once, talk, *once], [CPU, disk(tmp_path)], on_reset="keep", **told)
    assert first.tokens == plain.tokens + plain.tokens[:3]
    assert first.loaded() == {"cpu": len(LONG) * 2 * BLOCK}
    in_windows = 2 * 128 // 64 + 8 // 4 + 128 // 8
    blocks = len(LONG) * 2 + 1, len(LONG) + 1  # and of these with windows, one of the answer
    assert first.count("disk", "stored_blocks") == blocks[0] + blocks[1] * in_windows
    restarted = run_v4([*once, later], [disk(tmp_path)])
    assert restarted.tokens == plain.tokens[:3] + answers
    assert restarted.loaded() == {"disk": (len(LONG) * 2 + 1) * BLOCK}


SHARED = documents(3, BLOCK + 40)
CONCURRENT = [(SHARED[i % 3] + [i + 3] * 40, 40) for i in range(9)]


@pytest.mark.timeout(120)
@pytest.mark.faults
def test_loads_fail_and_requests_are_aborted_in_too_little_kv(
    run_v4: Callable[..., Run], tmp_path: Path
) -> None:
    """One whose load has failed finds no room, and vLLM asks nobody behind it, some of whom have
    loaded and hold the room."""
    answers = run_v4([[one] for one in CONCURRENT]).tokens
    tiers = [{"type": "cpu", "capacity": "4MiB"}, disk(tmp_path)]
    few = {"max_model_len": 448, "max_num_batched_tokens": 128, "num_gpu_blocks_override": 140}
    damaged = {"start": ["deepseek_v4"], "1": ["damage_all", str(tmp_path)]}
    more = {"abort": 5, "steps_in_flight": 2, "before": damaged}
    run = run_v4([CONCURRENT * 3, CONCURRENT * 3], tiers, **few, **more)
    for batch in run.tokens:
        for number, tokens in enumerate(batch):
            (expected,) = answers[number % len(CONCURRENT)]
            assert tokens == expected[: len(tokens)], f"request {number}"
    assert run.count("disk", "load_failures") > 0
    assert sum(run.loaded().values()) > 0
