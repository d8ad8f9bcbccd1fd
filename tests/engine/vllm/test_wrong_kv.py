"""That these tests can see wrong KV at all: what is wrong with a model's KV changes its answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.vllm.tiny_vllm import GEMMA, LLAMA, MISTRAL, Run, documents

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
