"""A real vLLM engine that sleeps, and one whose weights change under it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import write_model
from tests.support.tiny_vllm import LLAMA, Run, documents

pytestmark = pytest.mark.vllm

BATCH = [(prompt, 8) for prompt in documents(1, 600, seed=1)]
FULL = 18 * 32
NAP: list[Any] = [("sleep", {"level": 1}), ("wake_up", {})]
IN_PROCESS = {"env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}}


@pytest.mark.faults
@pytest.mark.fault(
    tier="any",
    fault="the engine sleeps, or its weights change in place and it is reset",
    outcome="nothing of before is served; others on the same disk, and an engine that is told to "
    "keep, lose nothing",
)
def test_sleep_and_new_weights(run_vllm: Callable[..., Run], tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", {**LLAMA, "initializer_range": 0.4})
    change = [
        ("collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(other)}}),
        ("reset_prefix_cache", {"reset_connector": True}),
    ]
    plain = run_vllm([BATCH] * 2, told={1: change}, **IN_PROCESS)
    old, new = plain.tokens
    assert old != new, "the weights must matter"

    disk = {"type": "disk", "capacity": "64MiB", "path": str(tmp_path / "disk")}
    wary = run_vllm([BATCH] * 3, [disk], told={1: NAP, 2: change}, **IN_PROCESS)
    assert wary.tokens == [old, old, new]
    assert wary.cached == [[0], [0], [0]]

    sibling = run_vllm([BATCH] * 2, [disk], told={1: NAP}, on_reset="keep", **IN_PROCESS)
    assert sibling.tokens == [old, old]
    assert sibling.cached == [[FULL], [FULL]]
    assert sibling.loaded() == {"disk": 2 * FULL}
