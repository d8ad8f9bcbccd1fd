"""That these tests can see wrong KV at all: what is wrong with a model's KV changes its answers.
And what else one process has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.vllm.tiny_vllm import (
    GEMMA,
    LLAMA,
    MISTRAL,
    Run,
    documents,
    hosted,
    under_own_spec,
)

pytestmark = pytest.mark.vllm

END = documents(1, 25, seed=9)[0]
PROMPTS = [[(document + END, 8)] for document in documents(4, 576)]
"""Four prompts of 18 full blocks, which end alike."""
IN_PROCESS = {"env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}}


@pytest.mark.parametrize(
    ("model", "stored"),
    [(LLAMA, 18), (GEMMA, 18 + 2 * 3), (MISTRAL, 18)],
    ids=["llama", "gemma", "mistral"],
)
def test_wrong_kv_changes_answers(
    run_vllm: Callable[..., Run],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    model: dict[str, Any],
    stored: int,
) -> None:
    """Two blocks are exchanged and one bit is flipped, behind all checks; `stored`: of a prompt."""
    folder = str(tmp_path / "disk")
    run = run_vllm(
        PROMPTS * 2,
        [{"type": "disk", "capacity": "64MiB", "path": folder}],
        model=str(tiny_model(model)),
        enable_prefix_caching=False,
        max_model_len=704,
        num_gpu_blocks_override=80,
        before={4: ("lie", folder, [(stored - 1, 2 * stored - 1)], [3 * stored - 1])},
        **IN_PROCESS,
    )
    right, wrong = run.tokens[:4], run.tokens[4:]
    assert len({tuple(answer) for (answer,) in right}) == 4, "what comes before the end matters"
    assert run.loaded() == {"disk": 4 * 18 * 32}
    assert [a == b for a, b in zip(wrong, right, strict=True)] == [False, False, False, True]


@pytest.mark.fault
@pytest.mark.parametrize("by", ["ours", "hosted", "a store"])
def test_a_second_engine_of_a_process_is_refused(
    run_vllm: Callable[..., Run], tmp_path: Path, by: str
) -> None:
    """vLLM would hand it the first one's connector, which copies the first one's KV."""
    cpu = {"type": "cpu", "capacity": "64MiB"}
    disk = {"type": "disk", "capacity": "64MiB", "path": str(tmp_path / "disk")}
    is_hosted = by != "ours"
    chain: dict[str, Any] = {"tiers": [cpu]}
    if is_hosted:
        transfer = hosted(cpu) if by == "hosted" else under_own_spec(disk, 64 << 20)
        chain = {"kv_transfer_config": transfer}
    run = run_vllm(
        PROMPTS * 2,
        enable_prefix_caching=is_hosted,
        told={4: [("start_another", {})]},
        settled=True,
        **chain,
        **IN_PROCESS,
    )
    assert run.tokens[4:] == run.tokens[:4]
    assert is_hosted or run.loaded() == {"cpu": 4 * 18 * 32}


def test_a_fork_that_ends_leaves_the_engine_its_socket(run_vllm: Callable[..., Run]) -> None:
    run = run_vllm(
        PROMPTS[:1] * 2,
        [{"type": "cpu", "capacity": "64MiB"}],
        told={1: [("end_in_fork", {})]},
        **IN_PROCESS,
    )
    assert run.status
