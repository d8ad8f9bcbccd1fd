"""Our connectors and vLLM's in one engine: the same tokens, and both of them load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.vllm.recipes import recipe
from tests.engine.vllm.tiny_vllm import BLOCK_BYTES, EngineFailed, Run
from tests.engine.vllm.vllm_chains import (
    COMPLETE,
    IN_PROCESS,
    ONE_BY_ONE,
    cpu,
    disk,
    tiers,
    transfer,
)

pytestmark = pytest.mark.vllm


def test_vllms_example_connector_is_a_child_of_ours(
    run_vllm: Callable[..., Run], answers: list[list[list[int]]], tmp_path: Path
) -> None:
    """It loads within the step and knows whole prompts only; our tiers load beside the steps."""
    (tmp_path / "example").mkdir()
    spec = {"version": 1, "load_when": "always", "tiers": [disk(tmp_path / "disk")]}
    both = recipe("Beside", chain=spec, shared_storage_path=str(tmp_path / "example"))
    _, example = both["kv_connector_extra_config"]["connectors"]
    options: dict[str, Any] = {"async_scheduling": False, **IN_PROCESS}
    first = run_vllm(ONE_BY_ONE * 2, kv_transfer_config=both, settled=True, **options)
    assert first.tokens == answers * 2
    assert first.loaded() == {"KVTiersConnector/disk": COMPLETE}
    # What settles is a prompt without a block, and stored, too.
    files = (tmp_path / "example").glob("*/*.safetensors")
    assert len({file.parent for file in files if file.stat().st_size > BLOCK_BYTES}) == 4

    alone = transfer("KVTiersConnector", [tiers(cpu(), name="ours"), example])
    second = run_vllm(ONE_BY_ONE, kv_transfer_config=alone, **options)
    assert second.tokens == answers
    assert [batch[0] for batch in second.cached] == [18 * 32] * 4, "all came from the example"
    assert second.loaded() == {}
    assert second.count("ours/cpu", "stored_blocks") == 0, "what it loads is not proven in time"


def test_the_policy_that_the_engine_obeys_is_the_outermost_connector_s(
    run_vllm: Callable[..., Run], tmp_path: Path
) -> None:
    """It fails the request of a block that is late or damaged; by default, too."""
    outer = transfer("MultiConnector", [tiers(disk(tmp_path))])
    outer["kv_load_failure_policy"] = "fail"
    with pytest.raises(EngineFailed, match="MultiConnector: kv_load_failure_policy is 'fail'"):
        run_vllm([], kv_transfer_config=outer, **IN_PROCESS)


def test_two_of_ours_are_children_of_vllms_multi_connector(
    run_vllm: Callable[..., Run], answers: list[list[list[int]]], tmp_path: Path
) -> None:
    """The first is too small for a whole prompt: it must not hide what the other has of it."""
    pair = [tiers(cpu("512KiB")), tiers(disk(tmp_path / "disk"))]
    multi = transfer("MultiConnector", pair)
    run = run_vllm(ONE_BY_ONE * 2, kv_transfer_config=multi, settled=True, **IN_PROCESS)
    assert run.tokens == answers * 2
    assert run.count("disk", "stored_blocks") == 72
    assert run.count("cpu", "stored_blocks") >= 72
    assert sum(run.loaded().values()) == COMPLETE
    assert run.count("tenant (other)", "tenant_loaded_tokens") == COMPLETE, "of both chains"
    again = run_vllm(ONE_BY_ONE, kv_transfer_config=multi, **IN_PROCESS)
    assert again.tokens == answers
    # vLLM's connector hands on what the first child's workers say alone: the other chain learns of
    # its own with the first step, after the first prompt was looked up.
    assert again.loaded() == {"disk": COMPLETE * 3 // 4}
