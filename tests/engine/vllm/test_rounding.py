"""A prefix that was loaded rounds as one that the engine's own prefix cache had."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.vllm.tiny_vllm import LLAMA, QWEN_NEXT, Run, documents

pytestmark = pytest.mark.vllm

LOGITS = {"logprobs": -1}
(TEXT,) = documents(1, 600)
PREFIX = TEXT[:580]
"""The text completes no block beyond those that end here."""


def ask(tokens: list[int], count: int, tiers: list[str]) -> list[Any]:
    """A batch of one request, which loads from these tiers alone."""
    sampling = {**LOGITS, "extra_args": {"kv_transfer_params": {"kvtiers": {"tiers": tiers}}}}
    return [(tokens, count, {"sampling": sampling})]


@pytest.mark.parametrize(
    ("model", "groups"), [(LLAMA, 1), (QWEN_NEXT, 4)], ids=["attention", "states"]
)
def test_a_loaded_prefix_rounds_as_the_engines_own_prefix_cache_does(
    run_vllm: Callable[..., Run],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    model: dict[str, Any],
    groups: int,
) -> None:
    """All logits are equal, bit for bit, and a bit of wrong KV is seen in them. What the engine
    computes at once may round otherwise, with a chain or without, so it is no measure of a load."""
    forget: list[Any] = [("reset_prefix_cache", {})]
    folder = str(tmp_path / "disk")
    run = run_vllm(
        [
            ask(PREFIX, 1, []),
            ask(TEXT, 8, []),
            ask(TEXT, 8, ["disk"]),
            ask(TEXT, 8, ["disk"]),
        ],
        [{"type": "disk", "capacity": "64MiB", "path": folder}],
        model=str(tiny_model(model)),
        told={2: forget, 3: forget},
        before={3: ("lie", folder, [], [*range(groups)])},
        on_reset="keep",
        settled=True,
        dtype="bfloat16",
        logprobs_mode="raw_logits",
        max_logprobs=-1,
        max_model_len=1024,
        max_num_batched_tokens=1024,
        env={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )
    hit = run.cached[1]
    assert hit[0] >= 512
    assert run.cached == [[0], hit, hit, hit]
    _, own, loaded, wrong = (logits for (logits,) in run.logits)
    assert len(own) == 8 and all(len(step) == 1000 for step in own)
    assert loaded == own
    assert wrong != own, "a wrong byte shows"
