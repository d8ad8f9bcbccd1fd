"""The bench of a restart: an engine loads what it stored, and each row says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm


def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.restart import Restarts, main

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # it starts sooner in one process
    passes: list[list[list[int]]] = []

    def begun(self: Restarts, warm: bool, quiet: float) -> tuple[float, float]:
        """One real engine is enough: those that have just begun are started by the same lines."""
        passes[:] = self.answers
        return (2.0 if warm else 4.0), 1.0

    monkeypatch.setattr(Restarts, "begun", begun)
    few = ["--documents", "3", "--tokens", "200", "--quiet", "0", "--rounds", "1"]
    assert main([*few, "--folder", str(tmp_path), "--json", str(tmp_path / "rows.json")]) == 0
    computed, loaded = passes
    assert computed == loaded
    assert len(set(map(tuple, computed))) == 3, "the prompts must matter"
    served, warm, without = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert served["engine"] == "has served" and served["not_computed"] > 0.5
    assert (warm["engine"], warm["p50_ttft_ms"]) == ("warm, after 0 s", 2.0)
    assert (without["engine"], without["p50_ttft_ms"]) == ("without, after 0 s", 4.0)
