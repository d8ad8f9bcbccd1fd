"""A real vLLM engine: what requests at once load, what their ends store, and what is counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.vllm.tiny_vllm import Batch, Run, documents

pytestmark = pytest.mark.vllm

PREFIX = documents(1, 640)[0]
FIRST: Batch = [([*PREFIX, *range(10, 20)], 23)]
"""672 tokens, 21 blocks, are computed: with the last but one of its answer the last is full."""
AT_ONCE: Batch = [([*PREFIX, 100 + n, 300 + n, 7], 8) for n in range(16)]
UNREAD: Batch = [(FIRST[0][0], 4, {"sampling": {"skip_reading_prefix_cache": True}})]
ROOM: dict[str, Any] = {
    "num_gpu_blocks_override": 500,
    "env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}


@pytest.fixture(scope="module")
def plain(run_vllm: Callable[..., Run]) -> Run:
    """What the engine answers without a chain."""
    return run_vllm([FIRST, AT_ONCE], **ROOM)


@pytest.fixture(scope="module")
def stored(
    run_vllm: Callable[..., Run], plain: Run, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """A disk tier that has the blocks of the first prompt, and of its answer."""
    path = tmp_path_factory.mktemp("disk")
    disk = [{"type": "disk", "capacity": "64MiB", "path": str(Path(path) / "tier")}]
    first = run_vllm([FIRST], disk, **ROOM)
    assert first.tokens == plain.tokens[:1]
    assert first.count("disk", "stored_blocks") == 21
    return disk


def test_sixteen_requests_of_one_prefix_load_it_once(
    run_vllm: Callable[..., Run], plain: Run, stored: list[dict[str, Any]]
) -> None:
    run = run_vllm([AT_ONCE, UNREAD], stored, **ROOM)
    assert run.tokens[0] == plain.tokens[1]
    assert run.loaded() == {"disk": len(PREFIX)}
    assert run.external_hits == run.count("disk", "hit_tokens") == len(PREFIX)
    assert run.count("disk", "hits") == 1
    assert run.count("disk", "lookups") == len(AT_ONCE), "not of the one that reads no prefix"
    assert run.tokens[1][0] == plain.tokens[0][0][:4] and run.cached[1] == [0]


def test_speculation_by_ngrams_changes_no_token(run_vllm: Callable[..., Run], plain: Run) -> None:
    others: Batch = [(document, 4) for document in documents(2, 640, seed=1)]
    few = {**ROOM, "num_gpu_blocks_override": 40}
    tiers = [{"type": "cpu", "capacity": "64MiB"}]
    run = run_vllm([FIRST, others, FIRST], tiers, speculative_config=NGRAM, **few)
    assert [run.tokens[0], run.tokens[2]] == [plain.tokens[0]] * 2
    assert run.loaded()["cpu"] > 0, "the others were meant to evict it"
