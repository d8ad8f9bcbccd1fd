"""Real vLLM engines over drawn chains, one after another over the same stores: no token differs."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spec.chain import ChainSpec
from tests.engine.vllm.tiny_vllm import (
    BLOCK_BYTES,
    GEMMA,
    GEMMA_4,
    LLAMA,
    MISTRAL,
    Run,
    documents,
)
from tests.soak.chains import TIERS, Chains
from tests.soak.faults import Mood, Sabotaged
from tests.support.replay_chains import SLOT
from tests.support.servers import RedisServer, binaries
from tiers.cpu.spec import CpuSpec

pytestmark = [pytest.mark.vllm, pytest.mark.faults]

ENGINES = 5
LONG = documents(4, 400)
REQUESTS = [(LONG[number % 4][: 400 - 16 * number] + [number + 3] * 40, 8) for number in range(12)]
BATCHES = [*([one] for one in REQUESTS[:4]), REQUESTS, REQUESTS[::-1]]
"""Prompts that begin alike come alone, and then all at once."""
SCALE = BLOCK_BYTES // SLOT
"""Drawn capacities are for smaller blocks; those of stores are large enough."""


def written(chain: ChainSpec) -> dict[str, Any]:
    """A drawn chain as its file would have it, with the disk itself: no fault is injected."""
    tiers = []
    for tier in chain.tiers:
        settings = tier.model_dump(mode="json", exclude_unset=True)
        if isinstance(tier, Sabotaged):
            settings |= tier.inner.model_dump(mode="json", exclude_unset=True)
            del settings["inner"]
        if isinstance(tier, CpuSpec):
            settings["capacity"] = tier.capacity * SCALE
        tiers.append({**settings, "type": tier.type})
    return {**chain.model_dump(mode="json", exclude_unset=True), "tiers": tiers}


@pytest.mark.parametrize("model", [LLAMA, GEMMA, GEMMA_4, MISTRAL], ids=lambda m: m["model_type"])
def test_no_token_differs(
    run_vllm: Callable[..., Run],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    model: dict[str, Any],
) -> None:
    options = {
        "model": str(tiny_model(model)),
        "max_model_len": 704,
        "max_num_batched_tokens": 128,
        "num_gpu_blocks_override": 80,
        "env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    }
    alone = [tokens for (tokens,) in run_vllm([[one] for one in REQUESTS], **options).tokens]
    expected = [*([tokens] for tokens in alone[:4]), alone, alone[::-1]]
    rng = random.Random(model["model_type"])
    loaded = 0.0
    with RedisServer(binaries()["valkey"]) as server:
        chains = Chains(tmp_path, server.url, Mood(rng), rng)
        for number in range(ENGINES):
            drawn = written(chains.draw(None if number else TIERS))
            steps = {"steps_in_flight": 2} if rng.random() < 0.5 else {}
            run = run_vllm(BATCHES, drawn["tiers"], drawn=drawn, **steps, **options)
            assert run.tokens == expected, drawn
            loaded += sum(run.loaded().values())
    assert loaded > 0
