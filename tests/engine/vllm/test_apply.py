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
AT_ONCE: Batch = [([*PREFIXES[n % 20], 100 + n // 20, 300 + n, 11], 64 + n % 5) for n in range(200)]
SETTINGS: dict[str, Any] = {"num_gpu_blocks_override": 160, "max_num_seqs": 32}
ONE_RANK = {"env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}}
TWO_RANKS: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "env": {**ONE_RANK["env"], "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
}


def little_memory(root: Path) -> str:
    """A folder whose /proc says that this machine has 256 MiB to spare."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text("MemTotal: 1048576 kB\nMemAvailable: 262144 kB\n")
    (root / "proc" / "self" / "cgroup").write_text("")
    return str(root)


@pytest.mark.fault
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [ONE_RANK, TWO_RANKS], ids=["one rank", "two ranks"])
def test_no_token_differs_while_the_chain_changes(
    run_vllm: Callable[..., Run], tmp_path: Path, ranks: dict[str, Any]
) -> None:
    """Order, sizes, a disk that is drained, detached and attached, settings, a refused change, and
    one for which the last rank alone has too little memory, of one rank with two steps in flight;
    prints how long steps took, which depends on the machine."""
    plain = run_vllm([ONE_EACH, AT_ONCE, ONE_EACH], **SETTINGS, **ranks)
    cpu = {"type": "cpu", "capacity": "12MiB"}
    disk = {"type": "disk", "path": str(tmp_path / "disk"), "capacity": "64MiB"}
    control = tmp_path / "control"

    def chain(*tiers: dict[str, Any], **more: Any) -> dict[str, Any]:
        fixed = {"version": 1, "staging": "64MiB", "load_policy": "first", "explain": {}}
        live = {"load_when": "always", "max_wait": "100s", "control": {"folder": str(control)}}
        return {**fixed, **live, "tiers": list(tiers), **more}

    small = {**disk, "capacity": "32MiB"}
    half, double, huge = ({**cpu, "capacity": size} for size in ("6MiB", "24MiB", "1GiB"))
    chains = [
        chain(disk, cpu),
        chain(small, half, load_policy="stitched"),
        chain(cpu),
        chain(cpu, disk, salt="another"),
        chain(cpu, disk),
        chain(huge, {**disk, "store_threshold": 2}),
        chain(double, {**disk, "durability": "batch", "store_threshold": 2}),
        chain(cpu, disk),
    ]
    report = tmp_path / "report.json"
    changes = {"folder": str(control), "chains": chains, "memory": little_memory(tmp_path / "root")}
    told = {"1": [["begin_changes", changes]], "2": [["end_changes", {"result": str(report)}]]}
    run = run_vllm(
        [ONE_EACH, AT_ONCE, ONE_EACH],
        [cpu, disk],
        told=told,
        control=control,
        steps_in_flight=2 if ranks is ONE_RANK else 1,
        **SETTINGS,
        **ranks,
    )
    found = json.loads(report.read_text())
    print(*(f"{key}: {value}" for key, value in found.items()), sep="\n")
    assert run.tokens == plain.tokens
    assert found["outcomes"] and found["changes"] >= 3, "they came while requests ran"
    for outcomes in found["outcomes"]:
        refused = [number for number, why in enumerate(outcomes) if why]
        assert refused == [3, 5], outcomes
        assert "salt" in outcomes[3]
        last = ranks.get("tensor_parallel_size", 1) - 1
        assert f"rank {last}: tier cpu: capacity 1GiB" in outcomes[5]
    assert run.loaded().keys() == {"cpu", "disk"}
    assert [tier["name"] for tier in run.status["tiers"]] == ["cpu", "disk"]
    assert run.status["chain_version"] == 1 + 6 * len(found["outcomes"])
