"""A model with linear attention in a real vLLM: its states come back with the KV they belong to."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import gcd
from pathlib import Path
from typing import Any

import pytest

from tests.engine.vllm.tiny_vllm import (
    GRANITE,
    QWEN_NEXT,
    STATE_BLOCK_TOKENS,
    EngineFailed,
    Run,
    documents,
    hosted,
)
from tests.support.compatibility import ON_V2, Cells, engine_version
from tests.support.servers import RedisServer

pytestmark = pytest.mark.vllm

CPU = {"type": "cpu", "capacity": "64MiB"}
BLOCKS = 1
"""Full blocks of a long prompt."""
LONG = documents(3, 600)
LONGER = {"max_model_len": 2040, "max_num_batched_tokens": STATE_BLOCK_TOKENS}
"""No chunk is of two blocks, so that each is computed by the same chunks whatever was loaded before
it. bfloat16 rounds otherwise where chunks begin elsewhere: on some processors answers change."""
END = LONG[0][BLOCKS * STATE_BLOCK_TOKENS :]
OTHERS = [prompt[: BLOCKS * STATE_BLOCK_TOKENS] + END for prompt in LONG[1:]]
"""They end as the first does: only what is before tells them apart."""


@pytest.fixture(scope="module")
def run_states(run_vllm: Callable[..., Run], tiny_model: Callable[..., Path]) -> Callable[..., Run]:
    def run(batches: Any, tiers: Any = None, model: Any = QWEN_NEXT, **more: Any) -> Run:
        options = {
            "max_model_len": 1024,
            "max_num_batched_tokens": 256,
            "num_gpu_blocks_override": 60,
            "dtype": "bfloat16",
            "env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            **more,
        }
        return run_vllm(batches, tiers, model=str(tiny_model(model)), **options)

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


@pytest.mark.parametrize("model", [QWEN_NEXT, GRANITE], ids=lambda model: model["model_type"])
def test_states_and_attention_come_back_from_every_tier(
    run_states: Callable[..., Run], tmp_path: Path, model: dict[str, Any]
) -> None:
    """Prompts twice, and next turns of conversations, through every tier and a restart."""
    run = partial(run_states, model=model, before={"start": ["mamba_states"]})
    once = [[(prompt, 8)] for prompt in [*LONG, *OTHERS]]
    plain = run([*once])
    answers = [batch[0] for batch in plain.tokens]
    same_end = [answers[0], *answers[len(LONG) :]]
    assert len({tuple(answer) for answer in same_end}) == len(same_end), "the prefix must matter"
    later = [[(turns(LONG[i], [answers[i]]), 8)] for i in range(3)]
    expected = plain.tokens + run(later).tokens

    tiers = [CPU, disk(tmp_path)]
    small = {"num_gpu_blocks_override": 24, "steps_in_flight": 2}  # less than two prompts
    small["max_model_len"] = 896  # without AMX blocks are shorter
    first = run([*once, *later, *once], tiers, settled=True, **small)
    assert first.tokens == expected + plain.tokens
    assert sum(first.loaded().values()) >= 5 * BLOCKS * STATE_BLOCK_TOKENS

    restarted = run([*once, *later], tiers[1:])
    assert restarted.tokens == expected
    assert restarted.loaded()["disk"] >= 5 * BLOCKS * STATE_BLOCK_TOKENS


def test_a_state_that_has_taken_in_a_token_which_was_dropped_is_not_stored(
    run_states: Callable[..., Run], tmp_path: Path
) -> None:
    """A token ends an answer while the next step computes with it, and the prompt goes on in its
    place. vLLM's own cache has that state, too: it is emptied before anybody asks again."""
    first, part, end = LONG[0][:200], LONG[1], LONG[2][:70]
    stops = {"allowed_token_ids": [11], "stop_token_ids": [11]}
    options: dict[str, Any] = {"model": GRANITE, "before": {"start": ["mamba_states"]}}
    options |= {"is_async": True, "steps_in_flight": 2, "max_model_len": 2040}
    history = [*first, *part, *part, *end]
    asked: list[Any] = [[(history, 8)], [(history, 8)]]
    plain = run_states(asked[:1], **options)
    forget: list[Any] = [("reset_prefix_cache", {})]
    options |= {"told": {1: forget, 2: forget}, "on_reset": "keep"}
    session = (first, 8, {"more": [part + part], "sampling": stops})
    run = run_states([[session], *asked], [CPU, disk(tmp_path)], **options)
    assert run.tokens[1:] == plain.tokens * 2
    assert run.cached[1] == [0] and run.cached[2] > [0]


def test_states_that_vllm_itself_mistakes_are_refused(run_states: Callable[..., Run]) -> None:
    """Of two prompts that begin alike the second begins at the end of the first, within a block,
    and leaves that block's state as one of the block's end."""
    for served in ({"tiers": [CPU]}, {"kv_transfer_config": hosted(CPU)}):
        with pytest.raises(EngineFailed, match="Leave --prefix-match-unit out"):
            run_states([[(LONG[0], 1)]], model=GRANITE, prefix_match_unit=16, **served)


TURNS = [
    [(tokens, 10, {} if turn == 0 else {"follows": 4 * turn - 4 + number})]
    for turn in range(6)
    for number, tokens in enumerate(documents(4, 600 if turn == 0 else 260, seed=turn + 3))
]
"""Four conversations of six turns, each after the answer before it."""
EARLY = 5
"""Tokens of an answer before its request is preempted."""
PROMPT_TOKENS = 4 * sum(600 + 270 * turn for turn in range(6))
OWN: dict[str, Any] = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 64 << 20},
}
"""vLLM's own offloading, as it is; and with copies that the CPU has, too:"""
OWN_ON_CPU = {
    **OWN,
    "kv_connector_extra_config": {
        **OWN["kv_connector_extra_config"],
        "spec_name": "OffloadingOnCpu",
        "spec_module_path": "tests.engine.vllm.own_offloading",
    },
}


def spoken(run: Run) -> list[list[int]]:
    """The whole prompt of each turn."""
    prompts: list[list[int]] = []
    for number, ((tokens, _, _),) in enumerate(TURNS):
        before = [] if number < 4 else prompts[number - 4] + run.tokens[number - 4][0]
        prompts.append(before + tokens)
    return prompts


@pytest.mark.faults
@pytest.mark.compatibility
@pytest.mark.timeout(900)
def test_conversations_are_preempted_and_a_disk_is_damaged(
    run_states: Callable[..., Run], shared_server: RedisServer, cells: Cells, tmp_path: Path
) -> None:
    """Through three tiers, beside vLLM's own offloading. Each request is preempted, and what the
    engine itself had kept is gone each time. The engine without tiers computes all that is loaded
    here, and splits it at the same places.

    One request at a time: with several in a batch the tokens of this model, which the engine runs
    in bfloat16 alone, differ without tiers, too.
    """
    if engine_version() < "0.32":
        pytest.skip("vLLM 0.32 and later tell where states are")
    alone = {"max_num_seqs": 1, "num_gpu_blocks_override": 24, **LONGER}
    preempting = {**alone, "preempt": EARLY, "settled": True}
    plain = run_states(TURNS, **preempting)
    assert plain.preemptions == len(TURNS)
    assert len({tuple(answer) for (answer,) in plain.tokens}) == len(TURNS)
    assert plain.cached == [[0]] * len(TURNS), "the engine's own cache was emptied each time"

    redis = {"type": "redis", "url": shared_server.url, "key_prefix": str(tmp_path)}
    tiers = [{"type": "cpu", "capacity": "2MiB"}, disk(tmp_path), {**redis, "timeout": "30s"}]
    half = {"12": ["damage_all", str(tmp_path / "disk")]}
    ours = run_states(TURNS, tiers, before=half, on_reset="keep", **preempting)
    assert all(set(here) <= {*there} for here, there in zip(ours.chunks, plain.chunks, strict=True))
    block = gcd(*(tokens for (tokens,) in ours.cached))
    ends = {(600 + 270 * turn) // block - (610 + 270 * turn) // block for turn in range(6)}
    assert ends == {0}, "no answer completes a block, whose tokens came one by one"
    assert ours.tokens == plain.tokens
    assert ours.preemptions == len(TURNS)
    assert ours.count("disk", "load_failures") > 0, ours.tiers
    assert ours.loaded().keys() == {"cpu", "disk", "redis"}

    # vLLM's own connector asserts that no request loads in the step that such a preemption is in.
    asked = [[(prompt, EARLY)] for prompt in spoken(plain)]
    forget: dict[int, Any] = {number: [("reset_prefix_cache", {})] for number in range(len(TURNS))}
    theirs = run_states(asked, kv_transfer_config=OWN_ON_CPU, told=forget, **alone)
    assert theirs.tokens == [[answer[:EARLY]] for (answer,) in plain.tokens]
    came = [sum(tokens for batch in run.cached for tokens in batch) for run in (ours, theirs)]
    assert came[0] >= came[1] > 0
    cells.conversations(PROMPT_TOKENS, *came)


@pytest.mark.faults
def test_as_much_comes_back_as_by_vllms_own_connector(run_states: Callable[..., Run]) -> None:
    """Four conversations of six turns, over our connector and over the engine's with our tier."""
    if ON_V2:
        pytest.skip("there the engine's own connector serves no states")
    texts = documents(4, 2000, seed=3)
    turns = [[(text[: 600 + 270 * turn], 8)] for turn in range(6) for text in texts]
    few = {"num_gpu_blocks_override": 24, "max_num_seqs": 1, "settled": True, **LONGER}
    ours = run_states(turns, [CPU], **few)
    theirs = run_states(turns, kv_transfer_config=hosted(CPU), **few)
    assert ours.tokens == theirs.tokens
    cached = [sum(tokens for batch in run.cached for tokens in batch) for run in (ours, theirs)]
    assert cached[0] >= cached[1] > 0
    assert sum(ours.loaded().values()) > 0


@pytest.mark.compatibility
def test_vllms_own_offloading_is_refused_on_the_cpu(
    run_vllm: Callable[..., Run], cells: Cells
) -> None:
    why = "CPU Offloading is currently only supported on CUDA-alike and XPU GPUs"
    with pytest.raises(EngineFailed, match=why):
        run_vllm([[(LONG[0], 1)]], kv_transfer_config=OWN)
    cells.refused("vLLM's own OffloadingConnector on the CPU", why, who="vLLM refuses")
