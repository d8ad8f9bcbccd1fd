"""A model with linear attention in a real vLLM: its states come back with the KV they belong to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import RedisServer
from tests.support.tiny_vllm import QWEN_NEXT, STATE_BLOCK_TOKENS, Run, documents, hosted

pytestmark = pytest.mark.vllm

CPU = {"type": "cpu", "capacity": "64MiB"}
BLOCKS = 1
"""Full blocks of a long prompt."""
LONG = documents(3, 600)
LONGER = {"max_model_len": 2040, "max_num_batched_tokens": 1024}
END = LONG[0][BLOCKS * STATE_BLOCK_TOKENS :]
OTHERS = [prompt[: BLOCKS * STATE_BLOCK_TOKENS] + END for prompt in LONG[1:]]
"""They end as the first does: only what is before tells them apart."""


@pytest.fixture(scope="module")
def run_states(run_vllm: Callable[..., Run], tiny_model: Callable[..., Path]) -> Callable[..., Run]:
    def run(batches: Any, tiers: Any = None, **more: Any) -> Run:
        options = {
            "max_model_len": 1024,
            "max_num_batched_tokens": 256,
            "num_gpu_blocks_override": 60,
            "dtype": "bfloat16",
            "env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            **more,
        }
        return run_vllm(batches, tiers, model=str(tiny_model(QWEN_NEXT)), **options)

    return run


def disk(folder: Path) -> dict[str, Any]:
    return {"type": "disk", "path": str(folder / "disk"), "capacity": "64MiB"}


def turns(prompt: list[int], answers: list[list[int]]) -> list[int]:
    """The prompt of a conversation after some answers, with 70 tokens of the user's after each."""
    return prompt + [
        token
        for number, answer in enumerate(answers)
        for token in [*answer, *documents(1, 70, seed=number + 50)[0]]
    ]


def test_states_and_attention_come_back_from_every_tier(
    run_states: Callable[..., Run], tmp_path: Path
) -> None:
    """Prompts twice, and next turns of conversations, through every tier and a restart."""
    once = [[(prompt, 8)] for prompt in [*LONG, *OTHERS]]
    plain = run_states([*once])
    answers = [batch[0] for batch in plain.tokens]
    same_end = [answers[0], *answers[len(LONG) :]]
    assert len({tuple(answer) for answer in same_end}) == len(same_end), "the prefix must matter"
    later = [[(turns(LONG[i], [answers[i]]), 8)] for i in range(3)]
    expected = plain.tokens + run_states(later).tokens

    tiers = [CPU, disk(tmp_path)]
    small = {"num_gpu_blocks_override": 24}  # less than two prompts
    first = run_states([*once, *later, *once], tiers, **small)
    assert first.tokens == expected + plain.tokens
    assert sum(first.loaded().values()) >= 5 * BLOCKS * STATE_BLOCK_TOKENS

    restarted = run_states([*once, *later], tiers[1:])
    assert restarted.tokens == expected
    assert restarted.loaded()["disk"] >= 5 * BLOCKS * STATE_BLOCK_TOKENS


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_conversations_take_turns_with_too_little_kv_and_a_damaged_tier(
    run_states: Callable[..., Run], shared_server: RedisServer, tmp_path: Path
) -> None:
    """Four conversations of six turns through three tiers and a restart.

    One request at a time: with several in a batch the tokens of this model, which the engine runs
    in bfloat16 alone, differ without tiers, too.
    """
    texts = documents(4, 2000, seed=3)
    prompts = [[(text[: 600 + 270 * turn], 30) for text in texts] for turn in range(6)]
    plain = run_states([[one] for batch in prompts for one in batch], **LONGER)
    answers = [tokens for (tokens,) in plain.tokens]
    expected = [answers[i : i + 4] for i in range(0, 24, 4)]

    few = {"num_gpu_blocks_override": 24, "max_num_seqs": 1, **LONGER}
    redis = {"type": "redis", "url": shared_server.url, "key_prefix": str(tmp_path)}
    tiers = [{"type": "cpu", "capacity": "4MiB"}, disk(tmp_path), {**redis, "timeout": "30s"}]
    first = run_states(prompts, tiers, load_policy="stitched", **few)
    assert first.tokens == expected
    assert sum(first.loaded().values()) > 0

    for slab in (tmp_path / "disk").glob("slab-*"):
        with slab.open("r+b") as file:
            for position in range(500_000, 6_000_000, 70_000):
                file.seek(position)
                file.write(b"\xff\xee\xdd")
    restarted = run_states(prompts, tiers, load_policy="stitched", **few)
    assert restarted.tokens == expected
    assert restarted.count("disk", "load_failures") > 0, restarted.tiers
    assert {"disk", "redis"} & restarted.loaded().keys()


@pytest.mark.faults
def test_as_much_comes_back_as_by_vllms_own_connector(run_states: Callable[..., Run]) -> None:
    """Four conversations of six turns, over our connector and over the engine's with our tier."""
    texts = documents(4, 2000, seed=3)
    turns = [[(text[: 600 + 270 * turn], 8)] for turn in range(6) for text in texts]
    few = {"num_gpu_blocks_override": 24, "max_num_seqs": 1, **LONGER}
    ours = run_states(turns, [CPU], **few)
    theirs = run_states(turns, kv_transfer_config=hosted(CPU), **few)
    assert ours.tokens == theirs.tokens
    cached = [sum(tokens for batch in run.cached for tokens in batch) for run in (ours, theirs)]
    assert cached[0] >= cached[1] > 0
    assert sum(ours.loaded().values()) > 0
