"""A real engine whose requests have more than a prompt and its answer: a drafter's KV beside the
model's own, or prompts that go on after an answer. No answer changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.vllm.checkpoints import write_drafter
from tests.engine.vllm.tiny_vllm import LLAMA, Batch, Run, documents, hosted
from tests.engine.vllm.vllm_chains import COMPLETE, IN_PROCESS, ONE_BY_ONE
from tests.support.compatibility import engine_version

pytestmark = pytest.mark.vllm


def small_chain(folder: Path) -> list[dict[str, Any]]:
    """Host memory has 16 blocks of these models at most, the disk all."""
    disk = {"type": "disk", "capacity": "64MiB", "path": str(folder / "disk")}
    return [{"type": "cpu", "capacity": "1MiB"}, disk]


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_a_drafter_has_kv_of_its_own(
    run_vllm: Callable[..., Run],
    answers: list[list[list[int]]],
    tiny_llama: Path,
    tmp_path: Path,
    method: str,
) -> None:
    """With two steps in flight. Of a prefix vLLM computes the last block anew for EAGLE. The model
    as its own drafter guesses all as long as no KV of the drafter is wrong."""
    is_own = method == "draft_model"
    drafter = tiny_llama if is_own else write_drafter(tmp_path / "drafter", LLAMA)
    guesses = {"method": method, "model": str(drafter), "num_speculative_tokens": 3}
    few = {"max_num_batched_tokens": 96, "steps_in_flight": 2, "settled": True, **IN_PROCESS}
    run = run_vllm(ONE_BY_ONE * 2, small_chain(tmp_path), speculative_config=guesses, **few)
    assert run.tokens == answers * 2
    assert sum(run.loaded().values()) == COMPLETE - 4 * 32 * (not is_own)
    assert run.drafts > 0 and (run.drafts_accepted == run.drafts or not is_own)


@pytest.mark.parametrize(
    ("version", "drafts", "is_async", "states", "right"),
    [
        ("0.31.0", False, True, False, False),
        ("0.32.0", False, False, False, True),
        ("0.32.0", True, True, False, True),
        ("0.32.0", True, False, False, False),
        ("0.33.0", True, False, False, True),
        ("0.31.0", False, False, True, False),
        ("0.32.0", False, False, True, True),
        ("0.33.0", False, True, True, False),
        ("0.33.0", True, False, True, False),
    ],
)
def test_where_prompts_that_go_on_have_no_tiers(
    version: str,
    drafts: bool,
    is_async: bool,
    states: bool,
    right: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tiers.engine import vllm_groups

    monkeypatch.setattr(vllm_groups, "vllm_version", version)
    config: Any = SimpleNamespace(
        speculative_config=object() if drafts else None,
        scheduler_config=SimpleNamespace(async_scheduling=is_async),
    )
    assert vllm_groups.goes_on_right(config, states) is right


def test_a_prompt_goes_on_after_an_answer(run_vllm: Callable[..., Run], tmp_path: Path) -> None:
    """Of each answer vLLM drops the last token, which ends a block here, and the prompt goes on in
    its place. Others ask for what was dropped, and for what came instead."""
    first, *parts, end = (document[:63] for document in documents(5, 63))
    talk, others = first[1:], [(document, 40) for document in documents(2, 300, seed=1)]
    session = (talk, 2, {"more": parts, "sampling": {"allowed_token_ids": [11]}})
    asked: list[Batch] = []
    for part in parts:
        asked.append([([*talk, 11, 11, *end], 8)])
        talk = [*talk, 11, *part]
    asked.append([(talk + end, 8)])
    few: dict[str, Any] = {"max_num_batched_tokens": 96, "num_gpu_blocks_override": 60}
    plain = run_vllm(asked, **few, **IN_PROCESS)
    batches = [[session, *others], *asked]
    forget: list[Any] = [("reset_prefix_cache", {})]
    told = dict.fromkeys(range(1, len(batches)), forget)
    options = {"is_async": True, "steps_in_flight": 2, "on_reset": "keep", "told": told, **few}
    run = run_vllm(batches, small_chain(tmp_path), load_policy="stitched", **options)
    assert run.tokens[1:] == plain.tokens
    # Before 0.32 vLLM's hashes are of what was dropped, so that nothing of the session is stored.
    stored = [[32], [96], [160], [224]] if engine_version() >= "0.32" else [[0], [32], [96], [160]]
    assert run.cached[1:] == stored, "whole blocks of what stayed"
    assert sum(run.loaded().values()) > 0


def test_what_others_find_of_a_prompt_that_went_on_is_not_stored_under_what_was_dropped(
    run_vllm: Callable[..., Run], tmp_path: Path
) -> None:
    """Others send an answer whole as their history. Before 0.32 they find a block in the engine's
    own cache whose name is of the token that was dropped, and whose KV of what came instead."""
    first, part, end, other = documents(4, 63)
    session = (first[1:], 2, {"more": [part], "sampling": {"allowed_token_ids": [11]}})
    history = [*first[1:], 11, 11]
    asked: list[Batch] = [[([*history, *end], 8)], [([*history, *other], 8)]]
    few: dict[str, Any] = {"max_num_batched_tokens": 96, "num_gpu_blocks_override": 60}
    plain = run_vllm(asked, **few, **IN_PROCESS)
    told: dict[int, list[Any]] = {2: [("reset_prefix_cache", {})]}
    options = {"is_async": True, "on_reset": "keep", "told": told, **few}
    run = run_vllm([[session], *asked], small_chain(tmp_path), **options)
    assert run.tokens[2] == plain.tokens[1]
    assert run.count("cpu", "stored_blocks") > 0


def test_prompts_that_go_on_leave_nothing_in_hosted_tiers_where_vllm_keeps_what_it_dropped(
    run_vllm: Callable[..., Run], tmp_path: Path
) -> None:
    first, part, end, other = documents(4, 63)
    session = (first[1:], 2, {"more": [part], "sampling": {"allowed_token_ids": [11]}})
    history = [*first[1:], 11, 11]
    few: dict[str, Any] = {"max_num_batched_tokens": 96, "num_gpu_blocks_override": 60}
    asked: Batch = [([*history, *other], 8)]
    plain = run_vllm([asked], **few, **IN_PROCESS)
    disk = {"type": "disk", "capacity": "64MiB", "path": str(tmp_path / "disk")}
    tiers = {"kv_transfer_config": hosted({"type": "cpu", "capacity": "16MiB"}, disk)}
    batches = [[session], [([*history, *end], 8)]]
    run_vllm(batches, is_async=True, settled=True, **tiers, **few)
    run = run_vllm([asked], **tiers, **few, **IN_PROCESS)
    assert run.tokens == plain.tokens
    assert (run.cached[0] > [0]) == (engine_version() >= "0.32")
