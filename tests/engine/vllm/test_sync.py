"""A child that loads within the step and fails: recomputed, and nothing of it is stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.vllm.tiny_vllm import Run
from tests.engine.vllm.vllm_chains import IN_PROCESS, ONE_BY_ONE, cpu, tiers, transfer
from tests.support.compatibility import ON_V2

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(ON_V2, reason="there vLLM itself answers wrongly after such a load"),
]


def failing(storage: Path) -> dict[str, Any]:
    return {
        "kv_connector": "FailingExample",
        "kv_connector_module_path": "tests.engine.vllm.failing_example",
        "kv_connector_extra_config": {"shared_storage_path": str(storage)},
    }


def test_what_it_loses_is_computed_and_never_stored(
    run_vllm: Callable[..., Run], answers: list[list[list[int]]], tmp_path: Path
) -> None:
    """Of ours, the cpu tier is too small for all prompts, so it would store them again."""
    both = transfer("KVTiersConnector", [failing(tmp_path), tiers(cpu("2MiB"), name="ours")])
    run = run_vllm(ONE_BY_ONE * 3, kv_transfer_config=both, async_scheduling=False, **IN_PROCESS)
    assert run.log.count("Recovered from KV load failure") == 8, "all of both later rounds fail"
    assert run.tokens == answers * 3
    assert run.loaded() == {}, "the first child serves"
    assert run.count("ours/cpu", "stored_blocks") == 4 * 18, "those computed in the first round"


def test_nor_is_what_others_computed_from_it_meanwhile(
    run_vllm: Callable[..., Run], answers: list[list[list[int]]], tmp_path: Path
) -> None:
    """vLLM finds the blocks of a load for others from when they are allocated."""
    (first,), *others = ONE_BY_ONE
    example = failing(tmp_path) | {"kv_role": "kv_both"}
    run_vllm([[first]], kv_transfer_config=example, **IN_PROCESS)
    both = transfer("KVTiersConnector", [tiers(cpu(), name="ours"), example])
    rounds = [[first, first], *others[:3], [first]]
    run = run_vllm(rounds, kv_transfer_config=both, async_scheduling=False, **IN_PROCESS)
    assert "Recovered from KV load failure: 2 request(s)" in run.log
    assert run.tokens == [answers[0] * 2, *answers[1:], answers[0]]
