"""`make gpu-engine` where there is no GPU: its order, what it does when answers differ, and all of
it with the CPU's engine in the GPU's place."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_engine
from bench.gpu_engine import MODES, SMOKE, Runs, main, run_all


def came(token: int = 1) -> dict[str, Any]:
    one = {"answer": [token], "cached": 0, "ttft": 0.1}
    result = {"rounds": [[one], [one]], "together": [[token]], "tokens_per_second": 1.0}
    return {**result, "runner": "V2", "async_scheduling": True}


Behaves = Callable[[dict[str, Any], Mapping[str, str]], dict[str, Any] | None]
"""What an engine of a job gives; None: it does not start."""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Behaves], Runs]:
    def make(behaves: Behaves) -> Runs:
        def child(job: dict[str, Any], env: Mapping[str, str], seconds: float) -> tuple[str, int]:
            assert 0 < seconds <= gpu_engine.ENGINE_SECONDS
            result = behaves(job, env)
            if result is None:
                return "it does not start", 1
            Path(job["result"]).write_text(json.dumps(result))
            return "", 0

        monkeypatch.setattr(gpu_engine, "_child", child)
        said: dict[str, Any] = {"engines": {}}
        return Runs(SMOKE, tmp_path / "engine.json", tmp_path, said=said)

    return make


def connector(job: dict[str, Any]) -> str:
    transfer = job["engine"].get("kv_transfer_config", {})
    return str(transfer.get("kv_connector", "none"))


def written(made: Runs) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(made.file.read_text())
    return found


def test_equal_answers_in_every_mode(runs: Callable[[Behaves], Runs]) -> None:
    made = runs(lambda job, env: came())
    assert run_all(made, MODES)
    assert [*written(made)["engines"]] == [
        f"{mode.name}, {name}" for mode in MODES for name in ("none", "chain", "native")
    ]


def test_answers_that_differ_end_it_and_are_narrowed_down(
    runs: Callable[[Behaves], Runs],
) -> None:
    """Here loads go wrong, whatever else there is."""

    def loads_wrong(job: dict[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
        return came(2 if connector(job) == "KVTiersConnector" and job["loads"] else 1)

    made = runs(loads_wrong)
    assert not run_all(made, MODES)
    found = written(made)
    equal = {name.partition("eager, ")[2]: one for name, one in found["differs"]["equal"].items()}
    assert equal == {"synchronous": False, "without loads": True, "by V1 and eager": False}
    assert not any("graphs" in name for name in found["engines"]), "nothing runs after it"


def test_a_mode_that_does_not_start_is_left_out(runs: Callable[[Behaves], Runs]) -> None:
    """And a peer that does not start fails nothing."""

    def starts(job: dict[str, Any], env: Mapping[str, str]) -> dict[str, Any] | None:
        is_v1 = env["VLLM_USE_V2_MODEL_RUNNER"] == "0"
        return came() if is_v1 and connector(job) != "OffloadingConnector" else None

    made = runs(starts)
    assert run_all(made, MODES)
    found = written(made)["engines"]
    assert len(found) == 2 + 3
    assert found["V2, eager, none"] == {"exit": 1, "seconds": 0.0, "output": "it does not start"}


def test_a_chain_that_does_not_start_fails_it(runs: Callable[[Behaves], Runs]) -> None:
    def starts(job: dict[str, Any], env: Mapping[str, str]) -> dict[str, Any] | None:
        return None if connector(job) == "KVTiersConnector" else came()

    assert not run_all(runs(starts), MODES)
    assert not run_all(runs(lambda job, env: None), MODES), "no engine ran at all"


@pytest.mark.vllm
@pytest.mark.faults
@pytest.mark.timeout(900)
def test_all_of_it_runs_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for vLLM's own connector, which refuses CPUs, and graphs and runners, which CPUs lack."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # starts sooner
    monkeypatch.setattr(gpu_engine, "MODES", MODES[2:])
    monkeypatch.setattr(gpu_engine, "ENGINE_SECONDS", 280.0)
    monkeypatch.setattr(gpu_engine, "SECONDS", 850.0)
    file = tmp_path / "engine.json"
    assert main(file, smoke=True) == 0
    said = json.loads(file.read_text())
    plain, chain, native = said["engines"].values()
    assert "CPU Offloading is currently only supported on" in native["output"]
    for one in plain, chain:
        assert len(one["rounds"][0]) == SMOKE.prompts and len(one["together"]) == SMOKE.at_once
        assert one["tokens_per_second"] > 0
        assert all(answer["ttft"] > 0 for part in one["rounds"] for answer in part)
    full = SMOKE.tokens // SMOKE.block_tokens * SMOKE.block_tokens
    assert [answer["cached"] for answer in chain["rounds"][1]] == [full] * SMOKE.prompts
    assert sum(answer["cached"] for answer in plain["rounds"][1]) < full * SMOKE.prompts
    answers = [tuple(one["answer"]) for one in plain["rounds"][0]]
    assert len({*answers}) == SMOKE.prompts, "prompts must matter"
