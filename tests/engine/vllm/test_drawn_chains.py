"""Real vLLM engines over drawn chains, one after another over the same stores: no token differs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spec.chain import ChainSpec
from tests.engine.vllm.checkpoints import write_adapter
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

ENGINES, MIXED = 3, 2
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


@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", [LLAMA, GEMMA, MISTRAL], ids=lambda m: m["model_type"])
def test_no_token_differs_of_adapters_and_salts_over_changes_and_refused_resets(
    run_vllm: Callable[..., Run],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    model: dict[str, Any],
) -> None:
    """The engine preempts some, its chain changes meanwhile, and half of the resets while a
    request runs are of its cache alone. Beside an adapter vLLM's CPU answers others wrongly."""
    adapters = [str(write_adapter(tmp_path / name, model, seed)) for seed, name in enumerate("ab")]
    rng = random.Random(model["model_type"])
    some = [(tokens, 24, {"salt": rng.choice("st")}) for tokens, _ in REQUESTS]
    kinds = [
        {"adapter": adapters[0]},
        {"adapter": adapters[1]},
        {"salt": "s", "adapter": adapters[0]},
    ]
    adapted = [(tokens, 24, rng.choice(kinds)) for tokens, _ in REQUESTS for _ in range(2)]
    options = {
        "model": str(tiny_model(model)),
        "max_model_len": 704,
        "max_num_batched_tokens": 128,
        "num_gpu_blocks_override": 60,
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 2,
        "max_lora_rank": 8,
        "env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    }
    asked = [*some, *adapted]
    said = [tokens for (tokens,) in run_vllm([[one] for one in asked], **options).tokens]
    batches = [adapted, some, adapted[::-1], some, adapted, some[::-1], some[:1]]
    control, report = tmp_path / "control", tmp_path / "report.json"
    under: list[Any] = ["change_under_a_request", {"asked": LONG[0][:300] + [7] * 20}]
    loaded = preempted = 0.0
    with RedisServer(binaries()["valkey"]) as server:
        chains = Chains(tmp_path, server.url, Mood(rng), rng)
        for number in range(MIXED):
            first = chains.draw(None if number else TIERS)
            drawn = written(first)
            live = {"control": {"folder": str(control)}, "explain": {}, "max_wait": "100s"}
            drawn |= live
            changed = [{**written(chains.change(first)), **live} for _ in range(3)]
            begin = {"folder": str(control), "chains": changed, "memory": "/"}
            told = {
                str(at): [[under[0], {**under[1], "reset_connector": rng.random() < 0.5}]]
                for at in range(2, 6)
            }
            told |= {"1": [["begin_changes", begin]]}
            told |= {"6": [["end_changes", {"result": str(report)}]]}
            steps = {"steps_in_flight": 2} if rng.random() < 0.5 else {}
            run = run_vllm(
                batches, drawn["tiers"], drawn=drawn, told=told, control=control, **steps, **options
            )
            for batch, answers in zip(batches, run.tokens, strict=True):
                assert answers == [said[asked.index(one)] for one in batch], drawn
            loaded += sum(run.loaded().values())
            preempted += run.preemptions
            assert json.loads(report.read_text())["changes"] > 0
    assert loaded > 0 and (preempted > 0 or model is MISTRAL)
