"""A real vLLM engine whose chain changes under 200 concurrent requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.vllm.tiny_vllm import Batch, Run, documents

pytestmark = [pytest.mark.vllm, pytest.mark.faults]

PREFIXES = documents(20, 416)
ONE_EACH: Batch = [([*prefix, 7, 8, 9], 4) for prefix in PREFIXES]
"""13 blocks of 64 KiB each: 17 MB, more than the cpu tier or the engine's own cache has."""
AT_ONCE: Batch = [([*PREFIXES[n % 20], 100 + n // 20, 300 + n, 11], 16 + n % 5) for n in range(200)]
SETTINGS: dict[str, Any] = {
    "num_gpu_blocks_override": 160,
    "max_num_seqs": 32,
    "env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
}


def test_no_token_differs_while_the_chain_changes(
    run_vllm: Callable[..., Run], tmp_path: Path
) -> None:
    """Order, sizes, a disk that is drained, detached and attached, settings, and a refused change,
    with two steps in flight; prints how long steps took, which depends on the machine."""
    plain = run_vllm([ONE_EACH, AT_ONCE, ONE_EACH], **SETTINGS)
    cpu = {"type": "cpu", "capacity": "12MiB"}
    disk = {"type": "disk", "path": str(tmp_path / "disk"), "capacity": "64MiB"}
    control = tmp_path / "control"

    def chain(*tiers: dict[str, Any], **more: Any) -> dict[str, Any]:
        fixed = {"version": 1, "staging": "64MiB", "load_policy": "first", "explain": {}}
        live = {"load_when": "always", "max_wait": "100s", "control": {"folder": str(control)}}
        return {**fixed, **live, "tiers": list(tiers), **more}

    small = {**disk, "capacity": "32MiB"}
    half, double = ({**cpu, "capacity": size} for size in ("6MiB", "24MiB"))
    chains = [
        chain(disk, cpu),
        chain(small, half, load_policy="stitched"),
        chain(cpu),
        chain(cpu, disk, salt="another"),
        chain(cpu, disk),
        chain(double, {**disk, "durability": "batch", "store_threshold": 2}),
        chain(cpu, disk),
    ]
    report = tmp_path / "report.json"
    told = {
        "1": [["begin_changes", {"folder": str(control), "chains": chains}]],
        "2": [["end_changes", {"result": str(report)}]],
    }
    run = run_vllm(
        [ONE_EACH, AT_ONCE, ONE_EACH],
        [cpu, disk],
        told=told,
        control=control,
        steps_in_flight=2,
        **SETTINGS,
    )
    found = json.loads(report.read_text())
    print({key: value for key, value in found.items() if key != "outcomes"})
    assert run.tokens == plain.tokens
    assert len(found["seconds"]) >= len(chains) - 1, "they came while requests ran"
    for outcomes in found["outcomes"]:
        refused = [bool(why) for why in outcomes]
        assert refused == [False, False, False, True, False, False, False], outcomes
        assert "salt" in outcomes[3]
    assert run.loaded().keys() == {"cpu", "disk"}
    assert [tier["name"] for tier in run.status["tiers"]] == ["cpu", "disk"]
    assert run.status["chain_version"] == 1 + 6 * len(found["outcomes"])
